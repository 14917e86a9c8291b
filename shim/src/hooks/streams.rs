//! `FILE` streams of pagemaps. libc's own streams do not call the interposed `read`, so a stream of a pagemap is replaced with one made
//! by fopencookie.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use nix::libc::{self, FILE, c_char, c_int, c_void, off64_t, size_t, ssize_t};

use super::{open, read};
use crate::libc_next::{missing, next_functions};
use crate::{config, pagemap_fds};

next_functions! {
    FOPEN = c"fopen": fn(*const c_char, *const c_char) -> *mut FILE;
    FREOPEN = c"freopen": fn(*const c_char, *const c_char, *mut FILE) -> *mut FILE;
    FDOPEN = c"fdopen": fn(c_int, *const c_char) -> *mut FILE;
    FILENO = c"fileno": fn(*mut FILE) -> c_int;
}

/// `cookie_io_functions_t` of glibc.
#[repr(C)]
struct CookieIoFunctions {
    read: Option<unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<unsafe extern "C-unwind" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<unsafe extern "C-unwind" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    static mut stdin: *mut FILE;
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: CookieIoFunctions) -> *mut FILE;
}

/// Replacement streams with their descriptors: glibc's fileno fails for cookie streams.
static STREAMS: [(AtomicPtr<FILE>, AtomicI32); 64] =
    [const { (AtomicPtr::new(ptr::null_mut()), AtomicI32::new(-1)) }; 64];

/// fopen(3)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    let Some(next) = FOPEN.get() else { return ptr::null_mut() };
    // SAFETY: passes on the caller's arguments.
    let file = unsafe { next(path, mode) };
    // SAFETY: the caller passes C strings, and libc has just opened the stream.
    unsafe { replace(path, mode, file) }
}

/// glibc: fopen64
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: passes on the caller's arguments.
    unsafe { fopen(path, mode) }
}

/// freopen(3). A libc stream cannot become a cookie stream in place, so for a pagemap a new stream is returned; if the stream was
/// `stdin`, `stdin` refers to the new one too.
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    let Some(next) = FREOPEN.get() else { return ptr::null_mut() };
    // SAFETY: passes on the caller's arguments.
    let opened = unsafe { next(path, mode, file) };
    // SAFETY: the caller passes C strings, and libc has just reopened the stream.
    let cookie_stream = unsafe { pagemap_stream(path, mode, opened) };
    if cookie_stream.is_null() {
        return opened;
    }
    let input = &raw mut stdin;
    // SAFETY: libc's variable; a program that reopens stdin does not access it concurrently.
    if unsafe { input.read() } == opened {
        // SAFETY: as above.
        unsafe { input.write(cookie_stream) };
    }
    cookie_stream
}

/// glibc: freopen64
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn freopen64(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    // SAFETY: passes on the caller's arguments.
    unsafe { freopen(path, mode, file) }
}

/// fdopen(3)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if pagemap_fds::pid_of(fd).is_some() {
        // SAFETY: the caller passes a C string and its descriptor.
        let cookie_stream = unsafe { open_cookie_stream(fd, mode) };
        if !cookie_stream.is_null() {
            return cookie_stream;
        }
    }
    let Some(next) = FDOPEN.get() else { return ptr::null_mut() };
    // SAFETY: passes on the caller's arguments.
    unsafe { next(fd, mode) }
}

/// fileno(3)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fileno(file: *mut FILE) -> c_int {
    for (stream, fd) in &STREAMS {
        if !file.is_null() && stream.load(Ordering::Acquire) == file {
            return fd.load(Ordering::Relaxed);
        }
    }
    let Some(next) = FILENO.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    unsafe { next(file) }
}

/// glibc: fileno_unlocked
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fileno_unlocked(file: *mut FILE) -> c_int {
    // SAFETY: passes on the caller's arguments.
    unsafe { fileno(file) }
}

/// Replaces a libc stream of a pagemap with a cookie stream; returns any other stream unchanged.
///
/// # Safety
/// `path` and `mode` are C strings, and `file` is null or a stream just opened with them.
unsafe fn replace(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    // SAFETY: the same requirements.
    let cookie_stream = unsafe { pagemap_stream(path, mode, file) };
    if cookie_stream.is_null() {
        return file;
    }
    // SAFETY: the program does not have the stream yet.
    unsafe { libc::fclose(file) };
    cookie_stream
}

/// Opens a cookie stream over a duplicate of the stream's descriptor. Returns null if the file is not a pagemap, and on failure.
///
/// # Safety
/// As for [`replace`].
unsafe fn pagemap_stream(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    if path.is_null() || file.is_null() || config::active().is_none() {
        return ptr::null_mut();
    }
    // SAFETY: the caller guarantees a C string.
    if !unsafe { CStr::from_ptr(path) }.to_bytes().ends_with(b"pagemap") {
        return ptr::null_mut();
    }
    // SAFETY: the caller guarantees a C string.
    let command = if unsafe { CStr::from_ptr(mode) }.to_bytes().contains(&b'e') {
        libc::F_DUPFD_CLOEXEC
    } else {
        libc::F_DUPFD
    };
    // SAFETY: the stream is open.
    let stream_fd = unsafe { fileno(file) };
    // SAFETY: F_DUPFD takes integers and accesses no memory.
    let fd = unsafe { libc::fcntl(stream_fd, command, 3) };
    if fd < 0 {
        return ptr::null_mut();
    }
    let cookie_stream = if open::mark_pagemap(fd) {
        // SAFETY: the caller guarantees the C string.
        unsafe { open_cookie_stream(fd, mode) }
    } else {
        ptr::null_mut()
    };
    if cookie_stream.is_null() {
        // SAFETY: fcntl returned this descriptor above, so nothing else owns it.
        unsafe { libc::close(fd) };
    }
    cookie_stream
}

/// Opens a cookie stream that owns `fd`.
///
/// # Safety
/// `mode` is a C string.
unsafe fn open_cookie_stream(fd: c_int, mode: *const c_char) -> *mut FILE {
    let Some((stream, slot)) = STREAMS
        .iter()
        .find(|(_, slot)| slot.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    else {
        return ptr::null_mut();
    };
    let cookie = ptr::from_ref(slot).cast_mut().cast();
    let functions = CookieIoFunctions {
        read: Some(read_cookie),
        write: None,
        seek: Some(seek_cookie),
        close: Some(close_cookie),
    };
    // SAFETY: the cookie refers to a static.
    let file = unsafe { fopencookie(cookie, mode, functions) };
    if file.is_null() {
        slot.store(-1, Ordering::Release);
    } else {
        stream.store(file, Ordering::Release);
    }
    file
}

/// # Safety
/// `cookie` was created by [`open_cookie_stream`].
unsafe fn slot_of(cookie: *mut c_void) -> &'static AtomicI32 {
    let slot: *mut AtomicI32 = cookie.cast();
    // SAFETY: the cookie was made from a reference to a static.
    unsafe { &*slot }
}

unsafe extern "C-unwind" fn read_cookie(cookie: *mut c_void, buffer: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: glibc passes the cookie of the stream.
    let fd = unsafe { slot_of(cookie) }.load(Ordering::Relaxed);
    // SAFETY: glibc passes a buffer of that length.
    unsafe { read::read(fd, buffer.cast(), len) }
}

unsafe extern "C-unwind" fn seek_cookie(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: glibc passes the cookie of the stream.
    let fd = unsafe { slot_of(cookie) }.load(Ordering::Relaxed);
    // SAFETY: glibc passes a pointer to an offset.
    let requested = unsafe { offset.read() };
    // SAFETY: lseek takes integers and accesses no memory.
    let position = unsafe { libc::lseek(fd, requested, whence) };
    if position < 0 {
        return -1;
    }
    // SAFETY: as above.
    unsafe { offset.write(position) };
    0
}

unsafe extern "C-unwind" fn close_cookie(cookie: *mut c_void) -> c_int {
    // SAFETY: glibc passes the cookie of the stream.
    let slot = unsafe { slot_of(cookie) };
    if let Some((stream, _)) = STREAMS.iter().find(|(_, other)| ptr::eq(other, slot)) {
        stream.store(ptr::null_mut(), Ordering::Release);
    }
    let fd = slot.swap(-1, Ordering::AcqRel);
    // SAFETY: the stream owned the descriptor and is being closed.
    unsafe { libc::close(fd) }
}
