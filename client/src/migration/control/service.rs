//! The methods of the service.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::v1;
use fdmap_proto::v1::migration_control_server::MigrationControl;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::super::monitor::{MigrationMonitor, MigrationState};
use super::progress::{cancelled, finalized, progress};
use crate::image::Control;

const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);
const MIN_INTERVAL_MS: u32 = 100;
const MAX_INTERVAL_MS: u32 = 60_000;

/// The service.
#[derive(Clone)]
pub(super) struct ControlService {
    monitor: Arc<MigrationMonitor>,
    control: Arc<Control>,
}

impl ControlService {
    pub(super) const fn new(monitor: Arc<MigrationMonitor>, control: Arc<Control>) -> Self {
        Self { monitor, control }
    }
}

/// One call of Watch.
struct Watcher {
    service: ControlService,
    states: watch::Receiver<MigrationState>,
    interval: Duration,
    is_first: bool,
    has_ended: bool,
}

impl Watcher {
    /// The next message. It is made when the connection has room for it, so that a late reader gets the newest.
    async fn next(mut self) -> Option<(Result<v1::MigrationProgress, Status>, Self)> {
        if self.has_ended {
            return None;
        }
        if !std::mem::take(&mut self.is_first) {
            let _ = timeout(self.interval, self.states.changed()).await;
        }
        let state = self.states.borrow_and_update().clone();
        self.has_ended = matches!(state, MigrationState::Ended(_));
        let message = progress(&state, &self.service.monitor, &self.service.control.progress());
        Some((Ok(message), self))
    }
}

#[tonic::async_trait]
impl MigrationControl for ControlService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::MigrationProgress, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<v1::WatchMigrationRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let interval = interval(request.into_inner().interval_ms)?;
        let states = self.monitor.state();
        let watcher = Watcher { service: self.clone(), states, interval, is_first: true, has_ended: false };
        Ok(Response::new(Box::pin(unfold(watcher, Watcher::next))))
    }

    async fn finalize(
        &self,
        _: Request<v1::FinalizeMigrationRequest>,
    ) -> Result<Response<v1::FinalizeMigrationResponse>, Status> {
        if !self.monitor.finalize() {
            let reason = match &*self.monitor.state().borrow() {
                MigrationState::Ended(_) => "the migration has ended",
                _ => "the program does not await Finalize: it was started without --await-finalize",
            };
            return Err(Status::failed_precondition(reason));
        }
        finalized(&*self.monitor.ended().await).map(Response::new)
    }

    async fn cancel(
        &self,
        _: Request<v1::CancelMigrationRequest>,
    ) -> Result<Response<v1::CancelMigrationResponse>, Status> {
        self.control.cancel();
        cancelled(&*self.monitor.ended().await).map(Response::new)
    }
}

/// The interval of a watch.
fn interval(interval_ms: u32) -> Result<Duration, Status> {
    match interval_ms {
        0 => Ok(DEFAULT_INTERVAL),
        MIN_INTERVAL_MS..=MAX_INTERVAL_MS => Ok(Duration::from_millis(interval_ms.into())),
        _ => Err(Status::invalid_argument(format!(
            "interval of {interval_ms} ms, expected {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::StreamExt as _;
    use tonic::Code;

    use super::*;
    use crate::migration::MigrationError;

    fn service(awaits_finalize: bool) -> ControlService {
        ControlService::new(Arc::new(MigrationMonitor::new(awaits_finalize)), Arc::default())
    }

    fn watch_request(interval_ms: u32) -> Request<v1::WatchMigrationRequest> {
        Request::new(v1::WatchMigrationRequest { interval_ms })
    }

    #[tokio::test]
    async fn intervals_are_limited() {
        for (interval_ms, valid) in
            [(0, true), (99, false), (100, true), (60_000, true), (60_001, false), (u32::MAX, false)]
        {
            let watched = service(false).watch(watch_request(interval_ms)).await;
            assert_eq!(watched.err().map(|status| status.code()), (!valid).then_some(Code::InvalidArgument));
        }
    }

    /// A reader that takes no message for some time gets the newest one, and then the end.
    #[tokio::test]
    async fn late_reader_gets_the_newest_state() {
        let service = service(false);
        let mut messages = service.watch(watch_request(60_000)).await.unwrap().into_inner();
        let mut next = async || messages.next().await.map(|message| message.unwrap());
        assert_eq!(next().await.unwrap().state(), v1::MigrationState::Connecting);
        for state in [MigrationState::Copying, MigrationState::Finalizing, MigrationState::Committing] {
            service.monitor.enter(&state);
        }
        assert_eq!(next().await.unwrap().state(), v1::MigrationState::Committing);
        service.monitor.fail(&MigrationError::Ended("it broke".to_owned()));
        let last = next().await.unwrap();
        assert_eq!((last.state(), last.reason.as_str()), (v1::MigrationState::Failed, "it broke"));
        assert!(next().await.is_none());
    }

    #[tokio::test]
    async fn ended_calls_change_nothing() {
        let service = service(true);
        let call = service.finalize(Request::new(v1::FinalizeMigrationRequest {}));
        assert!(timeout(Duration::from_millis(10), call).await.is_err(), "it waits for the end");
        assert!(service.control.check().is_ok());
        service.monitor.fail(&MigrationError::Ended("it broke".to_owned()));
        for _ in 0..2 {
            let repeated = service.finalize(Request::new(v1::FinalizeMigrationRequest {})).await;
            assert_eq!(repeated.unwrap_err().code(), Code::Aborted);
            assert!(service.cancel(Request::new(v1::CancelMigrationRequest {})).await.is_ok());
        }
        let unknown = MigrationError::Unknown { destination: "b".to_owned(), reason: "lost".to_owned() };
        let service = self::service(true);
        assert!(service.monitor.finalize());
        service.monitor.fail(&unknown);
        let status = service.finalize(Request::new(v1::FinalizeMigrationRequest {})).await.unwrap_err();
        assert_eq!(status.code(), Code::Unknown);
        let status = service.cancel(Request::new(v1::CancelMigrationRequest {})).await.unwrap_err();
        assert_eq!(status.code(), Code::Unknown);
    }
}
