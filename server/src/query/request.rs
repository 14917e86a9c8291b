//! Valid requests about page states.

use std::time::Duration;

use fdmap_proto::convert::{AttributeSet, ConvertError, FileName, duration_from_wire, state_from_wire};
use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange, SnapshotId, to_u64};
use fdmap_proto::v1;

use super::QueryError;
use crate::files::Limits;
use crate::pages::ScanOptions;

/// The form of an answer about pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Columns of runs.
    Runs,
    /// In Scan runs or bitmaps with slots, message by message; in Changes runs.
    Auto,
    /// One bitmap for each state. `slots`: with the swap slots of swapped pages.
    Bitmaps { slots: bool },
    /// 64-bit pagemap entries.
    Entries,
}

impl Encoding {
    /// Refuses attributes where an encoding has no place for them.
    pub(super) fn check_attributes(self, attributes: AttributeSet) -> Result<(), QueryError> {
        if matches!(self, Self::Runs | Self::Auto) || attributes.is_empty() {
            return Ok(());
        }
        Err(QueryError::Combination("attributes require ENCODING_RUNS or ENCODING_AUTO"))
    }
}

/// A valid `ScanRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanQuery {
    pub file: FileName,
    /// `None` selects all pages.
    pub range: Option<PageRange>,
    /// The states to report.
    pub states: StateSet,
    pub attributes: AttributeSet,
    /// Age of an earlier scan that may serve the request; 0 requires a new scan.
    pub max_age: Duration,
    pub encoding: Encoding,
    pub distinguish_swap_cached: bool,
    /// `None`: do not retain the snapshot.
    pub retain_for: Option<Duration>,
}

impl ScanQuery {
    /// True if the answer omits runs, and any number of them may precede the next message.
    #[must_use]
    pub fn skips_runs(&self) -> bool {
        matches!(self.encoding, Encoding::Runs | Encoding::Auto) && self.states != StateSet::ALL
    }

    /// Validates a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::ScanRequest, limits: &Limits) -> Result<Self, QueryError> {
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        let encoding = match encoding_of(request.encoding, request.slots)? {
            Encoding::Auto if !attributes.is_empty() => Encoding::Runs,
            encoding => encoding,
        };
        let mut states = StateSet::NONE;
        for state in &request.states {
            states |= StateSet::of(state_from_wire(*state)?);
        }
        let all = request.states.is_empty();
        encoding.check_attributes(attributes)?;
        if encoding == Encoding::Entries && !all {
            return Err(QueryError::Combination(
                "ENCODING_ENTRIES has an entry for each page: it excludes a selection of states",
            ));
        }
        Ok(Self {
            file: request.file.try_into()?,
            range: range_of(request.range)?,
            distinguish_swap_cached: request.distinguish_swap_cached
                || (!all && states.has(PageState::SwapCached)),
            states: if all { StateSet::ALL } else { states },
            attributes,
            max_age: duration_from_wire("max_age", request.max_age)?,
            encoding,
            retain_for: retain_for_of(request.retain_for, limits)?,
        })
    }

    /// The scan that the answer needs.
    #[must_use]
    pub const fn options(&self) -> ScanOptions {
        ScanOptions {
            distinguish_swap_cached: self.distinguish_swap_cached,
            attributes: !self.attributes.is_empty(),
        }
    }

    /// Checks the number of pages, once the range is known.
    ///
    /// # Errors
    /// [`QueryError::TooMany`]
    pub const fn check_pages(&self, range: PageRange, limits: &Limits) -> Result<(), QueryError> {
        if !self.attributes.is_empty() && range.len() > limits.attribute_pages {
            let (requested, limit) = (range.len(), limits.attribute_pages);
            return Err(QueryError::TooMany {
                resource: "pages in a Scan with attributes",
                requested,
                limit,
            });
        }
        Ok(())
    }
}

/// A valid `SummaryRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SummaryQuery {
    pub file: FileName,
    /// `None` selects all pages.
    pub range: Option<PageRange>,
    /// Age of an earlier scan that may serve the request; 0 requires a new scan.
    pub max_age: Duration,
    pub distinguish_swap_cached: bool,
    /// `None`: do not retain the snapshot.
    pub retain_for: Option<Duration>,
}

impl SummaryQuery {
    /// Validates a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::SummaryRequest, limits: &Limits) -> Result<Self, QueryError> {
        Ok(Self {
            file: request.file.try_into()?,
            range: range_of(request.range)?,
            max_age: duration_from_wire("max_age", request.max_age)?,
            distinguish_swap_cached: request.distinguish_swap_cached,
            retain_for: retain_for_of(request.retain_for, limits)?,
        })
    }
}

/// A valid `LookupRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupQuery {
    pub file: FileName,
    /// In the order of the answer.
    pub pages: Vec<PageIndex>,
    pub attributes: AttributeSet,
    /// Age of an earlier scan that may serve the request; 0 requires a new scan.
    pub max_age: Duration,
    pub distinguish_swap_cached: bool,
}

impl LookupQuery {
    /// Validates a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::LookupRequest, limits: &Limits) -> Result<Self, QueryError> {
        let requested = to_u64(request.pages.len());
        let limit = u64::from(limits.lookup_pages);
        if requested > limit {
            return Err(QueryError::TooMany { resource: "pages in a Lookup", requested, limit });
        }
        if requested == 0 {
            return Err(ConvertError::Missing("pages").into());
        }
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        if !attributes.is_empty() && requested > limits.attribute_pages {
            let limit = limits.attribute_pages;
            return Err(QueryError::TooMany {
                resource: "pages in a Lookup with attributes",
                requested,
                limit,
            });
        }
        Ok(Self {
            file: request.file.try_into()?,
            pages: request.pages.into_iter().map(PageIndex).collect(),
            attributes,
            max_age: duration_from_wire("max_age", request.max_age)?,
            distinguish_swap_cached: request.distinguish_swap_cached,
        })
    }

    /// The scan that the answer needs.
    #[must_use]
    pub const fn options(&self) -> ScanOptions {
        ScanOptions {
            distinguish_swap_cached: self.distinguish_swap_cached,
            attributes: !self.attributes.is_empty(),
        }
    }

    /// The pages as ranges in their order. Pages that follow one another are one range.
    ///
    /// # Errors
    /// [`QueryError::PastEnd`]
    pub fn ranges(&self, file_pages: u64) -> Result<Vec<PageRange>, QueryError> {
        let mut ranges = Vec::<PageRange>::new();
        for page in &self.pages {
            if page.0 >= file_pages {
                return Err(QueryError::PastEnd { requested: format!("page {page}"), file_pages });
            }
            match ranges.last_mut() {
                Some(last) if last.end() == *page => *last = PageRange::at(last.start(), last.len() + 1),
                _ => ranges.push(PageRange::at(*page, 1)),
            }
        }
        Ok(ranges)
    }
}

/// A valid `DiffRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffQuery {
    pub file: FileName,
    /// The older snapshot.
    pub from: SnapshotId,
    /// The newer snapshot; `None` requires a new scan.
    pub to: Option<SnapshotId>,
    /// `None` selects the pages that both snapshots cover.
    pub range: Option<PageRange>,
    /// Applies to the new scan. `None`: do not retain it.
    pub retain_for: Option<Duration>,
}

impl DiffQuery {
    /// Validates a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::DiffRequest, limits: &Limits) -> Result<Self, QueryError> {
        let retain_for = retain_for_of(request.retain_for, limits)?;
        let to = SnapshotId::new(request.to_snapshot_id);
        if to.is_some() && retain_for.is_some() {
            return Err(QueryError::Combination(
                "retain_for applies to a new scan and excludes to_snapshot_id",
            ));
        }
        Ok(Self {
            file: request.file.try_into()?,
            from: SnapshotId::new(request.from_snapshot_id)
                .ok_or(ConvertError::ZeroId("from_snapshot_id"))?,
            to,
            range: range_of(request.range)?,
            retain_for,
        })
    }

    /// The pages to compare. `covered`: those that both snapshots cover.
    ///
    /// # Errors
    /// [`QueryError::EmptyRange`] if no page is left.
    pub fn compared(&self, covered: PageRange) -> Result<PageRange, QueryError> {
        let range = self.range.map_or(covered, |range| range.intersect(covered));
        if range.is_empty() { Err(QueryError::EmptyRange(range)) } else { Ok(range) }
    }
}

pub(super) fn range_of(range: Option<v1::PageRange>) -> Result<Option<PageRange>, QueryError> {
    Ok(range.map(PageRange::try_from).transpose()?)
}

fn retain_for_of(
    retain_for: Option<prost_types::Duration>,
    limits: &Limits,
) -> Result<Option<Duration>, QueryError> {
    let requested = duration_from_wire("retain_for", retain_for)?;
    if requested > limits.retain_for {
        return Err(QueryError::RetainTooLong { requested, limit: limits.retain_for });
    }
    Ok((!requested.is_zero()).then_some(requested))
}

pub(super) fn encoding_of(encoding: i32, slots: bool) -> Result<Encoding, QueryError> {
    let unknown = ConvertError::UnknownEnum { field: "Encoding", value: encoding };
    Ok(match v1::Encoding::try_from(encoding).map_err(|_| unknown)? {
        v1::Encoding::Unspecified | v1::Encoding::Runs => Encoding::Runs,
        v1::Encoding::Bitmaps => Encoding::Bitmaps { slots },
        v1::Encoding::Entries => Encoding::Entries,
        v1::Encoding::Auto => Encoding::Auto,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query::resolve_range;

    fn request() -> v1::ScanRequest {
        v1::ScanRequest { file: Some(FileName::Name("ram".to_owned()).into()), ..Default::default() }
    }

    fn check(request: v1::ScanRequest) -> Result<ScanQuery, QueryError> {
        ScanQuery::new(request, &Limits::default())
    }

    #[test]
    fn scan_request_defaults_to_all_pages_in_runs() {
        let query = check(request()).unwrap();
        assert_eq!((query.encoding, query.states, query.range), (Encoding::Runs, StateSet::ALL, None));
        assert_eq!(query.options(), ScanOptions::default());
        assert_eq!(query.retain_for, None);
    }

    #[test]
    fn attributes_are_reported_by_runs() {
        let with =
            |attributes| v1::ScanRequest { encoding: v1::Encoding::Auto.into(), attributes, ..request() };
        assert_eq!(check(with(vec![])).unwrap().encoding, Encoding::Auto);
        assert_eq!(check(with(vec![v1::Attribute::Order.into()])).unwrap().encoding, Encoding::Runs);
    }

    #[test]
    fn selecting_swap_cached_pages_distinguishes_them() {
        let states = vec![v1::PageState::SwapCached.into()];
        assert!(check(v1::ScanRequest { states, ..request() }).unwrap().distinguish_swap_cached);
    }

    #[test]
    fn contradictory_and_unknown_fields_are_rejected() {
        let entries = v1::Encoding::Entries.into();
        let order = vec![v1::Attribute::Order.into()];
        let hole = vec![v1::PageState::Hole.into()];
        let bad = [
            v1::ScanRequest { encoding: entries, states: hole, ..request() },
            v1::ScanRequest { encoding: entries, attributes: order, ..request() },
            v1::ScanRequest { encoding: 17, ..request() },
            v1::ScanRequest { states: vec![0], ..request() },
            v1::ScanRequest { states: vec![99], ..request() },
            v1::ScanRequest { attributes: vec![99], ..request() },
            v1::ScanRequest { file: None, ..request() },
            v1::ScanRequest { range: Some(v1::PageRange { start: 5, end: 4 }), ..request() },
            v1::ScanRequest { max_age: Some(prost_types::Duration { seconds: -1, nanos: 0 }), ..request() },
            v1::ScanRequest {
                retain_for: Some(prost_types::Duration { seconds: 1 << 40, nanos: 0 }),
                ..request()
            },
        ];
        for request in bad {
            assert!(check(request.clone()).is_err(), "{request:?}");
        }
    }

    #[test]
    fn pages_with_attributes_are_limited() {
        let limits = Limits { attribute_pages: 100, ..Limits::default() };
        let request = v1::ScanRequest { attributes: vec![v1::Attribute::Order.into()], ..request() };
        let query = ScanQuery::new(request, &limits).unwrap();
        assert!(query.check_pages(PageRange::first(100), &limits).is_ok());
        assert!(query.check_pages(PageRange::first(101), &limits).is_err());
        let lookup = |pages| v1::LookupRequest {
            file: super::tests::request().file,
            pages: vec![0; pages],
            attributes: vec![v1::Attribute::Order.into()],
            ..Default::default()
        };
        assert!(LookupQuery::new(lookup(100), &limits).is_ok());
        assert!(LookupQuery::new(lookup(101), &limits).is_err());
    }

    #[test]
    fn lookup_is_limited_and_lies_in_the_file() {
        let request =
            |pages: Vec<u64>| v1::LookupRequest { file: request().file, pages, ..Default::default() };
        let limits = Limits { lookup_pages: 3, ..Limits::default() };
        assert!(LookupQuery::new(request(vec![]), &limits).is_err());
        let too_many = LookupQuery::new(request(vec![0; 4]), &limits);
        assert!(matches!(too_many, Err(QueryError::TooMany { requested: 4, limit: 3, .. })));
        let query = LookupQuery::new(request(vec![9, 1, 2]), &limits).unwrap();
        let ranges = query.ranges(10).unwrap();
        assert_eq!(ranges, [PageRange::at(PageIndex(9), 1), PageRange::at(PageIndex(1), 2)]);
        assert!(matches!(query.ranges(9), Err(QueryError::PastEnd { .. })));
    }

    #[test]
    fn range_past_the_end_of_the_file_is_rejected() {
        assert_eq!(resolve_range(None, 7), Ok(PageRange::first(7)));
        let range = |start, end| PageRange::new(PageIndex(start), PageIndex(end));
        assert_eq!(resolve_range(range(2, 7), 7), Ok(range(2, 7).unwrap()));
        assert!(matches!(resolve_range(range(2, 8), 7), Err(QueryError::PastEnd { .. })));
        assert!(matches!(resolve_range(range(2, 2), 7), Err(QueryError::EmptyRange(_))));
    }
}
