//! Calls by the 32-bit system call interface, as programs of 32 bits make them. Kernels without `CONFIG_IA32_EMULATION` lack it.

use std::arch::asm;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags};

use super::raw_mapping::RawMapping;
use crate::error::{CallContext as _, SyscallError};

/// Numbers of arch/x86/entry/syscalls/syscall_32.tbl.
const WRITE: i64 = 4;
const OLD_MMAP: i64 = 90;
const MREMAP: i64 = 163;
const MADVISE: i64 = 219;

/// `write` of `len` bytes at `at` of a mapping below 4 GiB. Returns the number of bytes.
///
/// # Errors
/// `write`; `EFAULT` outside of the mapping, or if it is not below 4 GiB.
pub fn write(
    fd: BorrowedFd<'_>,
    mapping: &RawMapping,
    (at, len): (usize, usize),
) -> Result<i64, SyscallError> {
    let [address, bytes] = low(mapping, at, len)?;
    // SAFETY: the kernel only reads the bytes, which belong to the mapping.
    unsafe { call_of_32_bits(WRITE, [fd.as_raw_fd().cast_unsigned(), address, bytes, 0]) }
        .call(|| format!("32-bit write of {len} bytes at {at} to descriptor {}", fd.as_raw_fd()))
}

/// `madvise` with any advice, of `len` bytes at `at` of a mapping below 4 GiB.
///
/// # Errors
/// `madvise`; `EFAULT` outside of the mapping, or if it is not below 4 GiB.
pub fn madvise(mapping: &RawMapping, (at, len): (usize, usize), advice: i32) -> Result<(), SyscallError> {
    let [address, bytes] = low(mapping, at, len)?;
    // SAFETY: the range belongs to the mapping, into which no reference exists.
    unsafe { call_of_32_bits(MADVISE, [address, bytes, advice.cast_unsigned(), 0]) }
        .map(drop)
        .call(|| format!("32-bit madvise({advice}) of {len} bytes at {at}"))
}

/// Maps `len` bytes of the file that is mapped at the start of a mapping below 4 GiB a second time, below 4 GiB: `mremap` with an
/// old length of 0.
///
/// # Errors
/// `mremap`; `EFAULT` if the start was unmapped or the mapping is not below 4 GiB.
pub fn duplicate(mapping: &RawMapping, len: usize) -> Result<RawMapping, SyscallError> {
    let what = || format!("32-bit mremap of 0 bytes to {len}");
    let [address, _] = low(mapping, 0, 1)?;
    let length = u32::try_from(len).map_err(|_| Errno::EINVAL).call(what)?;
    let flags = libc::MREMAP_MAYMOVE.cast_unsigned();
    // SAFETY: with an old length of 0 the call leaves the mapping alone and maps its pages at a free range.
    let new = unsafe { call_of_32_bits(MREMAP, [address, 0, length, flags]) }.call(what)?;
    // The upper half of the register is undefined.
    let new = usize::try_from(new & i64::from(u32::MAX)).map_err(|_| Errno::EOVERFLOW).call(what)?;
    // SAFETY: mremap returned this range, which belongs to the caller alone.
    Ok(unsafe { RawMapping::from_raw(std::ptr::with_exposed_provenance_mut(new), len) })
}

/// Six arguments of `mmap` in memory below 4 GiB, all of them 0.
#[derive(Debug)]
pub struct ZeroArguments {
    memory: RawMapping,
}

impl ZeroArguments {
    /// # Errors
    /// `mmap`
    pub fn new() -> Result<Self, SyscallError> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_32BIT;
        // Read-only and anonymous: its bytes are 0 for ever.
        RawMapping::map(None, 4096, ProtFlags::PROT_READ, flags).map(|memory| Self { memory })
    }

    #[must_use]
    pub const fn memory(&self) -> &RawMapping {
        &self.memory
    }

    /// `mmap` with these arguments.
    ///
    /// # Errors
    /// `mmap`: `EINVAL`, because the length is 0; `ENOSYS` without 32-bit calls.
    pub fn mmap(&self) -> Result<(), SyscallError> {
        let what = || "32-bit mmap of 0 bytes".to_owned();
        let [address, _] = low(&self.memory, 0, 6 * size_of::<u32>())?;
        // SAFETY: the call maps nothing: the kernel refuses a length of 0.
        unsafe { call_of_32_bits(OLD_MMAP, [address, 0, 0, 0]) }.map(drop).call(what)
    }
}

/// The address and the length of a part of a mapping, as 32-bit operands.
fn low(mapping: &RawMapping, at: usize, len: usize) -> Result<[u32; 2], SyscallError> {
    let operand = |value: usize| u32::try_from(value).map_err(|_| Errno::EFAULT);
    let start = mapping.checked(at, len)?.addr();
    operand(start + len)
        .and_then(|_| Ok([operand(start)?, operand(len)?]))
        .call(|| format!("32-bit operands for {len} bytes at {start:#x}"))
}

/// A call by the 32-bit interface. Its result may be an address above 2 GiB, which is no error although its sign bit is set.
///
/// # Safety
/// As for the call.
unsafe fn call_of_32_bits(number: i64, arguments: [u32; 4]) -> Result<i64, Errno> {
    let (mut result, [first, second, third, fourth]) = (number, arguments.map(u64::from));
    // SAFETY: int 0x80 takes its number in eax and arguments in ebx, ecx, edx and esi, and clobbers only rax and r8 to r11.
    // The code restores rbx, which is reserved for the compiler. The caller answers for the call.
    unsafe {
        asm!("xchg {first}, rbx", "int 0x80", "xchg {first}, rbx", first = inout(reg) first => _,
            inout("rax") result, in("rcx") second, in("rdx") third, in("rsi") fourth,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    match i32::try_from(result.saturating_neg()) {
        Ok(errno @ 1..=4095) => Err(Errno::from_raw(errno)),
        _ => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use nix::sys::mman::{MapFlags, ProtFlags};

    use super::*;
    use crate::memfd;

    #[test]
    fn calls_act_on_a_mapping_below_4_gib_only() {
        let fd = memfd::create("calls32", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * 4096).unwrap();
        let map = |flags| {
            let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            RawMapping::map(Some((fd.as_fd(), 0)), 2 * 4096, protection, MapFlags::MAP_SHARED | flags)
                .unwrap()
        };
        let high = map(MapFlags::empty());
        assert_eq!(madvise(&high, (0, 4096), libc::MADV_REMOVE).unwrap_err().errno, Errno::EFAULT);
        let low = map(MapFlags::MAP_32BIT);
        assert_eq!(madvise(&low, (4096, 8192), libc::MADV_REMOVE).unwrap_err().errno, Errno::EFAULT);
        low.write_all(4095, b"ab").unwrap();
        if let Err(error) = madvise(&low, (4096, 4096), libc::MADV_REMOVE) {
            eprintln!("not run: this kernel lacks 32-bit system calls: {}", error.errno);
            return;
        }
        assert_eq!((high.read(4095), high.read(4096)), (Ok(b'a'), Ok(0)));
        let second = duplicate(&low, 4096).unwrap();
        assert_eq!(second.read(4095), Ok(b'a'));
        assert!(u32::try_from(second.address()).is_ok());
        assert_eq!(madvise(&low, (0, 4096), -1).unwrap_err().errno, Errno::EINVAL);
        let target = memfd::create("calls32", None).unwrap();
        assert_eq!(write(target.as_fd(), &low, (4095, 1)), Ok(1));
        assert_eq!(nix::sys::uio::pread(&target, &mut [0; 2], 0), Ok(1));
    }
}
