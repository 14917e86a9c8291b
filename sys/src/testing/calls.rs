//! Calls with unusual or invalid operands, and calls for which neither std nor nix has a safe function.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

use super::calls32::ZeroArguments;
use super::raw_mapping::RawMapping;
use crate::error::{CallContext as _, SyscallError};
use crate::uffd::Userfaultfd;

/// An address where nothing is mapped. The kernel maps nothing below `vm.mmap_min_addr` unless a caller with `CAP_SYS_RAWIO`
/// requests that address with `MAP_FIXED`, and no caller does.
const UNMAPPED: usize = 4096;

/// An address at which the kernel can read nothing. It is not the start of a page.
const UNREADABLE: usize = 1;

/// Takes a write lease, which lasts until the descriptor is closed. The kernel sends SIGIO when another process opens the file.
///
/// # Errors
/// `fcntl(F_SETLEASE)`: `EAGAIN` if the file is open elsewhere.
pub fn lease(fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
    // SAFETY: F_SETLEASE takes an integer and accesses no memory.
    let granted = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    Errno::result(granted).call(|| format!("fcntl(F_SETLEASE) of descriptor {}", fd.as_raw_fd())).map(drop)
}

/// `pwrite` of `len` bytes from an address, which need not be mapped.
///
/// # Errors
/// `pwrite`: `EFAULT` if nothing readable is mapped there.
pub fn pwrite_from(fd: BorrowedFd<'_>, address: *const u8, len: usize, offset: i64) -> Result<usize, Errno> {
    // SAFETY: the kernel only reads the memory, and checks that it is mapped.
    let wrote = unsafe { libc::pwrite(fd.as_raw_fd(), address.cast(), len, offset) };
    Errno::result(wrote).map(isize::cast_unsigned)
}

/// `pwrite` of `len` bytes from address 1.
///
/// # Errors
/// Always: `EFAULT`, unless the call fails earlier.
pub fn pwrite_from_nowhere(fd: BorrowedFd<'_>, len: usize, offset: i64) -> Result<usize, Errno> {
    pwrite_from(fd, std::ptr::without_provenance(UNREADABLE), len, offset)
}

/// `pwritev2`. An offset of -1 is the file position.
///
/// # Errors
/// `pwritev2`; `EINVAL` for more parts than an int can count.
pub fn pwritev2(fd: BorrowedFd<'_>, parts: &[IoSlice<'_>], offset: i64, flags: i32) -> Result<usize, Errno> {
    let count = i32::try_from(parts.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: IoSlice has the layout of struct iovec. The kernel only reads the parts and their bytes.
    let wrote = unsafe { libc::pwritev2(fd.as_raw_fd(), parts.as_ptr().cast(), count, offset, flags) };
    Errno::result(wrote).map(isize::cast_unsigned)
}

/// What is added to the number of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberBits {
    None,
    /// The call is one of the x32 interface. `ENOSYS`: this kernel lacks it; its system call tracepoints report the call
    /// nevertheless.
    X32,
    /// A bit of the upper half of the register, which the kernel ignores.
    UpperHalf,
}

impl NumberBits {
    const fn added_to(self, number: libc::c_long) -> libc::c_long {
        match self {
            Self::None => number,
            Self::X32 => 0x4000_0000 + number,
            Self::UpperHalf => (1 << 32) + number,
        }
    }
}

/// `pwrite64`
///
/// # Errors
/// `pwrite64`
pub fn pwrite_numbered(
    bits: NumberBits,
    fd: BorrowedFd<'_>,
    bytes: &[u8],
    offset: i64,
) -> Result<usize, Errno> {
    let number = bits.added_to(libc::SYS_pwrite64);
    // SAFETY: the kernel only reads the bytes, and no more than there are. Their address may have more than 32 bits: x32 calls pass
    // their arguments in 64-bit registers.
    let wrote = unsafe { libc::syscall(number, fd.as_raw_fd(), bytes.as_ptr(), bytes.len(), offset) };
    Errno::result(wrote).map(|wrote| usize::try_from(wrote).unwrap_or(0))
}

/// `mremap` without flags, of a range that need not be mapped, to a length that is not less: it extends a mapping by free addresses
/// behind it, or fails.
///
/// # Errors
/// `mremap`; `EINVAL` if `old_len` is 0 or exceeds `len`.
pub fn expand_in_place(address: usize, old_len: usize, len: usize) -> Result<(), Errno> {
    if old_len == 0 || old_len > len {
        return Err(Errno::EINVAL);
    }
    let old = std::ptr::with_exposed_provenance_mut(address);
    let nowhere = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: without MREMAP_MAYMOVE and with a length that is not less, the call unmaps and moves nothing.
    let new = unsafe { libc::mremap(old, old_len, len, 0, nowhere) };
    if new == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// `mremap` that expands a page where nothing is mapped.
///
/// # Errors
/// Always: `EFAULT`.
pub fn expand_unmapped() -> Result<(), Errno> {
    expand_in_place(UNMAPPED, UNMAPPED, 2 * UNMAPPED)
}

/// `madvise` with an advice of 64 bits, of which the kernel uses 32.
///
/// # Errors
/// `madvise`; `EFAULT` outside of the mapping.
pub fn advise_with_64_bits(
    mapping: &RawMapping,
    (at, len): (usize, usize),
    advice: i64,
) -> Result<(), SyscallError> {
    let place = mapping.checked(at, len)?;
    // SAFETY: the range belongs to the mapping, into which no reference exists.
    let advised = unsafe { libc::syscall(libc::SYS_madvise, place, len, advice) };
    Errno::result(advised).map(drop).call(|| format!("madvise({advice:#x}) of {len} bytes at {at}"))
}

/// `madvise` of a byte where nothing is mapped.
///
/// # Errors
/// Always: `ENOMEM`, or `EINVAL` for an unknown advice.
pub fn advise_unmapped(advice: i32) -> Result<(), Errno> {
    // SAFETY: nothing is mapped there that the call could change.
    let advised = unsafe { libc::madvise(std::ptr::without_provenance_mut(UNMAPPED), 1, advice) };
    Errno::result(advised).map(drop)
}

/// `process_madvise` of ranges that the kernel cannot read, in a process that does not exist.
///
/// # Errors
/// Always: `EFAULT` or `EBADF`.
pub fn process_advise_unreadable(advice: i32) -> Result<(), Errno> {
    // SAFETY: no process has the descriptor -1, so the kernel changes nothing.
    let advised = unsafe { libc::syscall(libc::SYS_process_madvise, -1, UNREADABLE, 1, advice, 0) };
    Errno::result(advised).map(drop)
}

/// `UFFDIO_REGISTER` of a mapping for missing pages: each thread that accesses a page that is not present sleeps until the
/// userfaultfd is closed.
///
/// # Errors
/// `UFFDIO_REGISTER`.
pub fn block_access(uffd: &Userfaultfd, mapping: &RawMapping) -> Result<(), SyscallError> {
    // struct uffdio_register of linux/userfaultfd.h: start, length, mode, and a field for the kernel.
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    const MODE_MISSING: u64 = 1;
    let range = mapping.range(0, mapping.len());
    let mut register = [range.start, range.end - range.start, MODE_MISSING, 0];
    // SAFETY: `register` has the layout and size of struct uffdio_register, and outlives the call.
    let done = unsafe { libc::ioctl(uffd.as_fd().as_raw_fd(), UFFDIO_REGISTER, register.as_mut_ptr()) };
    Errno::result(done).map(drop).call(|| format!("UFFDIO_REGISTER of {range} for missing pages"))
}

/// `PAGEMAP_SCAN` with an argument of zeroes.
///
/// # Errors
/// Always: `EINVAL`.
pub fn scan_with_zero_argument(
    bits: NumberBits,
    pagemap: BorrowedFd<'_>,
    argument: &ZeroArguments,
) -> Result<(), Errno> {
    // linux/fs.h
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    let number = bits.added_to(libc::SYS_ioctl);
    let argument = argument.memory().range(0, 1).start;
    // SAFETY: the kernel refuses the argument, whose size is 0.
    let scanned = unsafe { libc::syscall(number, pagemap.as_raw_fd(), PAGEMAP_SCAN, argument) };
    Errno::result(scanned).map(drop)
}

/// `UDMABUF_CREATE` of the first page of a file, by any descriptor: only a udmabuf device knows the request. Returns the number of
/// a new descriptor.
///
/// # Errors
/// `ioctl`: `ENOTTY` for most descriptors.
pub fn create_udmabuf(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<i32, Errno> {
    // struct udmabuf_create of linux/udmabuf.h: memfd and flags of 32 bits, offset, size.
    const UDMABUF_CREATE: u64 = 0x4018_7542;
    let create = [u64::from(file.as_raw_fd().cast_unsigned()), 0, 4096];
    // SAFETY: a request with this number reads at most 24 bytes, the size of `create`.
    Errno::result(unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE, create.as_ptr()) })
}

/// Asks a FUSE connection to pass reads and writes through to the file. Returns the id of the file there.
///
/// # Errors
/// `ioctl`: `ENOTTY` for most descriptors.
pub fn open_backing(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<i32, Errno> {
    const FUSE_DEV_IOC_BACKING_OPEN: u64 = 0x4010_E501;
    // struct fuse_backing_map of linux/fuse.h: fd, flags, padding.
    let map = [file.as_raw_fd().cast_unsigned(), 0, 0, 0];
    // SAFETY: a request with this number reads at most 16 bytes, the size of `map`.
    Errno::result(unsafe { libc::ioctl(device.as_raw_fd(), FUSE_DEV_IOC_BACKING_OPEN, map.as_ptr()) })
}

/// Asks an iommufd to map the file.
///
/// # Errors
/// `ioctl`: `ENOTTY` for most descriptors.
pub fn map_file(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<(), Errno> {
    const IOMMU_IOAS_MAP_FILE: u64 = 0x3B8F;
    // struct iommu_ioas_map_file of linux/iommufd.h: size, flags, ioas_id, fd, start, length, iova.
    let mut map = [40, 0, 0, file.as_raw_fd().cast_unsigned(), 0, 0, 0, 0, 0, 0];
    // SAFETY: a request with this number reads and writes at most 40 bytes, the size of `map`.
    let mapped = unsafe { libc::ioctl(device.as_raw_fd(), IOMMU_IOAS_MAP_FILE, map.as_mut_ptr()) };
    Errno::result(mapped).map(drop)
}

/// `splice` from a pipe to the file position of a descriptor, which another thread may close meanwhile.
///
/// # Errors
/// `splice`
pub fn splice_to_number(pipe: BorrowedFd<'_>, target: i32, len: usize) -> Result<usize, Errno> {
    let (from, to) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: without offsets, the call accesses no memory of the process.
    let spliced = unsafe { libc::splice(pipe.as_raw_fd(), from, target, to, len, 0) };
    Errno::result(spliced).map(isize::cast_unsigned)
}

/// `write` of no byte to a descriptor that may not exist.
///
/// # Errors
/// `write`
pub fn write_to_number(target: i32) -> Result<usize, Errno> {
    // SAFETY: the call accesses no memory of the process.
    let written = unsafe { libc::write(target, std::ptr::null(), 0) };
    Errno::result(written).map(isize::cast_unsigned)
}

/// `dup2`: lets a descriptor refer to another open file, also for threads that use it at the moment.
///
/// # Errors
/// `dup2`.
pub fn replace_descriptor(target: BorrowedFd<'_>, by: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the call takes integers. The number of the descriptor stays open, and with the same owner.
    Errno::result(unsafe { libc::dup2(by.as_raw_fd(), target.as_raw_fd()) }).map(drop)
}

/// Sets both limits of the number of descriptors of a process: `prlimit(RLIMIT_NOFILE)`.
///
/// # Errors
/// `prlimit`.
pub fn limit_descriptors(pid: u32, limit: u64) -> Result<(), SyscallError> {
    let what = || format!("prlimit(RLIMIT_NOFILE, {limit}) of process {pid}");
    let target = i32::try_from(pid).map_err(|_| Errno::ESRCH).call(what)?;
    let limits = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: `limits` is a valid struct rlimit, and the pointer to the old limits may be null.
    let set = unsafe { libc::prlimit(target, libc::RLIMIT_NOFILE, &raw const limits, std::ptr::null_mut()) };
    Errno::result(set).map(drop).call(what)
}

/// `tgkill` of the first thread of a process, with signal 0; on x86-64 by the x32 ABI if `x32`.
///
/// # Errors
/// `tgkill`; `ENOSYS` without the x32 ABI.
pub fn signal_first_thread(pid: i32, x32: bool) -> Result<(), Errno> {
    let number = if x32 { libc::SYS_tgkill | 0x4000_0000 } else { libc::SYS_tgkill };
    // SAFETY: the call takes three numbers.
    let sent = unsafe { libc::syscall(number, pid, pid, 0) };
    Errno::result(sent).map(drop)
}

/// `fcntl(F_SETOWN)`: signals of the descriptor are for this process.
///
/// # Errors
/// `fcntl`
pub fn set_signal_owner(fd: BorrowedFd<'_>, pid: i32) -> Result<(), Errno> {
    // SAFETY: the call takes numbers.
    Errno::result(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETOWN, pid) }).map(drop)
}

/// `fork`, with the descriptor table in common. Returns the child's pid, and 0 in the child.
///
/// # Safety
/// As `fork`: the child of a process with several threads may only make system calls.
///
/// # Errors
/// `clone`
pub unsafe fn fork_with_common_descriptors() -> Result<i32, Errno> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: without a stack and CLONE_VM the call works as fork does.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    Errno::result(child).map(|child| i32::try_from(child).unwrap_or(0))
}

/// `_exit`: ends the process without its exit handlers, as a forked child must.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: the call takes an integer. Memory is unmapped together with the threads that could access it.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;

    #[test]
    fn calls_with_invalid_operands_fail_and_change_nothing() {
        let fd = memfd::create("calls", None).unwrap();
        assert_eq!(pwrite_from_nowhere(fd.as_fd(), 8, 0), Err(Errno::EFAULT));
        assert_eq!(expand_unmapped(), Err(Errno::EFAULT));
        assert_eq!(advise_unmapped(libc::MADV_REMOVE), Err(Errno::ENOMEM));
        assert!(process_advise_unreadable(libc::MADV_REMOVE).is_err());
        assert_eq!(create_udmabuf(fd.as_fd(), fd.as_fd()), Err(Errno::ENOTTY));
        let mapping = RawMapping::anonymous(2 * 4096).unwrap();
        assert_eq!(expand_in_place(mapping.address() + 1, 4096, 4096), Err(Errno::EINVAL));
        assert_eq!(expand_in_place(mapping.address(), 8192, 4096), Err(Errno::EINVAL));
        assert_eq!(expand_in_place(mapping.address(), 0, 4096), Err(Errno::EINVAL));
        mapping.write(2 * 4096 - 1, 1).unwrap();
    }

    #[test]
    fn parts_are_written_at_the_offset_or_the_position() {
        let fd = memfd::create("calls", None).unwrap();
        let parts = [IoSlice::new(b"abc"), IoSlice::new(b"de")];
        assert_eq!(pwritev2(fd.as_fd(), &parts, 7, 0), Ok(5));
        assert_eq!(pwritev2(fd.as_fd(), &parts, -1, 0), Ok(5));
        assert_eq!(pwrite_from(fd.as_fd(), b"x".as_ptr(), 1, 5), Ok(1));
        let mut content = [0; 12];
        assert_eq!(nix::sys::uio::pread(&fd, &mut content, 0), Ok(12));
        assert_eq!(&content, b"abcdex\0abcde");
    }

    #[test]
    fn advice_of_64_bits_acts_on_the_mapping_only() {
        let fd = memfd::create("calls", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * 4096).unwrap();
        let mapping = RawMapping::shared(fd.as_fd(), 0, 2 * 4096).unwrap();
        mapping.write_all(4095, b"ab").unwrap();
        let advice = 1 << 32 | i64::from(libc::MADV_REMOVE);
        advise_with_64_bits(&mapping, (4096, 4096), advice).unwrap();
        assert_eq!((mapping.read(4095), mapping.read(4096)), (Ok(b'a'), Ok(0)));
        assert_eq!(advise_with_64_bits(&mapping, (4096, 8192), advice).unwrap_err().errno, Errno::EFAULT);
    }
}
