//! Native AIO: `io_submit` and related calls, for which libc has no functions. See include/uapi/linux/aio_abi.h.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use bytemuck::{Pod, Zeroable};
use nix::errno::Errno;
use nix::libc;

use super::raw_mapping::RawMapping;
use crate::error::{CallContext as _, SyscallError};

/// `struct iocb` on little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Control {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: u64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Event {
    data: u64,
    control: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Control>() == 64 && size_of::<Event>() == 32);

/// The operation of a request: `IOCB_CMD_PREAD` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    Pread = 0,
    Pwrite = 1,
    Preadv = 7,
    Pwritev = 8,
    /// An operation that the kernel does not know.
    Unknown = 9,
}

/// An AIO context. Dropping it waits for its requests.
#[derive(Debug)]
pub struct Aio {
    context: u64,
}

impl Aio {
    /// A context for `depth` concurrent requests.
    ///
    /// # Errors
    /// `io_setup`.
    pub fn new(depth: usize) -> Result<Self, SyscallError> {
        let mut context = 0_u64;
        // SAFETY: io_setup stores one aio_context_t, an unsigned long.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        Errno::result(made).call(|| format!("io_setup for {depth} requests"))?;
        Ok(Self { context })
    }

    /// Starts to read `len` bytes into a mapping at `at`, or to write them from there. `tag` comes back with the result.
    ///
    /// # Safety
    /// The range must stay mapped until the request is complete. For a read it must be writable, and no reference into it exist.
    ///
    /// # Errors
    /// `io_submit`; `EINVAL` for other operations than `Pread` and `Pwrite`, whose memory would name further memory.
    pub unsafe fn submit(
        &self,
        opcode: Opcode,
        fd: BorrowedFd<'_>,
        (at, len): (*mut u8, usize),
        offset: u64,
        tag: u64,
    ) -> Result<(), SyscallError> {
        let what = || format!("io_submit({opcode:?}) of {len} bytes at {offset}");
        if !matches!(opcode, Opcode::Pread | Opcode::Pwrite) {
            return Err(Errno::EINVAL).call(what);
        }
        let buffer = at.expose_provenance() as u64;
        let control = Control { data: tag, buffer, bytes: len as u64, offset, ..Control::empty(opcode, fd) };
        submit(self.context, &[control]).call(what)
    }

    /// Writes bytes at offsets of files, by one call.
    ///
    /// # Errors
    /// `io_submit`, if the first of them cannot begin.
    pub fn submit_writes(&self, writes: &[(BorrowedFd<'_>, &'static [u8], u64)]) -> Result<(), SyscallError> {
        let control = |(fd, bytes, offset): &(BorrowedFd<'_>, &'static [u8], u64)| Control {
            buffer: bytes.as_ptr().expose_provenance() as u64,
            bytes: bytes.len() as u64,
            offset: *offset,
            ..Control::empty(Opcode::Pwrite, *fd)
        };
        let controls: Vec<_> = writes.iter().map(control).collect();
        submit(self.context, &controls).call(|| format!("io_submit of {} writes", writes.len()))
    }

    /// Waits for at least `least` requests, and returns the tags and results of at most `most`: a number of bytes, or a negative
    /// errno.
    ///
    /// # Errors
    /// `io_getevents`.
    pub fn wait(&self, least: usize, most: usize) -> Result<Vec<(u64, i64)>, SyscallError> {
        let mut events = vec![Event::zeroed(); most];
        let never = std::ptr::null::<libc::timespec>();
        let number = libc::SYS_io_getevents;
        // SAFETY: the buffer has room for the requested number of events.
        let got = unsafe { libc::syscall(number, self.context, least, most, events.as_mut_ptr(), never) };
        let got = Errno::result(got).call(|| format!("io_getevents of {least} to {most} requests"))?;
        events.truncate(usize::try_from(got).unwrap_or(0));
        Ok(events.iter().map(|event| (event.data, event.result)).collect())
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the call takes a number, and waits for requests in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

impl Control {
    fn empty(opcode: Opcode, fd: BorrowedFd<'_>) -> Self {
        Self { opcode: opcode as u16, fd: fd.as_raw_fd().cast_unsigned(), ..Self::zeroed() }
    }
}

fn submit(context: u64, controls: &[Control]) -> Result<(), Errno> {
    let list: Vec<_> = controls.iter().map(std::ptr::from_ref).collect();
    // SAFETY: the kernel copies the list and the control blocks before the call returns. The callers answer for the memory
    // that the control blocks name.
    let submitted = unsafe { libc::syscall(libc::SYS_io_submit, context, list.len(), list.as_ptr()) };
    Errno::result(submitted).map(drop)
}

/// Writes `bytes` at `offset` by one request.
///
/// # Errors
/// `io_setup`, `io_submit`, `io_getevents`; the error of the request.
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<usize, SyscallError> {
    let aio = Aio::new(1)?;
    // SAFETY: the bytes are only read, and outlive the request: dropping the context waits for it.
    unsafe { aio.submit(Opcode::Pwrite, fd, (bytes.as_ptr().cast_mut(), bytes.len()), offset, 0) }?;
    let results = aio.wait(1, 1)?;
    let result = results.first().map_or(0, |(_, result)| *result);
    usize::try_from(result)
        .map_err(|_| Errno::from_raw(i32::try_from(result.saturating_neg()).unwrap_or(0)))
        .call(|| format!("write of {} bytes at {offset} by native AIO", bytes.len()))
}

/// Submits requests to a context that does not exist, so that none of them begins.
///
/// # Errors
/// Always: `EINVAL`.
pub fn submit_to_no_context(requests: &[(Opcode, BorrowedFd<'_>)]) -> Result<(), Errno> {
    let controls: Vec<_> = requests.iter().map(|(opcode, fd)| Control::empty(*opcode, *fd)).collect();
    submit(0, &controls)
}

/// An [`Aio`] that reads into a mapping of its own, or writes from it.
#[derive(Debug)]
pub struct MappedAio {
    /// Dropped before the memory.
    aio: Aio,
    memory: RawMapping,
}

impl MappedAio {
    /// # Errors
    /// `io_setup`.
    pub fn new(depth: usize, memory: RawMapping) -> Result<Self, SyscallError> {
        Ok(Self { aio: Aio::new(depth)?, memory })
    }

    #[must_use]
    pub const fn memory(&self) -> &RawMapping {
        &self.memory
    }

    /// Like [`Aio::submit`], with `len` bytes at `at` of the memory.
    ///
    /// # Errors
    /// As [`Aio::submit`]; `EFAULT` if the memory does not contain the range.
    pub fn submit(
        &self,
        opcode: Opcode,
        fd: BorrowedFd<'_>,
        (at, len): (usize, usize),
        offset: u64,
        tag: u64,
    ) -> Result<(), SyscallError> {
        let at = self.memory.checked(at, len)?;
        // SAFETY: the memory is dropped after the context, which waits for its requests, and is lent by shared references only, which
        // cannot unmap it. For memory that is not writable, a read fails with EFAULT.
        unsafe { self.aio.submit(opcode, fd, (at.cast(), len), offset, tag) }
    }

    /// As [`Aio::wait`].
    ///
    /// # Errors
    /// `io_getevents`.
    pub fn wait(&self, least: usize, most: usize) -> Result<Vec<(u64, i64)>, SyscallError> {
        self.aio.wait(least, most)
    }
}
