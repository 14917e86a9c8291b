//! Which pages are read, and which are in the parent. Pure.

use fdmap_proto::{PageRange, PageState, Run, SwapSlot};

use super::super::chunks::CHUNK_PAGES;
use super::super::ranges::{PageSet, parts};

/// Consecutive pages of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) range: PageRange,
    pub(crate) origin: Origin,
}

/// Where the content of pages comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Read from the file.
    Memory,
    /// In swap; the slot of the first page, if the probe reports slots.
    Swap(Option<SwapSlot>),
    /// Unchanged since the parent, which stores it.
    Parent,
}

/// The parent of an image, for one file.
#[derive(Debug)]
pub(crate) struct Base {
    /// Pages that were written since.
    pub(crate) changed: PageSet,
    /// Pages whose content it or its parents store.
    pub(crate) stored: PageSet,
}

/// The pages of an image, in ascending order, from the states of pages. `file` has the pages of the file when its size was read: it may have
/// grown since. A page that is not in the result has no data, or was zero in the parent and did not change. Pages in an unknown state are
/// read.
pub(crate) fn plan(runs: &[Run], file: PageRange, base: Option<&Base>) -> Vec<Extent> {
    let mut extents = Vec::new();
    for run in runs.iter().filter(|run| run.state != PageState::Hole) {
        let range = run.range.intersect(file);
        let Some(base) = base else {
            extents.extend((!range.is_empty()).then(|| read(run, range)));
            continue;
        };
        for (range, is_changed) in base.changed.split(range) {
            if is_changed {
                extents.push(read(run, range));
            } else {
                let inherited = base.stored.split(range).filter(|(_, is_stored)| *is_stored);
                extents.extend(inherited.map(|(range, _)| Extent { range, origin: Origin::Parent }));
            }
        }
    }
    extents
}

fn read(run: &Run, range: PageRange) -> Extent {
    let origin = match run.state {
        PageState::Swapped => Origin::Swap(run.slot_of(range.start())),
        _ => Origin::Memory,
    };
    Extent { range, origin }
}

/// Groups of extents of which at most [`CHUNK_PAGES`] pages are read: a chunk each.
pub(crate) fn batches(extents: &[Extent]) -> Vec<Vec<Extent>> {
    let mut batches = Vec::new();
    let (mut batch, mut pages) = (Vec::new(), 0);
    for extent in extents {
        if extent.origin == Origin::Parent {
            batch.push(*extent);
            continue;
        }
        for range in parts(extent.range, CHUNK_PAGES) {
            if pages + range.len() > CHUNK_PAGES {
                batches.push(std::mem::take(&mut batch));
                pages = 0;
            }
            let skipped = range.start().0 - extent.range.start().0;
            let origin = match extent.origin {
                Origin::Swap(slot) => Origin::Swap(slot.and_then(|slot| slot.plus(skipped))),
                other => other,
            };
            batch.push(Extent { range, origin });
            pages += range.len();
        }
    }
    if !batch.is_empty() {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use fdmap_proto::PageIndex;
    use proptest::prelude::*;

    use super::*;

    const STATES: [PageState; 4] =
        [PageState::Hole, PageState::Resident, PageState::Swapped, PageState::Unknown];

    fn one(page: u64) -> PageRange {
        PageRange::at(PageIndex(page), 1)
    }

    fn slot(page: u64) -> SwapSlot {
        SwapSlot::new(1, 1000 + page).unwrap()
    }

    fn set(bits: &[bool]) -> PageSet {
        (0..).zip(bits).filter(|(_, bit)| **bit).map(|(page, _)| one(page)).collect()
    }

    /// Each page of the extents, with its slot if it is swapped.
    fn pages(extents: &[Extent]) -> Vec<(u64, Origin)> {
        let of = |extent: &Extent| {
            let (start, origin) = (extent.range.start().0, extent.origin);
            (start..extent.range.end().0).map(move |page| match origin {
                Origin::Swap(slot) => (page, Origin::Swap(slot.and_then(|slot| slot.plus(page - start)))),
                other => (page, other),
            })
        };
        extents.iter().flat_map(of).collect()
    }

    proptest! {
        /// Against a reference that decides page by page.
        #[test]
        fn each_page_is_read_or_inherited_as_it_has_to_be(
            states in proptest::collection::vec(0_usize..4, 40),
            changed in proptest::collection::vec(any::<bool>(), 40),
            stored in proptest::collection::vec(any::<bool>(), 40),
            has_base in any::<bool>(),
            file_pages in 0_u64..50,
        ) {
            let runs: Vec<_> = (0_u64..).zip(&states).map(|(page, state)| {
                let state = STATES[*state];
                Run { range: one(page), state, slot: state.is_swapped().then(|| slot(page)), attributes: None }
            }).collect();
            let base = Base { changed: set(&changed), stored: set(&stored) };
            let extents = plan(&runs, PageRange::first(file_pages), has_base.then_some(&base));
            let mut expected = Vec::new();
            for (page, ((state, changed), stored)) in (0_u64..).zip(states.iter().zip(&changed).zip(&stored)) {
                if page >= file_pages {
                    break;
                }
                let read = match STATES[*state] {
                    PageState::Hole => continue,
                    PageState::Swapped => Origin::Swap(Some(slot(page))),
                    _ => Origin::Memory,
                };
                if !has_base || *changed {
                    expected.push((page, read));
                } else if *stored {
                    expected.push((page, Origin::Parent));
                }
            }
            prop_assert_eq!(pages(&extents), expected);
        }

        #[test]
        fn batches_have_the_pages_of_the_extents(lengths in proptest::collection::vec((1_u64..700, 0_u64..3, 0_u8..3), 0..20)) {
            let mut at = 0;
            let extents: Vec<_> = lengths.into_iter().map(|(len, skip, origin)| {
                let range = PageRange::at(PageIndex(at + skip), len);
                at = range.end().0;
                let origin = [Origin::Memory, Origin::Swap(Some(slot(range.start().0))), Origin::Parent][usize::from(origin)];
                Extent { range, origin }
            }).collect();
            let batches = batches(&extents);
            for batch in &batches {
                let read: u64 = batch.iter().filter(|extent| extent.origin != Origin::Parent).map(|extent| extent.range.len()).sum();
                prop_assert!(read <= CHUNK_PAGES);
            }
            prop_assert_eq!(pages(&batches.concat()), pages(&extents));
        }
    }
}
