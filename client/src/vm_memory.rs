//! A file of the service as guest memory of [`vm_memory`], and the service's tracker behind its dirty queries.
//!
//! ```text
//!  vCPUs, devices, vm-memory --write--> mapping <--observes-- service
//!                                                                |
//!  dirty_at() <-- DirtyPages <-- update(): Checkpoint, Changes --+
//! ```
//!
//! Page tables tell of every write, whoever makes it: vCPUs, vhost-user devices, other processes. So
//! [`Bitmap::mark_dirty`] has nothing to do, and what [`Bitmap::dirty_at`] says holds for the generations that were asked
//! for last, not for this moment.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_proto::convert::FileName;
use fdmap_proto::units::{Generation, PageRange, PageSize, to_u64, to_usize};
use tokio::sync::Mutex;
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

use crate::grpc::{ChangedBatch, Changes, ChangesEncoding, ChangesOptions, Checkpoint};
use crate::{Client, ClientError, MappedFile};

/// Guest memory that is a file of the service.
pub type GuestRegion = GuestRegionMmap<DirtyPages>;

/// Maps a whole file as guest memory from `at` on. It is tracked, if [`MappedFile::track`] was called, until the last clone of
/// the region is dropped. Seal the file against shrinking: touching pages that it has lost raises `SIGBUS`.
///
/// # Errors
/// [`ClientError::Guest`] if the file is mapped read-only, or the guest's address space ends before the file does; [`ClientError::Syscall`] of `fcntl`.
pub fn region(file: MappedFile, at: GuestAddress) -> Result<GuestRegion, ClientError> {
    if !file.is_writable() {
        return Err(ClientError::Guest(format!("{:?} is mapped read-only", file.info().name)));
    }
    let (start, len) = (file.as_ptr(), file.len());
    let descriptor = fdmap_sys::fd::duplicate(file.as_fd())?;
    let dirty = DirtyPages::new(file);
    let builder = MmapRegionBuilder::new_with_bitmap(len, dirty)
        .with_mmap_prot(nix::libc::PROT_READ | nix::libc::PROT_WRITE)
        .with_mmap_flags(nix::libc::MAP_SHARED)
        .with_file_offset(FileOffset::new(File::from(descriptor), 0));
    // SAFETY: these are all the bytes of the mapping, which lives in the bitmap, which lives in the region.
    let builder = unsafe { builder.with_raw_mmap_pointer(start) };
    let region = builder.build().map_err(|error| ClientError::Guest(error.to_string()))?;
    let beyond = || ClientError::Guest(format!("{len} bytes do not fit from {:#x} on", at.0));
    GuestRegion::new(region, at).ok_or_else(beyond)
}

/// The pages of guest memory that were written, as they were asked for last.
#[derive(Clone, Debug)]
pub struct DirtyPages {
    shared: Arc<Shared>,
    /// Where a slice begins, bytes.
    base: usize,
}

#[derive(Debug)]
struct Shared {
    file: MappedFile,
    page_size: PageSize,
    pages: u64,
    /// A bit for each page.
    words: Vec<AtomicU64>,
    /// Held by whoever asks.
    updating: Mutex<()>,
}

impl DirtyPages {
    fn new(file: MappedFile) -> Self {
        let page_size = file.page_size();
        let pages = page_size.pages_in(to_u64(file.len()));
        let words = std::iter::repeat_with(AtomicU64::default).take(to_usize(pages.div_ceil(64))).collect();
        let shared = Shared { file, page_size, pages, words, updating: Mutex::default() };
        Self { shared: Arc::new(shared), base: 0 }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &MappedFile {
        &self.shared.file
    }

    /// Closes a generation, and has [`Self::dirty_at`](Bitmap::dirty_at) say from now on what was written after `since`. It is to
    /// be asked when this has returned: meanwhile it says of some pages what it said before. One call waits for the other;
    /// several consumers with a `since` of their own each need a client each and [`Client::changes`]. To be called next with the generation of the answer; if
    /// it fails, with the same `since` again: nothing is lost.
    ///
    /// # Errors
    /// [`ClientError::Refused`], with `OUT_OF_RANGE` if `since` is not closed; [`ClientError`] of the connection.
    pub async fn update(&self, client: &Client, since: Generation) -> Result<Checkpoint, ClientError> {
        let _updating = self.shared.updating.lock().await;
        let file = FileName::Id(self.shared.file.info().id);
        let made = client.checkpoint(&file, false, None).await?;
        let options = ChangesOptions { since, encoding: ChangesEncoding::Runs, ..ChangesOptions::default() };
        let changes = client.changes(&file, options).await?;
        let ranges = ranges(changes).await?;
        self.replace(&ranges);
        Ok(made)
    }

    fn replace(&self, ranges: &[PageRange]) {
        let mut words = vec![0_u64; self.shared.words.len()];
        // The file may have grown since it was mapped.
        let mapped = PageRange::first(self.shared.pages);
        for page in ranges
            .iter()
            .map(|range| range.intersect(mapped))
            .flat_map(|range| range.start().0..range.end().0)
        {
            if let Some(word) = words.get_mut(to_usize(page / 64)) {
                *word |= 1 << (page % 64);
            }
        }
        for (to, from) in self.shared.words.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
    }

    /// How many pages [`Self::dirty_at`](Bitmap::dirty_at) says were written.
    #[must_use]
    pub fn count(&self) -> u64 {
        let bits = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.shared.words.iter().map(bits).sum()
    }
}

async fn ranges(mut changes: Changes) -> Result<Vec<PageRange>, ClientError> {
    let mut ranges = Vec::new();
    while let Some(batch) = changes.next().await? {
        let ChangedBatch::Runs(runs) = batch else {
            return Err(ClientError::Unexpected("runs of changed pages were expected"));
        };
        ranges.extend(runs.iter().map(|run| run.run.range));
    }
    Ok(ranges)
}

impl WithBitmapSlice<'_> for DirtyPages {
    type S = Self;
}

impl BitmapSlice for DirtyPages {}

impl Bitmap for DirtyPages {
    /// Does nothing: page tables tell of the write.
    fn mark_dirty(&self, _offset: usize, _len: usize) {}

    /// True if the page at this byte was written in the generations that were asked for last.
    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.shared.page_size.page_at(to_u64(self.base.saturating_add(offset))).0;
        let word = self.shared.words.get(to_usize(page / 64));
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { shared: Arc::clone(&self.shared), base: self.base.saturating_add(offset) }
    }
}
