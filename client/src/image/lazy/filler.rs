//! Fills the absent pages of another mapping, or of this process, from an image.
//!
//! One thread reads the events and fills the pages: when it has read that a process removes pages, it never copies their old content.
//! Page faults come before the stream of all other pages.

mod calls;

use std::collections::VecDeque;
use std::os::fd::AsFd as _;

use fdmap_proto::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::PAGE_BYTES;
use super::super::chain::{ImageChain, ImageFile};
use super::super::error::ImageError;
use super::super::progress::{Control, Phase};
use super::content::Content;
use super::order::order;
use super::pages::{Need, RegionPages};
use super::{LazyCounts, LazyEnd, LazyRegion};

/// Pages around a page fault that are filled with it, bytes.
const FAULT_BYTES: u64 = 128 << 10;
/// Pages that the stream copies between two looks at the page faults, bytes.
const STREAM_BYTES: u64 = 256 << 10;
/// Longest time in which the end of the process is noticed, milliseconds.
const IDLE_MILLIS: u8 = 50;

/// The process that accesses the pages.
pub(super) trait Guest {
    /// True if it has ended.
    fn has_ended(&self) -> bool;
    /// True if a thread waits until all content is copied, which fails where content cannot be read.
    fn is_awaited(&self) -> bool;
    /// The content of pages cannot be read: accesses to them raise SIGBUS.
    fn on_damage(&self, error: &ImageError);
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
    content: Content<'a>,
    /// Pages to copy, in this order; those that were copied before are skipped.
    stream: VecDeque<(usize, PageRange)>,
    /// Addresses of page faults that wait.
    faults: VecDeque<u64>,
    buffer: Vec<u8>,
    /// The first and the last reason why content could not be read.
    damage: Vec<String>,
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
        Self {
            uffd,
            regions,
            content: Content::new(chain.reader(file.inode.shmid), &file.extents),
            stream,
            faults: VecDeque::new(),
            buffer: Vec::new(),
            damage: Vec::new(),
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
        match self.fill_all() {
            Ok(()) => Ok((LazyEnd::Complete, self.counts)),
            Err(Stop::Ended) => Ok((LazyEnd::ProcessEnded, self.counts)),
            Err(Stop::Failed(error)) => {
                self.abandon();
                Err(error)
            }
        }
    }

    fn fill_all(&mut self) -> Result<(), Stop> {
        loop {
            self.control.check()?;
            if self.guest.has_ended() {
                return Err(Stop::Ended);
            }
            self.read_events()?;
            while let Some(address) = self.faults.pop_front() {
                self.counts.faults += 1;
                self.serve(address)?;
            }
            match self.next_of_stream() {
                Some((region, pages)) => self.counts.streamed_pages += self.fill(region, pages)?,
                // Else it serves page faults, as long as the process runs.
                None if self.is_complete() && self.release()? => return Ok(()),
                None if self.guest.is_awaited() => return Err(self.first_damage().into()),
                None => self.wait()?,
            }
        }
    }

    /// All content was copied, or was removed by the process.
    fn is_complete(&self) -> bool {
        self.regions.iter().all(|region| region.missing_pages() == 0 && !region.has_damaged())
    }

    fn first_damage(&mut self) -> ImageError {
        let pages = self.counts.damaged_pages;
        let first = self.damage.first().cloned().unwrap_or_default();
        ImageError::Damaged { pages, first }
    }

    /// Remembers and reports why content cannot be read, once for each chunk.
    fn note_damage(&mut self, error: &ImageError) {
        self.counts.damaged_pages += 1;
        let text = fdmap_proto::error_chain(error);
        if self.damage.last() != Some(&text) {
            self.guest.on_damage(error);
            self.damage.truncate(1);
            self.damage.push(text);
        }
    }

    fn wait(&self) -> Result<(), Stop> {
        let mut polled = [PollFd::new(self.uffd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::from(IDLE_MILLIS)) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(SyscallError { call: "poll of a userfaultfd".to_owned(), errno }.into()),
        }
    }

    fn read_events(&mut self) -> Result<(), Stop> {
        while let Some(event) = self.uffd.read_event()? {
            match event {
                UffdEvent::PageFault { address } => self.faults.push_back(address),
                UffdEvent::Remove(range) | UffdEvent::Unmap(range) => {
                    let removed: u64 = self.regions.iter_mut().map(|region| region.remove(range)).sum();
                    self.counts.removed_pages += removed;
                    self.control.advance(removed, 0);
                }
                UffdEvent::Fork(child) => calls::refuse_child(&child, &mut self.regions),
                // Page faults at the new addresses are refused.
                UffdEvent::Remap { .. } | UffdEvent::Other(_) => {}
            }
        }
        Ok(())
    }

    /// Fills the page of a page fault, and its neighbours.
    fn serve(&mut self, address: u64) -> Result<(), Stop> {
        let found =
            self.regions.iter().enumerate().find_map(|(at, region)| Some((at, region.page_at(address)?)));
        let Some((region, page)) = found else {
            // No content is known for it.
            let start = address - address % PAGE_BYTES;
            return self.poison(AddressRange { start, end: start + PAGE_BYTES }, |_| true);
        };
        let pages = &self.regions[region];
        if pages.need(page) == Need::Content {
            let neighbours = pages.neighbours(page, (FAULT_BYTES / pages.page_bytes()).max(1));
            self.counts.fault_pages += self.fill(region, neighbours)?;
        }
        self.poison_damaged(region, page)?;
        match self.regions[region].need(page) {
            Need::Damaged => Ok(()),
            // What was filled just now exists, and stays.
            Need::Zero | Need::Content => self.zero(region, page),
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

    /// Copies the content of pages that lack it. Returns how many were copied.
    fn fill(&mut self, region: usize, pages: PageRange) -> Result<u64, Stop> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let copied = match self.content.read(self.regions[region].file_pages(pages), &mut buffer) {
            Ok(()) => self.copy(region, pages, &buffer),
            // Others of these pages may be in another chunk.
            Err(_) if pages.len() > 1 => (pages.start().0..pages.end().0)
                .try_fold(0, |sum, page| Ok(sum + self.fill(region, PageRange::at(PageIndex(page), 1))?)),
            Err(error) => {
                self.note_damage(&error);
                self.regions[region].damage(pages);
                self.poison_damaged(region, pages.start()).map(|()| 0)
            }
        };
        self.buffer = buffer;
        copied
    }
}
