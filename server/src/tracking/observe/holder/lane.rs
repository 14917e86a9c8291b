//! The service's end of a lane: one thread of a holder, which makes one call at a time.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, SyscallError, pidfd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::call::{SpaceCall, SpaceResult};
use super::patience::Patience;
use super::wire::{CallMessage, ResultMessage, SpaceId, read_frame, write_frame};

/// Time between two looks at the state of a thread that has not answered.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the first message of a lane. The holder may have to start.
const READY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the rest of a message that has begun.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(5);

/// Logged once.
static COUNTED: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(super) struct Lane {
    socket: UnixStream,
    holder: u32,
    thread: u32,
}

impl Lane {
    /// `None`: the holder can start no thread for the lane.
    pub(super) fn new(socket: UnixStream, holder: u32) -> Result<Option<Self>, SyscallError> {
        let timeout = || "setsockopt(SO_RCVTIMEO, SO_SNDTIMEO) of a lane".to_owned();
        socket.set_read_timeout(Some(TRANSFER_TIMEOUT)).call(timeout)?;
        socket.set_write_timeout(Some(TRANSFER_TIMEOUT)).call(timeout)?;
        let mut polled = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(READY_TIMEOUT).unwrap_or(PollTimeout::MAX);
        let call = || "wait for a new lane".to_owned();
        if poll(&mut polled, timeout).call(call)? == 0 {
            return Err(Errno::ETIMEDOUT).call(call);
        }
        let (ready, _) = read_frame::<ResultMessage>(&socket).call(|| "recvmsg on a new lane".to_owned())?;
        let Some((thread, counted)) = ready.lane() else { return Ok(None) };
        if let Some(error) = counted.filter(|_| !COUNTED.swap(true, Ordering::Relaxed)) {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(holder, error, "calls of a holder count as calls that take written bits");
        }
        Ok(Some(Self { socket, holder, thread }))
    }

    /// Sends a call. After a failure the holder has not made it.
    pub(super) fn send(&self, id: SpaceId, version: u64, call: &SpaceCall) -> io::Result<()> {
        write_frame(&self.socket, &CallMessage::new(id, version, call), &[])
    }

    /// Waits for the result. False if the thread has slept for as long as this operation is willing to wait: it then waits for the
    /// address space. A thread that runs, or waits for a processor, is waited for.
    pub(super) fn wait(&self) -> bool {
        // Most calls are answered before their state matters.
        if self.is_ready(LOOK_INTERVAL) {
            return true;
        }
        let mut patience = Patience::begin();
        let mut slept_since = Instant::now();
        loop {
            let slept = slept_since.elapsed();
            slept_since = Instant::now();
            if !self.thread_runs() && !patience.spend(slept) {
                return self.is_ready(Duration::ZERO);
            }
            if self.is_ready(LOOK_INTERVAL) {
                return true;
            }
        }
    }

    /// True if the result has arrived, or the holder has ended, within `timeout`.
    pub(super) fn is_ready(&self, timeout: Duration) -> bool {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        // A failure was caused by a signal, and counts as no answer.
        poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout).is_ok_and(|ready| ready > 0)
    }

    fn thread_runs(&self) -> bool {
        pidfd::state_of_thread(self.holder, self.thread) == Ok('R')
    }

    /// Receives the result, and descriptors.
    ///
    /// # Errors
    /// `recvmsg`, `read`: the holder has ended.
    pub(super) fn receive(&self) -> Result<(SpaceResult, Vec<OwnedFd>), SyscallError> {
        let (message, descriptors) = read_frame::<ResultMessage>(&self.socket)
            .call(|| format!("recvmsg of a result of holder {}", self.holder))?;
        let malformed = || format!("result of holder {}", self.holder);
        let result = message.result().ok_or(Errno::EBADMSG).call(malformed)?;
        Ok((result, descriptors))
    }
}
