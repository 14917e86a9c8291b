//! Reads pages from their swap slots, in windows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, SlotContent, SlotContents, SwapSlot, error_chain};

use super::super::PAGE_BYTES;
use super::super::chunks::CHUNK_PAGES;
use super::super::error::ImageError;
use super::counters::SwapOuts;
use super::layout::runs;
use super::scratch::Scratch;
use super::watch::Areas;

/// Pages of the smallest window. A smaller one takes hardly less time, so that its proof fails as often.
const MIN_WINDOW: usize = 16;
/// Pages of the largest window: all of a chunk.
const MAX_WINDOW: usize = to_usize(CHUNK_PAGES);

/// What all threads of a dump share.
#[derive(Debug, Default)]
pub(crate) struct SlotAccess {
    /// Held shared during a window, and exclusively while this process swaps pages out, which would refute the window's proof.
    gate: RwLock<()>,
    areas: Mutex<Option<Arc<Areas>>>,
    /// Why slots cannot be read, the first time that it happens.
    refusal: Mutex<Option<String>>,
}

impl SlotAccess {
    /// Runs `work`, which swaps pages out, while no window is open.
    pub(in crate::image) fn while_closed<T>(&self, work: impl FnOnce() -> T) -> T {
        // The lock protects no data.
        let _closed = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        work()
    }

    /// Why some slots could not be read at all. Refuted windows are no reason.
    pub(in crate::image) fn refusal(&self) -> Option<String> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn refuse(&self, reason: impl FnOnce() -> String) {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(reason);
    }

    /// The areas, which are watched at least from now on.
    fn areas(&self) -> Option<Arc<Areas>> {
        let mut shared = self.areas.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.is_none() {
            let refused = |error| self.refuse(|| error_chain(&error));
            *shared = Areas::watch().map_err(refused).ok().map(Arc::new);
        }
        shared.clone()
    }

    /// The areas have changed: others are watched next time.
    fn forget(&self, areas: &Arc<Areas>) {
        let mut shared = self.areas.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.as_ref().is_some_and(|shared| Arc::ptr_eq(shared, areas)) {
            *shared = None;
        }
    }
}

/// What is known of a swapped page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::image) enum SlotPage {
    /// Its content was read from its slot.
    Read,
    /// It is zero.
    Zero,
    /// Nothing: it has to be read through the file.
    Unread,
}

/// Asks the service for the slots of pages.
pub(in crate::image) type AskSlots<'a> = &'a dyn Fn(&[PageIndex]) -> Result<SlotContents, ImageError>;

/// Reads pages from their swap slots, in one thread.
#[derive(Debug)]
pub(in crate::image) struct SlotReader<'a> {
    access: &'a SlotAccess,
    /// Pages of the next window.
    window: usize,
    scratch: Scratch,
    /// Content of the pages of the last call.
    content: Vec<u8>,
}

/// Outcome of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Window {
    /// What it found is right.
    Proved,
    /// It may be wrong: something was swapped out meanwhile, or swap areas changed.
    Refuted,
    /// This host permits no proof, or the service cannot read swap areas.
    Unavailable,
}

impl<'a> SlotReader<'a> {
    pub(in crate::image) fn new(access: &'a SlotAccess) -> Self {
        Self { access, window: MAX_WINDOW, scratch: Scratch::default(), content: Vec::new() }
    }

    /// Reads pages. The content of those that are [`SlotPage::Read`] is in [`Self::page_mut`].
    pub(in crate::image) fn read(
        &mut self,
        pages: &[PageIndex],
        ask: AskSlots<'_>,
    ) -> Result<Vec<SlotPage>, ImageError> {
        let mut found = vec![SlotPage::Unread; pages.len()];
        self.content.clear();
        self.content.resize(pages.len() * to_usize(PAGE_BYTES), 0);
        let mut at = 0;
        while at < pages.len() {
            let end = pages.len().min(at + self.window);
            match self.window(&pages[at..end], at, &mut found[at..end], ask)? {
                Window::Unavailable => break,
                outcome => {
                    let is_proved = outcome == Window::Proved;
                    if !is_proved {
                        found[at..end].fill(SlotPage::Unread);
                    }
                    // The pages of a smallest window are not tried again.
                    if is_proved || self.window == MIN_WINDOW {
                        at = end;
                    }
                    self.window = next_window(self.window, is_proved);
                }
            }
        }
        Ok(found)
    }

    /// The content of a page of the last call of [`Self::read`], by its position.
    pub(in crate::image) fn page_mut(&mut self, position: usize) -> &mut [u8] {
        let page = to_usize(PAGE_BYTES);
        &mut self.content[position * page..(position + 1) * page]
    }

    /// Reads the pages of one window. `first`: position of its first page. The order of the calls is that of the proof: see the module.
    fn window(
        &mut self,
        pages: &[PageIndex],
        first: usize,
        found: &mut [SlotPage],
        ask: AskSlots<'_>,
    ) -> Result<Window, ImageError> {
        let _open = self.access.gate.read().unwrap_or_else(PoisonError::into_inner);
        let Some(areas) = self.access.areas() else { return Ok(Window::Unavailable) };
        let before = match SwapOuts::now() {
            Ok(Some(before)) => before,
            Ok(None) => {
                self.access.refuse(|| "zswap is on or has pages, or the kernel lacks a counter".to_owned());
                return Ok(Window::Unavailable);
            }
            Err(error) => {
                self.access.refuse(|| error_chain(&error));
                return Ok(Window::Unavailable);
            }
        };
        let asked = ask(pages)?;
        if asked.areas.is_empty() || asked.slots.len() != pages.len() {
            self.access.refuse(|| "the service does not report swap areas".to_owned());
            return Ok(Window::Unavailable);
        }
        if !areas.open(&asked.areas, &mut self.scratch) {
            self.access.forget(&areas);
            return Ok(Window::Refuted);
        }
        if let Some(error) = areas.refusal() {
            self.access.refuse(|| error_chain(error));
        }
        self.read_slots(&areas, &asked, first, found);
        if found.iter().all(|found| *found == SlotPage::Unread) {
            return Ok(Window::Proved);
        }
        let again = ask(pages)?;
        let after = SwapOuts::now().ok().flatten();
        if areas.have_changed() {
            self.access.forget(&areas);
            return Ok(Window::Refuted);
        }
        if after != Some(before) || again.areas != asked.areas || again.slots.len() != pages.len() {
            return Ok(Window::Refuted);
        }
        keep_equal(found, &asked.slots, &again.slots);
        Ok(Window::Proved)
    }

    /// Reads slots whose content is on a device that is open, in ascending order. Others, and those that cannot be read, stay unread.
    fn read_slots(&mut self, areas: &Areas, asked: &SlotContents, first: usize, found: &mut [SlotPage]) {
        let mut wanted: BTreeMap<u8, Vec<(u64, usize)>> = BTreeMap::new();
        for (position, (slot, content)) in asked.slots.iter().enumerate() {
            match (slot, content) {
                (Some(_), SlotContent::Zero) => found[position] = SlotPage::Zero,
                (Some(slot), SlotContent::Device) if areas.of(*slot).is_some() => {
                    wanted.entry(slot.swap_type()).or_default().push((slot.offset(), position));
                }
                _ => {}
            }
        }
        let page = to_usize(PAGE_BYTES);
        for (swap_type, slots) in wanted {
            for run in runs(slots) {
                let slot = SwapSlot::new(swap_type, run.first);
                let Some(area) = slot.and_then(|slot| areas.of(slot)) else { continue };
                let Self { scratch, content, .. } = self;
                let read = area.read(run.first, to_u64(run.positions.len()), scratch, |number, bytes| {
                    let at = (first + run.positions[number]) * page;
                    content[at..at + page].copy_from_slice(bytes);
                });
                if read.is_some() {
                    run.positions.iter().for_each(|position| found[*position] = SlotPage::Read);
                }
            }
        }
    }
}

/// Pages whose slot or answer changed stay unread.
fn keep_equal(
    found: &mut [SlotPage],
    before: &[(Option<SwapSlot>, SlotContent)],
    after: &[(Option<SwapSlot>, SlotContent)],
) {
    for (found, (before, after)) in found.iter_mut().zip(before.iter().zip(after)) {
        if before != after {
            *found = SlotPage::Unread;
        }
    }
}

/// Pages of the window after one of `pages`. A host that swaps out refutes large windows more often than small ones.
fn next_window(pages: usize, is_proved: bool) -> usize {
    if is_proved { (pages * 2).min(MAX_WINDOW) } else { (pages / 2).max(MIN_WINDOW) }
}

#[cfg(test)]
mod tests {
    use SlotContent::{Device, Unknown, Zero};
    use SlotPage::{Read, Unread};

    use super::*;

    #[test]
    fn pages_that_moved_or_changed_their_answer_stay_unread() {
        let [one, two] = [1, 2].map(|offset| SwapSlot::new(0, offset));
        for (before, after, expected) in [
            ((one, Device), (one, Device), Read),
            ((one, Device), (two, Device), Unread),
            ((one, Device), (one, Zero), Unread),
            ((one, Device), (one, Unknown), Unread),
            ((one, Device), (None, Unknown), Unread),
        ] {
            let mut found = [Read];
            keep_equal(&mut found, &[before], &[after]);
            assert_eq!(found, [expected], "{before:?} {after:?}");
        }
        let mut found = [SlotPage::Zero, Read];
        keep_equal(&mut found, &[(one, Zero), (two, Device)], &[(one, Zero), (one, Device)]);
        assert_eq!(found, [SlotPage::Zero, Unread]);
    }

    #[test]
    fn windows_shrink_to_the_smallest_and_grow_again() {
        let outcomes = |window, is_proved| {
            std::iter::successors(Some(window), move |window| Some(next_window(*window, is_proved)))
        };
        assert_eq!(outcomes(256, false).take(6).collect::<Vec<_>>(), [256, 128, 64, 32, 16, 16]);
        assert_eq!(outcomes(16, true).take(6).collect::<Vec<_>>(), [16, 32, 64, 128, 256, 256]);
    }

    /// Without swap areas, and without a service that knows them, nothing is read.
    #[test]
    fn service_without_swap_areas_leaves_all_pages_to_the_file() {
        let access = SlotAccess::default();
        let mut reader = SlotReader::new(&access);
        let pages: Vec<_> = (0..20).map(PageIndex).collect();
        let found = reader.read(&pages, &|_| Ok(SlotContents::default())).unwrap();
        assert_eq!(found, [Unread; 20]);
        // The first reason depends on the host's zswap.
        assert!(access.refusal().is_some());
        assert_eq!(access.while_closed(|| 5), 5, "no window is open");
        assert!(reader.read(&[], &|_| Err(ImageError::Cancelled)).unwrap().is_empty());
    }
}
