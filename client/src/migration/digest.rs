//! The digest of a file, from the hashes of its pages. Pure.
//!
//! ```text
//!   page: first half of BLAKE3(4096 bytes)       a page of zeroes has no hash
//!   block of 512 pages: BLAKE3(hashes; 16 zero bytes for a page without one)
//!   file: BLAKE3(size in bytes, then number and hash of each block that has a page with a hash)
//! ```
//!
//! Numbers are little-endian 64-bit words. A change of one page costs the hash of its block.

use std::collections::BTreeMap;

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageRange};

/// Hash of a page with data.
pub(crate) type PageHash = [u8; 16];
/// Digest of a file.
pub(crate) type FileDigest = [u8; 32];

const BLOCK_PAGES: u64 = 512;
const NO_HASH: PageHash = [0; 16];

/// The hashes of the pages of a file.
#[derive(Debug, Default)]
pub(crate) struct PageHashes {
    blocks: BTreeMap<u64, Block>,
}

#[derive(Debug)]
struct Block {
    hashes: Box<[PageHash]>,
    /// `None`: a page has changed since.
    digest: Option<FileDigest>,
}

impl Block {
    fn new() -> Self {
        Self { hashes: vec![NO_HASH; to_usize(BLOCK_PAGES)].into(), digest: None }
    }

    fn digest(&mut self) -> FileDigest {
        let hashes = &self.hashes;
        *self.digest.get_or_insert_with(|| *blake3::hash(hashes.as_flattened()).as_bytes())
    }

    fn is_empty(&self) -> bool {
        self.hashes.iter().all(|hash| *hash == NO_HASH)
    }
}

impl PageHashes {
    /// Sets the hash of a page with data.
    pub(crate) fn set(&mut self, page: PageIndex, hash: PageHash) {
        let block = self.blocks.entry(page.0 / BLOCK_PAGES).or_insert_with(Block::new);
        block.hashes[to_usize(page.0 % BLOCK_PAGES)] = hash;
        block.digest = None;
    }

    /// The pages are zero.
    pub(crate) fn clear(&mut self, range: PageRange) {
        let mut emptied = Vec::new();
        for (number, block) in self.blocks_in_mut(range) {
            block.hashes[within(number, range)].fill(NO_HASH);
            block.digest = None;
            if block.is_empty() {
                emptied.push(number);
            }
        }
        for number in emptied {
            self.blocks.remove(&number);
        }
    }

    /// The pages from `first` on are past the end of the file.
    pub(crate) fn clear_from(&mut self, first: PageIndex) {
        let end = self.blocks.last_key_value().map_or(0, |(number, _)| (number + 1) * BLOCK_PAGES);
        self.clear(PageRange::new(first, PageIndex(end.max(first.0))).unwrap_or(PageRange::first(0)));
    }

    /// Pages of `range` that have a hash, in ascending order.
    pub(crate) fn present(&self, range: PageRange) -> Vec<PageRange> {
        let mut found: Vec<PageRange> = Vec::new();
        for (number, block) in self.blocks.range(blocks_of(range)) {
            let inside = within(*number, range);
            let first = number * BLOCK_PAGES + to_u64(inside.start);
            for (page, hash) in (first..).zip(&block.hashes[inside]) {
                if *hash == NO_HASH {
                    continue;
                }
                match found.last_mut().filter(|last| last.end().0 == page) {
                    Some(last) => *last = PageRange::at(last.start(), last.len() + 1),
                    None => found.push(PageRange::at(PageIndex(page), 1)),
                }
            }
        }
        found
    }

    /// The digest of a file of `size_bytes`.
    pub(crate) fn digest(&mut self, size_bytes: u64) -> FileDigest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&size_bytes.to_le_bytes());
        for (number, block) in &mut self.blocks {
            hasher.update(&number.to_le_bytes());
            hasher.update(&block.digest());
        }
        *hasher.finalize().as_bytes()
    }

    fn blocks_in_mut(&mut self, range: PageRange) -> impl Iterator<Item = (u64, &mut Block)> {
        self.blocks.range_mut(blocks_of(range)).map(|(number, block)| (*number, block))
    }
}

/// Numbers of the blocks that have pages of `range`.
fn blocks_of(range: PageRange) -> std::ops::Range<u64> {
    range.start().0 / BLOCK_PAGES..range.end().0.div_ceil(BLOCK_PAGES).max(range.start().0 / BLOCK_PAGES)
}

/// Positions in a block of the pages of `range`.
fn within(block: u64, range: PageRange) -> std::ops::Range<usize> {
    let first = block * BLOCK_PAGES;
    let position = |page: PageIndex| to_usize(page.0.saturating_sub(first).min(BLOCK_PAGES));
    position(range.start())..position(range.end())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Change {
        Set(u64, u8),
        Clear(u64, u64),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (0_u64..1600, 1_u8..).prop_map(|(page, byte)| Change::Set(page, byte)),
            (0_u64..1600, 0_u64..900).prop_map(|(start, len)| Change::Clear(start, len)),
        ]
    }

    proptest! {
        /// The digest depends on the pages alone, not on the way to them.
        #[test]
        fn digest_is_that_of_the_pages(changes in proptest::collection::vec(change(), 0..40)) {
            let (mut hashes, mut pages) = (PageHashes::default(), BTreeMap::new());
            for change in changes {
                match change {
                    Change::Set(page, byte) => {
                        hashes.set(PageIndex(page), [byte; 16]);
                        pages.insert(page, byte);
                    }
                    Change::Clear(start, len) => {
                        hashes.clear(PageRange::at(PageIndex(start), len));
                        pages.retain(|page, _| !(start..start + len).contains(page));
                    }
                }
                hashes.digest(5);
            }
            let mut direct = PageHashes::default();
            for (page, byte) in &pages {
                direct.set(PageIndex(*page), [*byte; 16]);
            }
            prop_assert_eq!(hashes.digest(1), direct.digest(1));
            prop_assert_ne!(hashes.digest(1), direct.digest(2));
            let present = hashes.present(PageRange::first(1600));
            let listed: Vec<u64> = present.iter().flat_map(|range| range.start().0..range.end().0).collect();
            prop_assert_eq!(listed, pages.keys().copied().collect::<Vec<_>>());
            prop_assert!(present.windows(2).all(|pair| pair[0].end() < pair[1].start()));
            if let Some((page, byte)) = pages.first_key_value() {
                hashes.set(PageIndex(*page), [byte.wrapping_add(1).max(1); 16]);
                prop_assert_ne!(hashes.digest(1), direct.digest(1));
            }
        }
    }

    #[test]
    fn same_hash_at_another_page_is_another_digest() {
        let digest = |page| {
            let mut hashes = PageHashes::default();
            hashes.set(PageIndex(page), [1; 16]);
            hashes.digest(0)
        };
        assert!(digest(0) != digest(1) && digest(0) != digest(512));
    }
}
