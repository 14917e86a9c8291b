//! Descriptors that a client passed, and the receiver has checked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fdmap_sys::SyscallError;
use fdmap_sys::fd::duplicate;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::{Userfaultfd, is_userfaultfd};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::error::{OperationError, ProtocolError};
use crate::blocking::{BlockingCalls, Call};
use crate::tracking::HeldSpace;
use crate::tracking::holder::Holder;

/// A descriptor of a client.
#[derive(Debug)]
pub(super) enum Passed {
    /// The last close may block, and is not made here, whatever becomes of the request.
    Userfaultfd(HeldSpace),
    Other(PassedFd),
}

/// A memfd, or another descriptor whose last close only frees memory. That may take long, so no async worker thread makes it, wherever the
/// request is dropped.
#[derive(Debug)]
pub(super) struct PassedFd {
    fd: Option<OwnedFd>,
    closer: Closer,
}

/// Closes descriptors, in the threads that end files of their user.
#[derive(Clone, Debug)]
pub(super) struct Closer {
    blocking: BlockingCalls,
    /// Of a subordinate user, its owner.
    user: u32,
    /// Dropped with the last descriptor.
    _open: mpsc::Sender<()>,
}

/// The descriptors that a [`Closer`] closes.
#[derive(Debug)]
pub(super) struct Closes(mpsc::Receiver<()>);

impl Closer {
    pub(super) fn new(blocking: BlockingCalls, user: u32) -> (Self, Closes) {
        let (open, is_closed) = mpsc::channel(1);
        (Self { blocking, user, _open: open }, Closes(is_closed))
    }

    async fn close(self, fd: OwnedFd) {
        let call = Call::new("close of a passed descriptor");
        // A panic cannot occur: only the drop is called.
        let _ = self.blocking.end(self.user, call, move || drop(fd)).await;
    }
}

impl Closes {
    /// Waits until all descriptors are closed.
    pub(super) async fn wait(&mut self) {
        // Nothing is sent.
        let _ = self.0.recv().await;
    }
}

impl PassedFd {
    /// # Errors
    /// Never fails: only [`Self::close`] and the drop take the descriptor.
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>, OperationError> {
        self.fd.as_ref().map(AsFd::as_fd).ok_or_else(|| ProtocolError::DescriptorsLost.into())
    }

    fn duplicate(&self) -> Result<OwnedFd, OperationError> {
        duplicate(self.fd()?).map_err(OperationError::Descriptor)
    }

    /// Closes the descriptor here: in a thread of its user, or while another one of its open file description is open, so that this is not
    /// the last close.
    pub(super) fn close(mut self) {
        self.fd = None;
    }
}

impl Drop for PassedFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        // Without a runtime, there is no thread of one to delay.
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(self.closer.clone().close(fd)));
        }
    }
}

/// The descriptors of one packet, in order.
#[derive(Debug)]
pub(super) struct PassedDescriptors(std::vec::IntoIter<Passed>);

impl PassedDescriptors {
    /// `holder`: that of the client's user.
    pub(super) fn new(descriptors: Vec<OwnedFd>, holder: &Arc<Holder>, closer: &Closer) -> Self {
        let passed = |fd: OwnedFd| {
            if is_userfaultfd(fd.as_fd()).unwrap_or(false) {
                Passed::Userfaultfd(HeldSpace::new(Userfaultfd::of_checked(fd), Arc::clone(holder)))
            } else {
                Passed::Other(PassedFd { fd: Some(fd), closer: closer.clone() })
            }
        };
        Self(descriptors.into_iter().map(passed).collect::<Vec<_>>().into_iter())
    }

    fn next(&mut self) -> Result<Passed, OperationError> {
        // decode_packet() has checked the number of descriptors.
        self.0.next().ok_or_else(|| ProtocolError::DescriptorsLost.into())
    }

    /// The next descriptor, which is no userfaultfd.
    pub(super) fn other(&mut self) -> Result<PassedFd, OperationError> {
        match self.next()? {
            Passed::Other(fd) => Ok(fd),
            Passed::Userfaultfd(_) => Err(OperationError::ForeignDescriptor),
        }
    }

    pub(super) fn userfaultfd(&mut self) -> Result<HeldSpace, OperationError> {
        match self.next()? {
            Passed::Userfaultfd(held) => Ok(held),
            // Names the check that failed.
            Passed::Other(fd) => Err(Userfaultfd::from_fd(fd.duplicate()?)
                .map_or_else(OperationError::Descriptor, |_| OperationError::ForeignDescriptor)),
        }
    }

    pub(super) fn pagemap(&mut self) -> Result<Pagemap, OperationError> {
        self.checked(Pagemap::from_fd)
    }

    pub(super) fn maps(&mut self) -> Result<Maps, OperationError> {
        self.checked(Maps::from_fd)
    }

    /// The next descriptor, as a type that checks it.
    fn checked<T>(&mut self, check: fn(OwnedFd) -> Result<T, SyscallError>) -> Result<T, OperationError> {
        let passed = self.other()?;
        let checked = check(passed.duplicate()?).map_err(OperationError::Descriptor)?;
        passed.close();
        Ok(checked)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::mpsc::{TryRecvError, channel};
    use std::task::Poll;

    use super::*;
    use crate::files::Quotas;

    /// The only thread of a runtime closes no passed descriptor.
    #[test]
    fn passed_descriptor_is_closed_by_another_thread() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let (closed, is_closed) = channel();
        std::thread::spawn(move || closed.send(reader.read(&mut [0]).unwrap()));
        // One thread for calls that may block, and it is in use.
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.max_blocking_threads(1).build().unwrap();
        let (release, released) = channel::<()>();
        let _in_use = runtime.spawn_blocking(move || released.recv());
        let blocking = BlockingCalls::new(&Quotas::new(16), 1024, 16);
        let (closer, mut closes) = Closer::new(blocking, 1000);
        runtime.block_on(async {
            let passed = PassedFd { fd: Some(writer.into()), closer };
            passed.duplicate().map(drop).unwrap();
            assert!(passed.fd().is_ok());
            drop(passed);
            let mut closed = std::pin::pin!(closes.wait());
            for _ in 0..100 {
                tokio::task::yield_now().await;
                assert!(
                    std::future::poll_fn(|context| Poll::Ready(closed.as_mut().poll(context)))
                        .await
                        .is_pending()
                );
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(is_closed.try_recv(), Err(TryRecvError::Empty), "the runtime closed it");
            drop(release);
            closed.await;
        });
        assert_eq!(is_closed.recv(), Ok(0));
    }

    #[test]
    fn duplicate_is_closed_at_once() {
        let blocking = BlockingCalls::new(&Quotas::new(16), 1024, 16);
        let (closer, mut closes) = Closer::new(blocking, 1000);
        let (_reader, writer) = std::io::pipe().unwrap();
        let passed = PassedFd { fd: Some(writer.into()), closer };
        let _other = passed.duplicate().unwrap();
        // Outside of a runtime.
        passed.close();
        assert_eq!(closes.0.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
    }
}
