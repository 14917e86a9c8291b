//! Requests about written pages: validation, and the division of a Changes answer into messages.

use std::iter::Peekable;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::columns::Columns;
use fdmap_proto::convert::{AttributeSet, FileName, duration_from_wire, generation_from_wire};
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::runs::{ChangedPages, ChangedRun};
use fdmap_proto::tracking::check_cursor_name;
use fdmap_proto::units::{Generation, PageIndex, PageRange, to_usize};
use fdmap_proto::v1;

use super::QueryError;
use super::batches::split_off;
use super::density::{MAX_BITMAP_PAGES, MAX_ENTRY_PAGES, MAX_RUNS};
use super::request::{Encoding, encoding_of, range_of};
use crate::pages::{self, AttributeMap, ScanResult};
use crate::tracking::{Changed, StampMap};

/// Windows that `DirtyRate` accepts.
const DIRTY_RATE_WINDOWS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);

/// The point from which a Changes answer reports writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangesStart {
    /// Writes after this generation.
    Since(Generation),
    /// The set that this cursor froze when it began.
    Cursor(String),
}

/// A valid `ChangesRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangesQuery {
    pub file: FileName,
    pub start: ChangesStart,
    /// `None` selects all pages.
    pub range: Option<PageRange>,
    pub encoding: Encoding,
    /// Attributes to report for changed pages.
    pub attributes: AttributeSet,
}

impl ChangesQuery {
    /// Validates a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::ChangesRequest) -> Result<Self, QueryError> {
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        let encoding = encoding_of(request.encoding, false)?;
        encoding.check_attributes(attributes)?;
        let since = generation_from_wire("since_generation", request.since_generation)?;
        let start = if request.cursor.is_empty() {
            ChangesStart::Since(since)
        } else if since.is_none() {
            ChangesStart::Cursor(cursor_name(request.cursor)?)
        } else {
            return Err(QueryError::Combination("since and cursor exclude each other"));
        };
        let (file, range) = (request.file.try_into()?, range_of(request.range)?);
        Ok(Self { file, start, range, encoding, attributes })
    }
}

/// Validates the name of a cursor.
///
/// # Errors
/// [`QueryError::Cursor`]
pub fn cursor_name(name: String) -> Result<String, QueryError> {
    check_cursor_name(&name).map_err(QueryError::Cursor)?;
    Ok(name)
}

/// Validates the window of a `DirtyRateRequest`: 1 ms to 1 minute.
///
/// # Errors
/// [`QueryError::Window`]
pub fn dirty_rate_window(window: Option<prost_types::Duration>) -> Result<Duration, QueryError> {
    let window = duration_from_wire("window", window)?;
    if DIRTY_RATE_WINDOWS.contains(&window) { Ok(window) } else { Err(QueryError::Window(window)) }
}

/// The message bodies of a Changes answer.
#[derive(Debug)]
pub enum ChangedBatches {
    Runs {
        runs: Peekable<Changed>,
        /// The remainder of a run whose pages differ in their attributes.
        rest: Option<ChangedRun>,
        /// The attributes of the file's pages, and those that the answer reports.
        attributes: Option<(Arc<AttributeMap>, AttributeSet)>,
    },
    /// Bitmaps or entries.
    Pages {
        stamps: StampMap,
        /// The answer reports pages with a stamp after this generation.
        since: Generation,
        /// The pages of the messages that follow.
        rest: PageRange,
        /// The page states of entries. `None`: bitmaps.
        states: Option<ScanResult>,
    },
}

impl ChangedBatches {
    /// The answer to `query`: the pages of `range` written after `since`. `result` holds the page states that entries need, or
    /// the attributes that runs need.
    #[must_use]
    pub fn new(
        query: &ChangesQuery,
        stamps: StampMap,
        since: Generation,
        range: PageRange,
        result: Option<ScanResult>,
    ) -> Self {
        match query.encoding {
            Encoding::Runs | Encoding::Auto => Self::Runs {
                runs: stamps.changed(since, range).peekable(),
                rest: None,
                attributes: result.and_then(|result| result.attributes).map(|map| (map, query.attributes)),
            },
            Encoding::Bitmaps { .. } | Encoding::Entries => {
                Self::Pages { stamps, since, rest: range, states: result }
            }
        }
    }
}

impl Iterator for ChangedBatches {
    type Item = v1::changes_response::Body;

    fn next(&mut self) -> Option<Self::Item> {
        use v1::changes_response::Body;
        match self {
            Self::Runs { runs, rest, attributes } => {
                let mut next = || rest.take().or_else(|| runs.next());
                let first = next()?;
                let mut columns = Columns::new(first.range.start());
                let mut run = Some(first);
                while let Some(whole) = run {
                    let Some((map, requested)) = attributes else {
                        columns.push(&ChangedPages { run: whole, attributes: None });
                        run = if columns.len() < MAX_RUNS { runs.next() } else { None };
                        continue;
                    };
                    let attributes_of = |page: PageIndex| map.get(page).unpack(*requested);
                    let (start, end) = (whole.range.start(), whole.range.end());
                    let found = attributes_of(start);
                    let mut at = start.plus(1);
                    while at < end && attributes_of(at) == found {
                        at = at.plus(1);
                    }
                    let part = PageRange::at(start, at.0 - start.0);
                    let part = ChangedRun { range: part, ..whole };
                    columns.push(&ChangedPages { run: part, attributes: Some(found) });
                    let left = PageRange::new(at, end).filter(|left| !left.is_empty());
                    *rest = left.map(|range| ChangedRun { range, ..whole });
                    run = if columns.len() < MAX_RUNS { rest.take().or_else(|| runs.next()) } else { None };
                }
                Some(Body::Runs(columns.finish()))
            }
            Self::Pages { stamps, since, rest, states } => {
                if rest.is_empty() {
                    return None;
                }
                let now = split_off(rest, if states.is_some() { MAX_ENTRY_PAGES } else { MAX_BITMAP_PAGES });
                Some(match states {
                    None => {
                        let (changed, conservative) = stamps.changed_bits(*since, now);
                        Body::Bitmaps(v1::ChangedBitmaps {
                            first_page: now.start().0,
                            pages: now.len(),
                            changed: changed.into(),
                            conservative: conservative.into(),
                        })
                    }
                    Some(result) => {
                        let mut bytes = Vec::new();
                        pages::entries(&result.snapshot, now, &mut bytes);
                        set_soft_dirty(stamps.changed(*since, now), now.start(), &mut bytes);
                        Body::Entries(v1::EntryBatch { first_page: now.start().0, entries: bytes.into() })
                    }
                })
            }
        }
    }
}

/// Sets the soft-dirty bit of changed pages in little-endian entries. The first entry describes page `first`.
fn set_soft_dirty(changed: Changed, first: PageIndex, entries: &mut [u8]) {
    let (words, _) = entries.as_chunks_mut::<8>();
    let bit = PagemapEntry::SOFT_DIRTY.to_le_bytes();
    for run in changed {
        let (start, end) = (to_usize(run.range.start().0 - first.0), to_usize(run.range.end().0 - first.0));
        for word in &mut words[start..end] {
            word.iter_mut().zip(bit).for_each(|(byte, bit)| *byte |= bit);
        }
    }
}
