//! Bounds the memory of answers that clients do not read.
//!
//! HTTP/2 buffers up to 400 KiB of each call, and a connection has 64 calls. Here all calls of a connection together buffer
//! [`MAX_UNSENT_BYTES`]. Beyond that, a call gets its next part only when its last one was sent: so a call that is not read delays no
//! other one of its connection.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

/// Bytes of answers that wait to be written to one connection. With less, a fast client waits for each message to be encoded.
const MAX_UNSENT_BYTES: usize = 1 << 20;

/// The answers of one connection that wait to be written to it.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    bytes: AtomicUsize,
    /// Calls that have a part to send.
    waiting: Mutex<Vec<Waker>>,
}

impl Unsent {
    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::SeqCst);
        for waker in std::mem::take(&mut *self.waiting()) {
            waker.wake();
        }
    }

    /// Wakes the task when a part was sent. A peer can have a waiting task polled again and again: it counts once.
    fn wait(&self, task: &Waker) {
        let mut waiting = self.waiting();
        if !waiting.iter().any(|known| known.will_wake(task)) {
            waiting.push(task.clone());
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer whose parts count as unsent until they are written, or their call is canceled.
struct BoundedBody {
    inner: Body,
    connection: Arc<Unsent>,
    /// Unsent bytes of this call.
    own: Arc<AtomicUsize>,
}

/// A part of an answer. The connection drops it after writing it.
struct Part {
    bytes: Bytes,
    connection: Arc<Unsent>,
    own: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.own.fetch_sub(self.bytes.len(), Ordering::SeqCst);
        self.connection.remove(self.bytes.len());
    }
}

impl BoundedBody {
    fn may_add(&self) -> bool {
        self.own.load(Ordering::SeqCst) == 0
            || self.connection.bytes.load(Ordering::SeqCst) < MAX_UNSENT_BYTES
    }

    /// Waits until this call may add a part.
    fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        if self.may_add() {
            return Poll::Ready(());
        }
        self.connection.wait(cx.waker());
        // A part that was sent meanwhile woke nothing.
        if self.may_add() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn part(&self, bytes: Bytes) -> Bytes {
        if bytes.is_empty() {
            return bytes;
        }
        self.own.fetch_add(bytes.len(), Ordering::SeqCst);
        self.connection.add(bytes.len());
        Bytes::from_owner(Part {
            bytes,
            connection: Arc::clone(&self.connection),
            own: Arc::clone(&self.own),
        })
    }
}

impl HttpBody for BoundedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        ready!(this.poll_room(cx));
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| this.part(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// An answer of a connection, bounded.
pub(super) fn bounded(connection: Arc<Unsent>, inner: Body) -> Body {
    Body::new(BoundedBody { inner, connection, own: Arc::default() })
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    /// Counts how often a task is woken.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    const PART: usize = 64 << 10;

    /// A body with many parts.
    fn body(connection: &Arc<Unsent>) -> BoundedBody {
        struct Parts;
        impl HttpBody for Parts {
            type Data = Bytes;
            type Error = Status;

            fn poll_frame(
                self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
                Poll::Ready(Some(Ok(Frame::data(vec![1; PART].into()))))
            }
        }
        BoundedBody { inner: Body::new(Parts), connection: Arc::clone(connection), own: Arc::default() }
    }

    fn next(body: &mut BoundedBody, task: &Waker) -> Option<Bytes> {
        match Pin::new(body).poll_frame(&mut Context::from_waker(task)) {
            Poll::Ready(frame) => Some(frame.unwrap().unwrap().into_data().unwrap()),
            Poll::Pending => None,
        }
    }

    #[test]
    fn calls_of_a_connection_share_its_bytes_and_each_has_one_part() {
        let (connection, wakes) = (Arc::new(Unsent::default()), Arc::new(Wakes::default()));
        let task = Waker::from(Arc::clone(&wakes));
        let (mut first, mut second) = (body(&connection), body(&connection));
        let mut held: Vec<_> = std::iter::from_fn(|| next(&mut first, &task)).collect();
        assert_eq!(held.len(), MAX_UNSENT_BYTES / PART);
        let own = next(&mut second, &task).unwrap();
        assert_eq!((own.len(), next(&mut second, &task)), (PART, None));
        // Polled again and again, a task waits once.
        (0..100).for_each(|_| assert_eq!(next(&mut second, &task), None));
        assert_eq!((connection.waiting().len(), wakes.0.load(Ordering::SeqCst)), (1, 0));
        // A part that is split counts until its last piece is written.
        let mut sent = held.pop().unwrap();
        let piece = sent.split_to(10);
        drop(sent);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        drop(piece);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        assert_eq!(next(&mut second, &task), None, "both calls have unsent parts");
        drop(own);
        assert!(next(&mut second, &task).is_some());
        // A call that is canceled drops its parts.
        held.clear();
        drop(first);
        let more: Vec<_> = std::iter::from_fn(|| next(&mut second, &task)).collect();
        assert_eq!(more.len(), MAX_UNSENT_BYTES / PART);
    }
}
