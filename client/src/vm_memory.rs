//! Guest memory of [`vm_memory`] in a file of the service. The dirty bitmap is filled from write tracking.
//!
//! ```text
//!  vCPUs, devices, vm-memory --write--> mapping <--harvest--- service
//!                                                                |
//!  dirty_at() <-- DirtyPages <-- update(): Checkpoint, Changes --+
//! ```
//!
//! The service observes writes by vCPUs, vhost-user devices and other processes in the page tables. [`Bitmap::mark_dirty`]
//! therefore does nothing, and [`Bitmap::dirty_at`] reports the generations of the last update, not the current moment.

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

/// Guest memory region backed by a file of the service.
pub type GuestRegion = GuestRegionMmap<DirtyPages>;

/// Creates a guest memory region at guest address `at` from a mapped file. If [`MappedFile::track`] was called, the mapping
/// stays tracked until the last clone of the region is dropped. Seal the file against shrinking: access to a truncated page
/// raises `SIGBUS`.
///
/// # Errors
/// [`ClientError::Guest`] if the mapping is read-only or exceeds the guest address space; [`ClientError::Syscall`] of
/// fcntl(2).
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
    // SAFETY: start and len cover the mapping. The region owns the bitmap, and the bitmap owns the mapping.
    let builder = unsafe { builder.with_raw_mmap_pointer(start) };
    let region = builder.build().map_err(|error| ClientError::Guest(error.to_string()))?;
    let beyond =
        || ClientError::Guest(format!("{len} bytes at guest address {:#x} exceed the address space", at.0));
    GuestRegion::new(region, at).ok_or_else(beyond)
}

/// Dirty bitmap of guest memory, as of the last [`DirtyPages::update`].
#[derive(Clone, Debug)]
pub struct DirtyPages {
    shared: Arc<Shared>,
    /// Offset of this slice in the region, bytes.
    base: usize,
}

#[derive(Debug)]
struct Shared {
    file: MappedFile,
    page_size: PageSize,
    pages: u64,
    /// One bit per page.
    words: Vec<AtomicU64>,
    /// Serializes updates.
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

    /// Mapped file.
    #[must_use]
    pub fn file(&self) -> &MappedFile {
        &self.shared.file
    }

    /// Takes a checkpoint and replaces the bitmap with the pages written after `since`. The bitmap is mixed until the call
    /// returns. Pass the generation of the result as `since` of the next call; after an error repeat the call with the same
    /// `since`, no change is lost. Concurrent calls wait for each other. Consumers with different `since` values should use
    /// [`Client::changes`] instead.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with `OUT_OF_RANGE` if `since` is not closed; [`ClientError`] of the connection.
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
        // The file may be larger than the mapping.
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

    /// Number of dirty pages in the bitmap.
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
            return Err(ClientError::Unexpected("batch does not contain runs"));
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
    /// Does nothing: the service observes the write in the page tables.
    fn mark_dirty(&self, _offset: usize, _len: usize) {}

    /// Returns true if the page at this offset was written in the generations of the last update.
    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.shared.page_size.page_at(to_u64(self.base.saturating_add(offset))).0;
        let word = self.shared.words.get(to_usize(page / 64));
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { shared: Arc::clone(&self.shared), base: self.base.saturating_add(offset) }
    }
}
