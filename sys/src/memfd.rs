//! memfds: creation, size, seals, and recognition of memfds and other shared memory files.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use bitflags::bitflags;
use memfd::{HugetlbSize, MemfdOptions};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::memfd::MFdFlags;
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};
use nix::unistd::ftruncate;

use crate::error::{CallContext, SyscallError, errno_of};
use crate::fd::{link_target, stat};

/// `F_SEAL_SHRINK`: the file cannot shrink, so no access to a mapping of it raises `SIGBUS` because of truncation.
pub const SEAL_SHRINK: u32 = 0x2;
/// `F_SEAL_FUTURE_WRITE`: writable mappings cannot be made any more, and existing ones stay writable.
pub const SEAL_FUTURE_WRITE: u32 = 0x10;

/// The file system behind a memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemfdKind {
    /// shmem (tmpfs).
    Shmem,
    /// hugetlbfs with this page size in bytes.
    Hugetlb(u64),
}

/// Creates an empty memfd that allows sealing, close-on-exec.
///
/// # Errors
/// `memfd_create`; also `EINVAL` for a hugetlb page size without a `memfd_create` flag.
pub fn create(name: &str, hugetlb_page_size: Option<u64>) -> Result<OwnedFd, SyscallError> {
    let call = || match hugetlb_page_size {
        None => format!("memfd_create({name:?})"),
        Some(bytes) => format!("memfd_create({name:?}) with hugetlb pages of {bytes} bytes"),
    };
    let hugetlb = hugetlb_page_size.map(|bytes| hugetlb_size(bytes).ok_or(Errno::EINVAL));
    let options =
        MemfdOptions::new().allow_sealing(true).close_on_exec(true).hugetlb(hugetlb.transpose().call(call)?);
    match options.create(name) {
        Ok(memfd) => Ok(memfd.into_file().into()),
        Err(memfd::Error::Create(error) | memfd::Error::AddSeals(error) | memfd::Error::GetSeals(error)) => {
            Err(SyscallError { call: call(), errno: errno_of(&error) })
        }
    }
}

bitflags! {
    /// The `memfd_create` flags that a client may choose (`linux/memfd.h`). `MFD_CLOEXEC` is not among them: every memfd is created
    /// close-on-exec.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MemfdFlags: u32 {
        const ALLOW_SEALING = libc::MFD_ALLOW_SEALING;
        const HUGETLB = libc::MFD_HUGETLB;
        const NOEXEC_SEAL = libc::MFD_NOEXEC_SEAL;
        const EXEC = libc::MFD_EXEC;
        /// The bits that hold the base-2 logarithm of the huge page size.
        const HUGE_PAGE_SIZE = libc::MFD_HUGE_MASK << libc::MFD_HUGE_SHIFT;
    }
}

/// Creates an empty memfd with `flags`, close-on-exec.
///
/// # Errors
/// `memfd_create`: `EINVAL` for conflicting flags, a name longer than 249 bytes or a huge page size that this kernel does not
/// support.
pub fn create_with(name: &str, flags: MemfdFlags) -> Result<OwnedFd, SyscallError> {
    let bits = flags.bits();
    let call = || format!("memfd_create({name:?}, {bits:#x})");
    let all = MFdFlags::from_bits_retain(bits) | MFdFlags::MFD_CLOEXEC;
    nix::sys::memfd::memfd_create(name, all).call(call)
}

const fn hugetlb_size(bytes: u64) -> Option<HugetlbSize> {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    Some(match bytes {
        b if b == 64 * KIB => HugetlbSize::Huge64KB,
        b if b == 512 * KIB => HugetlbSize::Huge512KB,
        b if b == MIB => HugetlbSize::Huge1MB,
        b if b == 2 * MIB => HugetlbSize::Huge2MB,
        b if b == 8 * MIB => HugetlbSize::Huge8MB,
        b if b == 16 * MIB => HugetlbSize::Huge16MB,
        b if b == 256 * MIB => HugetlbSize::Huge256MB,
        b if b == GIB => HugetlbSize::Huge1GB,
        b if b == 2 * GIB => HugetlbSize::Huge2GB,
        b if b == 16 * GIB => HugetlbSize::Huge16GB,
        _ => return None,
    })
}

/// Sets the size with `ftruncate`.
///
/// # Errors
/// `ftruncate`: `EPERM` if a seal forbids it, `EFBIG` or `EINVAL` if the size is too large or, for hugetlb, not a multiple of
/// the page size.
pub fn resize(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), SyscallError> {
    let call = || format!("ftruncate of descriptor {} to {bytes} bytes", fd.as_raw_fd());
    let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG).call(call)?;
    ftruncate(fd, length).call(call)
}

/// Punches a hole: frees the pages of `bytes` bytes at `offset`, which then read as zeros. The file size does not change.
///
/// # Errors
/// `fallocate`: `EPERM` if a seal forbids it, `EINVAL` if `bytes` is 0.
pub fn punch_hole(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), SyscallError> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate_range(fd, flags, offset, bytes)
}

/// Allocates the missing pages of `bytes` bytes at `offset`, so that access to a mapping does not raise `SIGBUS` when memory runs
/// out. The file size does not change.
///
/// # Errors
/// `fallocate`: `ENOSPC` or `ENOMEM` if memory is exhausted, `EINVAL` if `bytes` is 0.
pub fn allocate(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), SyscallError> {
    fallocate_range(fd, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, bytes)
}

fn fallocate_range(
    fd: BorrowedFd<'_>,
    flags: FallocateFlags,
    offset: u64,
    bytes: u64,
) -> Result<(), SyscallError> {
    let call =
        || format!("fallocate({flags:?}) of {bytes} bytes at {offset} of descriptor {}", fd.as_raw_fd());
    let at = i64::try_from(offset).map_err(|_| Errno::EFBIG).call(call)?;
    let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG).call(call)?;
    loop {
        match fallocate(fd, flags, at, length) {
            // A signal interrupted the call, and the kernel has undone it.
            Err(Errno::EINTR) => {}
            result => return result.call(call),
        }
    }
}

/// Reads the seals, a set of `F_SEAL_*` bits.
///
/// # Errors
/// `fcntl(F_GET_SEALS)`: `EINVAL` if the file system does not support seals.
pub fn seals(fd: BorrowedFd<'_>) -> Result<u32, SyscallError> {
    let bits = fcntl(fd, FcntlArg::F_GET_SEALS)
        .call(|| format!("fcntl(F_GET_SEALS) of descriptor {}", fd.as_raw_fd()))?;
    Ok(bits.cast_unsigned())
}

/// Adds seals, a set of `F_SEAL_*` bits.
///
/// # Errors
/// `fcntl(F_ADD_SEALS)`: `EPERM` if `F_SEAL_SEAL` is set, `EBUSY` if a writable mapping prevents `F_SEAL_WRITE`, `EINVAL` for a
/// seal that this kernel does not support.
pub fn add_seals(fd: BorrowedFd<'_>, bits: u32) -> Result<(), SyscallError> {
    let seals = SealFlag::from_bits_retain(bits.cast_signed());
    fcntl(fd, FcntlArg::F_ADD_SEALS(seals))
        .call(|| format!("fcntl(F_ADD_SEALS, {bits:#x}) of descriptor {}", fd.as_raw_fd()))?;
    Ok(())
}

/// Returns the kind of a memfd; `None` if `fd` is not a memfd. A memfd is recognised by its link target `/memfd:...` and by its
/// device: memfds lie on mounts internal to the kernel, on which no path can be opened.
///
/// # Errors
/// `fstat`, `fstatfs`, `readlink`, or `memfd_create` of the memfd whose device is compared.
pub fn kind(fd: BorrowedFd<'_>) -> Result<Option<MemfdKind>, SyscallError> {
    if !supports_seals(fd)? {
        return Ok(None);
    }
    let status = stat(fd)?;
    // System V segments and shared anonymous memory lie on the same mounts, under other names.
    if status.st_nlink != 0 || !link_target(fd)?.starts_with("/memfd:") {
        return Ok(None);
    }
    let fs = fstatfs(fd).call(|| format!("fstatfs of descriptor {}", fd.as_raw_fd()))?;
    let (kind, page_size) = match fs.filesystem_type() {
        FsType(magic) if magic == TMPFS_MAGIC.0 => (MemfdKind::Shmem, None),
        FsType(magic) if magic == HUGETLBFS_MAGIC.0 => {
            let page_size = u64::try_from(fs.optimal_transfer_size()).unwrap_or(0);
            (MemfdKind::Hugetlb(page_size), Some(page_size))
        }
        _ => return Ok(None),
    };
    let reference = match create("fdmap-kind", page_size) {
        // A hugetlbfs mount may have a page size that memfds do not support.
        Err(SyscallError { errno: Errno::EINVAL | Errno::ENODEV, .. }) => return Ok(None),
        created => created?,
    };
    Ok((stat(&reference)?.st_dev == status.st_dev).then_some(kind))
}

/// Returns the kind of any shmem or hugetlb file, memfd or not; `None` for all other files. Shmem files are memfds, the files of
/// `/dev/shm` and of every tmpfs, System V segments and shared anonymous memory.
///
/// # Errors
/// `fcntl(F_GET_SEALS)`, `fstatfs`.
pub fn shared_memory(fd: BorrowedFd<'_>) -> Result<Option<MemfdKind>, SyscallError> {
    if !supports_seals(fd)? {
        return Ok(None);
    }
    let fs = fstatfs(fd).call(|| format!("fstatfs of descriptor {}", fd.as_raw_fd()))?;
    Ok(match fs.filesystem_type() {
        FsType(magic) if magic == TMPFS_MAGIC.0 => Some(MemfdKind::Shmem),
        FsType(magic) if magic == HUGETLBFS_MAGIC.0 => {
            Some(MemfdKind::Hugetlb(u64::try_from(fs.optimal_transfer_size()).unwrap_or(0)))
        }
        _ => None,
    })
}

/// Checks whether the file system of `fd` supports seals, as only shmem and hugetlbfs do. Any other file system is never asked
/// anything: one in user space may never answer.
fn supports_seals(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    match seals(fd) {
        Ok(_) => Ok(true),
        Err(SyscallError { errno: Errno::EINVAL | Errno::EBADF, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where a shared memory file comes from; decides how a process without a descriptor of the file can map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOrigin {
    /// `memfd_create`. Other processes reach it only through `/proc/PID/fd`.
    Memfd,
    /// A mount internal to the kernel: a System V segment, mapped by its key, or shared anonymous memory, which other processes
    /// cannot map.
    KernelMount,
    /// A tmpfs or hugetlbfs mount. Other processes map the file by its path.
    Mounted,
}

/// Returns the origin of a file for which [`shared_memory`] returns a kind.
///
/// # Errors
/// As [`kind`].
pub fn origin(fd: BorrowedFd<'_>) -> Result<FileOrigin, SyscallError> {
    if kind(fd)?.is_some() {
        return Ok(FileOrigin::Memfd);
    }
    let page_size = match shared_memory(fd)? {
        Some(MemfdKind::Hugetlb(page_size)) => Some(page_size),
        Some(MemfdKind::Shmem) | None => None,
    };
    let internal_device = match create("fdmap-origin", page_size) {
        Err(SyscallError { errno: Errno::EINVAL | Errno::ENODEV, .. }) => return Ok(FileOrigin::Mounted),
        other => stat(&other?)?.st_dev,
    };
    Ok(if stat(fd)?.st_dev == internal_device { FileOrigin::KernelMount } else { FileOrigin::Mounted })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_memfds_are_recognised_as_memfds() {
        let memfd = create("recognised", None).unwrap();
        assert_eq!(kind(memfd.as_fd()), Ok(Some(MemfdKind::Shmem)));

        assert_eq!(shared_memory(memfd.as_fd()), Ok(Some(MemfdKind::Shmem)));

        let (pipe, _other_end) = nix::unistd::pipe().unwrap();
        assert_eq!(kind(pipe.as_fd()), Ok(None));
        assert_eq!(shared_memory(pipe.as_fd()), Ok(None));
        let regular = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(kind(regular.as_fd()), Ok(None));
        assert_eq!(shared_memory(regular.as_fd()), Ok(None));
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert_eq!(kind(named.as_file().as_fd()), Ok(None), "a file with a path is not a memfd");
        assert_eq!(shared_memory(named.as_file().as_fd()), Ok(Some(MemfdKind::Shmem)));
        assert_eq!(origin(memfd.as_fd()), Ok(FileOrigin::Memfd));
        assert_eq!(origin(named.as_file().as_fd()), Ok(FileOrigin::Mounted));
        let directory = std::fs::File::open("/dev/shm").unwrap();
        assert_eq!(shared_memory(directory.as_fd()), Ok(None), "a directory is not shared memory");
        // Its name alone looks like that of a memfd; only the device differs.
        let unlinked = tempfile::Builder::new().prefix("memfd:").tempfile_in("/dev/shm").unwrap();
        let (unlinked, path) = unlinked.into_parts();
        drop(path);
        assert_eq!(kind(unlinked.as_fd()), Ok(None), "a file on a mounted tmpfs is not a memfd");
    }

    #[test]
    fn added_seals_accumulate_and_are_enforced() {
        let memfd = create("sealed", None).unwrap();
        resize(memfd.as_fd(), 5000).unwrap();
        add_seals(memfd.as_fd(), 0x2).unwrap();
        add_seals(memfd.as_fd(), 0x4).unwrap();
        assert_eq!(seals(memfd.as_fd()).unwrap() & 0xf, 0x6);
        assert_eq!(resize(memfd.as_fd(), 100).unwrap_err().errno, Errno::EPERM);
    }

    #[test]
    fn allocate_and_punch_hole_change_memory_but_not_size() {
        let memfd = create("memory", None).unwrap();
        resize(memfd.as_fd(), 1 << 20).unwrap();
        let blocks = || stat(&memfd).unwrap().st_blocks;
        allocate(memfd.as_fd(), 65536, 131_072).unwrap();
        assert_eq!(blocks() * 512, 131_072);
        punch_hole(memfd.as_fd(), 65536, 131_072).unwrap();
        assert_eq!((blocks(), stat(&memfd).unwrap().st_size), (0, 1 << 20));
        assert_eq!(punch_hole(memfd.as_fd(), 0, 0).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn size_beyond_63_bits_is_refused() {
        let memfd = create("large", None).unwrap();
        assert_eq!(resize(memfd.as_fd(), u64::MAX).unwrap_err().errno, Errno::EFBIG);
    }

    #[test]
    fn unsupported_hugetlb_page_size_is_refused() {
        assert_eq!(create("unsupported", Some(4 << 20)).unwrap_err().errno, Errno::EINVAL);
    }
}
