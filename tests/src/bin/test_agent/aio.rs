//! Native AIO: `io_submit` and related calls, for which libc has no functions. See include/uapi/linux/aio_abi.h.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::libc;

use crate::call::{Done, checked};

/// `struct iocb` on little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Control {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    control: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Control>() == 64 && size_of::<Event>() == 32);

/// `IOCB_CMD_PREAD`, `IOCB_CMD_PWRITE`.
const READ: u16 = 0;
const WRITE: u16 = 1;

/// An AIO context.
pub struct Aio {
    context: u64,
    events: Vec<Event>,
}

impl Aio {
    /// A context for `depth` concurrent operations.
    pub fn new(depth: usize) -> Done<Self> {
        let mut context = 0_u64;
        // SAFETY: io_setup stores one aio_context_t, an unsigned long.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        checked(result, || format!("io_setup for {depth}"))?;
        Ok(Self { context, events: vec![Event::default(); depth] })
    }

    /// Starts to read into, or to write from, memory that must exist until the operation is complete.
    pub fn submit(
        &mut self,
        tag: u64,
        fd: BorrowedFd<'_>,
        write: bool,
        memory: *mut u8,
        len: usize,
        offset: u64,
    ) -> Done {
        let control = Control {
            data: tag,
            opcode: if write { WRITE } else { READ },
            fd: fd.as_raw_fd() as u32,
            buffer: memory.expose_provenance() as u64,
            bytes: len as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let list = [&raw const control];
        // SAFETY: the kernel copies the list and the control block before the call returns. The caller is responsible
        // for the memory.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_ptr()) };
        checked(result, || format!("io_submit of {len} bytes at {offset}")).map(drop)
    }

    /// Waits for at least `least` operations. Returns the tag and the number of bytes of each completed operation.
    pub fn reap(&mut self, least: usize) -> Done<Vec<(u64, usize)>> {
        let (context, most) = (self.context, self.events.len());
        let events = self.events.as_mut_ptr();
        let never = std::ptr::null::<libc::timespec>();
        // SAFETY: the buffer has room for the requested number of events.
        let result = unsafe { libc::syscall(libc::SYS_io_getevents, context, least, most, events, never) };
        let count = checked(result, || format!("io_getevents of {least}"))?;
        self.events[..count]
            .iter()
            .map(|event| {
                Ok((event.data, checked(event.result, || format!("AIO returned {}", event.result))?))
            })
            .collect()
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the call takes a number, and waits for operations in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
