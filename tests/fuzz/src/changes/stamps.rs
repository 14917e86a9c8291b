//! The stamps of a file as a list of single pages, and as the service keeps them.

use arbitrary::Arbitrary;
use fdmap_proto::units::{Generation, PageIndex, PageRange, to_u64, to_usize};
use fdmap_server::tracking::{DirtyStamp, StampMap};

use crate::scan::model::Model;

/// Pages with stamps, from the first page of the model on.
const MAX_STAMPED: u64 = 20_000;

/// Pages that are stamped at once.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) struct StampDraft {
    /// Relative to the first page of the model.
    start: u16,
    pages: u8,
    long: bool,
    generation: u8,
    conservative: bool,
}

pub(super) struct StampList {
    first: u64,
    list: Vec<DirtyStamp>,
    pub(super) map: StampMap,
}

impl StampList {
    pub(super) fn new(model: &Model, drafts: &[StampDraft]) -> Self {
        let pages = (model.file_pages - model.first).min(MAX_STAMPED);
        let mut list = vec![DirtyStamp::NEVER; to_usize(pages)];
        let mut map = StampMap::default();
        for draft in drafts {
            let start = u64::from(draft.start) % MAX_STAMPED;
            let len = u64::from(draft.pages) * if draft.long { 40 } else { 1 };
            let end = start.saturating_add(len).min(pages);
            let Some(range) = PageRange::new(PageIndex(start), PageIndex(end)) else { continue };
            let generation = Generation::new(u64::from(draft.generation)).unwrap();
            let stamp = DirtyStamp::new(generation, draft.conservative);
            for old in &mut list[to_usize(start)..to_usize(end)] {
                *old = old.newer_of(stamp);
            }
            map.stamp(PageRange::at(PageIndex(model.first + start), range.len()), stamp);
        }
        Self { first: model.first, list, map }
    }

    /// The pages that may have a stamp.
    pub(super) fn window(&self) -> PageRange {
        PageRange::at(PageIndex(self.first), to_u64(self.list.len()))
    }

    /// Whether a page was written after `since`, and then whether the stamp is conservative.
    pub(super) fn changed(&self, page: u64, since: Generation) -> Option<bool> {
        let nth = page.checked_sub(self.first)?;
        let stamp = self.list.get(to_usize(nth))?;
        (stamp.generation() > since).then_some(stamp.is_conservative())
    }
}
