//! Writes the objects of an image.

use std::collections::BTreeMap;

use fdmap_proto::PageRange;
use fdmap_proto::units::to_u64;

use super::super::PAGE_BYTES;
use super::super::chunks::{ChunkIndex, Compression};
use super::super::error::ImageError;
use super::super::format::{
    ImageKind, PAGE_IN_PARENT, PAGE_PRESENT, PagemapEntry, PagemapHead, append_entry, header,
};
use super::super::names;
use super::super::store::{ImageStore, ObjectWriter};
use super::DumpCounts;
use super::content::Packed;

/// Most bytes of an entry for one page, with its length.
const MAX_ENTRY_BYTES: u64 = 64;
/// Most bytes by which a compressed chunk is larger than its pages, for each page.
const MAX_FRAME_OVERHEAD: u64 = 64;
/// Bytes of entries that are collected before they are written.
const BUFFER_BYTES: usize = 1 << 16;

/// Objects of an image that is being written. Dropped before [`Self::complete`], they are removed.
#[derive(Debug)]
pub(super) struct ImageWriter<'a> {
    store: &'a dyn ImageStore,
    /// Finished objects.
    made: Vec<String>,
    /// Their hashes, but those of pages files.
    pub(super) hashes: BTreeMap<String, String>,
    is_complete: bool,
}

impl<'a> ImageWriter<'a> {
    pub(super) const fn new(store: &'a dyn ImageStore) -> Self {
        Self { store, made: Vec::new(), hashes: BTreeMap::new(), is_complete: false }
    }

    /// Writes an object that is small, and keeps its hash.
    pub(super) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), ImageError> {
        let mut object = self.store.create(name, to_u64(bytes.len()))?;
        object.append(bytes)?;
        self.finish(name, object, blake3::hash(bytes))
    }

    /// Links the image to its parent.
    pub(super) fn link(&mut self, parent: &dyn ImageStore) -> Result<(), ImageError> {
        self.store.set_parent(parent)?;
        self.made.push(names::PARENT.to_owned());
        Ok(())
    }

    fn finish(
        &mut self,
        name: &str,
        object: Box<dyn ObjectWriter>,
        hash: blake3::Hash,
    ) -> Result<(), ImageError> {
        self.finish_pages(name, object)?;
        self.hashes.insert(name.to_owned(), hash.to_hex().to_string());
        Ok(())
    }

    fn finish_pages(&mut self, name: &str, object: Box<dyn ObjectWriter>) -> Result<(), ImageError> {
        object.finish()?;
        self.made.push(name.to_owned());
        Ok(())
    }

    /// Keeps the objects. Returns their names.
    pub(super) fn complete(mut self) -> Result<Vec<String>, ImageError> {
        self.store.sync()?;
        self.is_complete = true;
        Ok(std::mem::take(&mut self.made))
    }
}

impl Drop for ImageWriter<'_> {
    fn drop(&mut self) {
        // The inventory first: without it there is no image.
        for name in self.made.iter().rev().filter(|_| !self.is_complete) {
            let _ = self.store.remove(name);
        }
    }
}

/// Objects with the pages of one file.
#[derive(Debug)]
pub(super) struct FileWriter {
    shmid: u32,
    pages_id: u32,
    compression: Compression,
    pagemap: Box<dyn ObjectWriter>,
    hasher: blake3::Hasher,
    /// Entries that are not written yet.
    entries: Vec<u8>,
    /// The last pages, which the next ones may extend.
    last: Option<(PageRange, bool)>,
    pages: Box<dyn ObjectWriter>,
    index: ChunkIndex,
    pub(super) counts: DumpCounts,
}

impl FileWriter {
    /// Begins the objects of a file with at most `max_pages` pages.
    pub(super) fn new(
        store: &dyn ImageStore,
        shmid: u32,
        pages_id: u32,
        compression: Compression,
        max_pages: u64,
    ) -> Result<Self, ImageError> {
        // With the head.
        let max_entries = MAX_ENTRY_BYTES * (max_pages + 2);
        let max_content = (PAGE_BYTES + MAX_FRAME_OVERHEAD) * max_pages;
        let mut entries = header(ImageKind::Pagemap);
        append_entry(&mut entries, &PagemapHead { pages_id });
        Ok(Self {
            shmid,
            pages_id,
            compression,
            pagemap: store.create(&names::pagemap(shmid), max_entries)?,
            hasher: blake3::Hasher::new(),
            entries,
            last: None,
            pages: store.create(&names::pages(pages_id, compression.ending()), max_content)?,
            index: ChunkIndex::default(),
            counts: DumpCounts::default(),
        })
    }

    /// Appends a batch. Batches come in page order.
    pub(super) fn append(&mut self, packed: Packed) -> Result<(), ImageError> {
        for (range, is_present) in packed.ranges {
            match &mut self.last {
                Some((last, present)) if *present == is_present && last.end() == range.start() => {
                    *last = PageRange::at(last.start(), last.len() + range.len());
                }
                _ => {
                    self.push_last();
                    self.last = Some((range, is_present));
                }
            }
        }
        if let Some((chunk, frame)) = packed.chunk {
            self.index.push(chunk);
            self.pages.append(&frame)?;
        }
        self.counts.add(&packed.counts);
        if self.entries.len() >= BUFFER_BYTES { self.write_entries() } else { Ok(()) }
    }

    fn push_last(&mut self) {
        if let Some((range, is_present)) = self.last.take() {
            let flags = if is_present { PAGE_PRESENT } else { PAGE_IN_PARENT };
            let entry = PagemapEntry::new(range.start().0 * PAGE_BYTES, range.len(), flags);
            append_entry(&mut self.entries, &entry);
        }
    }

    fn write_entries(&mut self) -> Result<(), ImageError> {
        self.hasher.update(&self.entries);
        self.pagemap.append(&self.entries)?;
        self.entries.clear();
        Ok(())
    }

    /// Completes the objects of the file.
    pub(super) fn finish(mut self, image: &mut ImageWriter<'_>) -> Result<DumpCounts, ImageError> {
        self.push_last();
        self.write_entries()?;
        image.finish(&names::pagemap(self.shmid), self.pagemap, self.hasher.finalize())?;
        image.finish_pages(&names::pages(self.pages_id, self.compression.ending()), self.pages)?;
        image.write(&names::chunks(self.pages_id), &self.index.encode())?;
        Ok(self.counts)
    }
}
