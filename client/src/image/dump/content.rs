//! Reads the content of pages, and packs it into chunks.

use std::os::fd::AsFd as _;

use fdmap_proto::PageRange;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::mapping::{Advice, SharedMapping};

use super::super::PAGE_BYTES;
use super::super::chunks::{CHUNK_PAGES, Compression, StoredChunk, digest};
use super::super::error::ImageError;
use super::super::progress::Control;
use super::super::store::StoreError;
use super::plan::{Extent, Origin};
use super::{DumpCounts, DumpSource};

/// Pages of a batch as they are stored, in ascending order.
#[derive(Debug)]
pub(crate) struct Packed {
    /// Pages, and whether their content is in the chunk; else it is in the parent.
    pub(crate) ranges: Vec<(PageRange, bool)>,
    /// The chunk and its frame, if any page has content.
    pub(crate) chunk: Option<(StoredChunk, Vec<u8>)>,
    /// Digest of each page of the chunk, if the reader makes them.
    pub(crate) page_digests: Vec<[u8; 16]>,
    pub(crate) counts: DumpCounts,
}

/// Reads batches of one file, in one thread.
#[derive(Debug)]
pub(crate) struct ContentReader<'a> {
    source: &'a DumpSource,
    compression: Compression,
    control: &'a Control,
    digests_pages: bool,
    /// Content of one extent.
    buffer: Vec<u8>,
}

impl<'a> ContentReader<'a> {
    pub(crate) fn new(source: &'a DumpSource, compression: Compression, control: &'a Control) -> Self {
        Self { source, compression, control, digests_pages: false, buffer: Vec::new() }
    }

    /// The same, with a digest of each page.
    pub(crate) fn with_page_digests(self) -> Self {
        Self { digests_pages: true, ..self }
    }

    /// Reads a batch.
    pub(crate) fn read(&mut self, batch: &[Extent]) -> Result<Packed, ImageError> {
        self.control.check()?;
        let (page_digests, counts) = (Vec::new(), DumpCounts::default());
        let mut packed = Packed { ranges: Vec::new(), chunk: None, page_digests, counts };
        let mut chunk = Vec::with_capacity(to_usize(CHUNK_PAGES * PAGE_BYTES));
        let mut pages = 0;
        for Extent { range, origin } in batch {
            pages += range.len();
            if *origin == Origin::Parent {
                packed.counts.parent_pages += range.len();
                packed.ranges.push((*range, false));
                continue;
            }
            self.read_extent(*range, *origin, &mut packed.counts)?;
            for (page, is_zero) in (range.start().0..).zip(zero_pages(&self.buffer)) {
                let at = to_usize((page - range.start().0) * PAGE_BYTES);
                if is_zero {
                    packed.counts.zero_pages += 1;
                } else {
                    chunk.extend_from_slice(&self.buffer[at..at + to_usize(PAGE_BYTES)]);
                    packed.ranges.push((PageRange::at(fdmap_proto::PageIndex(page), 1), true));
                }
            }
        }
        if self.digests_pages {
            packed.page_digests = chunk.chunks(to_usize(PAGE_BYTES)).map(digest).collect();
        }
        packed.chunk = self.pack(chunk, &mut packed.counts)?;
        self.control.advance(pages, packed.counts.stored_bytes);
        Ok(packed)
    }

    /// Compresses a chunk.
    fn pack(
        &self,
        chunk: Vec<u8>,
        counts: &mut DumpCounts,
    ) -> Result<Option<(StoredChunk, Vec<u8>)>, ImageError> {
        if chunk.is_empty() {
            return Ok(None);
        }
        let (pages, digest) = (to_u64(chunk.len()) / PAGE_BYTES, digest(&chunk));
        let frame = self.compression.compress(chunk).map_err(|error| {
            let location = format!("pages of {}", self.source);
            StoreError { operation: "compressing", location, error }
        })?;
        counts.stored_pages += pages;
        counts.stored_bytes += to_u64(frame.len());
        let chunk = StoredChunk {
            pages: low_u32(pages),
            frame_bytes: low_u32(to_u64(frame.len())),
            digest: Some(digest),
        };
        Ok(Some((chunk, frame)))
    }

    /// Reads the pages of an extent into the buffer.
    fn read_extent(
        &mut self,
        range: PageRange,
        origin: Origin,
        counts: &mut DumpCounts,
    ) -> Result<(), ImageError> {
        self.read_file(range)?;
        if let Origin::Swap(_) = origin {
            counts.swapped_in_pages += range.len();
            counts.evicted_pages += self.evict(range);
        } else {
            counts.memory_pages += range.len();
        }
        Ok(())
    }

    /// Reads pages through the file. What is past its end is zero.
    fn read_file(&mut self, range: PageRange) -> Result<(), ImageError> {
        let offset = range.start().0 * PAGE_BYTES;
        self.buffer.clear();
        self.buffer.resize(to_usize(range.len() * PAGE_BYTES), 0);
        let mut filled = 0;
        while filled < self.buffer.len() {
            let bytes = fdmap_sys::fd::read_at(
                self.source.fd.as_fd(),
                offset + to_u64(filled),
                &mut self.buffer[filled..],
            )
            .map_err(|error| ImageError::Read { file: self.source.name(), range, error })?;
            if bytes == 0 {
                break;
            }
            filled += bytes;
        }
        Ok(())
    }

    /// Swaps pages out again that this dump has swapped in. Returns their number, 0 where the kernel does not permit that.
    fn evict(&self, range: PageRange) -> u64 {
        let (offset, len) = (range.start().0 * PAGE_BYTES, to_usize(range.len() * PAGE_BYTES));
        let evict = || {
            let mapping = SharedMapping::shared(&self.source.fd, offset, len, false)?;
            // MADV_PAGEOUT takes pages from page tables only.
            mapping.advise(Advice::PopulateRead)?;
            mapping.advise(Advice::PageOut)
        };
        if evict().is_ok() { range.len() } else { 0 }
    }
}

/// For each page of a buffer, whether it is zero.
fn zero_pages(buffer: &[u8]) -> impl Iterator<Item = bool> + '_ {
    buffer.chunks(to_usize(PAGE_BYTES)).map(|page| {
        let (blocks, rest) = page.as_chunks::<64>();
        rest.iter().all(|byte| *byte == 0)
            && blocks.iter().all(|block| block.iter().fold(0, |any, byte| any | byte) == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_of_a_page_makes_it_nonzero() {
        let page = to_usize(PAGE_BYTES);
        let mut buffer = vec![0; 3 * page];
        assert_eq!(zero_pages(&buffer).collect::<Vec<_>>(), [true; 3]);
        for at in [page, page + 63, page + 64, 2 * page - 1] {
            buffer[at] = 1;
            assert_eq!(zero_pages(&buffer).collect::<Vec<_>>(), [true, false, true], "{at}");
            buffer[at] = 0;
        }
    }
}
