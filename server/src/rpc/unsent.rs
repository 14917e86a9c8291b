//! Bounds the memory of answers that clients do not read.
//!
//! HTTP/2 buffers up to 400 KiB of each call, and a connection has 64 calls. Here all calls of a connection together buffer
//! [`MAX_UNSENT_BYTES`]. Beyond that, a call gets its next part only when its last one was sent: so a call that is not read delays no
//! other one of its connection.
//!
//! That part is as large as the answer of the call, and a user has many calls: [`Buffers`] charges the user for each part. An answer
//! beyond the limit is dropped and its call refused; a stream waits until its last part was sent.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::HeaderMap;

use super::buffers::Buffers;
use crate::files::{FileError, QuotaPermit};
use crate::status::status;

/// Bytes of answers that wait to be written to one connection. With less, a fast client waits for each message to be encoded.
const MAX_UNSENT_BYTES: usize = 1 << 20;

/// The answers of one connection that wait to be written to it.
#[derive(Debug)]
pub(super) struct Unsent {
    bytes: AtomicUsize,
    /// Calls that have a part to send.
    waiting: Mutex<Vec<Waker>>,
    buffers: Arc<Buffers>,
}

impl Unsent {
    pub(super) fn new(buffers: Arc<Buffers>) -> Self {
        Self { bytes: AtomicUsize::default(), waiting: Mutex::default(), buffers }
    }

    /// As [`Buffers::reserve`].
    pub(super) fn reserve(&self) -> Result<QuotaPermit, FileError> {
        self.buffers.reserve()
    }

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

/// The kind of an answer: it decides how its parts are charged.
pub(super) enum AnswerKind {
    /// Its user is charged for one stream.
    Stream,
    /// One message. The permit was reserved before the call.
    Single(QuotaPermit),
}

/// An answer whose parts count as unsent until they are written, or their call is canceled.
struct BoundedBody {
    inner: Body,
    connection: Arc<Unsent>,
    /// Unsent bytes of this call.
    own: Arc<AtomicUsize>,
    is_stream: bool,
    /// For the first part.
    reserved: Option<QuotaPermit>,
    /// A part was refused, which ended the answer.
    is_refused: bool,
}

/// A part of an answer. The connection drops it after writing it.
struct Part {
    bytes: Bytes,
    connection: Arc<Unsent>,
    own: Arc<AtomicUsize>,
    charge: Option<QuotaPermit>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.charge = None;
        self.own.fetch_sub(self.bytes.len(), Ordering::SeqCst);
        self.connection.remove(self.bytes.len());
    }
}

impl BoundedBody {
    fn new(connection: Arc<Unsent>, kind: AnswerKind, inner: Body) -> Self {
        let (is_stream, reserved) = match kind {
            AnswerKind::Stream => (true, None),
            AnswerKind::Single(reserved) => (false, Some(reserved)),
        };
        Self { inner, connection, own: Arc::default(), is_stream, reserved, is_refused: false }
    }

    fn may_add(&self) -> bool {
        self.own.load(Ordering::SeqCst) == 0
            || self.connection.bytes.load(Ordering::SeqCst) < MAX_UNSENT_BYTES
                && !(self.is_stream && self.connection.buffers.are_full_of_streams())
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

    /// The part to send in place of `bytes`, or if it is refused, the status of the call, which is its end.
    fn part(&mut self, bytes: Bytes) -> Result<Frame<Bytes>, Status> {
        if bytes.is_empty() {
            return Ok(Frame::data(bytes));
        }
        let buffers = &self.connection.buffers;
        let charge = if self.is_stream {
            buffers.charge_stream(bytes.len())
        } else {
            let charged = match self.reserved.take() {
                Some(mut charge) => buffers.charge_more(&mut charge, bytes.len()).map(|()| charge),
                None => buffers.charge(bytes.len()),
            };
            match charged {
                Ok(charge) => Some(charge),
                Err(error) => {
                    self.is_refused = true;
                    let mut trailers = HeaderMap::new();
                    status(error).add_header(&mut trailers)?;
                    return Ok(Frame::trailers(trailers));
                }
            }
        };
        self.own.fetch_add(bytes.len(), Ordering::SeqCst);
        self.connection.add(bytes.len());
        Ok(Frame::data(Bytes::from_owner(Part {
            bytes,
            connection: Arc::clone(&self.connection),
            own: Arc::clone(&self.own),
            charge,
        })))
    }
}

impl HttpBody for BoundedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.is_refused {
            return Poll::Ready(None);
        }
        ready!(this.poll_room(cx));
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame?.into_data().map_or_else(Ok, |bytes| this.part(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_refused || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// An answer of a connection, bounded.
pub(super) fn bounded(connection: Arc<Unsent>, kind: AnswerKind, inner: Body) -> Body {
    Body::new(BoundedBody::new(connection, kind, inner))
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use tonic::Code;

    use super::*;
    use crate::rpc::buffers::tests::buffers;

    /// Counts how often a task is woken.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    const PART: usize = 64 << 10;

    fn connection(of_calls: u64, of_streams: u64) -> Arc<Unsent> {
        Arc::new(Unsent::new(buffers(of_calls, of_streams)))
    }

    /// A body with many parts.
    fn body(connection: &Arc<Unsent>, is_stream: bool) -> BoundedBody {
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
        let kind =
            if is_stream { AnswerKind::Stream } else { AnswerKind::Single(connection.reserve().unwrap()) };
        BoundedBody::new(Arc::clone(connection), kind, Body::new(Parts))
    }

    fn next(body: &mut BoundedBody, task: &Waker) -> Option<Bytes> {
        match Pin::new(body).poll_frame(&mut Context::from_waker(task)) {
            Poll::Ready(frame) => Some(frame.unwrap().unwrap().into_data().unwrap()),
            Poll::Pending => None,
        }
    }

    #[test]
    fn calls_of_a_connection_share_its_bytes_and_each_has_one_part() {
        let (connection, wakes) = (connection(0, u64::MAX), Arc::new(Wakes::default()));
        let task = Waker::from(Arc::clone(&wakes));
        let (mut first, mut second) = (body(&connection, true), body(&connection, true));
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

    #[test]
    fn answer_beyond_the_limit_of_its_user_is_refused_on_any_connection() {
        // With what is reserved for the third one.
        let buffers = buffers(2 * PART as u64 + 8192, 0);
        let task = Waker::from(Arc::new(Wakes::default()));
        let mut calls: Vec<_> =
            (0..3).map(|_| body(&Arc::new(Unsent::new(Arc::clone(&buffers))), false)).collect();
        let mut refused = calls.pop().unwrap();
        let held: Vec<_> = calls.iter_mut().map(|call| next(call, &task).unwrap()).collect();
        let mut poll = || Pin::new(&mut refused).poll_frame(&mut Context::from_waker(&task));
        let Poll::Ready(Some(Ok(frame))) = poll() else { panic!("no frame") };
        let status = Status::from_header_map(frame.trailers_ref().unwrap()).unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(
            status.message(),
            "user 7 has 131072 bytes of answers; 65536 more would exceed the limit of 139264"
        );
        assert!(matches!(poll(), Poll::Ready(None)));
        // The charge is returned when a part was sent, also if its call lasts.
        drop(held);
        assert!(next(&mut calls[0], &task).is_some());
    }

    #[test]
    fn streams_beyond_the_limit_of_their_user_have_one_part_each() {
        let connection = connection(0, 3 * PART as u64);
        let task = Waker::from(Arc::new(Wakes::default()));
        let mut streams = [body(&connection, true), body(&connection, true)];
        let held: Vec<_> = std::iter::from_fn(|| next(&mut streams[0], &task)).collect();
        assert_eq!(held.len(), 3);
        let own = next(&mut streams[1], &task).unwrap();
        assert_eq!(next(&mut streams[1], &task), None, "it waits for its part");
        drop(own);
        assert!(next(&mut streams[1], &task).is_some());
        drop(held);
        assert!(next(&mut streams[1], &task).is_some());
    }
}
