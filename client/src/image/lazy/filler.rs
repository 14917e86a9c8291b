//! Fills the absent pages of another mapping, or of this process, from an image.
//!
//! One thread reads the events and fills the pages: when it has read that a process removes pages, it never copies their old content.
//! It never waits for the image: other threads read it (see `reads`). Page faults come before the stream of all other pages.
//!
//! # Zero is never read in place of content
//!
//! A registered mapping gives no page of its own: an access to an absent page waits. So a page can be read as zero only after it was filled
//! with zeroes here, or after its mapping was unregistered.
//!
//! 1. Each page that the image has begins as *missing*. It is settled when `UFFDIO_COPY` filled it, when it exists (`EEXIST`), when an event
//!    reports that the process removed, unmapped or moved it, and when `/proc/PID/smaps` shows that its address has no mapping that is
//!    registered. `ENOENT` alone settles nothing. A page that cannot be read is *damaged*, and no longer missing.
//! 2. Zeroes fill only pages that are neither missing nor damaged nor lack content since they were moved, and that no event concerns which
//!    is not read: the kernel refuses all calls meanwhile (`EAGAIN`), and after the event all of this is checked again.
//! 3. Mappings are unregistered when no page is missing or damaged, or after all of these were poisoned. That holds for memory that was
//!    moved, too: the kernel does not refuse to unregister while memory that lacks content is moved there.
//! 4. Pages that lack content when they are moved or copied to a child are poisoned there: see `refusal`. The event of memory that was
//!    unmapped can come after others have been mapped or moved there, so it changes nothing of this.
//! 5. Content that was read is copied only to pages that are missing at that moment. A page that is settled or damaged never becomes missing
//!    again, so it does not matter how long the read took and what changed meanwhile. A part that cannot be read is in no copy: see `fill`.
//!
//! The events of changes that overlap in time come in any order: see `changes`. Children are held until it is known what was moved before
//! them. Not handled: a move that overlaps a fork, and whose event is lost since the process ends or executes a program, or comes later than
//! [`HOLD_TIMEOUT`](super::spaces); and MADV_DONTNEED of memory that is moved between its event and its effect.
//!
//! At hand-off, all mappings are registered for missing pages and have the stated page size, so that a settled page is a whole one.

mod calls;
mod supply;

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use fdmap_proto::PageRange;
use fdmap_sys::address::AddressRange;
use fdmap_sys::sched::set_time_slice;
use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::PAGE_BYTES;
use super::super::chain::{ImageChain, ImageFile};
use super::super::error::ImageError;
use super::super::progress::{Control, Phase};
use super::changes::Move;
use super::content::Content;
use super::faults::FaultQueue;
use super::fill::Fill;
use super::lacking::{Lacking, LackingPart};
use super::order::order;
use super::pages::{Need, RegionPages};
use super::reads::{FAULT_SLICE, Reads};
use super::refusal::{CHANGE_INTERVAL, Poisoner};
use super::spaces::{Following, MAX_EVENTS, RefusedSpaces};
use super::{LazyCounts, LazyEnd, LazyNotice, LazyRegion};
use supply::Supply;

/// Pages that the stream copies between two looks at the page faults, bytes.
const STREAM_BYTES: u64 = 256 << 10;
/// Longest time in which the end of the process is noticed, milliseconds.
const IDLE_MILLIS: u8 = 50;
/// Shortest time between two reports of repeated reads.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);
/// Time in which the thread that waited for an event begins to run, and time in which it ends its change. If its pause until the next change
/// is not noticed, both count as such that overlap.
const WAKE_TIMEOUT: Duration = Duration::from_micros(50);
const CHANGE_TIMEOUT: Duration = Duration::from_millis(2);
/// Time until address spaces that change are poisoned again, milliseconds.
const REFUSED_MILLIS: u8 = 1;

/// The process that accesses the pages.
pub(super) trait Guest {
    /// True if it has ended. Its address space may have other users.
    fn has_ended(&self) -> bool;
    /// The parts of a range that are mapped and registered for missing pages now.
    fn registered(&self, range: AddressRange) -> Result<Vec<AddressRange>, SyscallError>;
    /// True if a thread waits until all content is copied, which fails where content cannot be read.
    fn is_awaited(&self) -> bool;
    /// Content could not be read.
    fn notice(&self, notice: LazyNotice<'_>);
}

/// Reason to end.
enum Stop {
    /// The address space has ended.
    Ended,
    Failed(ImageError),
}

impl From<ImageError> for Stop {
    fn from(error: ImageError) -> Self {
        Self::Failed(error)
    }
}

impl From<SyscallError> for Stop {
    fn from(error: SyscallError) -> Self {
        if error.errno == Errno::ESRCH { Self::Ended } else { Self::Failed(error.into()) }
    }
}

/// Fills the mappings of one userfaultfd.
pub(super) struct Filler<'a> {
    uffd: &'a Userfaultfd,
    regions: Vec<RegionPages>,
    supply: Supply<'a>,
    /// Pages to copy, in this order; those that were copied before are skipped.
    stream: VecDeque<(usize, PageRange)>,
    faults: FaultQueue,
    /// Page faults that wait are to be looked at again.
    has_changed: bool,
    /// Addresses of writes to write-protected pages that wait.
    protected: VecDeque<u64>,
    /// What lacks content and gets none: memory that the process moved, or all that is left.
    lacking: Lacking,
    poisoner: Poisoner,
    /// Addresses to which the process moved memory, which is still registered.
    moved: Lacking,
    /// Those of them where it lacked content: they have poison, or a page. A zero fill of a huge page would replace poison.
    refused: Lacking,
    following: Following,
    /// Children that were forked.
    children: RefusedSpaces,
    /// The first reason why content cannot be read.
    damage: Option<String>,
    /// When a repeated read was reported.
    noticed: Option<Instant>,
    control: &'a Control,
    guest: &'a dyn Guest,
    counts: LazyCounts,
}

impl<'a> Filler<'a> {
    pub(super) fn new(
        uffd: &'a Userfaultfd,
        regions: &[LazyRegion],
        chain: &'a ImageChain,
        file: &'a ImageFile,
        control: &'a Control,
        guest: &'a dyn Guest,
        reads: Reads,
    ) -> Self {
        let stored = || file.extents.iter().map(|extent| extent.range);
        let regions: Vec<_> = regions.iter().map(|region| RegionPages::new(*region, stored())).collect();
        let mut stream = VecDeque::new();
        for range in order(file) {
            let parts = regions.iter().map(|region| region.pages_of(range)).enumerate();
            stream.extend(parts.filter(|(_, pages)| !pages.is_empty()));
        }
        control.begin_round();
        control.expect(regions.iter().map(RegionPages::missing_pages).sum());
        control.enter(Phase::Copying);
        let content = Content::new(&file.extents, |first| chain.chunk_of(file.inode.shmid, first));
        Self {
            uffd,
            regions,
            supply: Supply::new(content, reads),
            stream,
            faults: FaultQueue::default(),
            has_changed: false,
            protected: VecDeque::new(),
            lacking: Lacking::default(),
            poisoner: Poisoner::default(),
            moved: Lacking::default(),
            refused: Lacking::default(),
            following: Following::default(),
            children: RefusedSpaces::default(),
            damage: None,
            noticed: None,
            control,
            guest,
            counts: LazyCounts::default(),
        }
    }

    /// Fills all pages, and unregisters the mappings: then no content is missing, and absent pages are holes. Where content cannot be read,
    /// it serves page faults until the process ends. After an error and a cancellation, accesses to the pages that are missing raise SIGBUS.
    ///
    /// # Errors
    /// [`ImageError`]
    pub(super) fn run(mut self) -> Result<(LazyEnd, LazyCounts), ImageError> {
        // An error of these calls costs time only.
        let before = set_time_slice(FAULT_SLICE);
        let filled = self.fill_all();
        if let Err(Stop::Failed(_)) = &filled {
            self.abandon();
        }
        self.children.add(self.following.release());
        self.children.finish();
        let _ = before.and_then(set_time_slice);
        match filled {
            Ok(()) => Ok((LazyEnd::Complete, self.counts)),
            Err(Stop::Ended) => Ok((LazyEnd::ProcessEnded, self.counts)),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    fn fill_all(&mut self) -> Result<(), Stop> {
        loop {
            self.control.check()?;
            // Other processes, as of vfork(2), may use its address space.
            if self.guest.has_ended() && self.uffd.address_space_exists() != Some(true) {
                return Err(Stop::Ended);
            }
            self.read_events()?;
            self.refuse_moved()?;
            self.children.advance();
            while let Some(address) = self.protected.pop_front() {
                self.unprotect(address)?;
            }
            self.receive()?;
            self.serve_faults()?;
            if let Some(fill) = self.supply.next_fault() {
                self.counts.fault_pages += self.settle(&fill)?;
                continue;
            }
            self.feed_stream();
            if let Some(fill) = self.supply.next_of_stream() {
                self.counts.streamed_pages += self.settle(&fill)?;
                continue;
            }
            if self.has_changed || self.faults.is_due() || !self.protected.is_empty() {
                continue;
            }
            let is_read = self.regions.iter().all(|region| region.missing_pages() == 0);
            let has_damaged = self.regions.iter().any(RegionPages::has_damaged);
            if is_read && !has_damaged && self.is_settled() {
                return self.release();
            }
            if is_read && has_damaged && self.guest.is_awaited() {
                return Err(self.first_damage().into());
            }
            // Else it serves page faults, as long as the process runs.
            self.wait()?;
        }
    }

    /// True if no memory that was moved lacks content, as far as the order of the changes is known.
    fn is_settled(&self) -> bool {
        self.lacking.is_empty() && !self.following.is_open()
    }

    fn first_damage(&self) -> ImageError {
        let pages = self.counts.damaged_pages;
        ImageError::Damaged { pages, first: self.damage.clone().unwrap_or_default() }
    }

    /// Takes the chunks that were read. Remembers and reports why one cannot be read.
    fn receive(&mut self) -> Result<(), ImageError> {
        let (guest, damage, counts) = (self.guest, &mut self.damage, &mut self.counts);
        let noticed = &mut self.noticed;
        self.supply.receive(|error| {
            if !error.is_transient() {
                damage.get_or_insert_with(|| fdmap_proto::error_chain(error));
                return guest.notice(LazyNotice::Damaged(error));
            }
            counts.repeated_reads += 1;
            if noticed.is_none_or(|before: Instant| before.elapsed() > NOTICE_INTERVAL) {
                *noticed = Some(Instant::now());
                guest.notice(LazyNotice::Repeated(error));
            }
        })
    }

    fn wait(&self) -> Result<(), Stop> {
        let is_idle = self.children.is_empty() && self.is_settled();
        let mut polled =
            [self.uffd.as_fd(), self.supply.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let timeout = PollTimeout::from(if is_idle { IDLE_MILLIS } else { REFUSED_MILLIS });
        match poll(&mut polled, timeout) {
            // After execve(2), the process has another one.
            Ok(0) if self.uffd.address_space_exists() == Some(false) => return Err(Stop::Ended),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => {
                // The process, which shares the flags of the descriptor, may have cleared this one.
                if polled[0].revents().is_some_and(|found| found.contains(PollFlags::POLLERR)) {
                    self.uffd.set_nonblocking()?;
                    std::thread::sleep(CHANGE_INTERVAL);
                }
            }
            Err(errno) => return Err(SyscallError { call: "poll of a userfaultfd".to_owned(), errno }.into()),
        }
        Ok(())
    }

    fn read_events(&mut self) -> Result<(), Stop> {
        let began = Instant::now();
        for _ in 0..MAX_EVENTS {
            self.children.add(self.following.settle(self.uffd));
            let event = match self.uffd.read_event() {
                Ok(Some(event)) => event,
                Ok(None) if self.following.is_open() && began.elapsed() < CHANGE_TIMEOUT => {
                    std::thread::yield_now();
                    continue;
                }
                Ok(None) => return Ok(()),
                // A fork, which waits until this process has closed others. The next call reads the next event.
                Err(SyscallError { errno: Errno::EMFILE | Errno::ENFILE, .. }) => {
                    std::thread::sleep(CHANGE_INTERVAL);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            // Before the event is handled, which can take longer than the pause until the next change.
            let is_last = is_followed(&event) && self.ends_at_once();
            match event {
                UffdEvent::PageFault { address } => {
                    self.counts.faults += 1;
                    self.faults.push(address);
                }
                UffdEvent::WriteProtectFault { address } => self.protected.push_back(address),
                UffdEvent::Remove(range) => {
                    self.remove(range);
                    self.lacking.remove(range);
                    self.refused.remove(range);
                }
                UffdEvent::Unmap(range) => {
                    self.following.unmap(self.lacking_within(range));
                    self.remove(range);
                }
                UffdEvent::Fork(child) => self.following.fork(child, self.all_lacking()),
                UffdEvent::Remap { from, to, len } => self.relocate(from, to, len),
                UffdEvent::Other(_) => {}
            }
            if is_last {
                self.children.add(self.following.close());
            }
        }
        Ok(())
    }

    /// True if the changes end at once whose events were read: another one can follow within a microsecond.
    fn ends_at_once(&self) -> bool {
        let began = Instant::now();
        while self.uffd.is_changing() {
            if began.elapsed() > WAKE_TIMEOUT {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    fn remove(&mut self, range: AddressRange) {
        let removed: u64 = self.regions.iter_mut().map(|region| region.remove(range)).sum();
        self.counts.removed_pages += removed;
        self.control.advance(removed, 0);
        self.has_changed = true;
    }

    /// All pages of the address space that lack content.
    fn all_lacking(&self) -> Lacking {
        let mut lacking = self.lacking_regions();
        lacking.merge(self.lacking.parts());
        lacking
    }

    /// All pages of the mappings that lack content.
    fn lacking_regions(&self) -> Lacking {
        let mut lacking = Lacking::default();
        for region in &self.regions {
            region.lacking().into_iter().for_each(|range| lacking.add(range, region.page_bytes()));
        }
        lacking
    }

    /// The pages of the mappings in a range that lack content.
    fn lacking_within(&self, range: AddressRange) -> Vec<LackingPart> {
        let overlaps = |region: &&RegionPages| !region.all_addresses().intersect(range).is_empty();
        let parts = self.regions.iter().filter(overlaps).flat_map(|region| {
            let page_bytes = region.page_bytes();
            region
                .lacking()
                .into_iter()
                .map(move |part| LackingPart { range: part.intersect(range), page_bytes })
        });
        parts.filter(|part| !part.range.is_empty()).collect()
    }

    /// The process moved memory, over what was at the new address. With MREMAP_DONTUNMAP, the old mapping stays, and is empty.
    fn relocate(&mut self, from: u64, to: u64, len: u64) {
        let Some(moved) = Move::new(from, to, len, self.page_bytes_at(from)) else { return };
        let mut of_regions = Lacking::default();
        of_regions.merge(self.lacking_within(moved.source));
        of_regions.merge(self.lacking_within(moved.target));
        self.following.relocate(moved, &of_regions, [&mut self.lacking, &mut self.refused]);
        self.remove(moved.source);
        self.remove(moved.target);
        self.moved.remove(moved.target);
        self.moved.add(moved.target, moved.page_bytes);
    }

    /// The page size of memory at an address, which may have been moved there.
    fn page_bytes_at(&self, address: u64) -> u64 {
        let of_region = || {
            let found = self.regions.iter().find(|region| region.all_addresses().contains(address))?;
            Some(found.page_bytes())
        };
        self.moved.page_bytes_at(address).or_else(of_region).unwrap_or(PAGE_BYTES)
    }

    /// Serves page faults as far as their content was read.
    fn serve_faults(&mut self) -> Result<(), Stop> {
        if std::mem::take(&mut self.has_changed) {
            self.faults.retry();
        }
        while let Some(address) = self.faults.pop() {
            if !self.serve(address)? {
                self.faults.wait(address);
            }
        }
        Ok(())
    }

    /// Serves a page fault. Returns false if its content is not read yet.
    fn serve(&mut self, address: u64) -> Result<bool, Stop> {
        if self.lacking.covers(address) {
            // It waits for the poison, or until the process removes or moves the page.
            return Ok(false);
        }
        if self.refused.covers(address) {
            self.poison_refused(address)?;
            return Ok(true);
        }
        if self.moved.covers(address) {
            self.zero_moved(address)?;
            return Ok(true);
        }
        let found =
            self.regions.iter().enumerate().find_map(|(at, region)| Some((at, region.page_at(address)?)));
        let Some((region, page)) = found else { return self.poison_unknown(address).map(|()| true) };
        let pages = &self.regions[region];
        match pages.need(page) {
            Need::Content => {
                self.supply.begin_fault(region, pages, page);
                return Ok(false);
            }
            Need::Damaged => self.poison_damaged(region, page)?,
            // Also a page that was filled since: it exists, and stays.
            Need::Zero => self.zero(region, page)?,
        }
        Ok(true)
    }

    /// True for an address to which memory was moved.
    fn is_moved(&self, address: u64) -> bool {
        self.lacking.covers(address) || self.moved.covers(address)
    }

    /// Has the next pages read for the stream.
    fn feed_stream(&mut self) {
        while self.supply.has_room_for_stream()
            && let Some((region, pages)) = self.next_of_stream()
        {
            self.supply.begin_stream(region, &self.regions[region], pages);
        }
    }

    fn next_of_stream(&mut self) -> Option<(usize, PageRange)> {
        while let Some((region, range)) = self.stream.front_mut() {
            let pages = &self.regions[*region];
            if let Some(run) = pages.missing_run(range.start(), range.end()) {
                let count = run.len().min((STREAM_BYTES / pages.page_bytes()).max(1));
                let next = PageRange::at(run.start(), count);
                *range = PageRange::new(next.end(), range.end())?;
                return Some((*region, next));
            }
            self.stream.pop_front();
        }
        None
    }

    /// Copies the content that was read to the pages that lack it. Returns how many were copied. Accesses to the others raise SIGBUS.
    fn settle(&mut self, fill: &Fill) -> Result<u64, Stop> {
        // Threads wait for pages that are not registered any more, too.
        self.has_changed = true;
        for page in fill.failed() {
            if self.regions[fill.region].need(page) == Need::Content {
                self.regions[fill.region].damage(PageRange::at(page, 1));
                self.counts.damaged_pages += 1;
                self.poison_damaged(fill.region, page)?;
            }
        }
        let parts = fill.parts();
        parts
            .into_iter()
            .try_fold(0, |sum, (pages, content)| Ok(sum + self.copy(fill.region, pages, content)?))
    }
}

/// True for the events of changes whose order matters.
const fn is_followed(event: &UffdEvent) -> bool {
    matches!(event, UffdEvent::Unmap(_) | UffdEvent::Fork(_) | UffdEvent::Remap { .. })
}
