//! Handlers of `fdmap.v1.Tracking`.

use std::iter::once;
use std::sync::Arc;

use fdmap_proto::convert::{FileName, generation_from_wire};
use fdmap_proto::file::Right;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::to_u64;
use fdmap_proto::v1;
use fdmap_proto::v1::tracking_server::Tracking;
use fdmap_proto::v1::watch_checkpoints_response::{Deleted, Event};
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status};

use super::changes::{ChangedSet, StatesOfChanges, cursor_user};
use super::pages::MAX_STAMP_BLOCKS_INLINE;
use super::stream::{ResponseStream, channel};
use super::{Rpc, decoded};
use crate::blocking::Call;
use crate::files::{Caller, FileError, QuotaPermit, ServiceFile};
use crate::query::{
    ChangedBatches, ChangesQuery, ChangesStart, cursor_name, dirty_rate_window, resolve_range,
};
use crate::service::Service;
use crate::status::status;
use crate::tracking::{Charge, DirtyRateWindow, StampMap, Tracker, TrackingError};

impl Rpc {
    /// Finds the file and its tracker, if the caller has `right` to the file. The first call for a file starts its tracker.
    async fn tracker(
        &self,
        caller: &Caller,
        file: Option<v1::FileRef>,
        right: Right,
    ) -> Result<(Arc<ServiceFile>, Arc<Tracker>), Status> {
        let file = self.file(caller, file, right)?;
        if let Some(tracker) = file.tracker_now() {
            return Ok((file, tracker));
        }
        let tracked = Arc::clone(&file);
        let tracker =
            self.on_file(caller, "start of tracking", &file, right, move |_| tracked.tracker()).await?;
        Ok((file, tracker))
    }

    /// Finds the tracker of a cursor request and validates the cursor's name.
    async fn cursor(
        &self,
        caller: &Caller,
        file: Option<v1::FileRef>,
        name: String,
    ) -> Result<(Arc<ServiceFile>, Arc<Tracker>, String), Status> {
        let name = cursor_name(name).map_err(status)?;
        let (file, tracker) = self.tracker(caller, file, Right::Checkpoint).await?;
        Ok((file, tracker, name))
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
        let (file, tracker) = self.tracker(&caller, file, Right::Checkpoint).await?;
        let idempotency_key = Some(idempotency_key).filter(|key| *key != 0);
        let checkpoint = self
            .on_file(&caller, "Checkpoint", &file, Right::Checkpoint, move |_| {
                tracker.checkpoint(force_scan, idempotency_key)
            })
            .await?;
        Ok(Response::new(checkpoint.into()))
    }

    type ChangesStream = ResponseStream<v1::ChangesResponse>;

    async fn changes(
        &self,
        request: Request<v1::ChangesRequest>,
    ) -> Result<Response<Self::ChangesStream>, Status> {
        use v1::changes_response::Body;
        let caller = self.caller(&request)?;
        let permit = self.stream(&caller)?;
        let query = ChangesQuery::new(request.into_inner()).map_err(status)?;
        let right =
            if matches!(query.start, ChangesStart::Cursor(_)) { Right::Checkpoint } else { Right::Inspect };
        let (file, tracker) = self.tracker(&caller, Some(query.file.clone().into()), right).await?;
        let (start, by) = (query.start.clone(), caller.clone());
        // Closed generations are read without the tracker's lock, sets of cursors with it.
        let is_closed = !matches!(start, ChangesStart::Cursor(_));
        let read = move |_: &Arc<Service>| ChangedSet::new(&tracker, &by, &start);
        let call = if is_closed { Call::about("Changes", &file) } else { Call::on("Changes", &file) };
        let changed = self.permitted(&caller, call, file.id(), right, read).await?;
        let range = resolve_range(query.range, changed.file_pages).map_err(status)?;
        let StatesOfChanges { result, provenance, of_attributes } =
            self.read_for_changes(&caller, &file, right, &query, &changed, range).await?;
        let ChangedSet { stamps, since, until_generation, file_pages, coverage, memory } = changed;
        let header = v1::ChangesHeader {
            since_generation: since.get(),
            until_generation: until_generation.get(),
            range: Some(range.into()),
            file_pages,
            coverage: Some(coverage),
            provenance,
        };
        // A frozen set is charged already.
        let uncharged = memory.is_none().then_some(&stamps);
        let states = (uncharged, result.as_ref().map(|result| &result.snapshot));
        let charged = of_attributes.as_ref().map_or(0, QuotaPermit::amount);
        let of_states = self.charge_states(&caller, &file, states, charged).await?;
        let permit = (permit, memory, of_attributes, of_states);
        let is_long = !query.attributes.is_empty() || stamps.block_count() > MAX_STAMP_BLOCKS_INLINE;
        let batches = ChangedBatches::new(&query, stamps, since, range, result);
        let bodies = once(Body::Header(header)).chain(batches);
        let messages = bodies.map(|body| v1::ChangesResponse { body: Some(body) });
        Ok(self.streamed(is_long, caller, Call::about("messages of Changes", &file), permit, messages))
    }

    async fn get_coverage(
        &self,
        request: Request<v1::GetCoverageRequest>,
    ) -> Result<Response<v1::GetCoverageResponse>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Inspect).await?;
        let now = self
            .on_file(&caller, "GetCoverage", &file, Right::Inspect, move |_| tracker.file_coverage())
            .await?;
        Ok(Response::new(now.into()))
    }

    async fn seal_writers(
        &self,
        request: Request<v1::SealWritersRequest>,
    ) -> Result<Response<v1::SealWritersResponse>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Write).await?;
        let (sealed, by) = (Arc::clone(&file), caller.clone());
        self.on_file(&caller, "SealWriters", &file, Right::Write, move |service| {
            service.registry.seal_writers(&by, &sealed)
        })
        .await?;
        let now = self
            .on_file(&caller, "GetCoverage", &file, Right::Write, move |_| tracker.file_coverage())
            .await?;
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
        let policy = decoded(CoveragePolicy::from_wire(policy))?;
        let (file, tracker) = self.tracker(&caller, file, Right::Write).await?;
        self.on_file(&caller, "SetCoveragePolicy", &file, Right::Write, move |_| {
            tracker.set_coverage_policy(policy)
        })
        .await?;
        Ok(Response::new(v1::SetCoveragePolicyResponse {}))
    }

    async fn dirty_rate(
        &self,
        request: Request<v1::DirtyRateRequest>,
    ) -> Result<Response<v1::DirtyRateResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DirtyRateRequest { file, window } = request.into_inner();
        let window = dirty_rate_window(window).map_err(status)?;
        let (file, tracker) = self.tracker(&caller, file, Right::Checkpoint).await?;
        let (id, call) = (file.id(), Call::on("DirtyRate", &file));
        // The file is not kept during the window: its last user would free it in a thread of the runtime.
        let open = self.permitted(&caller, call, id, Right::Checkpoint, move |_| {
            let _file = file;
            DirtyRateWindow::open(&tracker)
        });
        let open = open.await?;
        tokio::time::sleep(window).await;
        let (file, tracker) = self.tracker(&caller, Some(FileName::Id(id).into()), Right::Checkpoint).await?;
        let page_size = file.scans().source().page_size;
        let rate = self
            .on_file(&caller, "DirtyRate", &file, Right::Checkpoint, move |_| open.close(&tracker, page_size))
            .await?;
        Ok(Response::new(rate.into()))
    }

    type WatchCheckpointsStream = ResponseStream<v1::WatchCheckpointsResponse>;

    async fn watch_checkpoints(
        &self,
        request: Request<v1::WatchCheckpointsRequest>,
    ) -> Result<Response<Self::WatchCheckpointsStream>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Inspect).await?;
        let permits = (self.service.watches.acquire(&caller, 1).map_err(status)?, self.stream(&caller)?);
        let mut events = tracker.watch();
        // Hold neither tracker nor file while waiting: a deleted file is freed when its last user drops it.
        drop(tracker);
        let name = FileName::Id(file.id());
        drop(file);
        let rpc = self.clone();
        let (sender, response) = channel();
        tokio::spawn(async move {
            let _permits = permits;
            loop {
                let received = tokio::select! {
                    received = events.recv() => received,
                    () = sender.closed() => return,
                };
                let event = match received {
                    Ok(event) => Event::Checkpoint(event.into()),
                    Err(RecvError::Lagged(lost)) => Event::Lost(lost),
                    Err(RecvError::Closed) => Event::Deleted(Deleted {}),
                };
                // The caller may have lost the inspect right since.
                let inspects = rpc.service.registry.find(&caller, &name, Right::Inspect).is_ok();
                let last = matches!(event, Event::Deleted(_)) || !inspects;
                let event = if inspects { event } else { Event::Deleted(Deleted {}) };
                let sent = sender.send(Ok(v1::WatchCheckpointsResponse { event: Some(event) })).await;
                if last || sent.is_err() {
                    return;
                }
            }
        });
        Ok(response)
    }

    async fn create_cursor(
        &self,
        request: Request<v1::CreateCursorRequest>,
    ) -> Result<Response<v1::CreateCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::CreateCursorRequest { file, name, generation } = request.into_inner();
        let generation = decoded(generation_from_wire("generation", generation))?;
        let (file, tracker, name) = self.cursor(&caller, file, name).await?;
        let user = cursor_user(&caller);
        let cursor = self
            .on_file(&caller, "CreateCursor", &file, Right::Checkpoint, move |_| {
                tracker.create_cursor(&name, generation, user)
            })
            .await?;
        Ok(Response::new(v1::CreateCursorResponse { cursor: Some(cursor.into()) }))
    }

    async fn list_cursors(
        &self,
        request: Request<v1::ListCursorsRequest>,
    ) -> Result<Response<v1::ListCursorsResponse>, Status> {
        let caller = self.caller(&request)?;
        let (file, tracker) = self.tracker(&caller, request.into_inner().file, Right::Checkpoint).await?;
        let user = cursor_user(&caller);
        let cursors = self
            .on_file(&caller, "ListCursors", &file, Right::Checkpoint, move |_| {
                Ok::<_, TrackingError>(tracker.cursors(user))
            })
            .await?;
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
        let (file, tracker, name) = self.cursor(&caller, file, name).await?;
        let user = cursor_user(&caller);
        self.on_file(&caller, "DeleteCursor", &file, Right::Checkpoint, move |_| {
            tracker.delete_cursor(&name, user)
        })
        .await?;
        Ok(Response::new(v1::DeleteCursorResponse {}))
    }

    async fn begin_cursor(
        &self,
        request: Request<v1::BeginCursorRequest>,
    ) -> Result<Response<v1::BeginCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::BeginCursorRequest { file, name, force_scan } = request.into_inner();
        let (file, tracker, name) = self.cursor(&caller, file, name).await?;
        let user = cursor_user(&caller);
        let by = caller.clone();
        let begin = move |service: &Arc<Service>| {
            let charge = |stamps: &StampMap| {
                let memory = service.registry.states().acquire_at_most(&by, to_u64(stamps.bytes()));
                let refused = |error: FileError| TrackingError::Limit(error.to_string());
                Ok(Arc::new(memory.map_err(refused)?) as Charge)
            };
            tracker.begin_cursor(&name, user, force_scan, charge)
        };
        let begun = self.on_file(&caller, "BeginCursor", &file, Right::Checkpoint, begin).await?;
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
        let generation = decoded(generation_from_wire("generation", generation))?;
        let (file, tracker, name) = self.cursor(&caller, file, name).await?;
        let user = cursor_user(&caller);
        let cursor = self
            .on_file(&caller, "CommitCursor", &file, Right::Checkpoint, move |_| {
                tracker.commit_cursor(&name, user, generation)
            })
            .await?;
        Ok(Response::new(v1::CommitCursorResponse { cursor: Some(cursor.into()) }))
    }

    async fn abort_cursor(
        &self,
        request: Request<v1::AbortCursorRequest>,
    ) -> Result<Response<v1::AbortCursorResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::AbortCursorRequest { file, name } = request.into_inner();
        let (file, tracker, name) = self.cursor(&caller, file, name).await?;
        let user = cursor_user(&caller);
        let cursor = self
            .on_file(&caller, "AbortCursor", &file, Right::Checkpoint, move |_| {
                tracker.abort_cursor(&name, user)
            })
            .await?;
        Ok(Response::new(v1::AbortCursorResponse { cursor: Some(cursor.into()) }))
    }
}
