//! Content on its way to the pages: what page faults and the stream wait for, and chunks that were read last.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};

use fdmap_proto::{PageIndex, PageRange};

use super::super::super::PAGE_BYTES;
use super::super::super::chain::ChunkId;
use super::super::super::error::ImageError;
use super::super::content::Content;
use super::super::fill::Fill;
use super::super::pages::RegionPages;
use super::super::reads::{Priority, Reads};

/// Pages around a page fault that are filled with it, bytes.
const FAULT_BYTES: u64 = 128 << 10;
/// Memory for the content of page faults that wait, bytes. One may exceed it.
const MAX_FAULT_BYTES: u64 = 64 << 20;
/// The stream reads so much ahead, bytes. One fill may exceed it.
const MAX_STREAM_BYTES: u64 = 4 << 20;
/// Chunks that are kept after they were read: page faults are often near each other.
const MAX_KEPT_CHUNKS: usize = 16;

/// Fills that wait for their content.
pub(super) struct Supply<'a> {
    content: Content<'a>,
    reads: Reads,
    /// The one that was used last comes last.
    kept: VecDeque<(ChunkId, Vec<u8>)>,
    /// Chunks that cannot be read: they are not read again.
    failed: BTreeSet<ChunkId>,
    faults: VecDeque<Fill>,
    stream: VecDeque<Fill>,
}

impl<'a> Supply<'a> {
    pub(super) fn new(content: Content<'a>, reads: Reads) -> Self {
        let (kept, faults, stream) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { content, reads, kept, failed: BTreeSet::new(), faults, stream }
    }

    /// Begins to fill a page and its neighbours, as far as one chunk has them. No effect if it has begun before, or while too many others
    /// wait.
    pub(super) fn begin_fault(&mut self, number: usize, region: &RegionPages, page: PageIndex) {
        let is_same = |fill: &Fill| fill.region == number && fill.pages.contains(page);
        let held: u64 = self.faults.iter().map(Fill::bytes).sum();
        if self.faults.iter().any(is_same) || held >= MAX_FAULT_BYTES {
            return;
        }
        let mut pages = region.neighbours(page, (FAULT_BYTES / region.page_bytes()).max(1));
        if region.page_bytes() == PAGE_BYTES {
            let wanted = region.file_pages(PageRange::at(page, 1)).start();
            let pieces = self.content.pieces(region.file_pages(pages));
            let own = pieces.iter().find(|piece| piece.pages.contains(wanted));
            pages =
                own.map_or_else(|| PageRange::at(page, 1), |own| region.pages_of(own.pages).intersect(pages));
        }
        let fill = self.begun(number, region, pages, Priority::Fault);
        self.faults.push_back(fill);
    }

    /// True if the stream can read further pages ahead.
    pub(super) fn has_room_for_stream(&self) -> bool {
        self.stream.iter().map(Fill::bytes).sum::<u64>() < MAX_STREAM_BYTES
    }

    /// Begins to fill pages for the stream.
    pub(super) fn begin_stream(&mut self, number: usize, region: &RegionPages, pages: PageRange) {
        let fill = self.begun(number, region, pages, Priority::Stream);
        self.stream.push_back(fill);
    }

    fn begun(&mut self, number: usize, region: &RegionPages, pages: PageRange, priority: Priority) -> Fill {
        let file_pages = region.file_pages(pages);
        let mut fill = Fill::new(number, pages, file_pages, self.content.pieces(file_pages));
        let mut wanted: Vec<_> = fill.waits_for().collect();
        wanted.dedup();
        for chunk in wanted {
            if self.failed.contains(&chunk) {
                fill.supply(chunk, None);
            } else if let Some(at) = self.kept.iter().position(|(kept, _)| *kept == chunk) {
                let kept = self.kept.remove(at);
                fill.supply(chunk, kept.as_ref().map(|(_, bytes)| bytes.as_slice()));
                self.kept.extend(kept);
            } else {
                self.reads.request(chunk, priority);
            }
        }
        fill
    }

    /// Takes the chunks that were read. Calls `on_error` for each that cannot be read, and for each transient error: its read is repeated.
    ///
    /// # Errors
    /// [`ImageError::Cancelled`]
    pub(super) fn receive(&mut self, mut on_error: impl FnMut(&ImageError)) -> Result<(), ImageError> {
        for arrival in self.reads.take() {
            let bytes = match &arrival.result {
                Ok(bytes) => Some(bytes.as_slice()),
                Err(ImageError::Cancelled) => return Err(ImageError::Cancelled),
                Err(error) if error.is_transient() => {
                    on_error(error);
                    continue;
                }
                Err(error) => {
                    self.failed.insert(arrival.chunk);
                    on_error(error);
                    None
                }
            };
            for fill in self.faults.iter_mut().chain(&mut self.stream) {
                fill.supply(arrival.chunk, bytes);
            }
            if let Ok(bytes) = arrival.result {
                if self.kept.len() == MAX_KEPT_CHUNKS {
                    self.kept.pop_front();
                }
                self.kept.push_back((arrival.chunk, bytes));
            }
        }
        Ok(())
    }

    /// A fill for a page fault whose content is complete, as far as it can be read.
    pub(super) fn next_fault(&mut self) -> Option<Fill> {
        take_ready(&mut self.faults)
    }

    /// One for the stream.
    pub(super) fn next_of_stream(&mut self) -> Option<Fill> {
        take_ready(&mut self.stream)
    }
}

fn take_ready(fills: &mut VecDeque<Fill>) -> Option<Fill> {
    let at = fills.iter().position(Fill::is_ready)?;
    fills.remove(at)
}

/// Readable when chunks were read.
impl AsFd for Supply<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reads.as_fd()
    }
}
