//! `fdmap.v1.Pages`.

use std::iter::once;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::convert::{ConvertError, FileName};
use fdmap_proto::file::Right;
use fdmap_proto::units::{PageRange, SnapshotId};
use fdmap_proto::v1;
use fdmap_proto::v1::pages_server::Pages;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::Rpc;
use super::status::status;
use crate::files::{Caller, ServiceFile};
use crate::pages::ScanResult;
use crate::pages::{ScanOptions, Snapshot, Summary, diff};
use crate::probe::ScanError;
use crate::query::{
    ChangeBatches, DiffQuery, LookupQuery, QueryError, ScanBatches, ScanQuery, SummaryQuery, lookup_pages,
    resolve_range, summary_message,
};

pub(super) type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A stream of what is worked out as it is sent: a client that reads slowly, or goes, costs no more than that.
pub(super) fn streamed<T: Send + 'static>(
    items: impl Iterator<Item = T> + Send + 'static,
) -> Response<Streamed<T>> {
    Response::new(Box::pin(tokio_stream::iter(items.map(Ok))))
}

impl Rpc {
    fn file(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, Status> {
        self.service.registry.find(caller, name, Right::Inspect).map_err(status)
    }

    async fn read(
        &self,
        file: &ServiceFile,
        ranges: &[PageRange],
        wants: ScanOptions,
        max_age: Duration,
    ) -> Result<ScanResult, Status> {
        file.scans().read(ranges, wants, max_age).await.map_err(status)
    }

    fn provenance(
        &self,
        snapshot: &Snapshot,
        ranges: &[PageRange],
    ) -> Result<Option<v1::Provenance>, Status> {
        Ok(Some(self.service.provenance(snapshot, ranges).map_err(status)?.into()))
    }

    /// The id of a snapshot that is kept, or 0.
    fn keep(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        snapshot: &Snapshot,
        range: PageRange,
        retain_for: Option<Duration>,
    ) -> Result<u64, Status> {
        let Some(time) = retain_for else { return Ok(0) };
        let kept = file.kept().keep(caller, &self.service.kept, snapshot.clone(), range, time);
        kept.map(SnapshotId::get).map_err(status)
    }
}

fn file_pages(file: &ServiceFile) -> Result<u64, Status> {
    file.scans().source().file_pages().map_err(|error| status(Arc::<ScanError>::from(error)))
}

#[tonic::async_trait]
impl Pages for Rpc {
    async fn summary(
        &self,
        request: Request<v1::SummaryRequest>,
    ) -> Result<Response<v1::SummaryResponse>, Status> {
        let caller = self.caller(&request)?;
        let query = SummaryQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.file(&caller, &query.file)?;
        let range = resolve_range(query.range, file_pages(&file)?).map_err(status)?;
        let wants = ScanOptions { distinguish_swap_cached: query.distinguish_swap_cached, attributes: false };
        let ScanResult { snapshot, .. } = self.read(&file, &[range], wants, query.max_age).await?;
        let provenance = self.provenance(&snapshot, &[range])?;
        let snapshot_id = self.keep(&caller, &file, &snapshot, range, query.retain_for)?;
        let file_pages = snapshot.file_pages();
        let distinguish_swap_cached = query.distinguish_swap_cached;
        let counted =
            tokio::task::spawn_blocking(move || Summary::of(&snapshot, range, distinguish_swap_cached)).await;
        let summary = counted.map_err(|_| status(Arc::new(ScanError::Panicked)))?;
        Ok(Response::new(v1::SummaryResponse {
            provenance,
            range: Some(range.into()),
            snapshot_id,
            file_pages,
            ..summary_message(&summary)
        }))
    }

    type ScanStream = Streamed<v1::ScanResponse>;

    async fn scan(&self, request: Request<v1::ScanRequest>) -> Result<Response<Self::ScanStream>, Status> {
        use v1::scan_response::Body;
        let caller = self.caller(&request)?;
        let limits = &self.service.limits;
        let query = ScanQuery::new(request.into_inner(), limits).map_err(status)?;
        let file = self.file(&caller, &query.file)?;
        let range = resolve_range(query.range, file_pages(&file)?).map_err(status)?;
        query.check_pages(range, limits).map_err(status)?;
        let reading = self.read(&file, &[range], query.wants(), query.max_age).await?;
        let header = v1::ScanHeader {
            provenance: self.provenance(&reading.snapshot, &[range])?,
            range: Some(range.into()),
            file_pages: reading.snapshot.file_pages(),
            snapshot_id: self.keep(&caller, &file, &reading.snapshot, range, query.retain_for)?,
        };
        let bodies = once(Body::Header(header)).chain(ScanBatches::new(&query, reading, range));
        Ok(streamed(bodies.map(|body| v1::ScanResponse { body: Some(body) })))
    }

    async fn lookup(
        &self,
        request: Request<v1::LookupRequest>,
    ) -> Result<Response<v1::LookupResponse>, Status> {
        let caller = self.caller(&request)?;
        let query = LookupQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.file(&caller, &query.file)?;
        let ranges = query.ranges(file_pages(&file)?).map_err(status)?;
        let reading = self.read(&file, &ranges, query.wants(), query.max_age).await?;
        Ok(Response::new(v1::LookupResponse {
            provenance: self.provenance(&reading.snapshot, &ranges)?,
            pages: lookup_pages(&query.pages, &reading, query.distinguish_swap_cached, query.attributes),
        }))
    }

    type DiffStream = Streamed<v1::DiffResponse>;

    async fn diff(&self, request: Request<v1::DiffRequest>) -> Result<Response<Self::DiffStream>, Status> {
        use v1::diff_response::Body;
        let caller = self.caller(&request)?;
        let query = DiffQuery::new(request.into_inner(), &self.service.limits).map_err(status)?;
        let file = self.file(&caller, &query.file)?;
        let from = file.kept().get(&caller, query.from).map_err(status)?;
        let from_provenance = self.provenance(&from.snapshot, &[from.range])?;
        let distinguish_swap_cached = from_provenance.as_ref().is_some_and(|p| p.swap_cached_distinguished);
        let (to, range) = match query.to {
            Some(id) => {
                let to = file.kept().get(&caller, id).map_err(status)?;
                let range = query.compared(from.range.intersect(to.range)).map_err(status)?;
                (to.snapshot, range)
            }
            None => {
                let range = query.compared(from.range).map_err(status)?;
                let wants = ScanOptions { distinguish_swap_cached, attributes: false };
                (self.read(&file, &[range], wants, Duration::ZERO).await?.snapshot, range)
            }
        };
        let header = v1::DiffHeader {
            from: from_provenance,
            to: self.provenance(&to, &[range])?,
            range: Some(range.into()),
            to_snapshot_id: match query.to {
                Some(id) => id.get(),
                None => self.keep(&caller, &file, &to, range, query.retain_for)?,
            },
        };
        let distinguish_swap_cached =
            distinguish_swap_cached && header.to.as_ref().is_some_and(|p| p.swap_cached_distinguished);
        let batches =
            ChangeBatches::new(diff(&from.snapshot, &to, range, distinguish_swap_cached)).map(Body::Batch);
        let bodies = once(Body::Header(header)).chain(batches);
        Ok(streamed(bodies.map(|body| v1::DiffResponse { body: Some(body) })))
    }

    async fn drop_snapshot(
        &self,
        request: Request<v1::DropSnapshotRequest>,
    ) -> Result<Response<v1::DropSnapshotResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DropSnapshotRequest { file, snapshot_id } = request.into_inner();
        let convert = |error: ConvertError| status(QueryError::from(error));
        let name = FileName::try_from(file).map_err(convert)?;
        let id = SnapshotId::new(snapshot_id).ok_or_else(|| convert(ConvertError::ZeroId("snapshot_id")))?;
        self.file(&caller, &name)?.kept().release(&caller, id).map_err(status)?;
        Ok(Response::new(v1::DropSnapshotResponse {}))
    }
}
