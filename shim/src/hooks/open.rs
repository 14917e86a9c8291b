//! open, dup and fcntl: recognising pagemap descriptors.

use std::ffi::CStr;

use fdmap_sys::Errno;
use nix::libc::{self, c_char, c_int, c_long};

use crate::descriptor::link_target;
use crate::libc_next::{missing, next_functions};
use crate::{config, pagemap_fds, policy};

next_functions! {
    OPEN = c"open": fn(*const c_char, c_int, c_int) -> c_int;
    OPENAT = c"openat": fn(c_int, *const c_char, c_int, c_int) -> c_int;
    OPEN_2 = c"__open_2": fn(*const c_char, c_int) -> c_int;
    OPENAT_2 = c"__openat_2": fn(c_int, *const c_char, c_int) -> c_int;
    DUP = c"dup": fn(c_int) -> c_int;
    DUP2 = c"dup2": fn(c_int, c_int) -> c_int;
    DUP3 = c"dup3": fn(c_int, c_int, c_int) -> c_int;
    FCNTL = c"fcntl": fn(c_int, c_int, c_long) -> c_int;
}

/// Marks a descriptor that was just opened if it is a pagemap. For other paths only the suffix is compared.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn after_open(path: *const c_char, fd: c_int) -> c_int {
    if fd >= 0 && !path.is_null() {
        // SAFETY: the caller guarantees a C string, and the kernel has read it.
        let path = unsafe { CStr::from_ptr(path) };
        if path.to_bytes().ends_with(b"pagemap") {
            mark_pagemap(fd);
        }
    }
    fd
}

/// Marks a descriptor if it refers to a pagemap, no matter how it was opened. Does not allocate. Returns whether it is a pagemap.
pub fn mark_pagemap(fd: c_int) -> bool {
    let errno = Errno::last_raw();
    let mut buffer = [0; 64];
    let pid = link_target(fd, &mut buffer).and_then(policy::pagemap_pid);
    if let Some(pid) = pid.filter(|_| config::active().is_some()) {
        pagemap_fds::mark(fd, pid);
    }
    Errno::set_raw(errno);
    pid.is_some()
}

macro_rules! open_functions {
    ($($(#[$doc:meta])* $name:ident => $next:ident($([$directory:ident])? path $(, $more:ident)*);)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As for libc's function.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name(
                $($directory: c_int,)?
                path: *const c_char
                $(, $more: c_int)*
            ) -> c_int {
                let Some(next) = $next.get() else { return missing() };
                // SAFETY: passes on the caller's arguments.
                let fd = unsafe { next($($directory,)? path $(, $more)*) };
                // SAFETY: the caller passes a C string.
                unsafe { after_open(path, fd) }
            }
        )*
    };
}

open_functions! {
    /// open(2)
    open => OPEN(path, flags, mode);
    /// glibc: open with 64-bit offsets
    open64 => OPEN(path, flags, mode);
    /// openat(2)
    openat => OPENAT([directory] path, flags, mode);
    /// glibc: openat with 64-bit offsets
    openat64 => OPENAT([directory] path, flags, mode);
    /// open with `_FORTIFY_SOURCE`
    __open_2 => OPEN_2(path, flags);
    /// open64 with `_FORTIFY_SOURCE`
    __open64_2 => OPEN_2(path, flags);
    /// openat with `_FORTIFY_SOURCE`
    __openat_2 => OPENAT_2([directory] path, flags);
    /// openat64 with `_FORTIFY_SOURCE`
    __openat64_2 => OPENAT_2([directory] path, flags);
}

/// dup(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let Some(next) = DUP.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    after_dup(fd, unsafe { next(fd) })
}

/// dup2(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    let Some(next) = DUP2.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    after_dup(fd, unsafe { next(fd, to) })
}

/// dup3(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let Some(next) = DUP3.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    after_dup(fd, unsafe { next(fd, to, flags) })
}

/// fcntl(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    let Some(next) = FCNTL.get() else { return missing() };
    // SAFETY: passes on the caller's arguments; libc's fcntl ignores an argument that the command does not use.
    let result = unsafe { next(fd, command, argument) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => after_dup(fd, result),
        _ => result,
    }
}

/// glibc: fcntl64
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: passes on the caller's arguments.
    unsafe { fcntl(fd, command, argument) }
}

fn after_dup(from: c_int, to: c_int) -> c_int {
    if to >= 0 {
        pagemap_fds::copy(from, to);
    }
    to
}
