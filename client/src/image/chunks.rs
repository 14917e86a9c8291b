//! Chunks of a pages file: what is compressed, verified and read at once.
//!
//! A pages file is a sequence of chunks of at most [`CHUNK_PAGES`] pages. Compressed, each chunk is a frame of its own, so that `zstd -d` or
//! `lz4 -d` of the whole object yields the pages file that CRIU reads.

use std::io::{self, Read as _, Write as _};

use fdmap_proto::units::{low_u32, to_u64, to_usize};
use serde::{Deserialize, Serialize};

use super::PAGE_BYTES;

/// Most pages of a chunk.
pub const CHUNK_PAGES: u64 = 256;
/// A frame of a chunk that does not compress is hardly longer than the chunk.
const MAX_FRAME_BYTES: u32 = 2 << 20;
/// Fast levels cost less time than the storage that they save.
const ZSTD_LEVEL: i32 = 1;

/// Compression of a pages file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::EnumString,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Compression {
    /// Plain pages, which CRIU reads.
    #[default]
    None,
    Zstd,
    Lz4,
}

impl Compression {
    /// Ending of the object's name.
    #[must_use]
    pub const fn ending(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Zstd => ".zst",
            Self::Lz4 => ".lz4",
        }
    }

    /// Compresses a chunk into a frame.
    pub(super) fn compress(self, chunk: Vec<u8>) -> io::Result<Vec<u8>> {
        match self {
            Self::None => Ok(chunk),
            Self::Zstd => zstd::bulk::compress(&chunk, ZSTD_LEVEL),
            Self::Lz4 => {
                let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
                encoder.write_all(&chunk)?;
                encoder.finish().map_err(io::Error::other)
            }
        }
    }

    /// Decompresses a frame of exactly `bytes` bytes.
    pub(crate) fn decompress(self, frame: Vec<u8>, bytes: usize) -> io::Result<Vec<u8>> {
        let chunk = match self {
            Self::None => frame,
            Self::Zstd => zstd::bulk::decompress(&frame, bytes)?,
            Self::Lz4 => {
                let mut chunk = Vec::with_capacity(bytes);
                let decoder = lz4_flex::frame::FrameDecoder::new(frame.as_slice());
                decoder.take(to_u64(bytes) + 1).read_to_end(&mut chunk)?;
                chunk
            }
        };
        if chunk.len() != bytes {
            let reason = format!("{} bytes, expected {bytes}", chunk.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(chunk)
    }
}

/// A chunk as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredChunk {
    /// Number of pages, 1 to [`CHUNK_PAGES`].
    pub(super) pages: u32,
    /// Length of the frame, bytes.
    pub(super) frame_bytes: u32,
    /// First half of the BLAKE3 hash of the uncompressed chunk. `None`: CRIU wrote the chunk.
    pub(super) digest: Option<[u8; 16]>,
}

/// The digest of uncompressed bytes.
pub(crate) fn digest(chunk: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(chunk).as_bytes()[..16]);
    half
}

/// The chunks of one pages file, as the object `fdmap-chunks-N.bin` lists them: for each the number of its pages and the length of its
/// frame, little-endian 32-bit words, and its digest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ChunkIndex {
    chunks: Vec<StoredChunk>,
    /// First page and offset of each chunk in the object.
    starts: Vec<(u64, u64)>,
    /// Page and offset after the last chunk.
    end: (u64, u64),
}

/// A chunk of an index.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexedChunk {
    chunk: StoredChunk,
    /// Number of its first page in the pages file.
    pub(super) first_page: u64,
    offset: u64,
}

impl ChunkIndex {
    const ELEMENT_BYTES: usize = 24;

    pub(super) fn push(&mut self, chunk: StoredChunk) {
        self.starts.push(self.end);
        self.end.0 += u64::from(chunk.pages);
        self.end.1 += u64::from(chunk.frame_bytes);
        self.chunks.push(chunk);
    }

    /// Number of pages.
    pub(super) const fn pages(&self) -> u64 {
        self.end.0
    }

    /// Size of the object that has the chunks, bytes.
    pub(super) const fn object_bytes(&self) -> u64 {
        self.end.1
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let element = |chunk: &StoredChunk| {
            let mut bytes = [0; Self::ELEMENT_BYTES];
            bytes[..4].copy_from_slice(&chunk.pages.to_le_bytes());
            bytes[4..8].copy_from_slice(&chunk.frame_bytes.to_le_bytes());
            bytes[8..].copy_from_slice(&chunk.digest.unwrap_or_default());
            bytes
        };
        self.chunks.iter().flat_map(element).collect()
    }

    /// Decodes the object. Returns the reason if it is invalid.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (elements, rest) = bytes.as_chunks::<{ Self::ELEMENT_BYTES }>();
        if !rest.is_empty() {
            return Err(format!("truncated at byte {}", bytes.len() - rest.len()));
        }
        let mut index = Self::default();
        for (at, element) in elements.iter().enumerate() {
            let [a, b, c, d, e, f, g, h, digest @ ..] = *element;
            let (pages, frame_bytes) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            if pages == 0
                || u64::from(pages) > CHUNK_PAGES
                || frame_bytes == 0
                || frame_bytes > MAX_FRAME_BYTES
            {
                let offset = at * Self::ELEMENT_BYTES;
                return Err(format!("byte {offset}: chunk of {pages} pages in {frame_bytes} bytes"));
            }
            index.push(StoredChunk { pages, frame_bytes, digest: Some(digest) });
        }
        Ok(index)
    }

    /// The chunk that has a page of the pages file.
    pub(super) fn find(&self, page: u64) -> Option<IndexedChunk> {
        let at = self.starts.partition_point(|(first, _)| *first <= page).checked_sub(1)?;
        let (chunk, (first_page, offset)) = (*self.chunks.get(at)?, *self.starts.get(at)?);
        (page < self.end.0).then_some(IndexedChunk { chunk, first_page, offset })
    }
}

/// The chunk that has a page of an uncompressed pages file of CRIU, which has `pages` pages.
pub(super) fn find_plain(pages: u64, page: u64) -> Option<IndexedChunk> {
    let first_page = page - page % CHUNK_PAGES;
    let chunk_pages = low_u32(pages.checked_sub(first_page)?.min(CHUNK_PAGES));
    let chunk =
        StoredChunk { pages: chunk_pages, frame_bytes: chunk_pages * low_u32(PAGE_BYTES), digest: None };
    let offset = first_page.checked_mul(PAGE_BYTES)?;
    (page < pages).then_some(IndexedChunk { chunk, first_page, offset })
}

impl IndexedChunk {
    /// Number of its pages.
    pub(super) fn pages(&self) -> u64 {
        u64::from(self.chunk.pages)
    }

    /// Reads the chunk by `read_at`, and verifies it.
    pub(super) fn read(
        &self,
        compression: Compression,
        read_at: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Vec<u8>> {
        let mut frame = vec![0; to_usize(u64::from(self.chunk.frame_bytes))];
        read_at(self.offset, &mut frame)?;
        let bytes = compression.decompress(frame, to_usize(u64::from(self.chunk.pages) * PAGE_BYTES))?;
        if self.chunk.digest.is_some_and(|expected| digest(&bytes) != expected) {
            let reason = format!("the chunk at byte {} differs from its digest", self.offset);
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(pages: u64) -> Vec<u8> {
        (0..pages * PAGE_BYTES).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
    }

    /// An index of one chunk of `pages` pages, and its frame.
    fn stored(compression: Compression, chunk: &[u8], pages: u32) -> (ChunkIndex, Vec<u8>) {
        let frame = compression.compress(chunk.to_vec()).unwrap();
        let mut index = ChunkIndex::default();
        let frame_bytes = u32::try_from(frame.len()).unwrap();
        index.push(StoredChunk { pages, frame_bytes, digest: Some(digest(chunk)) });
        (index, frame)
    }

    #[test]
    fn chunks_are_read_as_written_and_each_flipped_byte_is_found() {
        for compression in [Compression::None, Compression::Zstd, Compression::Lz4] {
            let chunk = content(3);
            let read = |frame: &[u8], pages| {
                let (index, _) = stored(compression, &chunk, pages);
                index.find(0).unwrap().read(compression, |offset, out| {
                    assert_eq!((offset, out.len()), (0, frame.len()));
                    out.copy_from_slice(frame);
                    Ok(())
                })
            };
            let (_, frame) = stored(compression, &chunk, 3);
            assert_eq!(read(&frame, 3).unwrap(), chunk, "{compression}");
            assert!(read(&frame, 2).is_err() && read(&frame, 4).is_err(), "{compression}");
            for at in (0..frame.len()).step_by(frame.len() / 97 + 1) {
                let mut flipped = frame.clone();
                flipped[at] ^= 0x10;
                // A flipped bit of a frame's own header may change nothing.
                assert!(read(&flipped, 3).map_or(true, |read| read == chunk), "{compression} byte {at}");
            }
        }
    }

    #[test]
    fn pages_are_found_in_chunks_of_any_length() {
        let mut index = ChunkIndex::default();
        for pages in [3, 1, 256] {
            index.push(StoredChunk { pages, frame_bytes: 10, digest: None });
        }
        let found: Vec<_> = [0, 2, 3, 4, 259]
            .map(|page| index.find(page).map(|chunk| (chunk.first_page, chunk.offset)))
            .into();
        assert_eq!(found, [Some((0, 0)), Some((0, 0)), Some((3, 10)), Some((4, 20)), Some((4, 20))]);
        assert!(index.find(260).is_none() && ChunkIndex::default().find(0).is_none());
        let plain: Vec<_> = [0, 255, 256, 599, 600]
            .map(|page| {
                find_plain(600, page).map(|found| (found.first_page, found.chunk.pages, found.offset))
            })
            .into();
        let second = (256, 256, 256 * PAGE_BYTES);
        let expected =
            [Some((0, 256, 0)), Some((0, 256, 0)), Some(second), Some((512, 88, 512 * PAGE_BYTES)), None];
        assert_eq!(plain, expected);
    }

    #[test]
    fn index_is_decoded_as_encoded_and_truncation_is_found() {
        let (index, _) = stored(Compression::Zstd, &content(1), 1);
        let bytes = index.encode();
        assert_eq!(ChunkIndex::decode(&bytes).unwrap(), index);
        assert_eq!(ChunkIndex::decode(&bytes[..7]).unwrap_err(), "truncated at byte 0");
        for (at, reason) in [
            (0, "byte 0: chunk of 255 pages in"),
            (1, "byte 0: chunk of 65281 pages in"),
            (7, "byte 0: chunk of 1 pages in"),
        ] {
            let mut lying = bytes.clone();
            lying[at] = 0xff;
            match ChunkIndex::decode(&lying) {
                Ok(other) => assert_eq!(other.pages(), 255),
                Err(found) => assert!(found.starts_with(reason), "{found}"),
            }
        }
    }
}
