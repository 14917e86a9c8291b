//! The answer to a Changes call: which generations it covers, and the page states that its encoding needs.

use std::time::Duration;

use fdmap_proto::file::Right;
use fdmap_proto::units::{Generation, PageRange};
use fdmap_proto::v1;
use tonic::Status;

use super::Rpc;
use crate::blocking::Call;
use crate::files::{Caller, QuotaPermit, ServiceFile};
use crate::pages::{ScanOptions, ScanResult};
use crate::query::{ChangesQuery, ChangesStart, Encoding, QueryError};
use crate::status::status;
use crate::tracking::{Charge, CursorUser, FrozenSet, StampMap, Tracker, TrackingError};

/// Runs of changed pages whose attributes are read run by run. Beyond this number, one scan reads the whole requested range.
const MAX_ATTRIBUTE_RUNS: usize = 4096;

pub(super) const fn cursor_user(caller: &Caller) -> CursorUser {
    CursorUser { uid: caller.uid, admin: caller.admin }
}

/// The closed generations that answer a Changes call.
pub(super) struct ChangedSet {
    pub(super) stamps: StampMap,
    pub(super) since: Generation,
    pub(super) until_generation: Generation,
    /// Size of the file, in pages, when the last generation was closed.
    pub(super) file_pages: u64,
    pub(super) coverage: v1::Coverage,
    /// What the caller is charged for the stamps of a frozen set.
    pub(super) memory: Option<Charge>,
}

/// The page states or attributes of an answer; `None` if it needs neither.
#[derive(Default)]
pub(super) struct StatesOfChanges {
    pub(super) result: Option<ScanResult>,
    pub(super) provenance: Option<v1::Provenance>,
    /// What the caller is charged for attributes.
    pub(super) of_attributes: Option<QuotaPermit>,
}

impl ChangedSet {
    pub(super) fn new(
        tracker: &Tracker,
        caller: &Caller,
        start: &ChangesStart,
    ) -> Result<Self, TrackingError> {
        match start {
            ChangesStart::Since(since) => {
                let view = tracker.view();
                if *since > view.closed {
                    return Err(TrackingError::NotClosed { generation: *since, last_closed: view.closed });
                }
                Ok(Self {
                    stamps: view.stamps.clone(),
                    since: *since,
                    until_generation: view.closed,
                    file_pages: view.pages,
                    coverage: tracker.coverage(&view, *since).into(),
                    memory: None,
                })
            }
            ChangesStart::Cursor(name) => {
                let set = tracker.frozen(name, cursor_user(caller))?;
                let FrozenSet { since, until_generation, stamps, coverage, pages, memory } = set;
                let coverage = coverage.into();
                Ok(Self { stamps, since, until_generation, file_pages: pages, coverage, memory })
            }
        }
    }
}

impl Rpc {
    /// Reads the page states that entries need, or the attributes that runs need.
    pub(super) async fn read_for_changes(
        &self,
        caller: &Caller,
        file: &ServiceFile,
        right: Right,
        query: &ChangesQuery,
        changed: &ChangedSet,
        range: PageRange,
    ) -> Result<StatesOfChanges, Status> {
        let attributes = !query.attributes.is_empty();
        if !attributes && query.encoding != Encoding::Entries {
            return Ok(StatesOfChanges::default());
        }
        let mut ranges = vec![range];
        if attributes {
            let limit = self.service.limits.attribute_pages;
            let (call, stamps, since) = (Call::about("Changes", file), changed.stamps.clone(), changed.since);
            let find = move || {
                let runs = || stamps.changed(since, range).map(|run| run.range);
                let requested = runs().map(|run| run.len()).sum::<u64>();
                let some = || runs().take(MAX_ATTRIBUTE_RUNS + 1).collect::<Vec<_>>();
                if requested > limit { Err(requested) } else { Ok(some()) }
            };
            let found = self.service.blocking.run(caller, call, find).await.map_err(status)?;
            let runs = found.map_err(|requested| {
                let resource = "changed pages with attributes";
                status(QueryError::TooMany { resource, requested, limit })
            })?;
            if runs.is_empty() {
                return Ok(StatesOfChanges::default());
            }
            if runs.len() <= MAX_ATTRIBUTE_RUNS {
                ranges = runs;
            }
        }
        let options = ScanOptions { distinguish_swap_cached: false, attributes };
        let (result, of_attributes) =
            self.read(caller, file, right, &ranges, options, Duration::ZERO).await?;
        let provenance = self.provenance(caller, file, &result.snapshot, &ranges).await?;
        Ok(StatesOfChanges { result: Some(result), provenance, of_attributes: Some(of_attributes) })
    }
}
