//! `FILE` streams of pagemaps. libc reads for its streams past our `read`, so these are streams of our own (fopencookie).

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use nix::libc::{self, FILE, c_char, c_int, c_void, off64_t, size_t, ssize_t};

use super::descriptors;
use crate::libc_next::real;
use crate::pagemap_fds;

real! {
    FOPEN = c"fopen": fn(*const c_char, *const c_char) -> *mut FILE;
    FREOPEN = c"freopen": fn(*const c_char, *const c_char, *mut FILE) -> *mut FILE;
    FDOPEN = c"fdopen": fn(c_int, *const c_char) -> *mut FILE;
    FILENO = c"fileno": fn(*mut FILE) -> c_int;
}

/// `cookie_io_functions_t` of glibc.
#[repr(C)]
struct Functions {
    read: Option<unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<unsafe extern "C-unwind" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<unsafe extern "C-unwind" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    static mut stdin: *mut FILE;
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

/// Streams that were made here, and their descriptors; glibc knows of none for such.
static STREAMS: [(AtomicPtr<FILE>, AtomicI32); 64] =
    [const { (AtomicPtr::new(ptr::null_mut()), AtomicI32::new(-1)) }; 64];

/// fopen(3)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    let Some(real) = FOPEN.get() else { return ptr::null_mut() };
    // SAFETY: the caller's arguments.
    let file = unsafe { real(path, mode) };
    // SAFETY: the caller passes C strings, and libc has just made the stream.
    unsafe { instead(path, mode, file) }
}

/// fopen64 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's arguments.
    unsafe { fopen(path, mode) }
}

/// freopen(3). A stream cannot be made another kind of stream where it is, so what is returned is a new one, as
/// [`struct@Functions`] has it; if it was `stdin`, that is the new one as well.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    let Some(real) = FREOPEN.get() else { return ptr::null_mut() };
    // SAFETY: the caller's arguments.
    let opened = unsafe { real(path, mode, file) };
    // SAFETY: the caller passes C strings, and libc has just made the stream anew.
    let ours = unsafe { beside(path, mode, opened) };
    if ours.is_null() {
        return opened;
    }
    let input = &raw mut stdin;
    // SAFETY: libc's variable, which a program that reopens it does not use at the same time.
    if unsafe { input.read() } == opened {
        // SAFETY: as above.
        unsafe { input.write(ours) };
    }
    ours
}

/// freopen64 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn freopen64(
    path: *const c_char,
    mode: *const c_char,
    file: *mut FILE,
) -> *mut FILE {
    // SAFETY: the caller's arguments.
    unsafe { freopen(path, mode, file) }
}

/// fdopen(3)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if pagemap_fds::find(fd).is_some() {
        // SAFETY: the caller passes a C string and the descriptor.
        let ours = unsafe { stream(fd, mode) };
        if !ours.is_null() {
            return ours;
        }
    }
    let Some(real) = FDOPEN.get() else { return ptr::null_mut() };
    // SAFETY: the caller's arguments.
    unsafe { real(fd, mode) }
}

/// fileno(3)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fileno(file: *mut FILE) -> c_int {
    for (ours, fd) in &STREAMS {
        if !file.is_null() && ours.load(Ordering::Acquire) == file {
            return fd.load(Ordering::Relaxed);
        }
    }
    let Some(real) = FILENO.get() else { return crate::libc_next::missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(file) }
}

/// fileno_unlocked of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fileno_unlocked(file: *mut FILE) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { fileno(file) }
}

/// A stream of ours in place of one of libc's of a pagemap; any other as it is.
///
/// # Safety
/// C strings, and a stream that was just opened with them, or null.
unsafe fn instead(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    // SAFETY: the caller vouches for it.
    let ours = unsafe { beside(path, mode, file) };
    if ours.is_null() {
        return file;
    }
    // SAFETY: nobody else has seen it yet.
    unsafe { libc::fclose(file) };
    ours
}

/// A stream of ours over a descriptor of the same pagemap; null for other files, and where it cannot be had.
///
/// # Safety
/// As [`instead`].
unsafe fn beside(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    if path.is_null() || file.is_null() || crate::config().is_none() {
        return ptr::null_mut();
    }
    // SAFETY: the caller vouches for it.
    if !unsafe { CStr::from_ptr(path) }.to_bytes().ends_with(b"pagemap") {
        return ptr::null_mut();
    }
    // SAFETY: the caller vouches for it.
    let exec = if unsafe { CStr::from_ptr(mode) }.to_bytes().contains(&b'e') {
        libc::F_DUPFD_CLOEXEC
    } else {
        libc::F_DUPFD
    };
    // SAFETY: the stream is open.
    let theirs = unsafe { fileno(file) };
    // SAFETY: takes integers and touches no memory.
    let fd = unsafe { libc::fcntl(theirs, exec, 3) };
    if fd < 0 {
        return ptr::null_mut();
    }
    let ours = if descriptors::mark(fd) {
        // SAFETY: the caller vouches for the mode; the descriptor is ours.
        unsafe { stream(fd, mode) }
    } else {
        ptr::null_mut()
    };
    if ours.is_null() {
        // SAFETY: it was made above, and nobody else knows of it.
        unsafe { libc::close(fd) };
    }
    ours
}

/// A stream over a descriptor, which it closes in the end.
///
/// # Safety
/// `mode` is a C string.
unsafe fn stream(fd: c_int, mode: *const c_char) -> *mut FILE {
    let Some((ours, number)) = STREAMS
        .iter()
        .find(|(_, number)| number.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    else {
        return ptr::null_mut();
    };
    let cookie = ptr::from_ref(number).cast_mut().cast();
    let functions = Functions { read: Some(read), write: None, seek: Some(seek), close: Some(close) };
    // SAFETY: the cookie lives as long as the program.
    let file = unsafe { fopencookie(cookie, mode, functions) };
    if file.is_null() {
        number.store(-1, Ordering::Release);
    } else {
        ours.store(file, Ordering::Release);
    }
    file
}

/// # Safety
/// A cookie of [`stream`].
unsafe fn number(cookie: *mut c_void) -> &'static AtomicI32 {
    let number: *mut AtomicI32 = cookie.cast();
    // SAFETY: it was made of such a reference.
    unsafe { &*number }
}

unsafe extern "C-unwind" fn read(cookie: *mut c_void, buffer: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: glibc passes the cookie.
    let fd = unsafe { number(cookie) }.load(Ordering::Relaxed);
    // SAFETY: glibc passes a buffer of that length.
    unsafe { descriptors::read(fd, buffer.cast(), len) }
}

unsafe extern "C-unwind" fn seek(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: glibc passes the cookie.
    let fd = unsafe { number(cookie) }.load(Ordering::Relaxed);
    // SAFETY: glibc passes a pointer to an offset.
    let wanted = unsafe { offset.read() };
    // SAFETY: lseek takes integers and touches no memory.
    let now = unsafe { libc::lseek(fd, wanted, whence) };
    if now < 0 {
        return -1;
    }
    // SAFETY: as above.
    unsafe { offset.write(now) };
    0
}

unsafe extern "C-unwind" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: glibc passes the cookie.
    let number = unsafe { number(cookie) };
    if let Some((file, _)) = STREAMS.iter().find(|(_, one)| ptr::eq(one, number)) {
        file.store(ptr::null_mut(), Ordering::Release);
    }
    let fd = number.swap(-1, Ordering::AcqRel);
    // SAFETY: the stream's own descriptor, which nobody uses any more.
    unsafe { libc::close(fd) }
}
