//! `syscall`: the interposed calls by number.

use nix::libc::{self, c_int, c_long};

use super::{ioctl, madvise, mappings, open, read};
use crate::libc_next::{missing, next_functions};

next_functions! {
    SYSCALL = c"syscall": fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;
}

/// syscall(2)
///
/// # Safety
/// As for libc's function.
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
            // SAFETY: passes on the caller's arguments.
            let fd = unsafe { mappings::memfd_create(pointer(a), int(b).cast_unsigned()) };
            fd.into()
        }
        libc::SYS_mmap => {
            // SAFETY: as above.
            let start = unsafe { mappings::mmap(pointer(a), length(b), int(c), int(d), int(e), f) };
            to_register(start)
        }
        libc::SYS_munmap => {
            // SAFETY: as above.
            let result = unsafe { mappings::munmap(pointer(a), length(b)) };
            result.into()
        }
        libc::SYS_mremap => {
            // SAFETY: as above.
            let start = unsafe { mappings::mremap(pointer(a), length(b), length(c), int(d), pointer(e)) };
            to_register(start)
        }
        libc::SYS_madvise => {
            // SAFETY: as above.
            let result = unsafe { madvise::madvise(pointer(a), length(b), int(c)) };
            result.into()
        }
        libc::SYS_process_madvise => {
            let flags = int(e).cast_unsigned();
            // SAFETY: as above.
            let advised = unsafe { madvise::process_madvise(int(a), pointer(b), length(c), int(d), flags) };
            c_long::try_from(advised).unwrap_or(-1)
        }
        libc::SYS_openat => {
            // SAFETY: as above.
            let fd = unsafe { open::openat(int(a), pointer(b), int(c), int(d)) };
            fd.into()
        }
        libc::SYS_read => {
            // SAFETY: as above.
            let len = unsafe { read::read(int(a), pointer(b), length(c)) };
            c_long::try_from(len).unwrap_or(-1)
        }
        libc::SYS_pread64 => {
            // SAFETY: as above.
            let len = unsafe { read::pread(int(a), pointer(b), length(c), d) };
            c_long::try_from(len).unwrap_or(-1)
        }
        libc::SYS_ioctl => {
            // SAFETY: as above.
            let result = unsafe { ioctl::ioctl(int(a), b.cast_unsigned(), pointer(c)) };
            result.into()
        }
        _ => {
            let Some(next) = SYSCALL.get() else { return missing().into() };
            // SAFETY: as above.
            unsafe { next(number, a, b, c, d, e, f) }
        }
    }
}

const fn pointer<T>(register: c_long) -> *mut T {
    std::ptr::with_exposed_provenance_mut(length(register))
}

/// Truncates a register to an int, as the kernel does.
const fn int(register: c_long) -> c_int {
    let [a, b, c, d, ..] = register.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

const fn length(register: c_long) -> usize {
    usize::from_ne_bytes(register.to_ne_bytes())
}

fn to_register(pointer: *mut libc::c_void) -> c_long {
    c_long::from_ne_bytes(pointer.expose_provenance().to_ne_bytes())
}
