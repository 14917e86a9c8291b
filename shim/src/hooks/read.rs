//! read, pread, readv and preadv: correcting pagemap entries after the kernel has read them.

use nix::libc::{self, c_int, c_void, iovec, off_t, size_t, ssize_t};

use crate::libc_next::{missing, next_functions};
use crate::{guard, pagemap_fds, pagemap_read, session};

next_functions! {
    READ = c"read": fn(c_int, *mut c_void, size_t) -> ssize_t;
    READ_CHK = c"__read_chk": fn(c_int, *mut c_void, size_t, size_t) -> ssize_t;
    PREAD = c"pread": fn(c_int, *mut c_void, size_t, off_t) -> ssize_t;
    PREAD_CHK = c"__pread_chk": fn(c_int, *mut c_void, size_t, off_t, size_t) -> ssize_t;
    READV = c"readv": fn(c_int, *const iovec, c_int) -> ssize_t;
    PREADV = c"preadv": fn(c_int, *const iovec, c_int, off_t) -> ssize_t;
    PREADV2 = c"preadv2": fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
}

/// read(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    let Some(next) = READ.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, buffer, count) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], len, None);
    len
}

/// read with `_FORTIFY_SOURCE`
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    buffer_len: size_t,
) -> ssize_t {
    let Some(next) = READ_CHK.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, buffer, count, buffer_len) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], len, None);
    len
}

/// pread(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    let Some(next) = PREAD.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, buffer, count, offset) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], len, Some(offset));
    len
}

/// glibc: pread with 64-bit offsets
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: passes on the caller's arguments.
    unsafe { pread(fd, buffer, count, offset) }
}

/// pread with `_FORTIFY_SOURCE`
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __pread_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    buffer_len: size_t,
) -> ssize_t {
    let Some(next) = PREAD_CHK.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, buffer, count, offset, buffer_len) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], len, Some(offset));
    len
}

/// pread64 with `_FORTIFY_SOURCE`
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __pread64_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    buffer_len: size_t,
) -> ssize_t {
    // SAFETY: passes on the caller's arguments.
    unsafe { __pread_chk(fd, buffer, count, offset, buffer_len) }
}

/// readv(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(next) = READV.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, vectors, count) };
    // SAFETY: the caller's vectors, which the kernel has just used.
    unsafe { after_readv(fd, (vectors, count), len, None) };
    len
}

/// preadv(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    let Some(next) = PREADV.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, vectors, count, offset) };
    // SAFETY: the caller's vectors, which the kernel has just used.
    unsafe { after_readv(fd, (vectors, count), len, Some(offset)) };
    len
}

/// glibc: preadv with 64-bit offsets
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv64(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    // SAFETY: passes on the caller's arguments.
    unsafe { preadv(fd, vectors, count, offset) }
}

/// preadv2(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let Some(next) = PREADV2.get() else { return missing_read() };
    // SAFETY: passes on the caller's arguments.
    let len = unsafe { next(fd, vectors, count, offset, flags) };
    // SAFETY: the caller's vectors, which the kernel has just used.
    unsafe { after_readv(fd, (vectors, count), len, Some(offset).filter(|offset| *offset >= 0)) };
    len
}

/// glibc: preadv2 with 64-bit offsets
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: passes on the caller's arguments.
    unsafe { preadv2(fd, vectors, count, offset, flags) }
}

fn missing_read() -> ssize_t {
    missing();
    -1
}

/// # Safety
/// The vectors are those of a readv that returned `len`.
unsafe fn after_readv(
    fd: c_int,
    (vectors, count): (*const iovec, c_int),
    len: ssize_t,
    offset: Option<off_t>,
) {
    if len > 0
        && pagemap_fds::pid_of(fd).is_some()
        && let Ok(count) = usize::try_from(count)
    {
        // SAFETY: the kernel has just used this array.
        after_read(fd, unsafe { std::slice::from_raw_parts(vectors, count) }, len, offset);
    }
}

/// Corrects what was read at `offset`, or, if `offset` is `None`, before the descriptor's current position.
fn after_read(fd: c_int, vectors: &[iovec], len: ssize_t, offset: Option<off_t>) {
    if len <= 0 {
        return;
    }
    let Some(pid) = pagemap_fds::pid_of(fd) else { return };
    guard::run(|guard| {
        let start = match offset {
            Some(offset) => offset,
            // SAFETY: lseek takes integers and accesses no memory.
            None => unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }.checked_sub(i64::try_from(len).ok()?)?,
        };
        let (mut offset, mut remaining) = (u64::try_from(start).ok()?, usize::try_from(len).ok()?);
        session::with_shim(guard, |shim| {
            for vector in vectors {
                let len = vector.iov_len.min(remaining);
                // SAFETY: the kernel has just written these bytes, and the program cannot use them before the call returns.
                unsafe { pagemap_read::correct(shim, pid, vector.iov_base.cast(), len, offset) };
                offset += u64::try_from(len).unwrap_or(0);
                remaining -= len;
            }
        })
    });
}
