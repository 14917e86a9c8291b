//! Page states: summaries, scans, lookups and differences.

use std::time::Duration;

use bytes::Bytes;
use fdmap_proto::columns;
use fdmap_proto::convert::{ConvertError, duration_to_wire};
use fdmap_proto::units::{SnapshotId, to_u64};
use fdmap_proto::v1::scan_response::Body;
use fdmap_proto::{
    AttributeSet, Change, FileName, PageIndex, PageInfo, PageRange, PageSummary, Provenance, Run,
    SlotContents, StateSet, v1,
};
use tonic::Streaming;

use super::bitmaps::{Bitmaps, push_run};
use super::{Client, bounded};
use crate::{ClientError, Timeouts};

/// Encoding of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanEncoding {
    /// Runs or, where they are short, bitmaps with slots: what takes less time, batch by batch. With attributes, all batches
    /// have runs. [`Scan::next_runs`] and [`Scan::runs`] turn bitmaps into runs.
    #[default]
    Auto,
    /// Runs.
    Runs,
    /// One bitmap per state.
    Bitmaps {
        /// Include the swap slots of swapped pages.
        slots: bool,
    },
    /// One 64-bit pagemap entry per page.
    Entries,
}

/// Options of [`Client::scan`]. The default reports the current state of all pages.
#[derive(Clone, Debug)]
pub struct ScanRequest {
    /// Pages to report; `None`: all pages.
    pub range: Option<PageRange>,
    /// Report only pages in these states.
    pub states: StateSet,
    /// Attributes to report; valid with [`ScanEncoding::Auto`] and [`ScanEncoding::Runs`].
    pub attributes: AttributeSet,
    /// Maximum age of the answer.
    pub max_age: Duration,
    /// Encoding of the batches.
    pub encoding: ScanEncoding,
    /// Distinguish swap-cached from swapped pages.
    pub distinguish_swap_cached: bool,
    /// Retain the snapshot for this long, for [`Client::diff`]; 0: do not retain it.
    pub retain_for: Duration,
}

impl Default for ScanRequest {
    fn default() -> Self {
        Self {
            range: None,
            states: StateSet::ALL,
            attributes: AttributeSet::NONE,
            max_age: Duration::ZERO,
            encoding: ScanEncoding::default(),
            distinguish_swap_cached: false,
            retain_for: Duration::ZERO,
        }
    }
}

/// Options of [`Client::summary`]. The default counts all pages in their current state.
#[derive(Clone, Debug, Default)]
pub struct SummaryOptions {
    /// Pages to report; `None`: all pages.
    pub range: Option<PageRange>,
    /// Maximum age of the answer.
    pub max_age: Duration,
    /// Distinguish swap-cached from swapped pages.
    pub distinguish_swap_cached: bool,
    /// Retain the snapshot for this long, for [`Client::diff`]; 0: do not retain it.
    pub retain_for: Duration,
}

/// Header of a scan.
#[derive(Clone, Debug)]
pub struct ScanHeader {
    /// Provenance of the states.
    pub provenance: Provenance,
    /// Pages that the batches cover.
    pub range: PageRange,
    /// Size of the file in pages when it was read.
    pub file_pages: u64,
    /// Retained snapshot, if requested.
    pub snapshot: Option<SnapshotId>,
}

/// One batch of a scan.
#[derive(Clone, Debug)]
pub enum ScanBatch {
    /// Runs in ascending page order.
    Runs(Vec<Run>),
    /// Bitmaps of consecutive pages.
    Bitmaps(Bitmaps),
    /// Little-endian 64-bit pagemap entries.
    Entries {
        /// Page of the first entry.
        first: PageIndex,
        /// 8 bytes per page.
        bytes: Bytes,
    },
}

/// Result of [`Client::lookup`].
#[derive(Clone, Debug)]
pub struct Lookup {
    /// Provenance of the states.
    pub provenance: Provenance,
    /// One element per requested page, in request order.
    pub pages: Vec<PageInfo>,
}

impl Client {
    /// Counts pages by state.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn summary(
        &self,
        file: &FileName,
        options: &SummaryOptions,
    ) -> Result<PageSummary, ClientError> {
        let request = v1::SummaryRequest {
            file: Some(file.clone().into()),
            range: options.range.map(v1::PageRange::from),
            max_age: Some(duration_to_wire(options.max_age)),
            distinguish_swap_cached: options.distinguish_swap_cached,
            retain_for: Some(duration_to_wire(options.retain_for)),
        };
        let answer = self.wait("Summary", self.pages.clone().summary(request)).await?;
        Ok(answer.try_into()?)
    }

    /// Streams the state of every page of a range.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn scan(&self, file: &FileName, options: &ScanRequest) -> Result<Scan, ClientError> {
        let (encoding, slots) = match options.encoding {
            ScanEncoding::Auto => (v1::Encoding::Auto, false),
            ScanEncoding::Runs => (v1::Encoding::Runs, false),
            ScanEncoding::Bitmaps { slots } => (v1::Encoding::Bitmaps, slots),
            ScanEncoding::Entries => (v1::Encoding::Entries, false),
        };
        let all = options.states == StateSet::ALL;
        // An empty list selects all states.
        let selected = if all { StateSet::NONE } else { options.states };
        let request = v1::ScanRequest {
            file: Some(file.clone().into()),
            range: options.range.map(v1::PageRange::from),
            states: selected.elements().map(|state| v1::PageState::from(state).into()).collect(),
            attributes: options.attributes.to_wire(),
            max_age: Some(duration_to_wire(options.max_age)),
            encoding: encoding.into(),
            distinguish_swap_cached: options.distinguish_swap_cached,
            slots,
            retain_for: Some(duration_to_wire(options.retain_for)),
        };
        let mut stream = self.wait("Scan", self.pages.clone().scan(request)).await?;
        let first = bounded("Scan", self.timeouts, stream.message()).await?;
        let Some(Body::Header(header)) = first.and_then(|message| message.body) else {
            return Err(ClientError::Unexpected("first message of Scan is not a header"));
        };
        let header = ScanHeader {
            provenance: provenance(header.provenance)?,
            range: header.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
            file_pages: header.file_pages,
            snapshot: SnapshotId::new(header.snapshot_id),
        };
        let next = header.range.start();
        Ok(Scan { header, stream, next, complete: all, pending: None, timeouts: self.timeouts })
    }

    /// Returns the states of individual pages, in any order.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn lookup(
        &self,
        file: &FileName,
        pages: &[PageIndex],
        attributes: AttributeSet,
        max_age: Duration,
        distinguish_swap_cached: bool,
    ) -> Result<Lookup, ClientError> {
        let request = v1::LookupRequest {
            file: Some(file.clone().into()),
            pages: pages.iter().map(|page| page.0).collect(),
            attributes: attributes.to_wire(),
            max_age: Some(duration_to_wire(max_age)),
            distinguish_swap_cached,
        };
        let answer = self.wait("Lookup", self.pages.clone().lookup(request)).await?;
        let pages = answer.pages.into_iter().map(PageInfo::try_from).collect::<Result<_, _>>()?;
        Ok(Lookup { provenance: provenance(answer.provenance)?, pages })
    }

    /// Returns the swap slots of individual pages, in any order, and where the content of these slots is. Needs the right to read the file.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn slot_content(
        &self,
        file: &FileName,
        pages: &[PageIndex],
    ) -> Result<SlotContents, ClientError> {
        let request = v1::SlotContentRequest {
            file: Some(file.clone().into()),
            pages: pages.iter().map(|page| page.0).collect(),
        };
        let answer = self.wait("SlotContent", self.pages.clone().slot_content(request)).await?;
        Ok(answer.try_into()?)
    }

    /// Streams the differences between the retained snapshot `from` and the retained snapshot `to`. If `to` is `None`, reads the
    /// kernel now and retains the new snapshot for `retain_for`.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn diff(
        &self,
        file: &FileName,
        from: SnapshotId,
        to: Option<SnapshotId>,
        range: Option<PageRange>,
        retain_for: Duration,
    ) -> Result<Diff, ClientError> {
        let request = v1::DiffRequest {
            file: Some(file.clone().into()),
            from_snapshot_id: from.get(),
            to_snapshot_id: to.map_or(0, SnapshotId::get),
            range: range.map(v1::PageRange::from),
            retain_for: Some(duration_to_wire(retain_for)),
        };
        let mut stream = self.wait("Diff", self.pages.clone().diff(request)).await?;
        let first = bounded("Diff", self.timeouts, stream.message()).await?;
        let Some(v1::diff_response::Body::Header(header)) = first.and_then(|message| message.body) else {
            return Err(ClientError::Unexpected("first message of Diff is not a header"));
        };
        Ok(Diff {
            from: provenance(header.from)?,
            to: provenance(header.to)?,
            range: header.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
            to_snapshot: SnapshotId::new(header.to_snapshot_id),
            stream,
            timeouts: self.timeouts,
        })
    }

    /// Deletes a retained snapshot before its retention time ends.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn drop_snapshot(&self, file: &FileName, snapshot: SnapshotId) -> Result<(), ClientError> {
        let request =
            v1::DropSnapshotRequest { file: Some(file.clone().into()), snapshot_id: snapshot.get() };
        self.wait("DropSnapshot", self.pages.clone().drop_snapshot(request)).await.map(|_| ())
    }
}

/// Stream of page states.
#[derive(Debug)]
pub struct Scan {
    header: ScanHeader,
    stream: Streaming<v1::ScanResponse>,
    /// First page that is not received yet.
    next: PageIndex,
    /// Every page must be received.
    complete: bool,
    /// The last run of the batches that `next_runs` has read: the next batch may continue it.
    pending: Option<Run>,
    timeouts: Timeouts,
}

impl Scan {
    /// Header of the stream.
    #[must_use]
    pub const fn header(&self) -> &ScanHeader {
        &self.header
    }

    /// First page that is not received yet.
    #[must_use]
    pub const fn reached(&self) -> PageIndex {
        self.next
    }

    /// Returns the next batch; `None` at the end of the stream.
    ///
    /// # Errors
    /// [`ClientError::Unexpected`] if batches overlap or are missing; [`ClientError`] of the connection.
    pub async fn next(&mut self) -> Result<Option<ScanBatch>, ClientError> {
        let message = bounded("Scan", self.timeouts, self.stream.message()).await?;
        let Some(message) = message else {
            let whole = !self.complete || self.next == self.header.range.end();
            return if whole { Ok(None) } else { Err(ClientError::Unexpected("scan ended early")) };
        };
        let (first, end, batch) = match message.body {
            Some(Body::Runs(runs)) => {
                let first = PageIndex(runs.first_page);
                let runs = columns::decode(runs)?;
                let end = runs.last().map_or(first, |run| run.range.end());
                (first, end, ScanBatch::Runs(runs))
            }
            Some(Body::Bitmaps(batch)) => {
                let bitmaps = Bitmaps::try_from(batch)?;
                (bitmaps.range.start(), bitmaps.range.end(), ScanBatch::Bitmaps(bitmaps))
            }
            Some(Body::Entries(v1::EntryBatch { first_page, entries: bytes })) => {
                if !bytes.len().is_multiple_of(8) {
                    return Err(ClientError::Unexpected("entries are not a multiple of 8 bytes"));
                }
                let first = PageIndex(first_page);
                let end = first.plus(to_u64(bytes.len() / 8));
                (first, end, ScanBatch::Entries { first, bytes })
            }
            Some(Body::Header(_)) | None => return Err(ClientError::Unexpected("message is not a batch")),
        };
        if end <= first {
            return Err(ClientError::Unexpected("batch is empty"));
        }
        let fits = if self.complete { first == self.next } else { first >= self.next };
        if !fits || end > self.header.range.end() {
            return Err(ClientError::Unexpected("batch overlaps the previous one or leaves a gap"));
        }
        self.next = end;
        Ok(Some(batch))
    }

    /// Returns the runs of the next batches, at least one; `None` at the end of the stream. The runs of an answer are as long as
    /// possible, whatever its encoding and batches. Not to be mixed with [`Scan::next`].
    ///
    /// # Errors
    /// [`ClientError::Unexpected`] if batches overlap or are missing, have entries, or bitmaps that contradict each other;
    /// [`ClientError`] of the connection.
    pub async fn next_runs(&mut self) -> Result<Option<Vec<Run>>, ClientError> {
        loop {
            // A caller may give up while it waits, and call again: then `pending` is still there.
            let batch = self.next().await?;
            let mut runs: Vec<Run> = self.pending.take().into_iter().collect();
            match batch {
                Some(ScanBatch::Runs(next)) => next.into_iter().for_each(|run| push_run(&mut runs, run)),
                Some(ScanBatch::Bitmaps(bitmaps)) => bitmaps.runs(self.complete, &mut runs)?,
                Some(ScanBatch::Entries { .. }) => {
                    return Err(ClientError::Unexpected("batch has entries, not runs"));
                }
                None => return Ok(Some(runs).filter(|runs| !runs.is_empty())),
            }
            self.pending = runs.pop();
            if !runs.is_empty() {
                return Ok(Some(runs));
            }
        }
    }

    /// Collects all runs of a scan with any encoding but [`ScanEncoding::Entries`].
    ///
    /// # Errors
    /// As [`Scan::next_runs`].
    pub async fn runs(mut self) -> Result<Vec<Run>, ClientError> {
        let mut all = Vec::new();
        while let Some(runs) = self.next_runs().await? {
            all.extend(runs);
        }
        Ok(all)
    }
}

/// Stream of differences between two snapshots.
#[derive(Debug)]
pub struct Diff {
    /// Provenance of the older snapshot.
    pub from: Provenance,
    /// Provenance of the newer snapshot.
    pub to: Provenance,
    /// Pages that were compared.
    pub range: PageRange,
    /// The newer snapshot, if it is retained.
    pub to_snapshot: Option<SnapshotId>,
    stream: Streaming<v1::DiffResponse>,
    timeouts: Timeouts,
}

impl Diff {
    /// Returns the next differences in ascending page order; `None` at the end of the stream.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn next(&mut self) -> Result<Option<Vec<Change>>, ClientError> {
        match bounded("Diff", self.timeouts, self.stream.message()).await?.map(|message| message.body) {
            None => Ok(None),
            Some(Some(v1::diff_response::Body::Batch(batch))) => Ok(Some(columns::decode(batch)?)),
            Some(_) => Err(ClientError::Unexpected("message is not a batch")),
        }
    }
}

fn provenance(provenance: Option<v1::Provenance>) -> Result<Provenance, ClientError> {
    Ok(provenance.ok_or(ConvertError::Missing("provenance"))?.try_into()?)
}
