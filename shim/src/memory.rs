//! Memory of the program at addresses that it gave: copied by the kernel, so that a wrong address is an error and not the
//! program's end.

use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_sys::Errno;
use nix::libc;

/// Bytes in a page; told once, when the library is loaded.
static PAGE_BYTES: AtomicU64 = AtomicU64::new(4096);

/// Asks how large pages are.
pub fn begin() {
    // SAFETY: sysconf takes an integer and touches no memory.
    if let Ok(bytes) = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) {
        PAGE_BYTES.store(bytes, Ordering::Relaxed);
    }
}

/// Bytes in a page.
pub fn page_bytes() -> u64 {
    PAGE_BYTES.load(Ordering::Relaxed)
}

/// Plain data that any bytes are.
///
/// # Safety
/// Without padding, and any bytes are one.
pub unsafe trait Plain: Copy {}

// SAFETY: integers, as is the struct that the kernel has.
unsafe impl Plain for crate::scan::Argument {}
// SAFETY: likewise.
unsafe impl Plain for crate::scan::Region {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

/// Copies one in. `None` if it cannot be read.
pub fn read<T: Plain>(address: u64, into: &mut T) -> Option<()> {
    let len = size_of::<T>();
    let local = libc::iovec { iov_base: std::ptr::from_mut(into).cast(), iov_len: len };
    let remote = libc::iovec { iov_base: at(address)?, iov_len: len };
    // SAFETY: the kernel writes len bytes at most to a T, which any bytes are.
    let read = unsafe {
        libc::process_vm_readv(crate::service_calls::own_pid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    (usize::try_from(read) == Ok(len)).then_some(())
}

/// Copies some out.
///
/// # Errors
/// `EFAULT` if they cannot be written; else `process_vm_writev`.
pub fn write<T: Plain>(address: u64, values: &[T]) -> Result<(), Errno> {
    let len = size_of_val(values);
    if len == 0 {
        return Ok(());
    }
    let local = libc::iovec { iov_base: values.as_ptr().cast_mut().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: at(address).ok_or(Errno::EFAULT)?, iov_len: len };
    // SAFETY: the kernel reads len bytes of the values, and writes them where the program said that it wants them.
    let written = unsafe {
        libc::process_vm_writev(crate::service_calls::own_pid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    match Errno::result(written) {
        Ok(written) if usize::try_from(written) == Ok(len) => Ok(()),
        Ok(_) => Err(Errno::EFAULT),
        Err(errno) => Err(errno),
    }
}

/// An address as a number.
pub fn address_of<T>(pointer: *const T) -> u64 {
    u64::try_from(pointer.expose_provenance()).unwrap_or(0)
}

/// A number as an address.
pub fn at(address: u64) -> Option<*mut libc::c_void> {
    Some(std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?))
}
