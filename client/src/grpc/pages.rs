//! Page states.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use fdmap_proto::convert::{AttributeSet, ConvertError, FileName, duration_to_wire, state_from_wire};
use fdmap_proto::runs::{changes_from_wire, runs_from_wire};
use fdmap_proto::units::SnapshotId;
use fdmap_proto::v1::scan_response::Body;
use fdmap_proto::{
    Change, PageAttributes, PageIndex, PageRange, PageState, Provenance, Run, StateSet, SwapSlot, v1,
};
use tonic::Streaming;

use super::{Client, bounded};
use crate::{ClientError, Timeouts};

/// How a scan is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanEncoding {
    /// Runs; the only one with attributes.
    #[default]
    Runs,
    /// A bitmap for each state, with the slots of swapped pages or without.
    Bitmaps {
        /// With them.
        slots: bool,
    },
    /// 64-bit pagemap entries.
    Entries,
}

/// What to scan. The default is all of a file, as it is now, in runs.
#[derive(Clone, Debug)]
pub struct ScanRequest {
    /// `None`: all pages.
    pub range: Option<PageRange>,
    /// Only pages in these states.
    pub states: StateSet,
    /// These attributes.
    pub attributes: AttributeSet,
    /// How old the answer may be.
    pub max_age: Duration,
    /// How to answer.
    pub encoding: ScanEncoding,
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
    /// Keep the snapshot for so long, for a diff.
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

/// What to count. The default is all of a file, as it is now.
#[derive(Clone, Debug, Default)]
pub struct SummaryOptions {
    /// `None`: all pages.
    pub range: Option<PageRange>,
    /// How old the answer may be.
    pub max_age: Duration,
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
    /// Keep the snapshot for so long, for a diff.
    pub retain_for: Duration,
}

/// How many pages are in which state.
#[derive(Clone, Debug)]
pub struct PageSummary {
    /// What the counts rest on.
    pub provenance: Provenance,
    /// The pages counted.
    pub range: PageRange,
    /// Pages without data.
    pub hole: u64,
    /// Pages in memory.
    pub resident: u64,
    /// Pages in swap and in memory.
    pub swap_cached: u64,
    /// Pages in swap.
    pub swapped: u64,
    /// Pages whose state is unknown.
    pub unknown: u64,
    /// Runs of pages in one state.
    pub runs: u64,
    /// Swapped pages by swap type.
    pub swap_types: BTreeMap<u32, u64>,
    /// The snapshot, if it was to be kept.
    pub snapshot: Option<SnapshotId>,
    /// Pages of the file.
    pub file_pages: u64,
}

/// What comes first in a scan.
#[derive(Clone, Debug)]
pub struct ScanHeader {
    /// What the states rest on.
    pub provenance: Provenance,
    /// The pages that are told of.
    pub range: PageRange,
    /// Pages of the file.
    pub file_pages: u64,
    /// The snapshot, if it was to be kept.
    pub snapshot: Option<SnapshotId>,
}

/// A piece of a scan.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Runs in ascending order.
    Runs(Vec<Run>),
    /// Bitmaps.
    Bitmaps(Bitmaps),
    /// Little-endian 64-bit entries.
    Entries {
        /// The page of the first one.
        first: PageIndex,
        /// The entries.
        bytes: Bytes,
    },
}

/// Bitmaps of some pages: bit p % 8 of byte p / 8 belongs to the `p`th page. An empty one has no bit set.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // named and documented in pages.proto
pub struct Bitmaps {
    pub range: PageRange,
    pub hole: Bytes,
    pub resident: Bytes,
    pub swap_cached: Bytes,
    pub swapped: Bytes,
    pub unknown: Bytes,
    /// Little-endian slots of the pages in `swap_cached` or `swapped`, in page order.
    pub slots: Bytes,
}

/// One page that was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageInfo {
    /// Which.
    pub page: PageIndex,
    /// Its state.
    pub state: PageState,
    /// Where it lies in swap.
    pub slot: Option<SwapSlot>,
    /// If they were asked for.
    pub attributes: Option<PageAttributes>,
}

/// Pages that were looked up.
#[derive(Clone, Debug)]
pub struct Lookup {
    /// What the answer rests on.
    pub provenance: Provenance,
    /// The pages in the order asked.
    pub pages: Vec<PageInfo>,
}

impl Client {
    /// Counts pages by state.
    ///
    /// # Errors
    /// [`ClientError`]
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
        Ok(PageSummary {
            provenance: provenance(answer.provenance)?,
            range: answer.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
            hole: answer.hole_pages,
            resident: answer.resident_pages,
            swap_cached: answer.swap_cached_pages,
            swapped: answer.swapped_pages,
            unknown: answer.unknown_pages,
            runs: answer.runs,
            swap_types: answer.swap_types.iter().map(|count| (count.swap_type, count.pages)).collect(),
            snapshot: SnapshotId::new(answer.snapshot_id),
            file_pages: answer.file_pages,
        })
    }

    /// Every page of a file or a range of it.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn scan(&self, file: &FileName, options: &ScanRequest) -> Result<Scan, ClientError> {
        let (encoding, slots) = match options.encoding {
            ScanEncoding::Runs => (v1::Encoding::Runs, false),
            ScanEncoding::Bitmaps { slots } => (v1::Encoding::Bitmaps, slots),
            ScanEncoding::Entries => (v1::Encoding::Entries, false),
        };
        let all = options.states == StateSet::ALL;
        let wanted = PageState::ALL.into_iter().filter(|state| !all && options.states.contains(*state));
        let request = v1::ScanRequest {
            file: Some(file.clone().into()),
            range: options.range.map(v1::PageRange::from),
            states: wanted.map(|state| v1::PageState::from(state).into()).collect(),
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
            return Err(ClientError::Unexpected("a scan begins with its header"));
        };
        let header = ScanHeader {
            provenance: provenance(header.provenance)?,
            range: header.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
            file_pages: header.file_pages,
            snapshot: SnapshotId::new(header.snapshot_id),
        };
        let next = header.range.start();
        Ok(Scan { header, stream, next, complete: all, timeouts: self.timeouts })
    }

    /// Single pages, in any order.
    ///
    /// # Errors
    /// [`ClientError`]
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
            distinguish_swap_cached: distinguish_swap_cached,
        };
        let answer = self.wait("Lookup", self.pages.clone().lookup(request)).await?;
        let pages = answer.pages.into_iter().map(|page| {
            let slot = |raw| SwapSlot::from_raw(raw).ok_or(ConvertError::Slot(raw));
            Ok(PageInfo {
                page: PageIndex(page.page),
                state: state_from_wire(page.state)?,
                slot: page.slot.map(slot).transpose()?,
                attributes: page.attributes.map(PageAttributes::try_from).transpose()?,
            })
        });
        let pages = pages.collect::<Result<Vec<_>, ConvertError>>()?;
        Ok(Lookup { provenance: provenance(answer.provenance)?, pages })
    }

    /// What differs between a kept snapshot and another one, or now (`to` is `None`; then it can be kept as well).
    ///
    /// # Errors
    /// [`ClientError`]
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
            return Err(ClientError::Unexpected("a diff begins with its header"));
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

    /// Lets go of a kept snapshot before its time.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn drop_snapshot(&self, file: &FileName, snapshot: SnapshotId) -> Result<(), ClientError> {
        let request =
            v1::DropSnapshotRequest { file: Some(file.clone().into()), snapshot_id: snapshot.get() };
        self.wait("DropSnapshot", self.pages.clone().drop_snapshot(request)).await.map(|_| ())
    }
}

/// A scan, piece by piece.
#[derive(Debug)]
pub struct Scan {
    header: ScanHeader,
    stream: Streaming<v1::ScanResponse>,
    /// The pages before it have been told of.
    next: PageIndex,
    /// Every page is told of, so that a gap is an error.
    complete: bool,
    timeouts: Timeouts,
}

impl Scan {
    /// What came first.
    #[must_use]
    pub const fn header(&self) -> &ScanHeader {
        &self.header
    }

    /// The pages that have been told of lie before this one.
    #[must_use]
    pub const fn reached(&self) -> PageIndex {
        self.next
    }

    /// The next piece; `None` when all of it has come.
    ///
    /// # Errors
    /// [`ClientError`], also if the pieces do not make up the whole.
    pub async fn next(&mut self) -> Result<Option<Batch>, ClientError> {
        let message = bounded("Scan", self.timeouts, self.stream.message()).await?;
        let Some(message) = message else {
            let whole = !self.complete || self.next == self.header.range.end();
            return if whole { Ok(None) } else { Err(ClientError::Unexpected("the scan ended early")) };
        };
        let (first, end, batch) = match message.body {
            Some(Body::Runs(runs)) => {
                let first = PageIndex(runs.first_page);
                let runs = runs_from_wire(runs)?;
                let end = runs.last().map_or(first, |run| run.range.end());
                (first, end, Batch::Runs(runs))
            }
            Some(Body::Bitmaps(batch)) => {
                let bitmaps = bitmaps(batch)?;
                (bitmaps.range.start(), bitmaps.range.end(), Batch::Bitmaps(bitmaps))
            }
            Some(Body::Entries(v1::EntryBatch { first_page, entries: bytes })) => {
                if !bytes.len().is_multiple_of(8) {
                    return Err(ClientError::Unexpected("an entry is cut"));
                }
                let first = PageIndex(first_page);
                let end = first.plus(fdmap_proto::units::to_u64(bytes.len() / 8));
                (first, end, Batch::Entries { first, bytes })
            }
            Some(Body::Header(_)) | None => return Err(ClientError::Unexpected("a batch was expected")),
        };
        let fits = if self.complete { first == self.next } else { first >= self.next };
        if !fits || end > self.header.range.end() {
            return Err(ClientError::Unexpected("a batch does not follow the one before"));
        }
        self.next = end;
        Ok(Some(batch))
    }

    /// All runs of a scan in runs.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn runs(mut self) -> Result<Vec<Run>, ClientError> {
        let mut all = Vec::new();
        while let Some(batch) = self.next().await? {
            match batch {
                Batch::Runs(runs) => all.extend(runs),
                _ => return Err(ClientError::Unexpected("runs were expected")),
            }
        }
        Ok(all)
    }
}

fn bitmaps(batch: v1::BitmapBatch) -> Result<Bitmaps, ClientError> {
    let v1::BitmapBatch { first_page, pages, hole, resident, swap_cached, swapped, unknown, slots } = batch;
    let bytes = pages.div_ceil(8);
    for bitmap in [&hole, &resident, &swap_cached, &swapped, &unknown] {
        if !bitmap.is_empty() && fdmap_proto::units::to_u64(bitmap.len()) != bytes {
            return Err(ClientError::Unexpected("a bitmap has not as many bits as pages"));
        }
    }
    let ones = |bitmap: &Bytes| bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
    if !slots.is_empty()
        && fdmap_proto::units::to_u64(slots.len()) != 8 * (ones(&swap_cached) + ones(&swapped))
    {
        return Err(ClientError::Unexpected("there are not as many slots as swapped pages"));
    }
    let range = PageRange::at(PageIndex(first_page), pages);
    Ok(Bitmaps { range, hole, resident, swap_cached, swapped, unknown, slots })
}

/// A diff, piece by piece.
#[derive(Debug)]
pub struct Diff {
    /// What the older snapshot rests on.
    pub from: Provenance,
    /// What the newer one rests on.
    pub to: Provenance,
    /// The pages that were compared.
    pub range: PageRange,
    /// The newer snapshot, if it is kept.
    pub to_snapshot: Option<SnapshotId>,
    stream: Streaming<v1::DiffResponse>,
    timeouts: Timeouts,
}

impl Diff {
    /// The next changes in ascending order; `None` when all have come.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn next(&mut self) -> Result<Option<Vec<Change>>, ClientError> {
        match bounded("Diff", self.timeouts, self.stream.message()).await?.map(|message| message.body) {
            None => Ok(None),
            Some(Some(v1::diff_response::Body::Batch(batch))) => Ok(Some(changes_from_wire(&batch)?)),
            Some(_) => Err(ClientError::Unexpected("a batch was expected")),
        }
    }
}

fn provenance(provenance: Option<v1::Provenance>) -> Result<Provenance, ClientError> {
    Ok(provenance.ok_or(ConvertError::Missing("provenance"))?.try_into()?)
}
