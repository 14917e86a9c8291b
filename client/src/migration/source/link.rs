//! The connection to the destination. It is opened again when it breaks, and what was not acknowledged is sent again.
//!
//! ```text
//!   connect --> open --steps, acknowledgements--> closed
//!                 ^  |
//!                 |  | the connection breaks
//!                 |  v
//!                reopening --not within the time for that--> Lost
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fdmap_proto::v1;
use fdmap_proto::v1::migration_client::MigrationClient;
use fdmap_proto::v1::receive_request::Step;
use fdmap_proto::v1::receive_response::Result as Answer;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::super::MAX_UNACKNOWLEDGED;
use super::super::error::MigrationError;
use super::super::monitor::MigrationMonitor;
use crate::Timeouts;
use crate::error::ClientError;
use crate::grpc::{TlsAddress, cause, connect_tls};
use crate::image::{Control, ImageError};

/// First and longest pause between two attempts to open the connection again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Interval of looks whether the migration was cancelled.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// Where and how the destination is reached.
#[derive(Clone, Debug)]
pub struct DestinationAddress {
    /// `https://HOST:PORT` with the certificates.
    pub address: TlsAddress,
    pub timeouts: Timeouts,
    /// How long a broken connection may stay broken.
    pub reconnect_within: Duration,
}

/// The connection to the destination.
pub(super) struct Link<'a> {
    destination: &'a DestinationAddress,
    control: &'a Control,
    monitor: &'a MigrationMonitor,
    begin: v1::BeginMigration,
    /// `None`: broken.
    open: Option<Open>,
    /// Steps that the destination has not acknowledged, in order.
    unacknowledged: VecDeque<v1::ReceiveRequest>,
    /// Number of the last step.
    last: u64,
    committed: Option<v1::File>,
    /// The destination may have the file: the migration cannot be cancelled any more.
    is_committing: bool,
    /// The request to complete the file was given to a connection.
    is_commit_sent: bool,
    /// And that connection broke: a refusal may be that of another process.
    is_other_connection: bool,
    pub(super) reconnections: u32,
}

struct Open {
    requests: mpsc::Sender<v1::ReceiveRequest>,
    responses: Streaming<v1::ReceiveResponse>,
}

/// Why a connection ended.
enum Break {
    /// It may be opened again.
    Connection(String),
    /// The migration has ended.
    Final(MigrationError),
}

impl<'a> Link<'a> {
    /// Connects for the first time.
    pub(super) async fn connect(
        destination: &'a DestinationAddress,
        begin: v1::BeginMigration,
        control: &'a Control,
        monitor: &'a MigrationMonitor,
    ) -> Result<Self, MigrationError> {
        let mut link = Self {
            destination,
            control,
            monitor,
            begin,
            open: None,
            unacknowledged: VecDeque::new(),
            last: 0,
            committed: None,
            is_committing: false,
            is_commit_sent: false,
            is_other_connection: false,
            reconnections: 0,
        };
        match link.open().await {
            Ok(()) => {
                monitor.connect(true, 0);
                Ok(link)
            }
            Err(Break::Final(error)) => Err(error),
            Err(Break::Connection(reason)) => {
                let address = destination.address.uri.clone();
                Err(ClientError::Unreachable { address, reason }.into())
            }
        }
    }

    /// Sends a step. Waits while too many are not acknowledged.
    pub(super) async fn send(&mut self, step: Step) -> Result<(), MigrationError> {
        self.receive_until(MAX_UNACKNOWLEDGED - 1).await?;
        self.last += 1;
        self.is_committing = matches!(step, Step::Commit(_));
        let request = v1::ReceiveRequest { number: self.last, step: Some(step) };
        self.unacknowledged.push_back(request.clone());
        if self.open.as_ref().is_some_and(|open| open.requests.try_send(request).is_ok()) {
            self.is_commit_sent = self.is_committing;
            return Ok(());
        }
        let reason = self.read_to_end().await?;
        self.reopen(reason).await
    }

    /// Reads what the destination sent before the connection ended: it may have refused a step. Returns why the connection ended.
    async fn read_to_end(&mut self) -> Result<String, MigrationError> {
        let read = async {
            loop {
                match self.answer().await {
                    Ok(answer) => self.take(answer)?,
                    Err(Break::Final(error)) => return Err(error),
                    Err(Break::Connection(reason)) => return Ok(reason),
                }
            }
        };
        let read = tokio::time::timeout(MAX_RETRY_PAUSE, read).await;
        read.unwrap_or_else(|_| Ok("the connection ended".to_owned()))
    }

    /// Waits until all steps are acknowledged.
    pub(super) async fn flush(&mut self) -> Result<(), MigrationError> {
        self.receive_until(0).await
    }

    /// Waits until the destination has the file.
    pub(super) async fn committed(&mut self) -> Result<v1::File, MigrationError> {
        let after = self.destination.timeouts.answer + self.destination.reconnect_within;
        let committed = async {
            while self.committed.is_none() {
                self.receive().await?;
            }
            Ok::<_, MigrationError>(())
        };
        let waited = tokio::time::timeout(after, committed).await;
        let lost = |reason: &str| self.lost(after, reason.to_owned());
        waited.map_err(|_| lost("no answer"))??;
        let file = self.committed.take().ok_or_else(|| self.lost(after, "no file".to_owned()))?;
        self.end().await;
        Ok(file)
    }

    fn lost(&self, after: Duration, reason: String) -> MigrationError {
        MigrationError::Lost { destination: self.destination.address.uri.clone(), after, reason }
    }

    /// Asks the destination to drop the file. Does not wait long: it drops the file by itself, too.
    pub(super) async fn abort(mut self) {
        if let Some(open) = &self.open {
            let step = Some(Step::Abort(v1::AbortMigration {}));
            let _ = open.requests.try_send(v1::ReceiveRequest { number: self.last + 1, step });
        }
        self.end().await;
    }

    /// Ends the connection, so that the destination notices a regular end.
    async fn end(&mut self) {
        let Some(Open { requests, mut responses }) = self.open.take() else { return };
        drop(requests);
        let ended = async { while matches!(responses.message().await, Ok(Some(_))) {} };
        let _ = tokio::time::timeout(MAX_RETRY_PAUSE, ended).await;
    }

    async fn receive_until(&mut self, unacknowledged: usize) -> Result<(), MigrationError> {
        while self.unacknowledged.len() > unacknowledged {
            self.receive().await?;
        }
        Ok(())
    }

    /// Receives an answer. Opens the connection again if it is broken.
    async fn receive(&mut self) -> Result<(), MigrationError> {
        let reason = match self.answer().await {
            Ok(answer) => return self.take(answer),
            Err(Break::Final(error)) => return Err(error),
            Err(Break::Connection(reason)) => reason,
        };
        self.reopen(reason).await
    }

    /// The next answer of the open connection.
    async fn answer(&mut self) -> Result<Answer, Break> {
        let Some(open) = &mut self.open else {
            return Err(Break::Connection("the connection ended".to_owned()));
        };
        let message = tokio::select! {
            message = open.responses.message() => message,
            () = cancelled(self.control), if !self.is_committing => return Err(Break::Final(ImageError::Cancelled.into())),
        };
        match message {
            Ok(Some(v1::ReceiveResponse { result: Some(answer) })) => Ok(answer),
            Ok(Some(_)) => Err(Break::Connection("an answer without a result".to_owned())),
            Ok(None) => Err(Break::Connection("the destination ended the connection".to_owned())),
            Err(status) => Err(self.broken(&status)),
        }
    }

    fn take(&mut self, answer: Answer) -> Result<(), MigrationError> {
        match answer {
            Answer::Received(number) if number <= self.last => {
                while self.unacknowledged.front().is_some_and(|step| step.number <= number) {
                    self.unacknowledged.pop_front();
                }
                Ok(())
            }
            Answer::Received(_) => {
                Err(ClientError::Unexpected("the destination acknowledges a step that was not sent").into())
            }
            Answer::Committed(file) => {
                self.unacknowledged.clear();
                self.committed = Some(file);
                Ok(())
            }
        }
    }

    async fn reopen(&mut self, mut reason: String) -> Result<(), MigrationError> {
        let since = Instant::now();
        let mut pause = RETRY_PAUSE;
        self.open = None;
        self.monitor.connect(false, self.reconnections);
        self.begin.resumed = true;
        self.is_other_connection = self.is_commit_sent;
        let control = self.control;
        loop {
            if !self.is_committing {
                self.control.check()?;
            }
            if since.elapsed() >= self.destination.reconnect_within {
                return Err(self.lost(since.elapsed(), reason));
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
            let is_committing = self.is_committing;
            let opened = tokio::select! {
                opened = self.open() => opened,
                () = cancelled(control), if !is_committing => return Err(ImageError::Cancelled.into()),
            };
            match opened {
                Ok(()) => break,
                Err(Break::Final(error)) => return Err(error),
                Err(Break::Connection(now)) => reason = now,
            }
        }
        self.reconnections += 1;
        self.monitor.connect(true, self.reconnections);
        Ok(())
    }

    /// Opens the connection, and sends what the destination has not received.
    async fn open(&mut self) -> Result<(), Break> {
        let DestinationAddress { address, timeouts, .. } = self.destination;
        let channel = match connect_tls(address, *timeouts).await {
            Ok(channel) => channel,
            Err(error @ (ClientError::Unreachable { .. } | ClientError::TimedOut { .. })) => {
                return Err(Break::Connection(fdmap_proto::error_chain(&error)));
            }
            Err(error) => return Err(Break::Final(error.into())),
        };
        let (requests, queue) = mpsc::channel(MAX_UNACKNOWLEDGED + 2);
        let begin = Some(Step::Begin(self.begin.clone()));
        // The queue has room for it.
        let _ = requests.try_send(v1::ReceiveRequest { number: 0, step: begin });
        let opened = async {
            let mut client = MigrationClient::new(channel);
            let responses = client.receive(ReceiverStream::new(queue)).await;
            Ok(Open { requests, responses: responses.map_err(|status| self.broken(&status))?.into_inner() })
        };
        let after = timeouts.answer;
        let timed_out = || Break::Connection(format!("no answer within {after:?}"));
        let open = tokio::time::timeout(after, opened).await.map_err(|_| timed_out())??;
        self.open = Some(open);
        let first = tokio::time::timeout(after, self.answer()).await.map_err(|_| timed_out())??;
        self.take(first).map_err(Break::Final)?;
        let Some(open) = &self.open else { return Ok(()) };
        for step in &self.unacknowledged {
            let _ = open.requests.try_send(step.clone());
        }
        self.is_commit_sent = self.is_committing;
        Ok(())
    }

    /// Whether a status is that of the destination, or of the connection.
    fn broken(&self, status: &Status) -> Break {
        let is_of_connection = std::error::Error::source(status).is_some()
            || matches!(status.code(), Code::Unavailable | Code::Unknown | Code::DeadlineExceeded);
        // The client's library makes these of an answer that it cannot decode.
        let is_undecodable = matches!(status.code(), Code::Internal | Code::OutOfRange);
        if is_of_connection || self.is_commit_sent && is_undecodable {
            return Break::Connection(cause_of(status));
        }
        let reason = status.message().to_owned();
        if self.is_other_connection {
            return Break::Final(self.lost(Duration::ZERO, reason));
        }
        let destination = self.destination.address.uri.clone();
        Break::Final(MigrationError::Refused { destination, reason })
    }
}

fn cause_of(status: &Status) -> String {
    std::error::Error::source(status).map_or_else(|| status.message().to_owned(), cause)
}

/// Ends when the migration is cancelled.
async fn cancelled(control: &Control) {
    while control.check().is_ok() {
        sleep(CANCEL_INTERVAL).await;
    }
}
