//! The gRPC service of a destination.
//!
//! ```text
//!   idle --begin--> receiving --commit--> done
//!                    |  ^   \
//!         connection |  |    +-- a step is refused, abort, nothing for too long --> failed: the file is deleted
//!            breaks  v  | begin again, by the same client
//!                   waiting
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fdmap_proto::FileInfo;
use fdmap_proto::v1;
use fdmap_proto::v1::migration_server::Migration;
use fdmap_proto::v1::receive_request::Step;
use fdmap_proto::v1::receive_response::Result as Answer;
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::super::MAX_UNACKNOWLEDGED;
use super::super::error::Rejected;
use super::ReceivedFile;
use super::incoming::{Applied, Incoming, NewFile};
use crate::FdpassClient;

/// A connection sends its first message in this time.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// In place of the number of a connection: none serves the migration any more.
const ENDED: u64 = u64::MAX;

/// The client that makes a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Migrator {
    migration_id: u64,
    /// The client's certificate, DER.
    certificate: Vec<u8>,
}

/// State of the migration. Locked by the connection that serves it.
enum State {
    Idle,
    Receiving(Box<Incoming>),
    Done(Box<FileInfo>),
    Failed(Status),
}

/// State of the destination, for the function that waits for its end.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// The first connection.
    Idle,
    /// The next connection, since.
    Waiting(Instant),
    Connected,
    /// The file exists; true when the source has received that.
    Done(bool, Instant),
    Failed(String),
}

/// The service.
#[derive(Clone)]
pub(super) struct MigrationService(Arc<Shared>);

struct Shared {
    new: NewFile,
    /// Taken by the connection that begins the migration.
    fdpass: Mutex<Option<FdpassClient>>,
    identity: Mutex<Option<Migrator>>,
    /// Number of the connection that serves the migration: an earlier one ends. Or [`ENDED`].
    current: watch::Sender<u64>,
    state: AsyncMutex<State>,
    received: Mutex<Option<ReceivedFile>>,
    outcome: watch::Sender<Outcome>,
}

impl MigrationService {
    pub(super) fn new(new: NewFile, fdpass: FdpassClient) -> Self {
        Self(Arc::new(Shared {
            new,
            fdpass: Mutex::new(Some(fdpass)),
            identity: Mutex::default(),
            current: watch::Sender::new(0),
            state: AsyncMutex::new(State::Idle),
            received: Mutex::default(),
            outcome: watch::Sender::new(Outcome::Idle),
        }))
    }

    pub(super) fn outcome(&self) -> watch::Receiver<Outcome> {
        self.0.outcome.subscribe()
    }

    /// Ends the migration, unless the file exists. Its connection gets the reason.
    pub(super) async fn end(&self, reason: &str) {
        // The connection that has the lock ends.
        self.0.current.send_replace(ENDED);
        let mut state = self.0.state.lock().await;
        if !matches!(*state, State::Done(_)) {
            *state = State::Failed(Status::aborted(reason));
        }
    }

    /// The file, once it exists.
    pub(super) fn take_received(&self) -> Option<ReceivedFile> {
        self.0.received.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[tonic::async_trait]
impl Migration for MigrationService {
    type ReceiveStream = ReceiverStream<Result<v1::ReceiveResponse, Status>>;

    async fn receive(
        &self,
        request: Request<Streaming<v1::ReceiveRequest>>,
    ) -> Result<Response<Self::ReceiveStream>, Status> {
        let certificates = request.peer_certs();
        let certificate = certificates.as_ref().and_then(|chain| chain.first());
        let certificate = certificate.ok_or_else(|| Status::unauthenticated("no client certificate"))?;
        let certificate = certificate.as_ref().to_vec();
        let mut steps = request.into_inner();
        let first = timeout(BEGIN_TIMEOUT, steps.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no begin"))??;
        let Some(v1::ReceiveRequest { step: Some(Step::Begin(begin)), .. }) = first else {
            return Err(Status::invalid_argument("the first message is not begin"));
        };
        let identity = Migrator { migration_id: begin.migration_id, certificate };
        let connection = self.0.take_over(identity, begin.resumed)?;
        let (answers, stream) = mpsc::channel(MAX_UNACKNOWLEDGED + 1);
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            if let Err(status) = shared.serve(connection, begin, steps, &answers).await {
                let _ = answers.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl Shared {
    /// Admits a connection of the client that makes the migration. Returns its number.
    fn take_over(&self, identity: Migrator, resumed: bool) -> Result<u64, Status> {
        let mut known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            None if resumed => return Err(Status::not_found("the migration is not known here")),
            None => *known = Some(identity),
            Some(known) if *known == identity => {}
            Some(_) => return Err(Status::resource_exhausted("another migration is in progress")),
        }
        let mut number = ENDED;
        self.current.send_if_modified(|current| {
            number = if *current == ENDED { ENDED } else { *current + 1 };
            std::mem::replace(current, number) != number
        });
        let is_done = matches!(*self.outcome.borrow(), Outcome::Done(..));
        if number == ENDED && !is_done { Err(ended()) } else { Ok(number) }
    }

    /// Serves a connection until it ends.
    async fn serve(
        self: &Arc<Self>,
        connection: u64,
        begin: v1::BeginMigration,
        mut steps: Streaming<v1::ReceiveRequest>,
        answers: &mpsc::Sender<Result<v1::ReceiveResponse, Status>>,
    ) -> Result<(), Status> {
        let mut current = self.current.subscribe();
        let mut state = self.state.lock().await;
        self.outcome.send_if_modified(|outcome| {
            let waits = matches!(outcome, Outcome::Idle | Outcome::Waiting(_));
            if waits {
                *outcome = Outcome::Connected;
            }
            waits
        });
        self.begin(&mut state, begin).await?;
        let mut answer = match &*state {
            State::Receiving(incoming) => Answer::Received(incoming.number()),
            State::Done(file) => Answer::Committed((**file).clone().into()),
            State::Failed(status) => return Err(status.clone()),
            State::Idle => return Err(Status::internal("the migration has not begun")),
        };
        loop {
            let is_done = matches!(*state, State::Done(_));
            let exchange = async {
                let is_sent = answers.send(Ok(v1::ReceiveResponse { result: Some(answer) })).await.is_ok();
                (is_sent, steps.message().await)
            };
            let (is_sent, step) = tokio::select! {
                biased;
                // At the end, the source still has to receive that the file exists.
                _ = current.wait_for(|current| *current != connection && !(is_done && *current == ENDED)) => {
                    let is_over = *self.current.borrow() == ENDED;
                    let taken_over = || Status::unavailable("another connection has taken over");
                    return Err(if is_over { ended() } else { taken_over() });
                }
                exchanged = exchange => exchanged,
            };
            let step = match step {
                Ok(Some(step)) => step,
                Err(status) if is_invalid(&status) && !is_done => return Err(self.fail(&mut state, status)),
                end => {
                    self.note_end(&state, is_sent && end.is_ok());
                    return Ok(());
                }
            };
            answer = self.apply(&mut state, step).await?;
        }
    }

    /// Creates the file, unless that has happened.
    async fn begin(self: &Arc<Self>, state: &mut State, begin: v1::BeginMigration) -> Result<(), Status> {
        if !matches!(state, State::Idle) {
            return Ok(());
        }
        let shared = Arc::clone(self);
        let begun = tokio::task::spawn_blocking(move || {
            let taken = shared.fdpass.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(mut fdpass) = taken else {
                return Err(Rejected(Status::internal("the connection to fdmapd is in use")));
            };
            Incoming::begin(begin, &shared.new, &mut fdpass)
        });
        match begun.await {
            Ok(Ok(incoming)) => *state = State::Receiving(Box::new(incoming)),
            Ok(Err(Rejected(status))) => return Err(self.fail(state, status)),
            Err(error) => return Err(self.fail(state, Status::internal(error.to_string()))),
        }
        Ok(())
    }

    /// Applies a step in a thread that may block.
    async fn apply(&self, state: &mut State, step: v1::ReceiveRequest) -> Result<Answer, Status> {
        let incoming = match std::mem::replace(state, State::Idle) {
            State::Receiving(incoming) => incoming,
            other => {
                *state = other;
                return Err(Status::failed_precondition("the migration has ended"));
            }
        };
        let applied = tokio::task::spawn_blocking(move || {
            let mut incoming = incoming;
            let applied = incoming.apply(step);
            (incoming, applied)
        });
        match applied.await {
            Ok((incoming, Ok(Applied::Received(number)))) => {
                *state = State::Receiving(incoming);
                Ok(Answer::Received(number))
            }
            Ok((_, Ok(Applied::Committed(info, descriptor)))) => {
                *state = State::Done(info.clone());
                let received = ReceivedFile { info: (*info).clone(), descriptor };
                *self.received.lock().unwrap_or_else(PoisonError::into_inner) = Some(received);
                self.outcome.send_replace(Outcome::Done(false, Instant::now()));
                Ok(Answer::Committed((*info).into()))
            }
            Ok((_, Err(Rejected(status)))) => Err(self.fail(state, status)),
            Err(error) => Err(self.fail(state, Status::internal(error.to_string()))),
        }
    }

    fn fail(&self, state: &mut State, status: Status) -> Status {
        *state = State::Failed(status.clone());
        self.outcome.send_replace(Outcome::Failed(status.message().to_owned()));
        status
    }

    /// Notes the end of a connection; `is_regular`: the source has ended it, after it received all answers.
    fn note_end(&self, state: &State, is_regular: bool) {
        match state {
            State::Receiving(_) => {
                self.outcome.send_replace(Outcome::Waiting(Instant::now()));
            }
            State::Done(_) => {
                self.outcome.send_replace(Outcome::Done(is_regular, Instant::now()));
            }
            State::Idle | State::Failed(_) => {}
        }
    }
}

fn ended() -> Status {
    Status::aborted("the destination ended the migration")
}

/// True if a message cannot be decoded, or is too long. The errors of a connection have a source.
fn is_invalid(status: &Status) -> bool {
    std::error::Error::source(status).is_none() && matches!(status.code(), Code::OutOfRange | Code::Internal)
}
