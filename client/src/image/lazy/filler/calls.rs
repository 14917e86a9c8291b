//! The calls that fill pages, repeated while they fail for a moment.

use std::time::Duration;

use fdmap_proto::units::to_usize;
use fdmap_proto::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::{Errno, SyscallError};

use super::super::super::PAGE_BYTES;
use super::super::lacking::LackingPart;
use super::super::pages::Need;
use super::super::refusal::{self, CHANGE_INTERVAL, without_marker};
use super::{Filler, Stop};

/// Time until a call is repeated that found no memory.
const MEMORY_INTERVAL: Duration = Duration::from_millis(20);
/// Most tries to copy to a page of a mapping that is registered, but refuses it.
const MAX_COPY_ATTEMPTS: u32 = 1000;

impl Filler<'_> {
    /// Copies the content of `pages`, as far as they lack it: the process may remove some meanwhile.
    pub(super) fn copy(&mut self, region: usize, pages: PageRange, content: &[u8]) -> Result<u64, Stop> {
        let unit = self.regions[region].page_bytes();
        let (mut copied, mut attempts) = (0, 0);
        // After a range that is not one mapping.
        let mut single = false;
        while let Some(run) = self.regions[region].missing_run(pages.start(), pages.end()) {
            self.control.check()?;
            let run = if single { PageRange::at(run.start(), 1) } else { run };
            let skipped = to_usize((run.start().0 - pages.start().0) * unit);
            let bytes = &content[skipped..skipped + to_usize(run.len() * unit)];
            let to = self.regions[region].addresses(run).start;
            match self.uffd.copy(to, bytes) {
                Ok(filled) if !filled.is_multiple_of(unit) => return Err(part_of_page(filled, to).into()),
                Ok(filled) => {
                    let done = self.regions[region].settle(PageRange::at(run.start(), filled / unit));
                    copied += done;
                    self.control.advance(done, filled);
                }
                // Another mapping of the file, or an earlier access, has it: content of the process is never replaced.
                Err(SyscallError { errno: Errno::EEXIST, .. }) => {
                    let first = PageRange::at(run.start(), 1);
                    let done = self.regions[region].settle(first);
                    self.counts.existing_pages += done;
                    self.control.advance(done, 0);
                    self.uffd.wake(self.regions[region].addresses(first))?;
                }
                Err(SyscallError { errno: Errno::ENOENT, .. }) if run.len() > 1 => single = true,
                Err(error) if error.errno == Errno::ENOENT => {
                    attempts += 1;
                    if self.settle_unregistered(region, run.start())? == 0 {
                        if attempts == MAX_COPY_ATTEMPTS {
                            return Err(error.into());
                        }
                        std::thread::sleep(CHANGE_INTERVAL);
                    }
                }
                Err(error) => self.pause(error)?,
            }
        }
        Ok(copied)
    }

    /// Settles the pages that lack content from `page` on whose addresses have no registered mapping any more, up to the first one that has
    /// one, except those that were moved meanwhile: the event of that can come after they are gone. Returns their number.
    fn settle_unregistered(&mut self, region: usize, page: PageIndex) -> Result<u64, Stop> {
        let pages = &self.regions[region];
        let Some(run) = pages.missing_run(page, PageIndex(u64::MAX)) else { return Ok(0) };
        let range = pages.addresses(run);
        let registered = self.guest.registered(range).map_err(|error| self.stop(error))?;
        let end = registered.iter().map(|part| part.start.max(range.start)).min().unwrap_or(range.end);
        let gone = (end.min(range.end) - range.start) / pages.page_bytes();
        self.read_until_unchanged()?;
        let done = self.regions[region].settle(PageRange::at(run.start(), gone));
        self.counts.removed_pages += done;
        self.control.advance(done, 0);
        Ok(done)
    }

    /// Reads events until no thread changes the address space that began before.
    fn read_until_unchanged(&mut self) -> Result<(), Stop> {
        loop {
            self.control.check()?;
            self.read_events()?;
            if !self.uffd.is_changing() {
                return Ok(());
            }
            // Their descriptors may be too many for the event of a fork.
            self.children.advance();
            std::thread::sleep(CHANGE_INTERVAL);
        }
    }

    /// The address space has ended, or else the error. `/proc/PID` ends with the process, whose address space may have other users.
    fn stop(&self, error: SyscallError) -> Stop {
        match self.uffd.address_space_exists() {
            Some(false) => Stop::Ended,
            Some(true) => Stop::Failed(error.into()),
            None => error.into(),
        }
    }

    /// Fills a page without data, as long as it is one: the process may move other memory there meanwhile. What exists stays.
    pub(super) fn zero(&mut self, region: usize, page: PageIndex) -> Result<(), Stop> {
        let range = self.regions[region].addresses(PageRange::at(page, 1));
        self.zero_range(range, |filler| {
            filler.regions[region].need(page) == Need::Zero && !filler.is_moved(range.start)
        })
    }

    /// Fills a page without data in memory that was moved, as long as it is one. What exists stays.
    pub(super) fn zero_moved(&mut self, address: u64) -> Result<(), Stop> {
        let is_wanted = |filler: &Self| {
            let lacks_content = filler.lacking.covers(address) || filler.refused.covers(address);
            filler.moved.covers(address) && !lacks_content
        };
        self.zero_range(self.page_at(address), is_wanted)
    }

    /// Makes accesses raise SIGBUS to an address where memory lacked content when it was moved there.
    pub(super) fn poison_refused(&mut self, address: u64) -> Result<(), Stop> {
        self.poison(self.page_at(address), |filler| filler.refused.covers(address))
    }

    /// The page at an address.
    fn page_at(&self, address: u64) -> AddressRange {
        let unit = self.page_bytes_at(address);
        let start = address - address % unit;
        AddressRange { start, end: start + unit }
    }

    fn zero_range(&mut self, range: AddressRange, is_wanted: impl Fn(&Self) -> bool) -> Result<(), Stop> {
        while is_wanted(self) {
            self.control.check()?;
            let filled = if range.len() == PAGE_BYTES {
                without_marker(self.uffd, range, || self.uffd.zero(range))
            } else {
                // hugetlb has no UFFDIO_ZEROPAGE. A copy replaces markers.
                self.uffd.copy(range.start, &vec![0; to_usize(range.len())])
            };
            match filled {
                Ok(_) => {
                    self.counts.zero_pages += 1;
                    return Ok(());
                }
                // It exists, or is not mapped any more: the thread tries again.
                Err(SyscallError { errno: Errno::EEXIST | Errno::ENOENT, .. }) => {
                    return Ok(self.uffd.wake(range)?);
                }
                // Its pages are larger: no mapping that was handed off.
                Err(SyscallError { errno: Errno::EINVAL, .. }) => return Ok(()),
                Err(error) => self.pause(error)?,
            }
        }
        Ok(())
    }

    /// Makes accesses to a page raise SIGBUS, as long as it is damaged: the process may remove it meanwhile.
    pub(super) fn poison_damaged(&mut self, region: usize, page: PageIndex) -> Result<(), Stop> {
        let range = self.regions[region].addresses(PageRange::at(page, 1));
        self.poison(range, |filler| filler.regions[region].need(page) == Need::Damaged)
    }

    /// Makes accesses to a page raise SIGBUS, as long as `is_wanted`. Where the kernel cannot do that, they wait for ever.
    pub(super) fn poison(
        &mut self,
        range: AddressRange,
        is_wanted: impl Fn(&Self) -> bool,
    ) -> Result<(), Stop> {
        while is_wanted(self) {
            self.control.check()?;
            match without_marker(self.uffd, range, || self.uffd.poison(range)) {
                Ok(_) | Err(SyscallError { errno: Errno::EINVAL, .. }) => return Ok(()),
                // It exists, or is not mapped any more: the thread tries again.
                Err(SyscallError { errno: Errno::EEXIST | Errno::ENOENT, .. }) => {
                    return Ok(self.uffd.wake(range)?);
                }
                Err(error) => self.pause(error)?,
            }
        }
        Ok(())
    }

    /// Makes accesses to an address raise SIGBUS for which no content is known: memory that was moved, or a mapping that grew.
    pub(super) fn poison_unknown(&mut self, address: u64) -> Result<(), Stop> {
        self.poison(self.page_at(address), |_| true)
    }

    /// Removes the write protection of a page: no writes are tracked here.
    pub(super) fn unprotect(&mut self, address: u64) -> Result<(), Stop> {
        let page = self.page_at(address);
        loop {
            self.control.check()?;
            match self.uffd.write_protect(page, false) {
                Ok(()) | Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) => return Ok(()),
                Err(error) => self.pause(error)?,
            }
        }
    }

    /// Makes accesses to memory that was moved raise SIGBUS where it lacks content. While the address space changes, a later call continues.
    pub(super) fn refuse_moved(&mut self) -> Result<(), Stop> {
        if self.lacking.is_empty() || !self.uffd.can_poison() {
            return Ok(());
        }
        self.has_changed = true;
        match self.poison_lacking() {
            Ok(()) | Err(SyscallError { errno: Errno::EAGAIN | Errno::ENOMEM, .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn poison_lacking(&mut self) -> Result<(), SyscallError> {
        // Other memory may be moved there later.
        let refused = &mut self.refused;
        self.poisoner.poison(self.uffd, &mut self.lacking, |range| drop(refused.remove(range)))
    }

    fn unregister(&self, part: LackingPart) -> Result<(), Stop> {
        // ENOMEM stands for the end of the address space, too.
        refusal::unregister(self.uffd, part).map_err(|error| self.stop(error))
    }

    /// Waits before a call is repeated: after EAGAIN and ENOMEM, a later one can succeed. Returns any other error.
    fn pause(&mut self, error: SyscallError) -> Result<(), Stop> {
        match error.errno {
            Errno::EAGAIN => {
                self.read_events()?;
                self.children.advance();
                std::thread::sleep(CHANGE_INTERVAL);
            }
            // The thread that accesses the page waits longer.
            Errno::ENOMEM => std::thread::sleep(MEMORY_INTERVAL),
            _ => return Err(error.into()),
        }
        Ok(())
    }

    /// Makes accesses to all pages that lack content raise SIGBUS, and unregisters the mappings. If the kernel cannot do the first, they stay
    /// registered: accesses wait as long as the process has the userfaultfd open. Repeats what fails for as long as the address space
    /// exists.
    pub(super) fn abandon(&mut self) {
        if !self.uffd.can_poison() {
            return;
        }
        self.lacking = self.all_lacking();
        for region in &mut self.regions {
            region.remove(region.all_addresses());
        }
        loop {
            let interval = match self.poison_lacking().map_err(|error| error.errno) {
                Ok(()) if self.is_settled() => break,
                Err(Errno::ESRCH) => return,
                Err(Errno::ENOMEM) => MEMORY_INTERVAL,
                Ok(()) | Err(_) => CHANGE_INTERVAL,
            };
            // What fails in this, as for too many open descriptors, is repeated.
            let _ = self.read_events();
            self.children.advance();
            std::thread::sleep(interval);
        }
        // Accesses to pages that lack content cannot find zero any more, whether this succeeds or not.
        let _ = self.release();
    }

    /// Unregisters all mappings, when no memory lacks content. From then on the kernel fills absent pages with zeroes. Returns when no thread
    /// waits for an event.
    pub(super) fn release(&mut self) -> Result<(), Stop> {
        for region in &self.regions {
            self.unregister(LackingPart { range: region.all_addresses(), page_bytes: region.page_bytes() })?;
        }
        // A thread that began to remove or to move pages before waits until its event is read, as long as the process has a descriptor.
        loop {
            self.read_events()?;
            while let Some(part) = self.moved.pop() {
                self.unregister(part)?;
            }
            if !self.uffd.is_changing() {
                return Ok(());
            }
            self.children.advance();
            std::thread::sleep(CHANGE_INTERVAL);
        }
    }
}

/// The kernel filled a part of a page: the mapping has smaller pages.
fn part_of_page(bytes: u64, address: u64) -> SyscallError {
    SyscallError {
        call: format!("UFFDIO_COPY to {address:#x}: {bytes} bytes of a page"),
        errno: Errno::EINVAL,
    }
}
