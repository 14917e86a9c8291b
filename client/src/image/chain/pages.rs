//! The content of pages in an image.

use std::sync::Arc;

use fdmap_proto::units::to_usize;

use super::super::PAGE_BYTES;
use super::super::chunks::{ChunkIndex, Compression, IndexedChunk, find_plain};
use super::super::error::ImageError;
use super::super::names;
use super::super::side_file::SideFile;
use super::super::store::{ImageStore, ObjectReader, StoreError, read_whole};
use super::{Located, verify};

/// Largest chunk object that is read, bytes: that of a pages file of 12 TiB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// A pages file.
#[derive(Debug)]
pub(super) struct PagesObject {
    location: String,
    object: Arc<dyn ObjectReader>,
    compression: Compression,
    /// `None`: CRIU wrote it.
    index: Option<ChunkIndex>,
    /// Number of pages.
    pages: u64,
}

impl PagesObject {
    /// Opens a pages file of `pages` pages.
    pub(super) fn open(
        store: &dyn ImageStore,
        pages_id: u32,
        pages: u64,
        side: Option<&(SideFile, String)>,
    ) -> Result<Self, ImageError> {
        let compression = side.map(|(side, _)| side.compression);
        let index = compression.map(|_| chunk_index(store, pages_id, side)).transpose()?;
        let name = names::pages(pages_id, compression.unwrap_or_default().ending());
        let location = format!("{}/{name}", store.location());
        let object = store.open(&name)?.ok_or_else(|| ImageError::invalid(&location, "missing"))?;
        if let Some(found) = index.as_ref().map(ChunkIndex::pages).filter(|found| *found != pages) {
            let reason = format!("chunks of {found} pages, expected {pages}");
            return Err(ImageError::invalid(
                format!("{}/{}", store.location(), names::chunks(pages_id)),
                reason,
            ));
        }
        let expected = index.as_ref().map_or(pages.saturating_mul(PAGE_BYTES), ChunkIndex::object_bytes);
        if object.bytes() != expected {
            let reason = format!("{} bytes, expected {expected}", object.bytes());
            return Err(ImageError::invalid(location, reason));
        }
        Ok(Self { location, object, compression: compression.unwrap_or_default(), index, pages })
    }

    /// The chunk that has a page.
    pub(super) fn find(&self, page: u64) -> Option<IndexedChunk> {
        match &self.index {
            Some(index) => index.find(page),
            None => find_plain(self.pages, page),
        }
    }

    /// Reads and verifies the chunk that has a page. Returns it with the number of its first page.
    pub(super) fn chunk(&self, page: u64) -> Result<(u64, Vec<u8>), ImageError> {
        let Some(chunk) = self.find(page) else {
            return Err(ImageError::invalid(&self.location, format!("no page {page}")));
        };
        let read_at =
            |offset: u64, out: &mut [u8]| self.object.read_at(offset, out).map_err(|error| error.error);
        let bytes = chunk.read(self.compression, read_at).map_err(|error| {
            ImageError::from(StoreError { operation: "reading", location: self.location.clone(), error })
        })?;
        Ok((chunk.first_page, bytes))
    }
}

fn chunk_index(
    store: &dyn ImageStore,
    pages_id: u32,
    side: Option<&(SideFile, String)>,
) -> Result<ChunkIndex, ImageError> {
    let name = names::chunks(pages_id);
    let location = format!("{}/{name}", store.location());
    let object = store.open(&name)?.ok_or_else(|| ImageError::invalid(&location, "missing"))?;
    verify(&object, &name, side, &store.location())?;
    let bytes = read_whole(&*object, &location, MAX_INDEX_BYTES)?;
    ChunkIndex::decode(&bytes).map_err(|reason| ImageError::invalid(location, reason))
}

/// Chunks that a reader keeps: in a chain, pages of several images alternate.
const MAX_KEPT_CHUNKS: usize = 8;

/// Reads pages of one file. Keeps the chunks that were read last.
#[derive(Debug)]
pub struct PageReader<'a> {
    /// By level. `None`: the image does not have the file.
    images: Vec<Option<&'a PagesObject>>,
    /// The one that was used last comes last.
    kept: Vec<Chunk>,
}

#[derive(Debug)]
struct Chunk {
    level: usize,
    /// Number of its first page in the pages file.
    first_page: u64,
    bytes: Vec<u8>,
}

impl Chunk {
    /// The content from a page on; `None` if the chunk does not have it.
    fn from(&self, level: usize, page: u64) -> Option<&[u8]> {
        let at = to_usize(page.checked_sub(self.first_page)?.checked_mul(PAGE_BYTES)?);
        self.bytes.get(at..).filter(|rest| self.level == level && !rest.is_empty())
    }
}

impl<'a> PageReader<'a> {
    pub(super) const fn new(images: Vec<Option<&'a PagesObject>>) -> Self {
        Self { images, kept: Vec::new() }
    }

    /// Reads the first of the pages `located`, as many as are in one chunk. Returns their content: at least one page.
    ///
    /// # Errors
    /// [`ImageError`]
    pub fn read(&mut self, located: Located) -> Result<&[u8], ImageError> {
        let Located { range, level, position } = located;
        match self.kept.iter().position(|chunk| chunk.from(level, position).is_some()) {
            Some(at) => self.kept[at..].rotate_left(1),
            None => {
                let Some(Some(pages)) = self.images.get(level) else {
                    let object = format!("image {level} of the chain");
                    return Err(ImageError::invalid(object, "the file is missing"));
                };
                let (first_page, bytes) = pages.chunk(position)?;
                if self.kept.len() == MAX_KEPT_CHUNKS {
                    self.kept.remove(0);
                }
                self.kept.push(Chunk { level, first_page, bytes });
            }
        }
        let rest = self.kept.last().and_then(|chunk| chunk.from(level, position)).unwrap_or_default();
        Ok(&rest[..rest.len().min(to_usize(range.len().saturating_mul(PAGE_BYTES)))])
    }
}
