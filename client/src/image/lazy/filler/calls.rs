//! The calls that fill pages, repeated while they fail for a moment.

use std::time::Duration;

use fdmap_proto::units::to_usize;
use fdmap_proto::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError};

use super::super::super::PAGE_BYTES;
use super::super::pages::{Need, RegionPages};
use super::{Filler, Stop};

/// Time until a call is repeated while the address space changes.
const CHANGE_INTERVAL: Duration = Duration::from_micros(50);
/// Time until a call is repeated that found no memory.
const MEMORY_INTERVAL: Duration = Duration::from_millis(20);
/// A child whose address space changes all the time delays its parent for about this number of intervals.
const MAX_CHILD_ATTEMPTS: u32 = 10_000;

impl Filler<'_> {
    /// Copies the content of `pages`, as far as they lack it: the process may remove some meanwhile.
    pub(super) fn copy(&mut self, region: usize, pages: PageRange, content: &[u8]) -> Result<u64, Stop> {
        let unit = self.regions[region].page_bytes();
        let (mut at, mut copied) = (pages.start(), 0);
        // After a range that is not one mapping.
        let mut single = false;
        while let Some(run) = self.regions[region].missing_run(at, pages.end()) {
            self.control.check()?;
            let run = if single { PageRange::at(run.start(), 1) } else { run };
            let skipped = to_usize((run.start().0 - pages.start().0) * unit);
            let bytes = &content[skipped..skipped + to_usize(run.len() * unit)];
            let to = self.regions[region].addresses(run).start;
            let first = PageRange::at(run.start(), 1);
            match self.uffd.copy(to, bytes) {
                Ok(filled) => {
                    let done = self.regions[region].settle(PageRange::at(run.start(), filled / unit));
                    copied += done;
                    self.control.advance(done, filled);
                }
                // Another mapping of the file, or an earlier access, has it: content of the process is never replaced.
                Err(SyscallError { errno: Errno::EEXIST, .. }) => {
                    let done = self.regions[region].settle(first);
                    self.counts.existing_pages += done;
                    self.control.advance(done, 0);
                    self.uffd.wake(self.regions[region].addresses(first))?;
                }
                Err(SyscallError { errno: Errno::ENOENT, .. }) if run.len() > 1 => single = true,
                // Not mapped any more.
                Err(SyscallError { errno: Errno::ENOENT, .. }) => {
                    let done = self.regions[region].settle(first);
                    self.counts.removed_pages += done;
                    self.control.advance(done, 0);
                }
                Err(error) => self.pause(error)?,
            }
            at = if single { at } else { run.start() };
        }
        Ok(copied)
    }

    /// Fills a page without data. What exists stays.
    pub(super) fn zero(&mut self, region: usize, page: PageIndex) -> Result<(), Stop> {
        let pages = &self.regions[region];
        let (range, unit) = (pages.addresses(PageRange::at(page, 1)), pages.page_bytes());
        loop {
            self.control.check()?;
            let filled = if unit == PAGE_BYTES {
                self.uffd.zero(range)
            } else {
                // hugetlb has no UFFDIO_ZEROPAGE.
                self.uffd.copy(range.start, &vec![0; to_usize(unit)])
            };
            match filled {
                Ok(_) => {
                    self.counts.zero_pages += 1;
                    return Ok(());
                }
                Err(SyscallError { errno: Errno::EEXIST, .. }) => return Ok(self.uffd.wake(range)?),
                Err(SyscallError { errno: Errno::ENOENT, .. }) => return Ok(()),
                Err(error) => self.pause(error)?,
            }
        }
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
            match self.uffd.poison(range) {
                Ok(_) => return Ok(()),
                Err(SyscallError { errno: Errno::EEXIST, .. }) => return Ok(self.uffd.wake(range)?),
                Err(SyscallError { errno: Errno::ENOENT | Errno::EINVAL, .. }) => return Ok(()),
                Err(error) => self.pause(error)?,
            }
        }
        Ok(())
    }

    /// Waits before a call is repeated: after EAGAIN and ENOMEM, a later one can succeed. Returns any other error.
    fn pause(&mut self, error: SyscallError) -> Result<(), Stop> {
        match error.errno {
            Errno::EAGAIN => {
                self.read_events()?;
                std::thread::sleep(CHANGE_INTERVAL);
            }
            // The thread that accesses the page waits longer.
            Errno::ENOMEM => std::thread::sleep(MEMORY_INTERVAL),
            _ => return Err(error.into()),
        }
        Ok(())
    }

    /// Makes accesses to all pages that lack content raise SIGBUS, and unregisters the mappings. If the kernel cannot do the first, they stay
    /// registered: accesses wait as long as the process has the userfaultfd open.
    pub(super) fn abandon(&mut self) {
        loop {
            match poison_missing(self.uffd, &mut self.regions, true) {
                Ok(()) => break,
                Err(error) => {
                    if self.pause(error).is_err() {
                        return;
                    }
                }
            }
        }
        // What fails belongs to a process that has ended.
        let _ = self.release();
    }

    /// Unregisters the mappings. From then on the kernel fills absent pages with zeroes. Returns when no thread waits for an event; false if
    /// a mapping stays registered, since the process maps memory of another kind in its place, or nothing.
    pub(super) fn release(&mut self) -> Result<bool, Stop> {
        for region in &self.regions {
            match self.uffd.unregister(region.all_addresses()) {
                Ok(()) => {}
                Err(SyscallError { errno: Errno::EINVAL, .. }) => return Ok(false),
                // ENOMEM stands for the end of the address space, too.
                Err(_) if self.uffd.address_space_exists() == Some(false) => return Err(Stop::Ended),
                Err(error) => return Err(error.into()),
            }
        }
        // A thread that began to remove pages before waits until its event is read, as long as the process has a descriptor.
        loop {
            self.read_events()?;
            if !self.uffd.is_changing() {
                return Ok(true);
            }
            std::thread::sleep(CHANGE_INTERVAL);
        }
    }
}

/// Makes accesses of a forked child to pages that lack content raise SIGBUS: it is not served, and without a descriptor they would be zero.
pub(super) fn refuse_child(child: &Userfaultfd, regions: &mut [RegionPages]) {
    for _ in 0..MAX_CHILD_ATTEMPTS {
        match poison_missing(child, regions, false) {
            Err(SyscallError { errno: Errno::EAGAIN | Errno::ENOMEM, .. }) => {}
            // What fails otherwise belongs to a child that has ended.
            Ok(()) | Err(_) => return,
        }
        while let Ok(Some(_)) = child.read_event() {}
        std::thread::sleep(CHANGE_INTERVAL);
    }
}

/// Poisons all pages that lack content in the address space of a userfaultfd. `settles`: they are not missing afterwards.
fn poison_missing(
    uffd: &Userfaultfd,
    regions: &mut [RegionPages],
    settles: bool,
) -> Result<(), SyscallError> {
    for region in regions {
        let mut at = PageIndex(0);
        while let Some(run) = region.missing_run(at, PageIndex(u64::MAX)) {
            let done = match uffd.poison(region.addresses(run)) {
                Ok(bytes) => bytes / region.page_bytes(),
                Err(SyscallError { errno: Errno::EEXIST | Errno::ENOENT, .. }) => 1,
                Err(error) => return Err(error),
            };
            if settles {
                region.settle(PageRange::at(run.start(), done));
            }
            at = run.start().plus(done);
        }
    }
    Ok(())
}
