//! One bit for each page of a block.

use fdmap_proto::units::to_usize;

use super::blocks::{BLOCK_LEAVES, BLOCK_PAGES};

/// One bit for each page of a block. The word is the leaf, the bit is the page in the leaf.
pub type Plane = [u64; BLOCK_LEAVES];

/// A [`Plane`] that needs no heap memory if all bits are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Bits {
    #[default]
    None,
    All,
    Some(Box<Plane>),
}

impl Bits {
    #[must_use]
    pub fn new(plane: &Plane) -> Self {
        if plane.iter().fold(0, |or, word| or | word) == 0 {
            Self::None
        } else if plane.iter().fold(u64::MAX, |and, word| and & word) == u64::MAX {
            Self::All
        } else {
            Self::Some(Box::new(*plane))
        }
    }

    /// The bits of one leaf.
    #[must_use]
    pub fn word(&self, leaf: usize) -> u64 {
        match self {
            Self::None => 0,
            Self::All => u64::MAX,
            Self::Some(plane) => plane[leaf],
        }
    }

    /// The bit of the `page`th page of the block.
    #[must_use]
    pub fn get(&self, page: u64) -> bool {
        self.word(to_usize(page / 64)) >> (page % 64) & 1 == 1
    }

    /// The first page after `page` whose bit differs from that of `page`, or 4096.
    #[must_use]
    pub fn run_end(&self, page: u64) -> u64 {
        let Self::Some(plane) = self else {
            return BLOCK_PAGES;
        };
        let mut leaf = to_usize(page / 64);
        // Invert the words if the bit is set, so that the end is always the next set bit.
        let turn = if self.get(page) { u64::MAX } else { 0 };
        let mut word = (plane[leaf] ^ turn) & (u64::MAX << (page % 64));
        while word == 0 {
            leaf += 1;
            if leaf == BLOCK_LEAVES {
                return BLOCK_PAGES;
            }
            word = plane[leaf] ^ turn;
        }
        fdmap_proto::units::to_u64(leaf) * 64 + u64::from(word.trailing_zeros())
    }

    /// Number of set bits below `page`.
    #[must_use]
    pub fn rank(&self, page: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::All => page,
            Self::Some(plane) => {
                let leaf = to_usize(page / 64);
                let whole: u32 = plane[..leaf.min(BLOCK_LEAVES)].iter().map(|word| word.count_ones()).sum();
                let part = match plane.get(leaf) {
                    Some(word) if !page.is_multiple_of(64) => (word << (64 - page % 64)).count_ones(),
                    _ => 0,
                };
                u64::from(whole + part)
            }
        }
    }

    /// Heap memory in bytes.
    #[must_use]
    pub const fn heap_bytes(&self) -> usize {
        match self {
            Self::Some(_) => size_of::<Plane>(),
            _ => 0,
        }
    }
}
