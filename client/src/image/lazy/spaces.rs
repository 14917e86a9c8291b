//! Address spaces that change while their pages lack content, and those that are not served: children, and memory of a refused hand-off.

use std::time::{Duration, Instant};

use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};

use super::super::PAGE_BYTES;
use super::changes::{Changes, Move};
use super::lacking::{Lacking, LackingPart};
use super::refusal::{CHANGE_INTERVAL, Poisoner, unregister};

/// Most events that are read in a row: a process can raise them without end.
pub(super) const MAX_EVENTS: u32 = 1024;
/// Longest time for which a child is held: its accesses wait. Only moves before the fork concern it, and their events come as soon as their
/// threads run. Later changes can overlap one another without end.
const HOLD_TIMEOUT: Duration = Duration::from_secs(1);

/// The changes of an address space, whose events can come in another order.
#[derive(Debug, Default)]
pub(super) struct Following {
    changes: Changes,
    /// Children of forks that overlap other changes: whether memory was moved before them is known when these are over.
    held: Vec<Refused>,
    /// When the first of them was forked.
    held_since: Option<Instant>,
}

impl Following {
    /// True until [`Self::settle`] finds that the changes are over whose events were read.
    pub(super) fn is_open(&self) -> bool {
        !self.changes.is_empty() || !self.held.is_empty()
    }

    /// A child was forked, of an address space with all that lacks content now.
    pub(super) fn fork(&mut self, child: Userfaultfd, lacking: Lacking) {
        self.held.push(Refused::new(child, self.changes.ever(lacking)));
        self.held_since.get_or_insert_with(Instant::now);
    }

    /// Parts that lacked content were unmapped.
    pub(super) fn unmap(&mut self, parts: Vec<LackingPart>) {
        self.changes.unmap(parts);
    }

    /// Memory was moved: see [`Changes::relocate`].
    pub(super) fn relocate(&mut self, moved: Move, others: &Lacking, sets: [&mut Lacking; 2]) {
        let added = self.changes.relocate(moved, others, sets);
        for child in &mut self.held {
            child.lacking.merge(added.parts());
            child.all.merge(added.parts());
        }
    }

    /// If no change is in progress, the next one begins after all of which events were read. Returns the children that are complete, or were
    /// held for too long.
    pub(super) fn settle(&mut self, uffd: &Userfaultfd) -> Vec<Refused> {
        if !self.is_open() {
            Vec::new()
        } else if !uffd.is_changing() {
            self.close()
        } else if self.held_since.is_some_and(|since| since.elapsed() > HOLD_TIMEOUT) {
            self.release()
        } else {
            Vec::new()
        }
    }

    /// No change was in progress after the last event was read. Returns the children, which are complete.
    pub(super) fn close(&mut self) -> Vec<Refused> {
        self.changes = Changes::default();
        self.release()
    }

    /// The children, as far as they are known.
    pub(super) fn release(&mut self) -> Vec<Refused> {
        self.held_since = None;
        std::mem::take(&mut self.held)
    }
}

/// An address space that is not served.
#[derive(Debug)]
pub(super) struct Refused {
    uffd: Userfaultfd,
    /// What is not poisoned yet.
    lacking: Lacking,
    /// What lacked content in the beginning, for children.
    all: Lacking,
    poisoner: Poisoner,
    following: Following,
}

impl Refused {
    fn new(uffd: Userfaultfd, lacking: Lacking) -> Self {
        let (poisoner, following) = (Poisoner::default(), Following::default());
        Self { uffd, all: lacking.clone(), lacking, poisoner, following }
    }

    /// Continues to poison. Returns true once all is done, or the address space has ended: then the descriptor may be closed. Adds the
    /// address spaces that were forked meanwhile to `children`.
    fn advance(&mut self, children: &mut Vec<Self>) -> bool {
        if self.lacking.is_empty() && !self.following.is_open() {
            return true;
        }
        // Else accesses wait, as long as this descriptor is open. Of a 32-bit process, it is not known whether that can be done.
        if self.uffd.can_poison() || self.uffd.address_space_exists().is_none() {
            let all = &mut self.all;
            let gone = |range| drop(all.remove(range));
            match self.poisoner.poison(&self.uffd, &mut self.lacking, gone) {
                Ok(()) if !self.following.is_open() => return true,
                Err(SyscallError { errno: Errno::ESRCH, .. }) => {
                    children.append(&mut self.following.release());
                    return true;
                }
                Ok(()) | Err(_) => {}
            }
        }
        children.append(&mut self.following.settle(&self.uffd));
        self.read_events();
        if self.uffd.address_space_exists() == Some(false) {
            children.append(&mut self.following.release());
            return true;
        }
        false
    }

    fn read_events(&mut self) {
        for _ in 0..MAX_EVENTS {
            // After an error, as of too many open descriptors, the event stays queued, and the next call reads the next one.
            let Ok(Some(event)) = self.uffd.read_event() else { return };
            match event {
                UffdEvent::Fork(child) => self.following.fork(child, self.all.clone()),
                UffdEvent::Remap { from, to, len } => {
                    if let Some(moved) = Move::new(from, to, len, PAGE_BYTES) {
                        let sets = [&mut self.lacking, &mut self.all];
                        self.following.relocate(moved, &Lacking::default(), sets);
                    }
                }
                UffdEvent::Remove(range) => {
                    self.lacking.remove(range);
                    self.all.remove(range);
                }
                // Other memory may be there meanwhile. Where none is, nothing is poisoned.
                UffdEvent::Unmap(_) => {}
                // Poison wakes the thread.
                UffdEvent::PageFault { .. } | UffdEvent::WriteProtectFault { .. } | UffdEvent::Other(_) => {}
            }
        }
    }
}

/// Address spaces that are not served, until they are poisoned.
#[derive(Debug, Default)]
pub(super) struct RefusedSpaces(Vec<Refused>);

impl RefusedSpaces {
    pub(super) fn add(&mut self, mut spaces: Vec<Refused>) {
        self.0.append(&mut spaces);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Continues to poison all of them, without waiting.
    pub(super) fn advance(&mut self) {
        let mut children = Vec::new();
        self.0.retain_mut(|refused| !refused.advance(&mut children));
        self.0.append(&mut children);
    }

    /// Waits until all are poisoned or have ended.
    pub(super) fn finish(&mut self) {
        loop {
            self.advance();
            if self.is_empty() {
                return;
            }
            std::thread::sleep(CHANGE_INTERVAL);
        }
    }
}

/// Refuses all memory of these ranges, and unregisters it. `page_bytes` is unknown: see [`Poisoner`].
pub(super) fn refuse(uffd: Userfaultfd, ranges: &[AddressRange]) -> Result<(), SyscallError> {
    if !uffd.can_poison() {
        return Ok(());
    }
    let mut lacking = Lacking::default();
    for range in ranges {
        lacking.add(*range, PAGE_BYTES);
    }
    let own = uffd.try_clone()?;
    let mut spaces = RefusedSpaces::default();
    spaces.add(vec![Refused::new(uffd, lacking)]);
    spaces.finish();
    for range in ranges {
        unregister(&own, LackingPart { range: *range, page_bytes: PAGE_BYTES })?;
    }
    Ok(())
}
