//! What was written since when: requests, checked, and answers, cut into messages.

use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::changed::{ChangedColumns, ChangedRun};
use fdmap_proto::convert::{AttributeSet, FileName, duration_from_wire, generation_from_wire};
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::tracking::check_cursor_name;
use fdmap_proto::units::{Generation, PageIndex, PageRange, to_usize};
use fdmap_proto::v1;

use super::QueryError;
use super::batches::{BITS, ENTRIES, RUNS, cut};
use super::request::{Encoding, encoding_of, range_of};
use crate::pages::ScanResult;
use crate::pages::{self, AttributeMap};
use crate::tracking::{Changed, StampMap};

/// The shortest and the longest window of a rate.
const WINDOW: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);

/// Which writes are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Those after a generation.
    Since(Generation),
    /// Those that a cursor has frozen.
    Cursor(String),
}

/// A checked `ChangesRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangesQuery {
    /// Which file.
    pub file: FileName,
    /// Which writes.
    pub asked: Asked,
    /// Which pages; `None` is all.
    pub range: Option<PageRange>,
    /// How to answer.
    pub encoding: Encoding,
    /// These attributes of changed pages.
    pub attributes: AttributeSet,
}

impl ChangesQuery {
    /// Checks a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::ChangesRequest) -> Result<Self, QueryError> {
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        let encoding = encoding_of(request.encoding, false)?;
        if encoding != Encoding::Runs && !attributes.is_empty() {
            return Err(QueryError::Combination("attributes go with ENCODING_RUNS only"));
        }
        let since = generation_from_wire("since", request.since)?;
        let asked = if request.cursor.is_empty() {
            Asked::Since(since)
        } else if since.is_none() {
            Asked::Cursor(cursor_name(request.cursor)?)
        } else {
            return Err(QueryError::Combination("`since` does not go with a cursor"));
        };
        let (file, range) = (request.file.try_into()?, range_of(request.range)?);
        Ok(Self { file, asked, range, encoding, attributes })
    }
}

/// A name of a cursor, checked.
///
/// # Errors
/// [`QueryError::Cursor`]
pub fn cursor_name(name: String) -> Result<String, QueryError> {
    check_cursor_name(&name).map_err(QueryError::Cursor)?;
    Ok(name)
}

/// The window of a `DirtyRateRequest`.
///
/// # Errors
/// [`QueryError::Window`]
pub fn rate_window(window: Option<prost_types::Duration>) -> Result<Duration, QueryError> {
    let window = duration_from_wire("window", window)?;
    if WINDOW.contains(&window) { Ok(window) } else { Err(QueryError::Window(window)) }
}

/// The changed pages of a range as messages.
#[derive(Debug)]
pub enum ChangedBatches {
    /// As runs, with attributes if they were read.
    Runs {
        /// What is still to be told.
        runs: Peekable<Changed>,
        /// The rest of a run that attributes divide.
        rest: Option<ChangedRun>,
        /// Attributes, and which of them are wanted.
        attributes: Option<(Arc<AttributeMap>, AttributeSet)>,
    },
    /// As bitmaps, or as entries of the states that were read.
    Pages {
        /// When each page was written.
        stamps: StampMap,
        /// After this generation.
        since: Generation,
        /// What is still to be told.
        rest: PageRange,
        /// `None`: bitmaps.
        states: Option<ScanResult>,
    },
}

impl ChangedBatches {
    /// Pages of `range` that were written after `since`. `reading` has their states for entries, their attributes for runs
    /// that have any.
    #[must_use]
    pub fn new(
        query: &ChangesQuery,
        stamps: StampMap,
        since: Generation,
        range: PageRange,
        reading: Option<ScanResult>,
    ) -> Self {
        match query.encoding {
            Encoding::Runs => Self::Runs {
                runs: stamps.changed(since, range).peekable(),
                rest: None,
                attributes: reading.and_then(|reading| reading.attributes).map(|map| (map, query.attributes)),
            },
            Encoding::Bitmaps { .. } | Encoding::Entries => {
                Self::Pages { stamps, since, rest: range, states: reading }
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
                let mut columns = ChangedColumns::new(first.range.start());
                let mut run = Some(first);
                while let Some(whole) = run {
                    let Some((map, wanted)) = attributes else {
                        columns.push(whole, None);
                        run = if columns.len() < RUNS { runs.next() } else { None };
                        continue;
                    };
                    let alike = |page: PageIndex| map.get(page).unpack(*wanted);
                    let (start, end) = (whole.range.start(), whole.range.end());
                    let found = alike(start);
                    let mut at = start.plus(1);
                    while at < end && alike(at) == found {
                        at = at.plus(1);
                    }
                    let part = PageRange::at(start, at.0 - start.0);
                    columns.push(ChangedRun { range: part, ..whole }, Some(found));
                    let left = PageRange::new(at, end).filter(|left| !left.is_empty());
                    *rest = left.map(|range| ChangedRun { range, ..whole });
                    run = if columns.len() < RUNS { rest.take().or_else(|| runs.next()) } else { None };
                }
                Some(Body::Runs(columns.finish()))
            }
            Self::Pages { stamps, since, rest, states } => {
                if rest.is_empty() {
                    return None;
                }
                let now = cut(rest, if states.is_some() { ENTRIES } else { BITS });
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
                    Some(reading) => {
                        let mut bytes = Vec::new();
                        pages::entries(&reading.snapshot, now, &mut bytes);
                        mark(stamps.changed(*since, now), now.start(), &mut bytes);
                        Body::Entries(v1::EntryBatch { first_page: now.start().0, entries: bytes.into() })
                    }
                })
            }
        }
    }
}

/// Sets the soft-dirty bit of changed pages in little-endian entries that begin at `first`.
fn mark(changed: Changed, first: PageIndex, entries: &mut [u8]) {
    let (words, _) = entries.as_chunks_mut::<8>();
    let bit = PagemapEntry::SOFT_DIRTY.to_le_bytes();
    for run in changed {
        let (start, end) = (to_usize(run.range.start().0 - first.0), to_usize(run.range.end().0 - first.0));
        for word in &mut words[start..end] {
            word.iter_mut().zip(bit).for_each(|(byte, bit)| *byte |= bit);
        }
    }
}
