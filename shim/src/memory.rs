//! Access to the program's memory at addresses that it passed. The kernel copies the data, so an invalid address is an error instead
//! of a fault.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use fdmap_sys::Errno;
use nix::libc;

use crate::descriptor::own_pid;

/// Page size, set when the library is loaded.
static PAGE_BYTES: AtomicU64 = AtomicU64::new(4096);

/// Reads the page size.
pub fn initialize() {
    // SAFETY: sysconf takes an integer and accesses no memory.
    if let Ok(bytes) = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) {
        PAGE_BYTES.store(bytes, Ordering::Relaxed);
    }
}

/// Page size in bytes.
pub fn page_bytes() -> u64 {
    PAGE_BYTES.load(Ordering::Relaxed)
}

/// Reads a value at `address`. Returns `None` if the memory is not readable.
pub fn read<T: Pod>(address: u64, into: &mut T) -> Option<()> {
    let len = size_of::<T>();
    let local = libc::iovec { iov_base: std::ptr::from_mut(into).cast(), iov_len: len };
    let remote = libc::iovec { iov_base: pointer_to(address)?, iov_len: len };
    // SAFETY: the kernel writes at most `len` bytes to a T, for which any bytes are valid (Pod).
    let read = unsafe { libc::process_vm_readv(own_pid(), &raw const local, 1, &raw const remote, 1, 0) };
    (usize::try_from(read) == Ok(len)).then_some(())
}

/// Writes values at `address`.
///
/// # Errors
/// `EFAULT` if the memory is not writable; else `process_vm_writev`.
pub fn write<T: Pod>(address: u64, values: &[T]) -> Result<(), Errno> {
    let len = size_of_val(values);
    if len == 0 {
        return Ok(());
    }
    let local = libc::iovec { iov_base: values.as_ptr().cast_mut().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: pointer_to(address).ok_or(Errno::EFAULT)?, iov_len: len };
    // SAFETY: the kernel reads `len` bytes of the values and writes them to the address that the program passed.
    let written = unsafe { libc::process_vm_writev(own_pid(), &raw const local, 1, &raw const remote, 1, 0) };
    match Errno::result(written) {
        Ok(written) if usize::try_from(written) == Ok(len) => Ok(()),
        Ok(_) => Err(Errno::EFAULT),
        Err(errno) => Err(errno),
    }
}

/// Returns the address of a pointer.
pub fn address_of<T>(pointer: *const T) -> u64 {
    u64::try_from(pointer.expose_provenance()).unwrap_or(0)
}

/// Returns a pointer to an address.
pub fn pointer_to(address: u64) -> Option<*mut libc::c_void> {
    Some(std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?))
}
