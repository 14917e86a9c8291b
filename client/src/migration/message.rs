//! Conversions between messages and what they mean, with checks of what comes from the other host. Pure.

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageRange, v1};
use tonic::Status;

use super::digest::PageHash;
use super::error::Rejected;
use crate::image::{CHUNK_PAGES, Compression, PAGE_BYTES, digest};

pub(super) fn compression_to_wire(compression: Compression) -> v1::FrameCompression {
    match compression {
        Compression::None => v1::FrameCompression::None,
        Compression::Zstd => v1::FrameCompression::Zstd,
        Compression::Lz4 => v1::FrameCompression::Lz4,
    }
}

/// Pages of a step that are valid for a file.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) content: Vec<PageRange>,
    /// Of the pages of `content`, one after the other.
    pub(super) bytes: Vec<u8>,
    pub(super) zero: Vec<PageRange>,
}

impl Pages {
    /// Decodes pages of a file of `file_pages` pages.
    pub(super) fn decode(message: v1::MigratedPages, file_pages: u64) -> Result<Self, Rejected> {
        let invalid = |reason: String| Rejected(Status::invalid_argument(reason));
        let content = ascending(message.content, file_pages).map_err(invalid)?;
        let zero = ascending(message.zero, file_pages).map_err(invalid)?;
        let pages: u64 = content.iter().map(|range| range.len()).sum();
        if pages > CHUNK_PAGES {
            return Err(invalid(format!("{pages} pages in one step, at most {CHUNK_PAGES}")));
        }
        let compression = match v1::FrameCompression::try_from(message.compression) {
            Ok(v1::FrameCompression::None) => Compression::None,
            Ok(v1::FrameCompression::Zstd) => Compression::Zstd,
            Ok(v1::FrameCompression::Lz4) => Compression::Lz4,
            _ => return Err(invalid(format!("unknown compression {}", message.compression))),
        };
        let len = to_usize(pages * PAGE_BYTES);
        let bytes = if pages == 0 && message.frame.is_empty() {
            Vec::new()
        } else {
            let bytes = compression.decompress(message.frame.into(), len);
            bytes.map_err(|error| invalid(format!("content of {pages} pages: {error}")))?
        };
        Ok(Self { content, bytes, zero })
    }

    /// Each range with its content.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (PageRange, &[u8])> {
        let mut rest = self.bytes.as_slice();
        self.content.iter().map(move |range| {
            let (bytes, after) = rest.split_at(to_usize(range.len() * PAGE_BYTES));
            rest = after;
            (*range, bytes)
        })
    }

    /// Hashes of the pages of `content`; `None` for a page of zeroes.
    pub(super) fn hashes(&self) -> impl Iterator<Item = (u64, Option<PageHash>)> {
        let pages = self.content.iter().flat_map(|range| range.start().0..range.end().0);
        pages.zip(self.bytes.chunks(to_usize(PAGE_BYTES))).map(|(page, bytes)| {
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            (page, (!is_zero).then(|| digest(bytes)))
        })
    }
}

/// Ranges that are in ascending order, not empty, and within the file.
fn ascending(ranges: Vec<v1::PageRange>, file_pages: u64) -> Result<Vec<PageRange>, String> {
    let mut end = 0;
    ranges
        .into_iter()
        .map(|range| {
            let valid = PageRange::try_from(range).ok().filter(|range| !range.is_empty());
            let valid = valid.filter(|valid| valid.start().0 >= end && valid.end().0 <= file_pages);
            end = range.end;
            let v1::PageRange { start, end } = range;
            valid.ok_or_else(|| {
                format!("pages {start} to {end} of a file of {file_pages} pages are not valid here")
            })
        })
        .collect()
}

/// The digest of a step.
pub(super) fn file_digest(bytes: &[u8]) -> Result<super::digest::FileDigest, Rejected> {
    let wrong = |_| Rejected(Status::invalid_argument(format!("a digest of {} bytes", to_u64(bytes.len()))));
    bytes.try_into().map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(content: &[(u64, u64)], bytes: usize, zero: &[(u64, u64)]) -> v1::MigratedPages {
        let ranges = |ranges: &[(u64, u64)]| {
            ranges.iter().map(|&(start, end)| v1::PageRange { start, end }).collect::<Vec<_>>()
        };
        v1::MigratedPages {
            content: ranges(content),
            frame: vec![7; bytes].into(),
            compression: v1::FrameCompression::None.into(),
            zero: ranges(zero),
        }
    }

    #[test]
    fn valid_pages_are_decoded() {
        let pages = Pages::decode(message(&[(1, 2), (4, 6)], 3 * 4096, &[(2, 3), (7, 8)]), 8).unwrap();
        let ranges: Vec<_> = pages.ranges().map(|(range, bytes)| (range.start().0, bytes.len())).collect();
        assert_eq!(ranges, [(1, 4096), (4, 8192)]);
        assert_eq!(pages.hashes().map(|(page, _)| page).collect::<Vec<_>>(), [1, 4, 5]);
        assert!(pages.hashes().all(|(_, hash)| hash == Some(digest(&[7; 4096]))));
        assert_eq!(pages.zero.len(), 2);
    }

    #[test]
    fn invalid_pages_are_refused() {
        for (content, bytes, zero, reason) in [
            (&[(1, 1)][..], 0, &[][..], "pages 1 to 1"),
            (&[(2, 1)], 0, &[], "pages 2 to 1"),
            (&[(3, 4), (1, 2)], 8192, &[], "pages 1 to 2"),
            (&[(1, 3), (2, 4)], 4 * 4096, &[], "pages 2 to 4"),
            (&[(7, 9)], 8192, &[], "pages 7 to 9 of a file of 8 pages"),
            (&[], 0, &[(0, u64::MAX)], "pages 0 to"),
            (&[(1, 2)], 4095, &[], "content of 1 pages: 4095 bytes"),
            (&[(1, 2)], 8192, &[], "content of 1 pages: 8192 bytes"),
            (&[], 4096, &[], "content of 0 pages"),
        ] {
            let Rejected(status) = Pages::decode(message(content, bytes, zero), 8).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(reason), "{reason}: {}", status.message());
        }
        let Rejected(status) = Pages::decode(message(&[(0, 257)], 257 * 4096, &[]), 1000).unwrap_err();
        assert!(status.message().contains("257 pages in one step"), "{}", status.message());
        let unknown = v1::MigratedPages { compression: 9, ..message(&[(0, 1)], 4096, &[]) };
        assert!(Pages::decode(unknown, 8).unwrap_err().0.message().contains("unknown compression 9"));
        let frame = zstd::bulk::compress(&vec![0; 1 << 24], 1).unwrap().into();
        let compression = v1::FrameCompression::Zstd.into();
        let large = v1::MigratedPages { compression, frame, ..message(&[(0, 1)], 0, &[]) };
        assert!(Pages::decode(large, 8).is_err());
    }
}
