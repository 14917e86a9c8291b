//! A buffer for reads with `O_DIRECT`, which need memory that is aligned to blocks.

use fdmap_proto::units::to_usize;

use super::super::PAGE_BYTES;

/// Memory that is aligned to pages.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<u8>);

impl Scratch {
    /// `pages` pages, with any content.
    pub(super) fn bytes(&mut self, pages: u64) -> &mut [u8] {
        let (wanted, page) = (to_usize(pages * PAGE_BYTES), to_usize(PAGE_BYTES));
        if self.0.len() < wanted + page {
            self.0.resize(wanted + page, 0);
        }
        let start = self.0.as_ptr().align_offset(page);
        &mut self.0[start..start + wanted]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_to_pages() {
        let mut scratch = Scratch::default();
        for pages in [1, 0, 300, 2] {
            let bytes = scratch.bytes(pages);
            assert_eq!(bytes.len(), to_usize(pages * PAGE_BYTES));
            assert!(bytes.as_ptr().addr().is_multiple_of(4096));
        }
    }
}
