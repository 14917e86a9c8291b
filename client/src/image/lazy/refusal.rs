//! Pages that get no content any more: accesses to those that lack it raise SIGBUS.
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
//!    child is poisoned by its own descriptor, as are its children (see `spaces`). A child that is forked after that inherits the poison.
//!
//! Before Linux 6.6, pages cannot be poisoned: then mappings stay registered, and accesses wait for as long as the process itself has a
//! descriptor of its userfaultfd open; those of children until the children end, for which this process waits.

use std::time::Duration;

use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError};

use super::lacking::{Lacking, LackingPart};

/// Time until a call is repeated while the address space changes.
pub(super) const CHANGE_INTERVAL: Duration = Duration::from_micros(50);
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

/// What became of pages that lack content.
enum Done {
    /// So many bytes are poisoned, or exist, or have pages that cannot be poisoned.
    Refused(u64),
    /// The first page is not registered.
    Gone,
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
    /// Poisons all that lacks content. After an error, what is left in `lacking` was not poisoned. `gone` gets the ranges that are not
    /// registered.
    ///
    /// # Errors
    /// `EAGAIN` until the events of the address space are read; `ENOMEM`; `ESRCH` if the address space has ended.
    pub(super) fn poison(
        &mut self,
        uffd: &Userfaultfd,
        lacking: &mut Lacking,
        mut gone: impl FnMut(AddressRange),
    ) -> Result<(), SyscallError> {
        while let Some(part) = lacking.first() {
            let bytes = match self.poison_first(uffd, part)? {
                Done::Refused(bytes) => bytes,
                Done::Gone => {
                    let start = part.range.start;
                    gone(AddressRange { start, end: start + part.page_bytes });
                    part.page_bytes
                }
            };
            lacking.settle(bytes);
        }
        Ok(())
    }

    /// Poisons pages from the start of the part on.
    fn poison_first(&mut self, uffd: &Userfaultfd, part: LackingPart) -> Result<Done, SyscallError> {
        let LackingPart { range, page_bytes } = part;
        loop {
            let len = range.len().min(self.limit).max(page_bytes);
            let run = AddressRange { start: range.start, end: range.start + len };
            let first = AddressRange { start: range.start, end: range.start + page_bytes };
            match without_marker(uffd, first, || uffd.poison(run)) {
                Ok(bytes) => {
                    self.limit = len.saturating_mul(2);
                    return Ok(Done::Refused(bytes));
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
                    return Ok(Done::Refused(page_bytes));
                }
                Err(error) if error.errno == Errno::EINVAL => return self.poison_huge(uffd, part, error),
                Err(error) if error.errno == Errno::ENOENT => {
                    return unless_changing(uffd, Done::Gone, error);
                }
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
    ) -> Result<Done, SyscallError> {
        let LackingPart { range, page_bytes } = part;
        let fits =
            |huge: &u64| *huge > page_bytes && range.start.is_multiple_of(*huge) && range.len() >= *huge;
        // The smaller first: the kernel refuses a part of a huge page, and takes several.
        for huge in HUGE_PAGES.into_iter().rev().filter(fits) {
            let page = AddressRange { start: range.start, end: range.start + huge };
            match without_marker(uffd, page, || uffd.poison(page)) {
                Ok(bytes) => {
                    self.limit = huge.saturating_mul(2);
                    return Ok(Done::Refused(bytes));
                }
                Err(SyscallError { errno: Errno::EEXIST, .. }) => {
                    uffd.wake(page)?;
                    return Ok(Done::Refused(huge));
                }
                Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        unless_changing(uffd, Done::Refused(page_bytes), refused)
    }
}

/// A page for which the kernel finds no mapping is done, unless it is being moved: the kernel looks for its mapping before it looks for that
/// again.
fn unless_changing(uffd: &Userfaultfd, done: Done, error: SyscallError) -> Result<Done, SyscallError> {
    if uffd.is_changing() { Err(SyscallError { errno: Errno::EAGAIN, ..error }) } else { Ok(done) }
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
