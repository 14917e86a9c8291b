//! Bounds the memory of requests.
//!
//! A request is decoded when all of it has arrived, and up to the size limit of a request is held until then. Of the
//! calls of a connection, [`CONCURRENT_REQUESTS`] are received at a time. What others have sent stays in their HTTP/2 windows, which
//! hold [`CONNECTION_WINDOW_BYTES`] together, and a share of them that each call may fill: so no call delays the one whose turn it is.
//! A request that is not complete after [`REQUEST_TIMEOUT`] is refused. [`Buffers`] charges the user for the received bytes of a
//! request until its answer begins: a call that waits keeps its request in memory.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;

use super::buffers::{Buffers, MIN_BUFFER_BYTES};
use crate::files::{FileError, QuotaPermit};
use crate::status::status;

/// Concurrent calls on one connection.
pub(super) const MAX_CONCURRENT_CALLS: u32 = 64;
/// Requests of one connection that are received at a time.
const CONCURRENT_REQUESTS: usize = 4;
/// Time for a request, from its headers to its end.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// What a connection may send before the service reads it.
pub(super) const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// What one of its calls may send.
pub(super) const STREAM_WINDOW_BYTES: u32 = CONNECTION_WINDOW_BYTES / MAX_CONCURRENT_CALLS;

/// The requests of one connection.
#[derive(Clone, Debug)]
pub(super) struct Unreceived {
    turns: Arc<Semaphore>,
    buffers: Arc<Buffers>,
}

impl Unreceived {
    pub(super) fn new(buffers: Arc<Buffers>) -> Self {
        Self { turns: Arc::new(Semaphore::new(CONCURRENT_REQUESTS)), buffers }
    }

    pub(super) fn memory(&self, charge: RequestCharge) -> CallMemory {
        CallMemory { buffers: Arc::clone(&self.buffers), charge }
    }
}

/// A request of which the service reads nothing before its turn, nor after its deadline.
struct BoundedRequest {
    inner: Body,
    turn: Turn,
    received: usize,
    buffers: Arc<Buffers>,
    charge: RequestCharge,
    deadline: Instant,
    /// Wakes the task at the deadline. `None` until the request is waited for.
    timeout: Option<Pin<Box<Sleep>>>,
}

/// The charge for the received bytes of a request, and for what its call holds, beyond what is reserved for each call.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestCharge(Arc<Mutex<Option<QuotaPermit>>>);

/// Lets a call charge its user for more than it received, until its answer begins.
#[derive(Clone, Debug)]
pub(super) struct CallMemory {
    buffers: Arc<Buffers>,
    charge: RequestCharge,
}

impl CallMemory {
    /// Charges the user for `bytes`, of which some are reserved for each call.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn charge(&self, bytes: usize) -> Result<(), FileError> {
        self.charge.grow(&self.buffers, bytes)
    }
}

enum Turn {
    Waiting(Pin<Box<dyn Future<Output = Turn> + Send>>),
    Taken {
        _until_dropped: OwnedSemaphorePermit,
    },
    /// The request is complete, or was refused.
    Over,
}

/// A request of a connection, bounded. The user is charged until both results are dropped.
pub(super) fn bounded(connection: Unreceived, inner: Body) -> (Body, RequestCharge) {
    bounded_until(Instant::now() + REQUEST_TIMEOUT, connection, inner)
}

fn bounded_until(deadline: Instant, connection: Unreceived, inner: Body) -> (Body, RequestCharge) {
    let Unreceived { turns, buffers } = connection;
    let turn = match Arc::clone(&turns).try_acquire_owned() {
        Ok(permit) => Turn::Taken { _until_dropped: permit },
        Err(_) => Turn::Waiting(Box::pin(async move {
            // Fails for no semaphore that stays open.
            turns.acquire_owned().await.map_or(Turn::Over, |permit| Turn::Taken { _until_dropped: permit })
        })),
    };
    let charge = RequestCharge::default();
    let request =
        BoundedRequest { inner, turn, received: 0, buffers, charge: charge.clone(), deadline, timeout: None };
    (Body::new(request), charge)
}

impl BoundedRequest {
    fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Turn::Waiting(turn) = &mut self.turn {
            self.turn = ready!(turn.as_mut().poll(cx));
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let frame = frame.map(|frame| frame.and_then(|frame| self.charged(frame)));
        if self.inner.is_end_stream() || !matches!(frame, Some(Ok(_))) {
            self.turn = Turn::Over;
        }
        Poll::Ready(frame)
    }

    /// A frame, if its user may have so much in buffers.
    fn charged(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, Status> {
        self.received += frame.data_ref().map_or(0, Bytes::len);
        self.charge.grow(&self.buffers, self.received).map(|()| frame).map_err(|error| {
            self.refuse();
            status(error)
        })
    }

    fn refuse(&mut self) {
        self.turn = Turn::Over;
        self.charge.end();
    }
}

impl RequestCharge {
    fn grow(&self, buffers: &Buffers, bytes: usize) -> Result<(), FileError> {
        match &mut *self.charge() {
            Some(charge) => buffers.charge_more(charge, bytes),
            None if bytes <= MIN_BUFFER_BYTES => Ok(()),
            none => buffers.charge(bytes).map(|charge| *none = Some(charge)),
        }
    }

    fn end(&self) {
        let ended = self.charge().take();
        drop(ended);
    }

    fn charge(&self) -> MutexGuard<'_, Option<QuotaPermit>> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HttpBody for BoundedRequest {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = this.poll_inner(cx) {
            return Poll::Ready(frame);
        }
        let deadline = this.deadline;
        let timeout = this.timeout.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        ready!(timeout.as_mut().poll(cx));
        this.refuse();
        let message = format!("the request was not complete {REQUEST_TIMEOUT:?} after its headers");
        Poll::Ready(Some(Err(Status::deadline_exceeded(message))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl fmt::Debug for BoundedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundedRequest").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tonic::Code;

    use super::*;
    use crate::rpc::buffers::tests::buffers;

    fn connection() -> Unreceived {
        Unreceived::new(buffers(u64::MAX, 0))
    }

    /// A body whose parts a test sends.
    struct Sent(mpsc::UnboundedReceiver<Bytes>);

    impl HttpBody for Sent {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    /// The end of a request that its client has, and the one that the service has. One part was sent.
    fn request(connection: &Unreceived, deadline: Instant) -> (mpsc::UnboundedSender<Bytes>, Body) {
        let (client, body, _) = charged_request(connection, deadline, 4);
        (client, body)
    }

    /// The same with the charge for it. `bytes` of it were sent.
    fn charged_request(
        connection: &Unreceived,
        deadline: Instant,
        bytes: usize,
    ) -> (mpsc::UnboundedSender<Bytes>, Body, RequestCharge) {
        let (client, sent) = mpsc::unbounded_channel();
        client.send(vec![0; bytes].into()).unwrap();
        let (body, charge) = bounded_until(deadline, connection.clone(), Body::new(Sent(sent)));
        (client, body, charge)
    }

    #[test]
    fn what_a_call_holds_beside_its_request_counts_for_its_user() {
        let buffers = buffers(64 << 10, 0);
        let connection = Unreceived::new(Arc::clone(&buffers));
        let charge = RequestCharge::default();
        let memory = connection.memory(charge.clone());
        memory.charge(100).unwrap();
        assert_eq!(buffers.charge(64 << 10).unwrap().amount(), 64 << 10, "what each call has is reserved");
        memory.charge(32 << 10).unwrap();
        assert!(buffers.charge(64 << 10).is_err());
        let other = connection.memory(RequestCharge::default());
        assert!(other.charge(64 << 10).is_err());
        charge.end();
        other.charge(64 << 10).unwrap();
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Read {
        Nothing,
        Part,
        End,
        Failed(Code),
    }

    /// What the service reads now.
    async fn read(body: &mut Body) -> Read {
        std::future::poll_fn(|cx| {
            Poll::Ready(match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Pending => Read::Nothing,
                Poll::Ready(None) => Read::End,
                Poll::Ready(Some(Ok(_))) => Read::Part,
                Poll::Ready(Some(Err(status))) => Read::Failed(status.code()),
            })
        })
        .await
    }

    #[tokio::test]
    async fn requests_of_a_connection_are_received_in_turn() {
        let never = Instant::now() + Duration::from_secs(3600);
        let connection = connection();
        let mut requests: Vec<_> = (0..=CONCURRENT_REQUESTS).map(|_| request(&connection, never)).collect();
        let (_waiting_client, mut waiting) = requests.pop().unwrap();
        for (_, body) in &mut requests {
            assert_eq!((read(body).await, read(body).await), (Read::Part, Read::Nothing));
        }
        assert_eq!(read(&mut waiting).await, Read::Nothing, "all turns are taken");
        // Another connection has turns of its own.
        let (client, mut other) = request(&self::connection(), never);
        assert_eq!(read(&mut other).await, Read::Part);
        drop(client);
        assert_eq!(read(&mut other).await, Read::End);
        // A complete request passes its turn on, although its body still exists.
        let (client, mut complete) = requests.pop().unwrap();
        drop(client);
        assert_eq!(read(&mut complete).await, Read::End);
        assert_eq!((read(&mut waiting).await, read(&mut waiting).await), (Read::Part, Read::Nothing));
        // So does one that is canceled.
        let (_next_client, mut next) = request(&connection, never);
        assert_eq!(read(&mut next).await, Read::Nothing);
        drop(requests.pop());
        assert_eq!(read(&mut next).await, Read::Part);
    }

    #[tokio::test]
    async fn request_that_is_not_complete_in_time_is_refused() {
        let connection = connection();
        let soon = Instant::now() + Duration::from_millis(50);
        let mut requests: Vec<_> = (0..=CONCURRENT_REQUESTS).map(|_| request(&connection, soon)).collect();
        // The last one waits for its turn.
        for (_client, body) in requests.iter_mut().rev() {
            let end = loop {
                match read(body).await {
                    Read::Part => {}
                    Read::Nothing => tokio::task::yield_now().await,
                    end => break end,
                }
            };
            assert_eq!(end, Read::Failed(Code::DeadlineExceeded));
        }
        assert!(Instant::now() >= soon);
        let (_client, mut next) = request(&connection, soon + REQUEST_TIMEOUT);
        assert_eq!(read(&mut next).await, Read::Part, "a refused request has no turn");
    }

    #[tokio::test]
    async fn requests_of_all_connections_count_for_their_user_until_their_calls_end() {
        let never = Instant::now() + Duration::from_secs(3600);
        let buffers = buffers(48 << 10, 0);
        let request = |kib: usize| charged_request(&Unreceived::new(Arc::clone(&buffers)), never, kib << 10);
        let (_small_client, mut small, _small_charge) = request(8);
        let (first_client, mut first, _first_charge) = request(16);
        let (_second_client, mut second, second_charge) = request(10);
        for body in [&mut small, &mut first, &mut second] {
            assert_eq!(read(body).await, Read::Part);
        }
        // With 16 KiB of the second one, more than 48 KiB.
        first_client.send(vec![0; 20 << 10].into()).unwrap();
        assert_eq!(read(&mut first).await, Read::Failed(Code::ResourceExhausted));
        // It counts no more.
        let (third_client, mut third, third_charge) = request(32);
        assert_eq!(read(&mut third).await, Read::Part);
        // One that is complete counts until its call ends.
        drop(third_client);
        assert_eq!(read(&mut third).await, Read::End);
        drop(third);
        assert!(buffers.charge(0).is_err());
        drop(third_charge);
        assert!(buffers.charge(32 << 10).is_ok());
        // So does one that is canceled.
        drop(second);
        assert!(buffers.charge(48 << 10).is_err());
        drop(second_charge);
        assert!(buffers.charge(48 << 10).is_ok());
    }
}
