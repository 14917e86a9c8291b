//! Handlers of `fdmap.v1.Pages`.

use std::iter::once;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::convert::{ConvertError, FileName};
use fdmap_proto::file::Right;
use fdmap_proto::units::{PageIndex, PageRange, SnapshotId, to_u64, to_usize};
use fdmap_proto::v1::pages_server::Pages;
use fdmap_proto::{SlotContents, v1};
use tonic::{Request, Response, Status};

use super::stream::ResponseStream;
use super::unreceived::CallMemory;
use super::{Rpc, decoded};
use crate::blocking::Call;
use crate::files::{Caller, QuotaPermit, ServiceFile};
use crate::pages::{BlockRange, ScanOptions, ScanResult, Snapshot, Summary, diff};
use crate::probe::ScanError;
use crate::query::{
    DiffBatches, DiffQuery, LookupQuery, ScanBatches, ScanQuery, SummaryQuery, lookup_pages, resolve_range,
    settled_slots, slot_query, summary_message,
};
use crate::status::status;
use crate::tracking::StampMap;

/// Blocks that a worker thread of the runtime may visit for one call.
const MAX_BLOCKS_INLINE: usize = 4096;
/// The same of stamps, of which each page is visited where pages differ.
pub(super) const MAX_STAMP_BLOCKS_INLINE: usize = 64;
/// What a page of a Lookup costs, in visits of a block: searches for its block, its attributes, and the scan that read it.
const SEARCHES_OF_A_PAGE: usize = 4;

impl Rpc {
    fn inspected(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, Status> {
        self.service.registry.find(caller, name, Right::Inspect).map_err(status)
    }

    /// Reads page states, in a thread of the caller unless another request scans the file anyway. Fails if the caller has lost `right` to
    /// the file meanwhile. Charges the caller for the memory of attributes, which only this call has.
    pub(super) async fn read(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        right: Right,
        ranges: &[PageRange],
        options: ScanOptions,
        max_age: Duration,
    ) -> Result<(ScanResult, QuotaPermit), Status> {
        let call = self.service.blocking.begin_scan(caller, file.id()).map_err(status)?;
        let result = file.scans().read_when(call.turn(), ranges, options, max_age).await.map_err(status)?;
        self.service.registry.find(caller, &FileName::Id(file.id()), right).map_err(status)?;
        let bytes = result.attributes.as_ref().map_or(0, |attributes| to_u64(attributes.bytes()));
        let memory = self.service.registry.states().acquire_at_most(caller, bytes).map_err(status)?;
        Ok((result, memory))
    }

    /// Does work on all blocks of something: in a thread of the caller, if the blocks are many.
    pub(super) async fn on_blocks<R: Send + 'static>(
        &self,
        caller: &Caller,
        call: Call,
        blocks: usize,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Status> {
        if blocks <= MAX_BLOCKS_INLINE {
            return Ok(work());
        }
        self.service.blocking.run(caller, call, work).await.map_err(status)
    }

    pub(super) async fn provenance(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        snapshot: &Snapshot,
        ranges: &[PageRange],
    ) -> Result<Option<v1::Provenance>, Status> {
        let blocks: u64 = ranges.iter().map(|range| BlockRange::around(*range).len()).sum();
        // Each range costs a search.
        let blocks = snapshot.block_count().min(to_usize(blocks)) + ranges.len();
        let (service, of, ranges) = (Arc::clone(&self.service), snapshot.clone(), ranges.to_vec());
        let (call, describe) = (Call::rest("provenance", file), move || service.provenance(&of, &ranges));
        let provenance = self.on_blocks(caller, call, blocks, describe).await?;
        Ok(Some(provenance.map_err(status)?.into()))
    }

    /// Charges the caller for the memory of stamps, and of a snapshot, beside the bytes that it is charged for attributes of the same
    /// answer.
    pub(super) async fn charge_states(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        (stamps, snapshot): (Option<&StampMap>, Option<&Snapshot>),
        of_attributes: u64,
    ) -> Result<QuotaPermit, Status> {
        let (stamps, snapshot) = (stamps.cloned(), snapshot.cloned());
        let blocks = stamps.as_ref().map_or(0, StampMap::block_count)
            + snapshot.as_ref().map_or(0, Snapshot::block_count);
        let bytes = move || {
            let of_stamps = stamps.map_or(0, |stamps| to_u64(stamps.bytes()));
            of_stamps + snapshot.map_or(0, |snapshot| to_u64(snapshot.bytes()))
        };
        let bytes = self.on_blocks(caller, Call::rest("size of an answer", file), blocks, bytes).await?;
        let states = self.service.registry.states();
        states.acquire_at_most_beside(caller, bytes, of_attributes).map_err(status)
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

/// Charges the caller for what a call about single pages holds until its answer begins.
fn charge_pages(memory: Option<CallMemory>, pages: &[PageIndex], ranges: &[PageRange]) -> Result<(), Status> {
    // Ranges twice for the scan, and once for the answer, in a vector that may be half full.
    let bytes = size_of_val(pages) + 4 * size_of_val(ranges);
    memory.map_or(Ok(()), |memory| memory.charge(bytes)).map_err(status)
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
        let (result, of_attributes) =
            self.read(&caller, &file, Right::Inspect, &[range], options, query.max_age).await?;
        let provenance = self.provenance(&caller, &file, &result.snapshot, &[range]).await?;
        let of = result.snapshot.clone();
        let count = move || Summary::of(&of, range, distinguish_swap_cached);
        let summary =
            self.service.blocking.run(&caller, Call::rest("Summary", &file), count).await.map_err(status)?;
        let file_pages = result.snapshot.file_pages();
        // Last: nothing can fail after it, so the client gets the id.
        let snapshot_id = match query.retain_for {
            Some(_) => {
                let states = (None, Some(&result.snapshot));
                let memory =
                    Arc::new(self.charge_states(&caller, &file, states, of_attributes.amount()).await?);
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
        let (result, of_attributes) =
            self.read(&caller, &file, Right::Inspect, &[range], query.options(), query.max_age).await?;
        let states = (None, Some(&result.snapshot));
        let memory = Arc::new(self.charge_states(&caller, &file, states, of_attributes.amount()).await?);
        let snapshot = (&result.snapshot, &memory);
        let header = v1::ScanHeader {
            provenance: self.provenance(&caller, &file, &result.snapshot, &[range]).await?,
            range: Some(range.into()),
            file_pages: result.snapshot.file_pages(),
            snapshot_id: self.retain(&caller, &file, snapshot, range, query.retain_for)?,
        };
        let permit = (permit, memory, of_attributes);
        let is_long = query.skips_runs()
            || !query.attributes.is_empty()
            || result.snapshot.block_count() > MAX_BLOCKS_INLINE;
        let bodies = once(Body::Header(header)).chain(ScanBatches::new(&query, result, range));
        let messages = bodies.map(|body| v1::ScanResponse { body: Some(body) });
        Ok(self.streamed(is_long, caller, Call::about("messages of a Scan", &file), permit, messages))
    }

    async fn lookup(
        &self,
        request: Request<v1::LookupRequest>,
    ) -> Result<Response<v1::LookupResponse>, Status> {
        let caller = self.caller(&request)?;
        let memory = request.extensions().get::<CallMemory>().cloned();
        let query = LookupQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        let ranges = query.ranges(file_pages(&file)?).map_err(status)?;
        charge_pages(memory, &query.pages, &ranges)?;
        let (result, memory) =
            self.read(&caller, &file, Right::Inspect, &ranges, query.options(), query.max_age).await?;
        let (service, searches) = (Arc::clone(&self.service), SEARCHES_OF_A_PAGE * query.pages.len());
        let answer = move || {
            let _memory = memory;
            Ok::<_, Arc<ScanError>>(v1::LookupResponse {
                provenance: Some(service.provenance(&result.snapshot, &ranges)?.into()),
                pages: lookup_pages(&query.pages, &result, query.distinguish_swap_cached, query.attributes),
            })
        };
        let answer = self.on_blocks(&caller, Call::rest("Lookup", &file), searches, answer).await?;
        Ok(Response::new(answer.map_err(status)?))
    }

    async fn slot_content(
        &self,
        request: Request<v1::SlotContentRequest>,
    ) -> Result<Response<v1::SlotContentResponse>, Status> {
        let caller = self.caller(&request)?;
        let memory = request.extensions().get::<CallMemory>().cloned();
        let query = slot_query(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.inspected(&caller, &query.file)?;
        self.service.registry.find(&caller, &query.file, Right::Read).map_err(status)?;
        let ranges = query.ranges(file_pages(&file)?).map_err(status)?;
        charge_pages(memory, &query.pages, &ranges)?;
        let slots_now = async || {
            let (read, _) =
                self.read(&caller, &file, Right::Read, &ranges, query.options(), query.max_age).await?;
            self.inspected(&caller, &FileName::Id(file.id()))?;
            Ok::<_, Status>(query.pages.iter().map(|page| read.snapshot.slot(*page)).collect::<Vec<_>>())
        };
        let before = slots_now().await?;
        let swapped: Vec<_> = before.iter().copied().flatten().collect();
        let call = Call::rest("SlotContent", &file);
        let reading =
            self.blocking(&caller, call, move |service| service.probe.slot_contents(&swapped)).await?;
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
        let from_provenance = self.provenance(&caller, &file, &from.snapshot, &[from.range]).await?;
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
                let (ScanResult { snapshot, .. }, of_attributes) =
                    self.read(&caller, &file, Right::Inspect, &[range], options, Duration::ZERO).await?;
                let states = (None, Some(&snapshot));
                let memory = self.charge_states(&caller, &file, states, of_attributes.amount()).await?;
                (snapshot, Arc::new(memory), range)
            }
        };
        let to_provenance = self.provenance(&caller, &file, &to, &[range]).await?;
        let distinguish_swap_cached =
            distinguish_swap_cached && to_provenance.as_ref().is_some_and(|p| p.swap_cached_distinguished);
        let after = to.clone();
        let compare = move || diff(&from.snapshot, &after, range, distinguish_swap_cached);
        let differences =
            self.service.blocking.run(&caller, Call::rest("Diff", &file), compare).await.map_err(status)?;
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
        Ok(self.streamed(true, caller, Call::about("messages of a Diff", &file), permit, messages))
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
