//! Address spaces whose pages get no content any more: accesses to pages that lack it raise SIGBUS.
//!
//! This is what keeps zero from being read in place of content when a restore fails, when a hand-off is refused, and in children and memory
//! that was moved, which are not served. The argument:
//!
//! 1. While a descriptor of the userfaultfd is open and the mapping is registered, an access to an absent page waits. So nothing is read
//!    from a page that lacks its content until it is poisoned, or until the mapping is unregistered or the last descriptor is closed.
//! 2. Both come after all pages that lack content were poisoned (`UFFDIO_POISON` succeeded), exist (`EEXIST` without write protection: an
//!    absent page that the process has write-protected has a marker, for which the kernel returns `EEXIST`, too), or are not registered
//!    (`ENOENT` of a single page: that of several pages only means that they are not in one mapping).
//! 3. The kernel refuses to poison (`EAGAIN`) from the beginning of a fork, mremap, munmap or madvise that raises an event until the event
//!    is read. So the events are known that concern pages before these are done: a page that moved is poisoned at its new address, and a
//!    child is poisoned by its own descriptor, as are its children. A child that is forked after that inherits the poison.
//!
//! Before Linux 6.6, pages cannot be poisoned: then mappings stay registered, and accesses wait for as long as the process itself has a
//! descriptor of its userfaultfd open; those of children until the children end, for which this process waits.

use std::time::Duration;

use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};

use super::super::PAGE_BYTES;
use super::lacking::{Lacking, LackingPart};

/// Time until a call is repeated while the address space changes.
pub(super) const CHANGE_INTERVAL: Duration = Duration::from_micros(50);
/// Most events that are read in a row: a process can raise them without end.
pub(super) const MAX_EVENTS: u32 = 1024;
/// The process may protect a page again, so its protection is removed so many times until the page counts as one that exists.
const MAX_UNPROTECT_ATTEMPTS: u32 = 4;
/// Page sizes of x86-64 that are larger than a base page: parts of a range begin at their multiples, where they can.
const HUGE_PAGES: [u64; 2] = [1 << 30, 2 << 20];

/// Fills or poisons absent pages by `call`, of which `first` is the first one. If that has the marker of an absent page that the process has
/// write-protected, for which the kernel also returns `EEXIST`, removes the protection and repeats the call.
///
/// # Errors
/// That of `call`: `EEXIST` only if the page exists; of [`Userfaultfd::write_protect`].
pub(super) fn without_marker<T>(
    uffd: &Userfaultfd,
    first: AddressRange,
    call: impl Fn() -> Result<T, SyscallError>,
) -> Result<T, SyscallError> {
    for _ in 0..MAX_UNPROTECT_ATTEMPTS {
        match call() {
            Err(SyscallError { errno: Errno::EEXIST, .. }) => {}
            other => return other,
        }
        match uffd.write_protect(first, false) {
            Ok(()) => {}
            // It cannot be protected.
            Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) => break,
            Err(error) => return Err(error),
        }
    }
    call()
}

/// Poisons pages, in runs of a length that adapts to the mappings.
#[derive(Clone, Debug)]
pub(super) struct Poisoner {
    /// Longest run of the next call, bytes: halved where it exceeds one mapping, doubled where it does not.
    limit: u64,
}

impl Default for Poisoner {
    fn default() -> Self {
        Self { limit: u64::MAX }
    }
}

impl Poisoner {
    /// Poisons all that lacks content. After an error, what is left in `lacking` was not poisoned.
    ///
    /// # Errors
    /// `EAGAIN` until the events of the address space are read; `ENOMEM`; `ESRCH` if the address space has ended.
    pub(super) fn poison(&mut self, uffd: &Userfaultfd, lacking: &mut Lacking) -> Result<(), SyscallError> {
        while let Some(part) = lacking.first() {
            let done = self.poison_first(uffd, part)?;
            lacking.settle(done);
        }
        Ok(())
    }

    /// Poisons pages from the start of the part on. Returns the number of bytes that cannot be read as zero any more, or are not registered.
    fn poison_first(&mut self, uffd: &Userfaultfd, part: LackingPart) -> Result<u64, SyscallError> {
        let LackingPart { range, page_bytes } = part;
        loop {
            let len = range.len().min(self.limit).max(page_bytes);
            let run = AddressRange { start: range.start, end: range.start + len };
            let first = AddressRange { start: range.start, end: range.start + page_bytes };
            match without_marker(uffd, first, || uffd.poison(run)) {
                Ok(bytes) => {
                    self.limit = len.saturating_mul(2);
                    return Ok(bytes);
                }
                // Not one mapping, or not whole pages of one.
                Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) if len > page_bytes => {
                    self.limit = half(len, page_bytes);
                }
                // The page that exists, or has a marker, may be a huge one.
                Err(SyscallError { errno: Errno::EEXIST, .. }) if len > page_bytes => self.limit = page_bytes,
                Err(SyscallError { errno: Errno::EEXIST, .. }) => {
                    // A thread may have waited since before it existed.
                    uffd.wake(first)?;
                    return Ok(page_bytes);
                }
                Err(error) if error.errno == Errno::EINVAL => return self.poison_huge(uffd, part, error),
                Err(error) if error.errno == Errno::ENOENT => return gone(uffd, page_bytes, error),
                Err(error) => return Err(error),
            }
        }
    }

    /// As [`Self::poison_first`], of a part whose pages are larger than stated, or cannot be poisoned.
    fn poison_huge(
        &mut self,
        uffd: &Userfaultfd,
        part: LackingPart,
        refused: SyscallError,
    ) -> Result<u64, SyscallError> {
        let LackingPart { range, page_bytes } = part;
        let fits =
            |huge: &u64| *huge > page_bytes && range.start.is_multiple_of(*huge) && range.len() >= *huge;
        // The smaller first: the kernel refuses a part of a huge page, and takes several.
        for huge in HUGE_PAGES.into_iter().rev().filter(fits) {
            let page = AddressRange { start: range.start, end: range.start + huge };
            match without_marker(uffd, page, || uffd.poison(page)) {
                Ok(bytes) => {
                    self.limit = huge.saturating_mul(2);
                    return Ok(bytes);
                }
                Err(SyscallError { errno: Errno::EEXIST, .. }) => {
                    uffd.wake(page)?;
                    return Ok(huge);
                }
                Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        gone(uffd, page_bytes, refused)
    }
}

/// A page that is not registered is done, unless it is being moved: the kernel looks for its mapping before it looks for that again.
fn gone(uffd: &Userfaultfd, page_bytes: u64, error: SyscallError) -> Result<u64, SyscallError> {
    if uffd.is_changing() { Err(SyscallError { errno: Errno::EAGAIN, ..error }) } else { Ok(page_bytes) }
}

/// About half of `len` bytes, in whole pages, if possible in whole huge pages.
fn half(len: u64, page_bytes: u64) -> u64 {
    let half = len / 2;
    let unit = HUGE_PAGES.into_iter().find(|huge| half >= *huge).unwrap_or(page_bytes).max(page_bytes);
    (half - half % unit).max(page_bytes)
}

/// Unregisters all mappings of a range; those that are not registered stay as they are.
///
/// # Errors
/// `ESRCH` or `ENOMEM` if the address space has ended; `ENOMEM`.
pub(super) fn unregister(uffd: &Userfaultfd, part: LackingPart) -> Result<(), SyscallError> {
    let mut ranges = vec![part.range];
    while let Some(range) = ranges.pop() {
        match uffd.unregister(range) {
            Ok(()) => {}
            // A part of it is not mapped, or memory of another kind.
            Err(SyscallError { errno: Errno::EINVAL, .. }) => {
                if range.len() > part.page_bytes {
                    let middle = range.start + half(range.len(), part.page_bytes);
                    ranges.push(AddressRange { start: middle, end: range.end });
                    ranges.push(AddressRange { start: range.start, end: middle });
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
}

impl Refused {
    pub(super) fn new(uffd: Userfaultfd, lacking: Lacking) -> Self {
        Self { uffd, all: lacking.clone(), lacking, poisoner: Poisoner::default() }
    }

    /// Continues to poison. Returns true once all is done, or the address space has ended: then the descriptor may be closed. Adds the
    /// address spaces that were forked meanwhile to `children`.
    fn advance(&mut self, children: &mut Vec<Self>) -> bool {
        if self.lacking.is_empty() {
            return true;
        }
        // Else accesses wait, as long as this descriptor is open. Of a 32-bit process, it is not known whether that can be done.
        if self.uffd.can_poison() || self.uffd.address_space_exists().is_none() {
            match self.poisoner.poison(&self.uffd, &mut self.lacking) {
                Ok(()) | Err(SyscallError { errno: Errno::ESRCH, .. }) => return true,
                Err(_) => {}
            }
        }
        for _ in 0..MAX_EVENTS {
            // After an error, as of too many open descriptors, the event stays queued.
            let Ok(Some(event)) = self.uffd.read_event() else { break };
            match event {
                UffdEvent::Fork(child) => children.push(Self::new(child, self.all.clone())),
                UffdEvent::Remap { from, to, len } => {
                    self.lacking.relocate(from, to, len);
                    self.all.relocate(from, to, len);
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
        self.uffd.address_space_exists() == Some(false)
    }
}

/// Address spaces that are not served, until they are poisoned.
#[derive(Debug, Default)]
pub(super) struct RefusedSpaces(Vec<Refused>);

impl RefusedSpaces {
    pub(super) fn add(&mut self, refused: Refused) {
        self.0.push(refused);
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

/// Refuses all memory of these ranges, and unregisters it. `page_bytes` is unknown: see [`half`].
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
    spaces.add(Refused::new(uffd, lacking));
    spaces.finish();
    for range in ranges {
        unregister(&own, LackingPart { range: *range, page_bytes: PAGE_BYTES })?;
    }
    Ok(())
}
