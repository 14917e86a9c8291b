//! Handlers of `fdmap.v1.Pages`.

use std::iter::once;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::convert::{ConvertError, FileName};
use fdmap_proto::file::Right;
use fdmap_proto::units::{PageRange, SnapshotId, to_u64, to_usize};
use fdmap_proto::v1::pages_server::Pages;
use fdmap_proto::{SlotContents, v1};
use tonic::{Request, Response, Status};

use super::stream::{ResponseStream, streamed, streamed_by_threads};
use super::{Rpc, decoded};
use crate::files::{Caller, QuotaPermit, ServiceFile};
use crate::pages::{BlockRange, ScanOptions, ScanResult, Snapshot, Summary, diff};
use crate::query::{
    DiffBatches, DiffQuery, LookupQuery, ScanBatches, ScanQuery, SummaryQuery, lookup_pages, resolve_range,
    settled_slots, slot_query, summary_message,
};
use crate::status::status;
use crate::tracking::StampMap;

/// Blocks that a worker thread of the runtime may visit: some 100 us.
const MAX_BLOCKS_INLINE: usize = 4096;

impl Rpc {
    fn inspected(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, Status> {
        self.service.registry.find(caller, name, Right::Inspect).map_err(status)
    }

    /// Reads page states, in a thread of the caller unless another request scans the file anyway. Fails if the caller has lost `right` to
    /// the file meanwhile.
    pub(super) async fn read(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        right: Right,
        ranges: &[PageRange],
        options: ScanOptions,
        max_age: Duration,
    ) -> Result<ScanResult, Status> {
        let call = self.service.blocking.begin(caller).map_err(status)?;
        let thread = || call.thread();
        let result = file.scans().read_when(thread, ranges, options, max_age).await.map_err(status)?;
        self.service.registry.find(caller, &FileName::Id(file.id()), right).map_err(status)?;
        Ok(result)
    }

    /// Does work on all blocks of something: in a thread of the caller, if the blocks are many.
    async fn on_blocks<R: Send + 'static>(
        &self,
        caller: &Caller,
        blocks: usize,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Status> {
        if blocks <= MAX_BLOCKS_INLINE {
            return Ok(work());
        }
        self.service.blocking.run(caller, None, work).await.map_err(status)
    }

    pub(super) async fn provenance(
        &self,
        caller: &Caller,
        snapshot: &Snapshot,
        ranges: &[PageRange],
    ) -> Result<Option<v1::Provenance>, Status> {
        let blocks: u64 = ranges.iter().map(|range| BlockRange::around(*range).len()).sum();
        let blocks = snapshot.block_count().min(to_usize(blocks));
        let (service, of, ranges) = (Arc::clone(&self.service), snapshot.clone(), ranges.to_vec());
        let provenance = self.on_blocks(caller, blocks, move || service.provenance(&of, &ranges)).await?;
        Ok(Some(provenance.map_err(status)?.into()))
    }

    /// Charges the caller for the memory of states that an answer holds: of the snapshot, which may be retained, and of the attributes.
    pub(super) async fn charge_states(
        &self,
        caller: &Caller,
        states: &ScanResult,
    ) -> Result<(Arc<QuotaPermit>, QuotaPermit), Status> {
        let of = states.clone();
        let bytes = self.on_blocks(caller, states.snapshot.block_count(), move || of.bytes()).await?;
        let [snapshot, attributes] = bytes;
        let permit = self.service.registry.states().acquire_at_most(caller, snapshot + attributes);
        let (snapshot, attributes) = permit.map_err(status)?.split(snapshot);
        Ok((Arc::new(snapshot), attributes))
    }

    /// Charges the caller for the memory of stamps, and of states, that an answer about changes holds.
    pub(super) async fn charge_changes(
        &self,
        caller: &Caller,
        stamps: Option<&StampMap>,
        states: Option<&ScanResult>,
    ) -> Result<QuotaPermit, Status> {
        let (stamps, states) = (stamps.cloned(), states.cloned());
        let blocks = stamps.as_ref().map_or(0, StampMap::block_count)
            + states.as_ref().map_or(0, |states| states.snapshot.block_count());
        let bytes = move || {
            let of_stamps = stamps.map_or(0, |stamps| to_u64(stamps.bytes()));
            of_stamps + states.map_or(0, |states| states.bytes().iter().sum())
        };
        let bytes = self.on_blocks(caller, blocks, bytes).await?;
        self.service.registry.states().acquire_at_most(caller, bytes).map_err(status)
    }

    /// Retains a snapshot, whose memory is charged, if the request wants that. Returns its id, or 0.
    fn retain(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        snapshot: (&Snapshot, &Arc<QuotaPermit>),
        range: PageRange,
        retain_for: Option<Duration>,
    ) -> Result<u64, Status> {
        let Some(retain_for) = retain_for else { return Ok(0) };
        let (quota, charged) = (&self.service.retained, (snapshot.0.clone(), Arc::clone(snapshot.1)));
        let id = file.retained().retain(caller, quota, charged, range, retain_for);
        id.map(SnapshotId::get).map_err(status)
    }
}

fn file_pages(file: &ServiceFile) -> Result<u64, Status> {
    file.scans().source().file_pages().map_err(status)
}

#[tonic::async_trait]
impl Pages for Rpc {
    async fn summary(
        &self,
        request: Request<v1::SummaryRequest>,
    ) -> Result<Response<v1::SummaryResponse>, Status> {
        let caller = self.caller(&request)?;
        let query = SummaryQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        let range = resolve_range(query.range, file_pages(&file)?).map_err(status)?;
        let distinguish_swap_cached = query.distinguish_swap_cached;
        let options = ScanOptions { distinguish_swap_cached, attributes: false };
        let result = self.read(&caller, &file, Right::Inspect, &[range], options, query.max_age).await?;
        let provenance = self.provenance(&caller, &result.snapshot, &[range]).await?;
        let of = result.snapshot.clone();
        let count = move || Summary::of(&of, range, distinguish_swap_cached);
        let summary = self.service.blocking.run(&caller, None, count).await.map_err(status)?;
        let file_pages = result.snapshot.file_pages();
        // Last: nothing can fail after it, so the client gets the id.
        let snapshot_id = match query.retain_for {
            Some(_) => {
                let (memory, _) = self.charge_states(&caller, &result).await?;
                self.retain(&caller, &file, (&result.snapshot, &memory), range, query.retain_for)?
            }
            None => 0,
        };
        Ok(Response::new(v1::SummaryResponse {
            provenance,
            range: Some(range.into()),
            snapshot_id,
            file_pages,
            ..summary_message(&summary)
        }))
    }

    type ScanStream = ResponseStream<v1::ScanResponse>;

    async fn scan(&self, request: Request<v1::ScanRequest>) -> Result<Response<Self::ScanStream>, Status> {
        use v1::scan_response::Body;
        let caller = self.caller(&request)?;
        let permit = self.stream(&caller)?;
        let limits = &self.service.limits;
        let query = ScanQuery::new(request.into_inner(), limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        let range = resolve_range(query.range, file_pages(&file)?).map_err(status)?;
        query.check_pages(range, limits).map_err(status)?;
        let result =
            self.read(&caller, &file, Right::Inspect, &[range], query.options(), query.max_age).await?;
        let (memory, of_attributes) = self.charge_states(&caller, &result).await?;
        let snapshot = (&result.snapshot, &memory);
        let header = v1::ScanHeader {
            provenance: self.provenance(&caller, &result.snapshot, &[range]).await?,
            range: Some(range.into()),
            file_pages: result.snapshot.file_pages(),
            snapshot_id: self.retain(&caller, &file, snapshot, range, query.retain_for)?,
        };
        let permit = (permit, memory, of_attributes);
        let bodies = once(Body::Header(header)).chain(ScanBatches::new(&query, result, range));
        let messages = bodies.map(|body| v1::ScanResponse { body: Some(body) });
        Ok(if query.skips_runs() {
            streamed_by_threads(Arc::clone(&self.service), caller, permit, messages)
        } else {
            streamed(permit, messages)
        })
    }

    async fn lookup(
        &self,
        request: Request<v1::LookupRequest>,
    ) -> Result<Response<v1::LookupResponse>, Status> {
        let caller = self.caller(&request)?;
        let query = LookupQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        let ranges = query.ranges(file_pages(&file)?).map_err(status)?;
        let result =
            self.read(&caller, &file, Right::Inspect, &ranges, query.options(), query.max_age).await?;
        Ok(Response::new(v1::LookupResponse {
            provenance: self.provenance(&caller, &result.snapshot, &ranges).await?,
            pages: lookup_pages(&query.pages, &result, query.distinguish_swap_cached, query.attributes),
        }))
    }

    async fn slot_content(
        &self,
        request: Request<v1::SlotContentRequest>,
    ) -> Result<Response<v1::SlotContentResponse>, Status> {
        let caller = self.caller(&request)?;
        let query = slot_query(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        self.service.registry.find(&caller, &query.file, Right::Read).map_err(status)?;
        let ranges = query.ranges(file_pages(&file)?).map_err(status)?;
        let slots_now = async || {
            let read =
                self.read(&caller, &file, Right::Read, &ranges, query.options(), query.max_age).await?;
            self.inspected(&caller, &FileName::Id(file.id()))?;
            Ok::<_, Status>(query.pages.iter().map(|page| read.snapshot.slot(*page)).collect::<Vec<_>>())
        };
        let before = slots_now().await?;
        let swapped: Vec<_> = before.iter().copied().flatten().collect();
        let reading = self.blocking(&caller, move |service| service.probe.slot_contents(&swapped)).await?;
        let after = slots_now().await?;
        let slots = settled_slots(&before, &reading.contents, &after);
        Ok(Response::new(SlotContents { slots, areas: reading.areas }.into()))
    }

    type DiffStream = ResponseStream<v1::DiffResponse>;

    async fn diff(&self, request: Request<v1::DiffRequest>) -> Result<Response<Self::DiffStream>, Status> {
        use v1::diff_response::Body;
        let caller = self.caller(&request)?;
        let permit = self.stream(&caller)?;
        let query = DiffQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        let from = file.retained().get(&caller, query.from).map_err(status)?;
        let from_provenance = self.provenance(&caller, &from.snapshot, &[from.range]).await?;
        let distinguish_swap_cached = from_provenance.as_ref().is_some_and(|p| p.swap_cached_distinguished);
        let (to, memory, range) = match query.to {
            Some(id) => {
                let to = file.retained().get(&caller, id).map_err(status)?;
                let range = query.compared(from.range.intersect(to.range)).map_err(status)?;
                (to.snapshot, to.memory, range)
            }
            None => {
                let range = query.compared(from.range).map_err(status)?;
                let options = ScanOptions { distinguish_swap_cached, attributes: false };
                let result =
                    self.read(&caller, &file, Right::Inspect, &[range], options, Duration::ZERO).await?;
                let (memory, _) = self.charge_states(&caller, &result).await?;
                (result.snapshot, memory, range)
            }
        };
        let to_provenance = self.provenance(&caller, &to, &[range]).await?;
        let distinguish_swap_cached =
            distinguish_swap_cached && to_provenance.as_ref().is_some_and(|p| p.swap_cached_distinguished);
        let after = to.clone();
        let compare = move || diff(&from.snapshot, &after, range, distinguish_swap_cached);
        let differences = self.service.blocking.run(&caller, None, compare).await.map_err(status)?;
        let header = v1::DiffHeader {
            from: from_provenance,
            to: to_provenance,
            range: Some(range.into()),
            to_snapshot_id: match query.to {
                Some(id) => id.get(),
                None => self.retain(&caller, &file, (&to, &memory), range, query.retain_for)?,
            },
        };
        let permit = (permit, from.memory, memory);
        let bodies = once(Body::Header(header)).chain(DiffBatches::new(differences).map(Body::Batch));
        let messages = bodies.map(|body| v1::DiffResponse { body: Some(body) });
        Ok(streamed_by_threads(Arc::clone(&self.service), caller, permit, messages))
    }

    async fn drop_snapshot(
        &self,
        request: Request<v1::DropSnapshotRequest>,
    ) -> Result<Response<v1::DropSnapshotResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DropSnapshotRequest { file, snapshot_id } = request.into_inner();
        let id = decoded(SnapshotId::new(snapshot_id).ok_or(ConvertError::ZeroId("snapshot_id")))?;
        self.file(&caller, file, Right::Inspect)?.retained().remove(&caller, id).map_err(status)?;
        Ok(Response::new(v1::DropSnapshotResponse {}))
    }
}
