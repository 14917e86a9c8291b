//! Page states in memory: a persistent map of blocks of 4096 pages, immutable snapshots of it, and the runs, counts,
//! differences and encodings that are computed from them. This folder does no I/O and has no unsafe code. It does not
//! know how states are read.

mod attributes;
mod bits;
mod block;
mod blocks;
mod builder;
mod diff;
mod encode;
mod map;
mod runs;
mod scan;
mod slots;
mod spans;
mod summary;

pub use attributes::{AttributeMap, PackedAttributes};
pub use bits::{Bits, Plane};
pub use block::Block;
pub use blocks::{BLOCK_LEAVES, BLOCK_PAGES, BlockIndex, BlockRange, LEAF_PAGES};
pub use builder::BlockBuilder;
pub use diff::{Differences, diff};
pub(crate) use encode::put_word;
pub use encode::{bitmaps, entries, state_words};
pub use map::{Scanned, Snapshot};
pub use runs::{RunOptions, Runs};
pub use scan::{ScanOptions, ScanResult};
pub use spans::{ScanStamp, Spans};
pub use summary::Summary;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
pub(crate) mod oracle;
#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests;
