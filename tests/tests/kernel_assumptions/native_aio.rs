//! Native AIO: one request at a time.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use fdmap_sys::Errno;
use nix::libc;

/// `struct iocb` of `linux/aio_abi.h`
#[derive(Default)]
#[repr(C)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

const _: () = assert!(size_of::<Request>() == 64);

/// `linux/aio_abi.h`
#[derive(Clone, Copy)]
pub(crate) enum Opcode {
    Pread = 0,
    Pwrite = 1,
}

/// A context with room for one request. Dropping it waits for the request.
pub(crate) struct Aio(u64);

impl Aio {
    pub(crate) fn new() -> Self {
        let mut context = 0_u64;
        // SAFETY: the kernel writes one 64-bit number to `context`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
        assert_eq!(made, 0, "io_setup: {}", Errno::last());
        Self(context)
    }

    /// Reads to, or writes from, `len` bytes at `buffer`, at offset 0 of the file.
    ///
    /// # Safety
    /// The buffer must stay mapped until [`Self::wait`] has returned. For a read, it must be writable.
    pub(crate) unsafe fn submit(&self, opcode: Opcode, fd: BorrowedFd<'_>, buffer: *mut u8, len: usize) {
        let request = Request {
            opcode: opcode as u16,
            fd: fd.as_raw_fd().cast_unsigned(),
            buffer: buffer.addr() as u64,
            bytes: len as u64,
            ..Request::default()
        };
        let list = [&raw const request];
        // SAFETY: the list has one request, copied before the call returns; the caller vouches for the buffer.
        let submitted = unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1, list.as_ptr()) };
        assert_eq!(submitted, 1, "io_submit: {}", Errno::last());
    }

    /// Waits until the request is complete. Returns the number of bytes read or written.
    pub(crate) fn wait(&self) -> i64 {
        // struct io_event: data, obj, res, res2
        let mut event = [0_i64; 4];
        let none = std::ptr::null::<libc::timespec>();
        // SAFETY: the kernel writes at most one event, and `event` has room for it.
        let got = unsafe { libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, event.as_mut_ptr(), none) };
        assert_eq!(got, 1, "io_getevents: {}", Errno::last());
        event[2]
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the call takes the context that io_setup created.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}
