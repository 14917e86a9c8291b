//! `syscall`: the same calls by their number.

use nix::libc::{self, c_int, c_long};

use super::{descriptors, mappings};
use crate::libc_next::{missing, real};

real! {
    SYSCALL = c"syscall": fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;
}

/// syscall(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    match number {
        libc::SYS_memfd_create => {
            // SAFETY: the caller's arguments.
            let made = unsafe { mappings::memfd_create(pointer(a), low(b).cast_unsigned()) };
            made.into()
        }
        libc::SYS_mmap => {
            // SAFETY: likewise.
            let mapped = unsafe { mappings::mmap(pointer(a), length(b), low(c), low(d), low(e), f) };
            address(mapped)
        }
        libc::SYS_munmap => {
            // SAFETY: likewise.
            let done = unsafe { mappings::munmap(pointer(a), length(b)) };
            done.into()
        }
        libc::SYS_mremap => {
            // SAFETY: likewise.
            let moved = unsafe { mappings::mremap(pointer(a), length(b), length(c), low(d), pointer(e)) };
            address(moved)
        }
        libc::SYS_openat => {
            // SAFETY: likewise.
            let opened = unsafe { descriptors::openat(low(a), pointer(b), low(c), low(d)) };
            opened.into()
        }
        libc::SYS_read => {
            // SAFETY: likewise.
            let read = unsafe { descriptors::read(low(a), pointer(b), length(c)) };
            c_long::try_from(read).unwrap_or(-1)
        }
        libc::SYS_pread64 => {
            // SAFETY: likewise.
            let read = unsafe { descriptors::pread(low(a), pointer(b), length(c), d) };
            c_long::try_from(read).unwrap_or(-1)
        }
        libc::SYS_ioctl => {
            // SAFETY: likewise.
            let done = unsafe { descriptors::ioctl(low(a), b.cast_unsigned(), pointer(c)) };
            done.into()
        }
        _ => {
            let Some(real) = SYSCALL.get() else { return missing().into() };
            // SAFETY: likewise.
            unsafe { real(number, a, b, c, d, e, f) }
        }
    }
}

const fn pointer<T>(register: c_long) -> *mut T {
    std::ptr::with_exposed_provenance_mut(length(register))
}

/// As the kernel takes an int: the low half of the register.
const fn low(register: c_long) -> c_int {
    let [a, b, c, d, ..] = register.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

const fn length(register: c_long) -> usize {
    usize::from_ne_bytes(register.to_ne_bytes())
}

fn address(pointer: *mut libc::c_void) -> c_long {
    c_long::from_ne_bytes(pointer.expose_provenance().to_ne_bytes())
}
