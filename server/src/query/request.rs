//! Requests, checked and bounded.

use std::time::Duration;

use fdmap_proto::convert::{AttributeSet, ConvertError, FileName, duration_from_wire, state_from_wire};
use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange, SnapshotId, to_u64};
use fdmap_proto::v1;

use super::QueryError;
use crate::files::Limits;
use crate::pages::ScanOptions;

/// How a scan is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Columns of runs.
    Runs,
    /// One bitmap for each state, with the slots of swapped pages or without.
    Bitmaps {
        /// With them.
        slots: bool,
    },
    /// 64-bit pagemap entries.
    Entries,
}

/// A checked `ScanRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanQuery {
    /// Which file.
    pub file: FileName,
    /// Which pages; `None` is all.
    pub range: Option<PageRange>,
    /// Only pages in these states.
    pub states: StateSet,
    /// These attributes.
    pub attributes: AttributeSet,
    /// How old the answer may be.
    pub max_age: Duration,
    /// How to answer.
    pub encoding: Encoding,
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
    /// Keep the snapshot for so long.
    pub retain_for: Option<Duration>,
}

impl ScanQuery {
    /// Checks a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::ScanRequest, limits: &Limits) -> Result<Self, QueryError> {
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        let encoding = encoding_of(request.encoding, request.slots)?;
        let mut states = StateSet::NONE;
        for state in &request.states {
            states = states.with(state_from_wire(*state)?);
        }
        let all = request.states.is_empty();
        if encoding != Encoding::Runs && !attributes.is_empty() {
            return Err(QueryError::Combination("attributes go with ENCODING_RUNS only"));
        }
        if encoding == Encoding::Entries && !all {
            return Err(QueryError::Combination(
                "ENCODING_ENTRIES has an entry for each page: it does not go with states",
            ));
        }
        Ok(Self {
            file: request.file.try_into()?,
            range: range_of(request.range)?,
            distinguish_swap_cached: request.distinguish_swap_cached
                || (!all && states.contains(PageState::SwapCached)),
            states: if all { StateSet::ALL } else { states },
            attributes,
            max_age: duration_from_wire("max_age", request.max_age)?,
            encoding,
            retain_for: keep_of(request.retain_for, limits)?,
        })
    }

    /// What must be read for it.
    #[must_use]
    pub const fn wants(&self) -> ScanOptions {
        ScanOptions {
            distinguish_swap_cached: self.distinguish_swap_cached,
            attributes: !self.attributes.is_empty(),
        }
    }

    /// Checks the pages that it came to.
    ///
    /// # Errors
    /// [`QueryError::TooMany`]
    pub const fn check_pages(&self, range: PageRange, limits: &Limits) -> Result<(), QueryError> {
        if !self.attributes.is_empty() && range.len() > limits.attribute_pages {
            let (asked, most) = (range.len(), limits.attribute_pages);
            return Err(QueryError::TooMany { what: "pages in a scan with attributes", asked, most });
        }
        Ok(())
    }
}

/// A checked `SummaryRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SummaryQuery {
    /// Which file.
    pub file: FileName,
    /// Which pages; `None` is all.
    pub range: Option<PageRange>,
    /// How old the answer may be.
    pub max_age: Duration,
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
    /// Keep the snapshot for so long.
    pub retain_for: Option<Duration>,
}

impl SummaryQuery {
    /// Checks a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::SummaryRequest, limits: &Limits) -> Result<Self, QueryError> {
        Ok(Self {
            file: request.file.try_into()?,
            range: range_of(request.range)?,
            max_age: duration_from_wire("max_age", request.max_age)?,
            distinguish_swap_cached: request.distinguish_swap_cached,
            retain_for: keep_of(request.retain_for, limits)?,
        })
    }
}

/// A checked `LookupRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupQuery {
    /// Which file.
    pub file: FileName,
    /// Which pages, in the order asked.
    pub pages: Vec<PageIndex>,
    /// These attributes.
    pub attributes: AttributeSet,
    /// How old the answer may be.
    pub max_age: Duration,
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
}

impl LookupQuery {
    /// Checks a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::LookupRequest, limits: &Limits) -> Result<Self, QueryError> {
        let asked = to_u64(request.pages.len());
        let most = u64::from(limits.lookup_pages);
        if asked > most {
            return Err(QueryError::TooMany { what: "pages in a Lookup", asked, most });
        }
        if asked == 0 {
            return Err(ConvertError::Missing("pages").into());
        }
        let attributes = AttributeSet::from_wire(&request.attributes)?;
        if !attributes.is_empty() && asked > limits.attribute_pages {
            let most = limits.attribute_pages;
            return Err(QueryError::TooMany { what: "pages in a Lookup with attributes", asked, most });
        }
        Ok(Self {
            file: request.file.try_into()?,
            pages: request.pages.into_iter().map(PageIndex).collect(),
            attributes,
            max_age: duration_from_wire("max_age", request.max_age)?,
            distinguish_swap_cached: request.distinguish_swap_cached,
        })
    }

    /// What must be read for it.
    #[must_use]
    pub const fn wants(&self) -> ScanOptions {
        ScanOptions {
            distinguish_swap_cached: self.distinguish_swap_cached,
            attributes: !self.attributes.is_empty(),
        }
    }

    /// The pages as ranges of one.
    ///
    /// # Errors
    /// [`QueryError::PastEnd`]
    pub fn ranges(&self, file_pages: u64) -> Result<Vec<PageRange>, QueryError> {
        let range = |page: &PageIndex| {
            if page.0 < file_pages {
                Ok(PageRange::at(*page, 1))
            } else {
                Err(QueryError::PastEnd { asked: format!("page {page}"), file_pages })
            }
        };
        self.pages.iter().map(range).collect()
    }
}

/// A checked `DiffRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffQuery {
    /// Which file.
    pub file: FileName,
    /// The older snapshot.
    pub from: SnapshotId,
    /// The newer one; `None` is now.
    pub to: Option<SnapshotId>,
    /// Which pages; `None` is what both cover.
    pub range: Option<PageRange>,
    /// Keep what was read now for so long.
    pub retain_for: Option<Duration>,
}

impl DiffQuery {
    /// Checks a request.
    ///
    /// # Errors
    /// [`QueryError`]
    pub fn new(request: v1::DiffRequest, limits: &Limits) -> Result<Self, QueryError> {
        let retain_for = keep_of(request.retain_for, limits)?;
        let to = SnapshotId::new(request.to_snapshot_id);
        if to.is_some() && retain_for.is_some() {
            return Err(QueryError::Combination(
                "retain_for is for what is read now, not for a kept snapshot",
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

    /// The pages to compare, of those that both snapshots cover.
    ///
    /// # Errors
    /// [`QueryError::EmptyRange`] if there are none.
    pub fn compared(&self, covered: PageRange) -> Result<PageRange, QueryError> {
        let range = self.range.map_or(covered, |range| range.intersect(covered));
        if range.is_empty() { Err(QueryError::EmptyRange(range)) } else { Ok(range) }
    }
}

pub(super) fn range_of(range: Option<v1::PageRange>) -> Result<Option<PageRange>, QueryError> {
    Ok(range.map(PageRange::try_from).transpose()?)
}

fn keep_of(keep: Option<prost_types::Duration>, limits: &Limits) -> Result<Option<Duration>, QueryError> {
    let asked = duration_from_wire("retain_for", keep)?;
    if asked > limits.keep {
        return Err(QueryError::KeepTooLong { asked, most: limits.keep });
    }
    Ok((!asked.is_zero()).then_some(asked))
}

pub(super) fn encoding_of(encoding: i32, slots: bool) -> Result<Encoding, QueryError> {
    let unknown = ConvertError::UnknownEnum { field: "Encoding", value: encoding };
    Ok(match v1::Encoding::try_from(encoding).map_err(|_| unknown)? {
        v1::Encoding::Unspecified | v1::Encoding::Runs => Encoding::Runs,
        v1::Encoding::Bitmaps => Encoding::Bitmaps { slots },
        v1::Encoding::Entries => Encoding::Entries,
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
    fn empty_scan_request_asks_for_everything_in_runs() {
        let query = check(request()).unwrap();
        assert_eq!((query.encoding, query.states, query.range), (Encoding::Runs, StateSet::ALL, None));
        assert_eq!(query.wants(), ScanOptions::default());
        assert_eq!(query.retain_for, None);
    }

    #[test]
    fn asking_for_swap_cached_pages_tells_them_apart() {
        let states = vec![v1::PageState::SwapCached.into()];
        assert!(check(v1::ScanRequest { states, ..request() }).unwrap().distinguish_swap_cached);
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
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
    fn attributes_are_bounded() {
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
    fn lookups_are_bounded_and_within_the_file() {
        let request =
            |pages: Vec<u64>| v1::LookupRequest { file: request().file, pages, ..Default::default() };
        let limits = Limits { lookup_pages: 3, ..Limits::default() };
        assert!(LookupQuery::new(request(vec![]), &limits).is_err());
        let most = LookupQuery::new(request(vec![0; 4]), &limits);
        assert!(matches!(most, Err(QueryError::TooMany { asked: 4, most: 3, .. })));
        let query = LookupQuery::new(request(vec![9, 1]), &limits).unwrap();
        assert!(query.ranges(10).is_ok());
        assert!(matches!(query.ranges(9), Err(QueryError::PastEnd { .. })));
    }

    #[test]
    fn ranges_lie_in_the_file() {
        assert_eq!(resolve_range(None, 7), Ok(PageRange::first(7)));
        let range = |start, end| PageRange::new(PageIndex(start), PageIndex(end));
        assert_eq!(resolve_range(range(2, 7), 7), Ok(range(2, 7).unwrap()));
        assert!(matches!(resolve_range(range(2, 8), 7), Err(QueryError::PastEnd { .. })));
        assert!(matches!(resolve_range(range(2, 2), 7), Err(QueryError::EmptyRange(_))));
    }
}
