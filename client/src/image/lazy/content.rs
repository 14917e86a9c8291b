//! The content of pages of one file, with the pages around them that have no data.

use fdmap_proto::PageRange;
use fdmap_proto::units::{to_u64, to_usize};

use super::super::PAGE_BYTES;
use super::super::chain::{Located, PageReader};
use super::super::error::ImageError;
use super::order::extent_from;

/// Reads pages of one file.
#[derive(Debug)]
pub(super) struct Content<'a> {
    reader: PageReader<'a>,
    /// The stored pages, in ascending order.
    extents: &'a [Located],
}

impl<'a> Content<'a> {
    pub(super) const fn new(reader: PageReader<'a>, extents: &'a [Located]) -> Self {
        Self { reader, extents }
    }

    /// Reads and verifies base pages of the file into `buffer`, in place of what it had. Pages without data are zero.
    pub(super) fn read(&mut self, pages: PageRange, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
        buffer.clear();
        buffer.resize(to_usize(pages.len() * PAGE_BYTES), 0);
        let mut at = pages.start();
        while let Some(extent) = extent_from(self.extents, at) {
            let wanted = extent.range.intersect(PageRange::new(at, pages.end()).unwrap_or(pages));
            if wanted.is_empty() {
                break;
            }
            let position = extent.position + (wanted.start().0 - extent.range.start().0);
            let bytes = self.reader.read(Located { range: wanted, level: extent.level, position })?;
            let skipped = to_usize((wanted.start().0 - pages.start().0) * PAGE_BYTES);
            buffer[skipped..skipped + bytes.len()].copy_from_slice(bytes);
            at = wanted.start().plus(to_u64(bytes.len()) / PAGE_BYTES);
        }
        Ok(())
    }
}
