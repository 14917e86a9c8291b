//! `fdmap.v1.Tracking`.

use std::iter::once;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_proto::convert::{ConvertError, FileName, duration_to_wire, generation_from_wire};
use fdmap_proto::file::Right;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::{Generation, PageSize, to_f64};
use fdmap_proto::v1;
use fdmap_proto::v1::tracking_server::Tracking;
use fdmap_proto::v1::watch_checkpoints_response::{Deleted, Event};
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status};

use super::Rpc;
use super::pages::{Streamed, streamed};
use super::status::status;
use crate::files::{Caller, ServiceFile};
use crate::pages::ScanResult;
use crate::pages::{ScanOptions, Snapshot};
use crate::probe::ScanError;
use crate::query::{
    Asked, ChangedBatches, ChangesQuery, Encoding, QueryError, cursor_name, rate_window, resolve_range,
};
use crate::tracking::{Checkpoint, CheckpointEvent, CursorUser, FrozenSet, StampMap, Tracker, TrackingError};

/// Runs of changed pages whose attributes are read one by one; of more the range around all of them is.
const ATTRIBUTE_RUNS: usize = 4096;

fn checked<T>(value: Result<T, ConvertError>) -> Result<T, Status> {
    value.map_err(|error| status(QueryError::from(error)))
}

const fn user(caller: &Caller) -> CursorUser {
    CursorUser { uid: caller.uid, admin: caller.admin }
}

fn checkpoint_message(checkpoint: Checkpoint) -> v1::CheckpointResponse {
    let Checkpoint { generation, unchanged, counts, coverage, duration, time } = checkpoint;
    v1::CheckpointResponse {
        generation: generation.get(),
        unchanged,
        observed_pages: counts.exact,
        conservative_pages: counts.conservative,
        coverage: Some(coverage.into()),
        duration: Some(duration_to_wire(duration)),
        time: Some(time.into()),
    }
}

fn per_second(pages: u64, window: Duration) -> f64 {
    if window.is_zero() { 0.0 } else { to_f64(pages) / window.as_secs_f64() }
}

fn made_message(made: &CheckpointEvent) -> v1::CheckpointEvent {
    let pages = made.counts.exact + made.counts.conservative;
    v1::CheckpointEvent {
        generation: made.generation.get(),
        observed_pages: made.counts.exact,
        conservative_pages: made.counts.conservative,
        time: Some(made.time.into()),
        since_last: made.since_last.map(duration_to_wire),
        pages_per_second: made.since_last.map_or(0.0, |window| per_second(pages, window)),
    }
}

/// What a Changes call is answered from.
struct Answering {
    stamps: StampMap,
    since: Generation,
    until_generation: Generation,
    pages: u64,
    coverage: v1::Coverage,
}

impl Rpc {
    /// The tracker of the file, if the caller has `right` to it. Where there is none yet, its generations begin.
    async fn tracker(
        &self,
        caller: &Caller,
        file: Option<v1::FileRef>,
        right: Right,
    ) -> Result<(Arc<ServiceFile>, Arc<Tracker>), Status> {
        let name = checked(FileName::try_from(file))?;
        let file = self.service.registry.find(caller, &name, right).map_err(status)?;
        let begun = Arc::clone(&file);
        let tracker = self.blocking(move |_| begun.tracker()).await?;
        Ok((file, tracker))
    }

    /// The same and what a cursor is called.
    async fn cursor(
        &self,
        caller: &Caller,
        file: Option<v1::FileRef>,
        name: String,
    ) -> Result<(Arc<Tracker>, String), Status> {
        let name = cursor_name(name).map_err(status)?;
        let (_, tracker) = self.tracker(caller, file, Right::Checkpoint).await?;
        Ok((tracker, name))
    }

    async fn read_for_changes(
        &self,
        file: &ServiceFile,
        query: &ChangesQuery,
        answering: &Answering,
        range: fdmap_proto::units::PageRange,
    ) -> Result<(Option<ScanResult>, Option<v1::Provenance>), Status> {
        let attributes = !query.attributes.is_empty();
        if !attributes && query.encoding != Encoding::Entries {
            return Ok((None, None));
        }
        let mut ranges = vec![range];
        if attributes {
            let changed = answering.stamps.changed(answering.since, range);
            let runs: Vec<_> = changed.map(|run| run.range).collect();
            let (asked, most) =
                (runs.iter().map(|run| run.len()).sum::<u64>(), self.service.limits.attribute_pages);
            if asked > most {
                let what = "changed pages with attributes";
                return Err(status(QueryError::TooMany { what, asked, most }));
            }
            if runs.is_empty() {
                return Ok((None, None));
            }
            if runs.len() <= ATTRIBUTE_RUNS {
                ranges = runs;
            }
        }
        let wants = ScanOptions { distinguish_swap_cached: false, attributes };
        let reading = file.scans().read(&ranges, wants, Duration::ZERO).await.map_err(status)?;
        let provenance = |snapshot: &Snapshot| self.service.provenance(snapshot, &ranges);
        let provenance = provenance(&reading.snapshot).map_err(status::<Arc<ScanError>>)?;
        Ok((Some(reading), Some(provenance.into())))
    }
}

fn answering(tracker: &Tracker, caller: &Caller, asked: &Asked) -> Result<Answering, TrackingError> {
    match asked {
        Asked::Since(since) => {
            let view = tracker.view();
            if *since > view.closed {
                return Err(TrackingError::NotClosed { asked: *since, closed: view.closed });
            }
            Ok(Answering {
                stamps: view.stamps.clone(),
                since: *since,
                until_generation: view.closed,
                pages: view.pages,
                coverage: tracker.coverage(&view, *since).into(),
            })
        }
        Asked::Cursor(name) => {
            let FrozenSet { since, until_generation, stamps, coverage, pages } =
                tracker.frozen(name, user(caller))?;
            Ok(Answering { stamps, since, until_generation, pages, coverage: coverage.into() })
        }
    }
}

#[tonic::async_trait]
impl Tracking for Rpc {
    async fn checkpoint(
        &self,
        request: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::CheckpointRequest { file, force_scan, idempotency_key } = request.into_inner();
        let (_, tracker) = self.tracker(&caller, file, Right::Checkpoint).await?;
        let idempotency_key = Some(idempotency_key).filter(|id| *id != 0);
        let checkpoint = self.blocking(move |_| tracker.checkpoint(force_scan, idempotency_key)).await?;
        Ok(Response::new(checkpoint_message(checkpoint)))
    }

    type ChangesStream = Streamed<v1::ChangesResponse>;

    async fn changes(
        &self,
        request: Request<v1::ChangesRequest>,
    ) -> Result<Response<Self::ChangesStream>, Status> {
        use v1::changes_response::Body;
        let caller = self.caller(&request)?;
        let query = ChangesQuery::new(request.into_inner()).map_err(status)?;
        let right = if matches!(query.asked, Asked::Cursor(_)) { Right::Checkpoint } else { Right::Inspect };
        let (file, tracker) = self.tracker(&caller, Some(query.file.clone().into()), right).await?;
        let (asked, by) = (query.asked.clone(), caller.clone());
        let answering = self.blocking(move |_| answering(&tracker, &by, &asked)).await?;
        let range = resolve_range(query.range, answering.pages).map_err(status)?;
        let (reading, provenance) = self.read_for_changes(&file, &query, &answering, range).await?;
        let Answering { stamps, since, until_generation, pages, coverage } = answering;
        let header = v1::ChangesHeader {
            since: since.get(),
            until_generation: until_generation.get(),
            range: Some(range.into()),
            file_pages: pages,
            coverage: Some(coverage),
            provenance,
        };
        let batches = ChangedBatches::new(&query, stamps, since, range, reading);
        let bodies = once(Body::Header(header)).chain(batches);
        Ok(streamed(bodies.map(|body| v1::ChangesResponse { body: Some(body) })))
    }

    async fn get_coverage(
        &self,
        request: Request<v1::GetCoverageRequest>,
    ) -> Result<Response<v1::GetCoverageResponse>, Status> {
        let caller = self.caller(&request)?;
        let (_, tracker) = self.tracker(&caller, request.into_inner().file, Right::Inspect).await?;
        let now = self.blocking(move |_| tracker.coverage_report()).await?;
        Ok(Response::new(v1::GetCoverageResponse {
            coverage: Some(now.coverage.into()),
            mappings: now.mappings.into_iter().map(v1::TrackedMapping::from).collect(),
            policy: v1::CoveragePolicy::from(now.policy).into(),
            generation: now.closed_generation.get(),
            writers_sealed: now.writers_sealed,
        }))
    }

    async fn seal_writers(
        &self,
        request: Request<v1::SealWritersRequest>,
    ) -> Result<Response<v1::SealWritersResponse>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Write).await?;
        let closing = Arc::clone(&file);
        self.blocking(move |service| service.registry.close(&closing)).await?;
        let now = self.blocking(move |_| tracker.coverage_report()).await?;
        let file = file.info(&caller).map_err(status)?;
        Ok(Response::new(v1::SealWritersResponse {
            file: Some(file.into()),
            coverage: Some(now.coverage.into()),
        }))
    }

    async fn set_coverage_policy(
        &self,
        request: Request<v1::SetCoveragePolicyRequest>,
    ) -> Result<Response<v1::SetCoveragePolicyResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::SetCoveragePolicyRequest { file, policy } = request.into_inner();
        let policy = checked(CoveragePolicy::from_wire(policy))?;
        let (_, tracker) = self.tracker(&caller, file, Right::Write).await?;
        self.blocking(move |_| tracker.set_coverage_policy(policy)).await?;
        Ok(Response::new(v1::SetCoveragePolicyResponse {}))
    }

    async fn dirty_rate(
        &self,
        request: Request<v1::DirtyRateRequest>,
    ) -> Result<Response<v1::DirtyRateResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DirtyRateRequest { file, window } = request.into_inner();
        let window = rate_window(window).map_err(status)?;
        let (file, tracker) = self.tracker(&caller, file, Right::Checkpoint).await?;
        let first = Arc::clone(&tracker);
        let before = self.blocking(move |_| first.checkpoint(false, None)).await?;
        let began = Instant::now();
        tokio::time::sleep(window).await;
        let second = Arc::clone(&tracker);
        let after = self.blocking(move |_| second.checkpoint(false, None)).await?;
        let window = began.elapsed();
        // Somebody else may have closed generations in between.
        let counts = self
            .blocking(move |_| {
                Ok::<_, TrackingError>((tracker.count(before.generation), after.generation, {
                    let view = tracker.view();
                    tracker.coverage(&view, before.generation)
                }))
            })
            .await?;
        let (counts, generation, coverage) = counts;
        let pages = counts.exact + counts.conservative;
        let rate = per_second(pages, window);
        let page: PageSize = file.scans().source().page_size;
        Ok(Response::new(v1::DirtyRateResponse {
            window: Some(duration_to_wire(window)),
            observed_pages: counts.exact,
            conservative_pages: counts.conservative,
            pages_per_second: rate,
            bytes_per_second: rate * to_f64(page.bytes()),
            coverage: Some(coverage.into()),
            generation: generation.get(),
        }))
    }

    type WatchCheckpointsStream = Streamed<v1::WatchCheckpointsResponse>;

    async fn watch_checkpoints(
        &self,
        request: Request<v1::WatchCheckpointsRequest>,
    ) -> Result<Response<Self::WatchCheckpointsStream>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Inspect).await?;
        let share = self.service.watches.take(&caller, 1).map_err(status)?;
        let mut made = tracker.watch();
        // Not held while waiting: a file that was deleted ends with its last user.
        drop(tracker);
        let name = FileName::Id(file.id());
        drop(file);
        let rpc = self.clone();
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        tokio::spawn(async move {
            let _share = share;
            loop {
                let news = tokio::select! {
                    news = made.recv() => news,
                    () = sender.closed() => return,
                };
                let event = match news {
                    Ok(made) => Event::Checkpoint(made_message(&made)),
                    Err(RecvError::Lagged(lost)) => Event::Lost(lost),
                    Err(RecvError::Closed) => Event::Deleted(Deleted {}),
                };
                // The right to see may have been taken away.
                let seen = rpc.service.registry.find(&caller, &name, Right::Inspect).is_ok();
                let last = matches!(event, Event::Deleted(_)) || !seen;
                let event = if seen { event } else { Event::Deleted(Deleted {}) };
                let sent = sender.send(Ok(v1::WatchCheckpointsResponse { event: Some(event) })).await;
                if last || sent.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn create_cursor(
        &self,
        request: Request<v1::CreateCursorRequest>,
    ) -> Result<Response<v1::CreateCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::CreateCursorRequest { file, name, generation } = request.into_inner();
        let generation = checked(generation_from_wire("generation", generation))?;
        let (tracker, name) = self.cursor(&caller, file, name).await?;
        let user = user(&caller);
        let cursor = self.blocking(move |_| tracker.create_cursor(&name, generation, user)).await?;
        Ok(Response::new(v1::CreateCursorResponse { cursor: Some(cursor.into()) }))
    }

    async fn list_cursors(
        &self,
        request: Request<v1::ListCursorsRequest>,
    ) -> Result<Response<v1::ListCursorsResponse>, Status> {
        let caller = self.caller(&request)?;
        let (_, tracker) = self.tracker(&caller, request.into_inner().file, Right::Checkpoint).await?;
        let user = user(&caller);
        let cursors = self.blocking(move |_| Ok::<_, TrackingError>(tracker.cursors(user))).await?;
        Ok(Response::new(v1::ListCursorsResponse {
            cursors: cursors.into_iter().map(v1::Cursor::from).collect(),
        }))
    }

    async fn delete_cursor(
        &self,
        request: Request<v1::DeleteCursorRequest>,
    ) -> Result<Response<v1::DeleteCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DeleteCursorRequest { file, name } = request.into_inner();
        let (tracker, name) = self.cursor(&caller, file, name).await?;
        let user = user(&caller);
        self.blocking(move |_| tracker.delete_cursor(&name, user)).await?;
        Ok(Response::new(v1::DeleteCursorResponse {}))
    }

    async fn begin_cursor(
        &self,
        request: Request<v1::BeginCursorRequest>,
    ) -> Result<Response<v1::BeginCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::BeginCursorRequest { file, name, force_scan } = request.into_inner();
        let (tracker, name) = self.cursor(&caller, file, name).await?;
        let user = user(&caller);
        let begun = self.blocking(move |_| tracker.begin_cursor(&name, user, force_scan)).await?;
        let (cursor, counts, coverage) = begun;
        Ok(Response::new(v1::BeginCursorResponse {
            cursor: Some(cursor.into()),
            observed_pages: counts.exact,
            conservative_pages: counts.conservative,
            coverage: Some(coverage.into()),
        }))
    }

    async fn commit_cursor(
        &self,
        request: Request<v1::CommitCursorRequest>,
    ) -> Result<Response<v1::CommitCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::CommitCursorRequest { file, name, generation } = request.into_inner();
        let generation = checked(generation_from_wire("generation", generation))?;
        let (tracker, name) = self.cursor(&caller, file, name).await?;
        let user = user(&caller);
        let cursor = self.blocking(move |_| tracker.commit_cursor(&name, user, generation)).await?;
        Ok(Response::new(v1::CommitCursorResponse { cursor: Some(cursor.into()) }))
    }

    async fn abort_cursor(
        &self,
        request: Request<v1::AbortCursorRequest>,
    ) -> Result<Response<v1::AbortCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::AbortCursorRequest { file, name } = request.into_inner();
        let (tracker, name) = self.cursor(&caller, file, name).await?;
        let user = user(&caller);
        let cursor = self.blocking(move |_| tracker.abort_cursor(&name, user)).await?;
        Ok(Response::new(v1::AbortCursorResponse { cursor: Some(cursor.into()) }))
    }
}
