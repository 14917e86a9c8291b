//! Reads the content of pages, and packs it into chunks.

use std::os::fd::AsFd as _;
use std::time::Duration;

use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_proto::{PageIndex, PageRange};
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::{Errno, SyscallError};

use super::super::PAGE_BYTES;
use super::super::chunks::{CHUNK_PAGES, Compression, StoredChunk, digest};
use super::super::error::ImageError;
use super::super::progress::Control;
use super::super::store::StoreError;
use super::super::swap::{SlotAccess, SlotPage, SlotReader};
use super::plan::{Extent, Origin};
use super::{DumpCounts, DumpSource};

/// Time until a page is read again for which there was no memory, and how often that happens.
const MEMORY_INTERVAL: Duration = Duration::from_millis(10);
const MAX_MEMORY_ATTEMPTS: u32 = 200;

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
    /// Size of the file in the image.
    size_bytes: u64,
    compression: Compression,
    control: &'a Control,
    digests_pages: bool,
    access: &'a SlotAccess,
    slots: SlotReader<'a>,
    /// Content of one extent.
    buffer: Vec<u8>,
}

/// A batch that is being packed.
struct Packing {
    packed: Packed,
    chunk: Vec<u8>,
}

impl Packing {
    /// Appends pages with their content, without those that are zero.
    fn append(&mut self, start: PageIndex, content: &[u8]) {
        for (page, (bytes, is_zero)) in
            (start.0..).zip(content.chunks(to_usize(PAGE_BYTES)).zip(zero_pages(content)))
        {
            if is_zero {
                self.packed.counts.zero_pages += 1;
            } else {
                self.chunk.extend_from_slice(bytes);
                self.packed.ranges.push((PageRange::at(PageIndex(page), 1), true));
            }
        }
    }
}

impl<'a> ContentReader<'a> {
    pub(crate) fn new(
        source: &'a DumpSource,
        size_bytes: u64,
        compression: Compression,
        control: &'a Control,
        access: &'a SlotAccess,
    ) -> Self {
        let slots = SlotReader::new(access);
        let (digests_pages, buffer) = (false, Vec::new());
        Self { source, size_bytes, compression, control, digests_pages, access, slots, buffer }
    }

    /// The same, with a digest of each page.
    pub(crate) fn with_page_digests(self) -> Self {
        Self { digests_pages: true, ..self }
    }

    /// Reads a batch.
    pub(crate) fn read(&mut self, batch: &[Extent]) -> Result<Packed, ImageError> {
        self.control.check()?;
        let (page_digests, counts) = (Vec::new(), DumpCounts::default());
        let mut packing = Packing {
            packed: Packed { ranges: Vec::new(), chunk: None, page_digests, counts },
            chunk: Vec::with_capacity(to_usize(CHUNK_PAGES * PAGE_BYTES)),
        };
        let swapped = batch.iter().filter(|extent| matches!(extent.origin, Origin::Swap(Some(_))));
        let swapped: Vec<_> = swapped.flat_map(|extent| indexes(extent.range)).collect();
        let source = self.source;
        let found = self.slots.read(&swapped, &|pages| source.slot_content(pages))?;
        let (mut pages, mut position) = (0, 0);
        for Extent { range, origin } in batch {
            pages += range.len();
            match origin {
                Origin::Parent => {
                    packing.packed.counts.parent_pages += range.len();
                    packing.packed.ranges.push((*range, false));
                }
                Origin::Memory => {
                    self.read_file(*range)?;
                    packing.packed.counts.memory_pages += range.len();
                    packing.append(range.start(), &self.buffer);
                }
                Origin::Swap(None) => self.swap_in(*range, &mut packing)?,
                Origin::Swap(Some(_)) => {
                    let end = position + to_usize(range.len());
                    self.read_swapped(*range, position, &found[position..end], &mut packing)?;
                    position = end;
                }
            }
        }
        let Packing { mut packed, chunk } = packing;
        if self.digests_pages {
            packed.page_digests = chunk.chunks(to_usize(PAGE_BYTES)).map(digest).collect();
        }
        packed.chunk = self.pack(chunk, &mut packed.counts)?;
        self.control.count(&packed.counts.sources());
        self.control.advance(pages, packed.counts.stored_bytes);
        Ok(packed)
    }

    /// Packs swapped pages of which `found` has what their slots have. `position`: that of the first of them in the slot reader.
    fn read_swapped(
        &mut self,
        range: PageRange,
        position: usize,
        found: &[SlotPage],
        packing: &mut Packing,
    ) -> Result<(), ImageError> {
        let mut at = 0;
        for part in found.chunk_by(|one, other| one == other) {
            let pages = PageRange::at(range.start().plus(to_u64(at)), to_u64(part.len()));
            match part[0] {
                SlotPage::Zero => packing.packed.counts.zero_slot_pages += pages.len(),
                SlotPage::Unread => self.swap_in(pages, packing)?,
                SlotPage::Read => {
                    packing.packed.counts.slot_pages += pages.len();
                    for (number, page) in (at..).zip(indexes(pages)) {
                        let content = self.slots.page_mut(position + number);
                        // A mapping may have written past the end of the file.
                        let inside = self.size_bytes.saturating_sub(page.0 * PAGE_BYTES).min(PAGE_BYTES);
                        content[to_usize(inside)..].fill(0);
                        packing.append(page, content);
                    }
                }
            }
            at += part.len();
        }
        Ok(())
    }

    /// Packs swapped pages that are read through the file, and swaps them out again.
    fn swap_in(&mut self, range: PageRange, packing: &mut Packing) -> Result<(), ImageError> {
        self.read_file(range)?;
        packing.packed.counts.swapped_in_pages += range.len();
        packing.packed.counts.evicted_pages += self.access.while_closed(|| self.evict(range));
        packing.append(range.start(), &self.buffer);
        Ok(())
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

    /// Reads pages through the file. What is past its end is zero.
    fn read_file(&mut self, range: PageRange) -> Result<(), ImageError> {
        let offset = range.start().0 * PAGE_BYTES;
        self.buffer.clear();
        self.buffer.resize(to_usize(range.len() * PAGE_BYTES), 0);
        let (mut filled, mut attempts) = (0, 0);
        while filled < self.buffer.len() {
            let at = offset + to_u64(filled);
            match fdmap_sys::fd::read_at(self.source.fd.as_fd(), at, &mut self.buffer[filled..]) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                // The cgroup of the swapped pages has no room: it swaps others out, which takes time.
                Err(SyscallError { errno: Errno::ENOMEM, .. }) if attempts < MAX_MEMORY_ATTEMPTS => {
                    self.control.check()?;
                    attempts += 1;
                    std::thread::sleep(MEMORY_INTERVAL);
                }
                Err(error) => return Err(ImageError::Read { file: self.source.name(), range, error }),
            }
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

fn indexes(range: PageRange) -> impl Iterator<Item = PageIndex> {
    (range.start().0..range.end().0).map(PageIndex)
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
