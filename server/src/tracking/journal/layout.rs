//! Where everything lies in a journal, and what its words mean.

use fdmap_proto::units::{PageSize, low_u32, to_u64};
use fdmap_sys::SyscallError;

use super::super::stamp::PageStamp;
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// The first bytes of a journal.
pub(super) const MAGIC: [u8; 8] = *b"FDMAPJ1\0";
/// Of the layout. Another one is not read.
pub(super) const VERSION: u32 = 1;
/// Bytes of the head: magic, version, pages in a block, bytes in a page, blocks in the table.
pub(super) const HEAD_BYTES: usize = 32;

/// Blocks that there is room for: files of 64 TiB with pages of 4 KiB.
pub(super) const MOST_BLOCKS: u64 = 1 << 22;
/// Bytes that a record may have at most.
pub const MOST_RECORD_BYTES: usize = 256 << 10;

/// How often the hot data was written; the lowest bit is the slot that counts.
pub(super) const HOT_SEQUENCE: u64 = 0x1000;
/// The same for the record.
pub(super) const RECORD_SEQUENCE: u64 = 0x1008;
/// 0 if nothing is intended, else 1 plus the slot that says what.
pub(super) const INTENT_WORD: u64 = 0x1010;
/// Two of [`INTENT_BYTES`].
pub(super) const INTENT_SLOTS: u64 = 0x2000;
/// Generation, first page, page after the last.
pub(super) const INTENT_BYTES: u64 = 24;
/// Two pages of 4096 bytes.
pub(super) const HOT_SLOTS: u64 = 0x3000;
/// Bytes from one to the other.
pub(super) const HOT_STRIDE: u64 = 0x1000;
/// Where what is always there ends.
pub(super) const FIXED_END: u64 = HOT_SLOTS + 2 * HOT_STRIDE;
/// Two of [`RECORD_STRIDE`]: the length in 8 bytes, then the record.
pub(super) const RECORD_SLOTS: u64 = 0x10000;
/// Bytes from one to the other.
pub(super) const RECORD_STRIDE: u64 = 0x50000;
/// A word of 8 bytes for each block.
pub(super) const TABLE: u64 = 1 << 20;
/// Bytes of the table whose memory is taken at a time.
pub(super) const TABLE_STEP: u64 = 4096;
/// 4 bytes a page for each block, the place of the block being fixed.
pub(super) const ARRAYS: u64 = TABLE + MOST_BLOCKS * 8;
/// Bytes of the stamps of one block.
pub(super) const ARRAY_BYTES: u64 = BLOCK_PAGES * 4;
/// A journal is never longer than this.
pub(super) const MOST_BYTES: u64 = ARRAYS + MOST_BLOCKS * ARRAY_BYTES;

const _: () = assert!(RECORD_SLOTS + 2 * RECORD_STRIDE <= TABLE);
const _: () = assert!(8 + to_u64(MOST_RECORD_BYTES) <= RECORD_STRIDE);
const _: () = assert!((ARRAYS - TABLE).is_multiple_of(TABLE_STEP));
// Mappings begin at multiples of the page size, which is 64 KiB at most.
const _: () = assert!(ARRAYS.is_multiple_of(1 << 16));
const _: () = assert!(FIXED_END <= RECORD_SLOTS);

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Not a memfd of shmem.
    #[error("the file is no memfd of shmem")]
    NotMemfd,
    /// It could be cut while it is mapped.
    #[error("the file is not sealed against shrinking (F_SEAL_SHRINK), its seals are {0:#x}")]
    Shrinkable(u32),
    /// It begins with something else than a journal does.
    #[error("the file is no journal")]
    Foreign,
    /// Written by another version of the service.
    #[error("the journal has layout {0}, this service reads {VERSION}")]
    Version(u32),
    /// Written where pages are of another size, or are grouped otherwise.
    #[error(
        "the journal is about pages of {page_bytes} bytes in blocks of {block_pages}, here they are of {here}"
    )]
    Pages {
        /// Bytes in a page.
        page_bytes: u64,
        /// Pages in a block.
        block_pages: u32,
        /// The page size of this host.
        here: PageSize,
    },
    /// Shorter than what it says to hold, or longer than any journal.
    #[error("the journal has {bytes} bytes where {expected} were expected")]
    Length {
        /// Its length.
        bytes: u64,
        /// What it should be: at least this, or at most.
        expected: u64,
    },
    /// It holds what no service wrote.
    #[error("the journal is damaged: {what} at byte {offset} means nothing")]
    Damaged {
        /// What is wrong.
        what: &'static str,
        /// Where it lies in the journal.
        offset: u64,
    },
    /// The record is too long.
    #[error("a record of {0} bytes is longer than {MOST_RECORD_BYTES}")]
    RecordTooLong(usize),
    /// There is no room for the stamps of that block.
    #[error("block {} lies beyond the {MOST_BLOCKS} that a journal has room for", .0.0)]
    TooFar(BlockIndex),
    /// The kernel refused.
    #[error("a system call failed")]
    Syscall(#[from] SyscallError),
}

/// What a word of the table says of a block.
///
/// The kind is in the lower half of the word and the stamp in the upper one, so that both change by one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Every page has this stamp, which may be "never".
    Uniform(PageStamp),
    /// Each page has a stamp of its own, in the block's array.
    Dense,
}

impl Entry {
    const NEVER: u64 = 0;
    const UNIFORM: u64 = 1;
    const DENSE: u64 = 2;

    /// `None` if the word means nothing.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let stamp = PageStamp::from_bits(low_u32(word >> 32))?;
        match (word & 0xffff_ffff, stamp == PageStamp::NEVER) {
            (Self::NEVER, true) => Some(Self::Uniform(PageStamp::NEVER)),
            (Self::UNIFORM, false) => Some(Self::Uniform(stamp)),
            (Self::DENSE, true) => Some(Self::Dense),
            _ => None,
        }
    }

    pub(super) fn word(self) -> u64 {
        match self {
            Self::Uniform(PageStamp::NEVER) => Self::NEVER,
            Self::Uniform(stamp) => Self::UNIFORM | u64::from(stamp.bits()) << 32,
            Self::Dense => Self::DENSE,
        }
    }
}

/// Where the word of a block lies; `None` if there is no room for the block.
pub(super) fn entry_offset(index: BlockIndex) -> Option<u64> {
    (index.0 < MOST_BLOCKS).then(|| TABLE + index.0 * 8)
}

/// Where the stamps of a block lie that there is room for.
pub(super) const fn array_offset(index: BlockIndex) -> u64 {
    ARRAYS + index.0 * ARRAY_BYTES
}

/// The head of a journal.
pub(super) fn head(page_size: PageSize) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&low_u32(BLOCK_PAGES).to_le_bytes());
    head[16..24].copy_from_slice(&page_size.bytes().to_le_bytes());
    head[24..].copy_from_slice(&MOST_BLOCKS.to_le_bytes());
    head
}

/// Whether `found` is the head of a journal that can be read here.
pub(super) fn check_head(found: &[u8; HEAD_BYTES], here: PageSize) -> Result<(), JournalError> {
    let expected = head(here);
    if found[..8] != MAGIC {
        return Err(JournalError::Foreign);
    }
    let version = u32_at(found, 8);
    if version != VERSION {
        return Err(JournalError::Version(version));
    }
    if found[12..24] != expected[12..24] {
        let (page_bytes, block_pages) = (u64_at(found, 16), u32_at(found, 12));
        return Err(JournalError::Pages { page_bytes, block_pages, here });
    }
    if *found != expected {
        return Err(JournalError::Damaged { what: "the number of blocks", offset: 24 });
    }
    Ok(())
}

/// The little-endian word at `offset`, which must lie in `bytes`.
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

/// The same of 4 bytes.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}
