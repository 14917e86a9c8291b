//! memfds: making, sizing, sealing and recognising them.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use memfd::{HugetlbSize, MemfdOptions};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::memfd::MFdFlags;
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};
use nix::unistd::ftruncate;

use crate::error::{Call, SyscallError, errno_of};

/// `F_SEAL_SHRINK`: what lies in the file stays in it, so that no access to a mapping of it is cut off.
pub const SEAL_SHRINK: u32 = 0x2;

/// The file system behind a memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemfdKind {
    /// shmem
    Shmem,
    /// hugetlb, with pages of this many bytes
    Hugetlb(u64),
}

/// Makes a memfd that can be sealed, close-on-exec, of size 0.
///
/// # Errors
/// `memfd_create`; `EINVAL` also for a hugetlb page size that `memfd_create` has no flag for.
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

/// Flags of `memfd_create` that a caller may choose: `linux/memfd.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemfdFlags(u32);

impl MemfdFlags {
    /// `None` if there are others than `MFD_ALLOW_SEALING`, `MFD_HUGETLB` with a page size, `MFD_NOEXEC_SEAL` and `MFD_EXEC`.
    #[must_use]
    pub const fn new(bits: u32) -> Option<Self> {
        let known = libc::MFD_ALLOW_SEALING
            | libc::MFD_HUGETLB
            | libc::MFD_NOEXEC_SEAL
            | libc::MFD_EXEC
            | libc::MFD_HUGE_MASK << libc::MFD_HUGE_SHIFT;
        if bits & !known == 0 { Some(Self(bits)) } else { None }
    }

    /// As `memfd_create` takes them.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// Makes a memfd with these flags and close-on-exec, of size 0.
///
/// # Errors
/// `memfd_create`: `EINVAL` for flags that do not go together, a name of more than 249 bytes or a huge page size that this
/// kernel does not have.
pub fn create_with(name: &str, flags: MemfdFlags) -> Result<OwnedFd, SyscallError> {
    let bits = flags.bits();
    let call = || format!("memfd_create({name:?}, {bits:#x})");
    let given = MFdFlags::from_bits_retain(bits) | MFdFlags::MFD_CLOEXEC;
    nix::sys::memfd::memfd_create(name, given).call(call)
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

/// `ftruncate`.
///
/// # Errors
/// `ftruncate`: `EPERM` if a seal forbids it, `EFBIG` or `EINVAL` if the size is too large or, for hugetlb, no
/// multiple of the page size.
pub fn resize(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), SyscallError> {
    let call = || format!("ftruncate of descriptor {} to {bytes} bytes", fd.as_raw_fd());
    let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG).call(call)?;
    ftruncate(fd, length).call(call)
}

/// Lets go of the memory of some bytes of a file, which read as zeros from then on. Its size stays.
///
/// # Errors
/// `fallocate`: `EPERM` if a seal forbids it, `EINVAL` for no bytes.
pub fn punch_hole(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), SyscallError> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    allocate_or_punch(fd, flags, offset, bytes)
}

/// Takes memory for some bytes of a file that has none there yet, so that touching a mapping of it does not raise
/// `SIGBUS` for want of memory. Its size stays.
///
/// # Errors
/// `fallocate`: `ENOSPC` or `ENOMEM` if there is not that much, `EINVAL` for no bytes.
pub fn allocate(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), SyscallError> {
    allocate_or_punch(fd, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, bytes)
}

fn allocate_or_punch(
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
            // It undoes what it did when a signal arrives.
            Err(Errno::EINTR) => {}
            result => return result.call(call),
        }
    }
}

/// The seals, as the bits of `fcntl(F_GET_SEALS)`.
///
/// # Errors
/// `fcntl`: `EINVAL` if it is no file that can have seals.
pub fn seals(fd: BorrowedFd<'_>) -> Result<u32, SyscallError> {
    let bits = fcntl(fd, FcntlArg::F_GET_SEALS)
        .call(|| format!("fcntl(F_GET_SEALS) of descriptor {}", fd.as_raw_fd()))?;
    Ok(bits.cast_unsigned())
}

/// Adds seals, as the bits of `fcntl(F_ADD_SEALS)`.
///
/// # Errors
/// `fcntl`: `EPERM` if it is sealed against sealing, `EBUSY` if a writable mapping forbids `F_SEAL_WRITE`,
/// `EINVAL` for a seal that this kernel does not have.
pub fn add_seals(fd: BorrowedFd<'_>, bits: u32) -> Result<(), SyscallError> {
    let seals = SealFlag::from_bits_retain(bits.cast_signed());
    fcntl(fd, FcntlArg::F_ADD_SEALS(seals))
        .call(|| format!("fcntl(F_ADD_SEALS, {bits:#x}) of descriptor {}", fd.as_raw_fd()))?;
    Ok(())
}

/// What kind of memfd `fd` is, or `None` if it is none: memfds lie on mounts of the kernel's own, which nobody can open a
/// path on, and have names that say so.
///
/// # Errors
/// `fstat`, `fstatfs`, `readlink`, or `memfd_create` of one to compare with.
pub fn kind(fd: BorrowedFd<'_>) -> Result<Option<MemfdKind>, SyscallError> {
    // Seals first: only shmem and hugetlbfs know the call, so no foreign file system is asked anything.
    match seals(fd) {
        Ok(_) => {}
        Err(SyscallError { errno: Errno::EINVAL | Errno::EBADF, .. }) => return Ok(None),
        Err(error) => return Err(error),
    }
    let stat = crate::fd::stat(fd)?;
    // What else the kernel keeps on these mounts (System V segments, shared anonymous memory) is named otherwise.
    if stat.st_nlink != 0 || !crate::fd::link_target(fd)?.starts_with("/memfd:") {
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
    let other = match create("fdmap-kind", page_size) {
        // A mount of hugetlbfs may have pages that no memfd can have.
        Err(SyscallError { errno: Errno::EINVAL | Errno::ENODEV, .. }) => return Ok(None),
        other => other?,
    };
    Ok((crate::fd::stat(&other)?.st_dev == stat.st_dev).then_some(kind))
}

/// What `fd` is made of if it is any file of shmem or hugetlb, memfd or not; `None` for all else. Files of shmem are those of
/// `/dev/shm` and of every tmpfs, System V segments, and memory that is mapped shared and anonymous.
///
/// # Errors
/// `fstat`, `fstatfs`.
pub fn shared_memory(fd: BorrowedFd<'_>) -> Result<Option<MemfdKind>, SyscallError> {
    // As for memfds: a foreign file system may never answer.
    match seals(fd) {
        Ok(_) => {}
        Err(SyscallError { errno: Errno::EINVAL | Errno::EBADF, .. }) => return Ok(None),
        Err(error) => return Err(error),
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

/// How a process that has no descriptor of a file of shared memory comes to map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Not at all, or by `/proc`: a memfd.
    Memfd,
    /// By a key, as a System V segment, or not at all, as shared anonymous memory: on a mount of the kernel's own.
    Kernel,
    /// By its path, on a mount that somebody made.
    Path,
}

/// How others come to map a file for which [`shared_memory`] says what it is.
///
/// # Errors
/// As [`kind`].
pub fn reach(fd: BorrowedFd<'_>) -> Result<Reach, SyscallError> {
    if kind(fd)?.is_some() {
        return Ok(Reach::Memfd);
    }
    let page_size = match shared_memory(fd)? {
        Some(MemfdKind::Hugetlb(page_size)) => Some(page_size),
        Some(MemfdKind::Shmem) | None => None,
    };
    let kernels = match create("fdmap-reach", page_size) {
        Err(SyscallError { errno: Errno::EINVAL | Errno::ENODEV, .. }) => return Ok(Reach::Path),
        other => crate::fd::stat(&other?)?.st_dev,
    };
    Ok(if crate::fd::stat(fd)?.st_dev == kernels { Reach::Kernel } else { Reach::Path })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn memfd_is_recognised_and_other_files_are_not() {
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
        assert_eq!(kind(named.as_file().as_fd()), Ok(None), "a file with a path is not ours to own");
        assert_eq!(shared_memory(named.as_file().as_fd()), Ok(Some(MemfdKind::Shmem)));
        assert_eq!(reach(memfd.as_fd()), Ok(Reach::Memfd));
        assert_eq!(reach(named.as_file().as_fd()), Ok(Reach::Path));
        let folder = std::fs::File::open("/dev/shm").unwrap();
        assert_eq!(shared_memory(folder.as_fd()), Ok(None), "a folder holds no memory");
        // Not even by its name, which is all that tells it apart but for its mount.
        let unlinked = tempfile::Builder::new().prefix("memfd:").tempfile_in("/dev/shm").unwrap();
        let (unlinked, path) = unlinked.into_parts();
        drop(path);
        assert_eq!(kind(unlinked.as_fd()), Ok(None), "a file of a tmpfs that anybody may mount");
    }

    #[test]
    fn seals_add_up() {
        let memfd = create("sealed", None).unwrap();
        resize(memfd.as_fd(), 5000).unwrap();
        add_seals(memfd.as_fd(), 0x2).unwrap();
        add_seals(memfd.as_fd(), 0x4).unwrap();
        assert_eq!(seals(memfd.as_fd()).unwrap() & 0xf, 0x6);
        assert_eq!(resize(memfd.as_fd(), 100).unwrap_err().errno, Errno::EPERM);
    }

    #[test]
    fn memory_is_taken_and_let_go_of() {
        let memfd = create("memory", None).unwrap();
        resize(memfd.as_fd(), 1 << 20).unwrap();
        let blocks = || crate::fd::stat(&memfd).unwrap().st_blocks;
        allocate(memfd.as_fd(), 65536, 131_072).unwrap();
        assert_eq!(blocks() * 512, 131_072);
        punch_hole(memfd.as_fd(), 65536, 131_072).unwrap();
        assert_eq!((blocks(), crate::fd::stat(&memfd).unwrap().st_size), (0, 1 << 20));
        assert_eq!(punch_hole(memfd.as_fd(), 0, 0).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn size_beyond_the_kernels_is_refused() {
        let memfd = create("large", None).unwrap();
        assert_eq!(resize(memfd.as_fd(), u64::MAX).unwrap_err().errno, Errno::EFBIG);
    }

    #[test]
    fn odd_hugetlb_size_is_refused() {
        assert_eq!(create("odd", Some(4 << 20)).unwrap_err().errno, Errno::EINVAL);
    }
}
