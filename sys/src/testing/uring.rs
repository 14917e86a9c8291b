//! io_uring requests whose memory outlives them.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use io_uring::squeue::Entry;
pub use io_uring::squeue::Flags;
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, opcode};
use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext as _, SyscallError, errno_of};

/// The file of a request.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    Descriptor(BorrowedFd<'a>),
    /// The index of a registered file.
    Registered(u32),
}

/// A ring with room for a few requests.
pub struct Ring(IoUring);

impl Ring {
    /// # Errors
    /// `io_uring_setup`.
    pub fn new() -> Result<Self, SyscallError> {
        IoUring::new(4).map(Self).call(|| "io_uring_setup for 4 requests".to_owned())
    }

    /// Registers files, which later requests name by their index.
    ///
    /// # Errors
    /// `io_uring_register`.
    pub fn register(&self, files: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        let raw: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
        self.0.submitter().register_files(&raw).call(|| format!("io_uring_register of {raw:?}"))
    }

    /// Starts to write `bytes` at `offset`, without waiting.
    ///
    /// # Errors
    /// `io_uring_enter`; `EBUSY` if the ring is full.
    pub fn submit_write(
        &mut self,
        target: Target<'_>,
        bytes: &'static [u8],
        offset: u64,
        flags: Flags,
    ) -> Result<(), SyscallError> {
        let entry = write_entry(target, bytes, offset)?.flags(flags);
        // SAFETY: the bytes are static and only read.
        unsafe { self.0.submission().push(&entry) }
            .map_err(|_| Errno::EBUSY)
            .call(|| "a request for a full ring".to_owned())?;
        self.0.submit().map(drop).call(|| "io_uring_enter".to_owned())
    }

    /// Submits an advice for no memory that waits until `pipe` is readable, without waiting.
    ///
    /// # Errors
    /// As [`Self::submit_write`].
    pub fn submit_advice_behind(&mut self, pipe: BorrowedFd<'_>) -> Result<(), SyscallError> {
        let readable = u32::try_from(libc::POLLIN).unwrap_or_default();
        let poll = opcode::PollAdd::new(Fd(pipe.as_raw_fd()), readable).build().flags(Flags::IO_LINK);
        let advice = opcode::Madvise::new(std::ptr::null(), 0, libc::MADV_NORMAL).build();
        self.submit_two(&[poll, advice])
    }

    /// Submits an advice for no memory that the kernel cancels, since the request before it fails. It has no completion event.
    ///
    /// # Errors
    /// As [`Self::submit_write`].
    pub fn submit_canceled_advice(&mut self) -> Result<(), SyscallError> {
        let fails = opcode::Fsync::new(Fd(-1)).build().flags(Flags::IO_LINK | Flags::SKIP_SUCCESS);
        let advice = opcode::Madvise::new(std::ptr::null(), 0, libc::MADV_NORMAL).build();
        self.submit_two(&[fails, advice])
    }

    /// Submits requests that use no memory, without waiting.
    fn submit_two(&mut self, entries: &[Entry; 2]) -> Result<(), SyscallError> {
        // SAFETY: the callers pass requests that use no memory.
        unsafe { self.0.submission().push_multiple(entries) }
            .map_err(|_| Errno::EBUSY)
            .call(|| "two requests for a full ring".to_owned())?;
        self.0.submit().map(drop).call(|| "io_uring_enter".to_owned())
    }

    /// Reads up to 16 bytes at `offset`, or at the file position, and waits. Returns the number of bytes, or a negative errno.
    ///
    /// # Errors
    /// `io_uring_enter`; `EBUSY` if the ring is full.
    pub fn read(&mut self, file: BorrowedFd<'_>, offset: Option<u64>) -> Result<i32, SyscallError> {
        let mut bytes = [0_u8; 16];
        let read = opcode::Read::new(Fd(file.as_raw_fd()), bytes.as_mut_ptr(), 16);
        self.run(&read.offset(offset.unwrap_or(u64::MAX)).build())
    }

    /// Splices up to 16 bytes from a file at its position to a pipe, and waits. Returns as [`Self::read`].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn splice(&mut self, file: BorrowedFd<'_>, pipe: BorrowedFd<'_>) -> Result<i32, SyscallError> {
        let splice = opcode::Splice::new(Fd(file.as_raw_fd()), -1, Fd(pipe.as_raw_fd()), -1, 16);
        self.run(&splice.build())
    }

    /// Submits a request and waits for it. Its memory must be valid until then.
    fn run(&mut self, entry: &Entry) -> Result<i32, SyscallError> {
        // SAFETY: the memory of the request is that of the callers, which wait() outlives: it returns when the request is complete,
        // or when nothing could be submitted.
        unsafe { self.0.submission().push(entry) }
            .map_err(|_| Errno::EBUSY)
            .call(|| "a request for a full ring".to_owned())?;
        self.wait()
    }

    /// Waits for the next completion, also if signals arrive. Returns its result: a number of bytes, or a negative errno.
    ///
    /// # Errors
    /// `io_uring_enter`.
    pub fn wait(&mut self) -> Result<i32, SyscallError> {
        next_result(&mut self.0)
    }
}

/// Submits what is queued, and waits for the next completion, also if signals arrive.
pub(super) fn next_result(ring: &mut IoUring) -> Result<i32, SyscallError> {
    loop {
        // A signal that arrives after requests were submitted makes the call return early, and without an error.
        match ring.submit_and_wait(1).map_err(|error| errno_of(&error)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).call(|| "io_uring_enter".to_owned()),
        }
        if let Some(event) = ring.completion().next() {
            return Ok(event.result());
        }
    }
}

/// Writes `bytes` at `offset` by a ring of its own. Returns the number of bytes.
///
/// # Errors
/// `io_uring_setup` or `io_uring_enter`; the error of the request.
pub fn write(target: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<usize, SyscallError> {
    let mut ring = Ring::new()?;
    let entry = write_entry(Target::Descriptor(target), bytes, offset)?;
    let result = ring.run(&entry)?;
    let what = || format!("write of {} bytes at {offset} by io_uring", bytes.len());
    usize::try_from(result).map_err(|_| Errno::from_raw(result.saturating_neg())).call(what)
}

fn write_entry(target: Target<'_>, bytes: &[u8], offset: u64) -> Result<Entry, SyscallError> {
    let len = u32::try_from(bytes.len())
        .map_err(|_| Errno::EINVAL)
        .call(|| format!("write of {} bytes by io_uring", bytes.len()))?;
    let write = match target {
        Target::Descriptor(fd) => opcode::Write::new(Fd(fd.as_raw_fd()), bytes.as_ptr(), len),
        Target::Registered(index) => opcode::Write::new(Fixed(index), bytes.as_ptr(), len),
    };
    Ok(write.offset(offset).build())
}
