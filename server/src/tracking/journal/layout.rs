//! Offsets and encodings in a journal.

use fdmap_proto::units::{PageSize, low_u32, to_u64};
use fdmap_sys::SyscallError;

use super::super::dirty_stamp::DirtyStamp;
use crate::pages::{BLOCK_PAGES, BlockIndex};

pub(super) const MAGIC: [u8; 8] = *b"FDMAPJ1\0";
/// Version of the layout. Other versions are refused.
pub(super) const VERSION: u32 = 1;
/// Magic, version, pages per block, bytes per page, blocks in the table.
pub(super) const PREAMBLE_BYTES: usize = 32;

/// Blocks in the table: enough for a file of 64 TiB with pages of 4 KiB.
pub(super) const MAX_BLOCKS: u64 = 1 << 22;
pub const MAX_RECORD_BYTES: usize = 256 << 10;

/// Offset of the header's sequence number. Its lowest bit selects the valid slot.
pub(super) const HEADER_SEQUENCE: u64 = 0x1000;
/// Offset of the record's sequence number. Its lowest bit selects the valid slot.
pub(super) const RECORD_SEQUENCE: u64 = 0x1008;
/// Offset of the intent word: 0 if there is no intent, else 1 plus its slot.
pub(super) const INTENT_WORD: u64 = 0x1010;
/// Offset of two intents of [`INTENT_BYTES`].
pub(super) const INTENT_SLOTS: u64 = 0x2000;
/// Generation, first page, page after the last.
pub(super) const INTENT_BYTES: u64 = 24;
/// Offset of two headers.
pub(super) const HEADER_SLOTS: u64 = 0x3000;
/// Distance of the headers in bytes.
pub(super) const HEADER_STRIDE: u64 = 0x1000;
/// End of the part whose memory is always allocated.
pub(super) const FIXED_END: u64 = HEADER_SLOTS + 2 * HEADER_STRIDE;
/// Offset of two records. Each is a length of 8 bytes, then the data.
pub(super) const RECORD_SLOTS: u64 = 0x10000;
/// Distance of the records in bytes.
pub(super) const RECORD_STRIDE: u64 = 0x50000;
/// Offset of the table: a word of 8 bytes for each block.
pub(super) const TABLE: u64 = 1 << 20;
/// Bytes of the table whose memory is allocated at once.
pub(super) const TABLE_STEP: u64 = 4096;
/// Offset of the arrays: [`ARRAY_BYTES`] for each block, dense or not.
pub(super) const ARRAYS: u64 = TABLE + MAX_BLOCKS * 8;
/// Size of the array of one block: 4 bytes for each page.
pub(super) const ARRAY_BYTES: u64 = BLOCK_PAGES * 4;
/// Maximum length of a journal.
pub(super) const MAX_BYTES: u64 = ARRAYS + MAX_BLOCKS * ARRAY_BYTES;

const _: () = assert!(RECORD_SLOTS + 2 * RECORD_STRIDE <= TABLE);
const _: () = assert!(8 + to_u64(MAX_RECORD_BYTES) <= RECORD_STRIDE);
const _: () = assert!((ARRAYS - TABLE).is_multiple_of(TABLE_STEP));
// Mappings start at multiples of the page size, which is at most 64 KiB.
const _: () = assert!(ARRAYS.is_multiple_of(1 << 16));
const _: () = assert!(FIXED_END <= RECORD_SLOTS);

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("the journal is not a shmem memfd")]
    NotMemfd,
    /// The file could be truncated while it is mapped.
    #[error("the journal lacks F_SEAL_SHRINK, its seals are {0:#x}")]
    Shrinkable(u32),
    #[error("the file is not a journal: it has no magic")]
    BadMagic,
    #[error("the journal has layout version {0}, fdmapd supports version {VERSION}")]
    Version(u32),
    #[error(
        "the journal has pages of {page_bytes} bytes in blocks of {block_pages}, this host has pages of {host}"
    )]
    PageSize { page_bytes: u64, block_pages: u32, host: PageSize },
    /// The journal is shorter than its contents require, or longer than the maximum.
    #[error("the journal has {bytes} bytes, expected {expected}")]
    Length {
        bytes: u64,
        /// The minimum or maximum length.
        expected: u64,
    },
    #[error("the journal is damaged: invalid {what} at byte {offset}")]
    Damaged { what: &'static str, offset: u64 },
    #[error("a record of {0} bytes exceeds the maximum of {MAX_RECORD_BYTES}")]
    RecordTooLong(usize),
    #[error("block {} exceeds the {MAX_BLOCKS} blocks of a journal", .0.0)]
    BlockOutOfRange(BlockIndex),
    #[error("accessing the journal")]
    Syscall(#[from] SyscallError),
}

/// The table entry of a block. The kind is the lower half of the word and the stamp the upper half, so that one store
/// changes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockEntry {
    /// All pages have this stamp, which may be [`DirtyStamp::NEVER`].
    Uniform(DirtyStamp),
    /// The array of the block has a stamp for each page.
    Dense,
}

impl BlockEntry {
    const NEVER: u64 = 0;
    const UNIFORM: u64 = 1;
    const DENSE: u64 = 2;

    /// `None` if the word is invalid.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let stamp = DirtyStamp::from_bits(low_u32(word >> 32))?;
        match (word & 0xffff_ffff, stamp == DirtyStamp::NEVER) {
            (Self::NEVER, true) => Some(Self::Uniform(DirtyStamp::NEVER)),
            (Self::UNIFORM, false) => Some(Self::Uniform(stamp)),
            (Self::DENSE, true) => Some(Self::Dense),
            _ => None,
        }
    }

    pub(super) fn word(self) -> u64 {
        match self {
            Self::Uniform(DirtyStamp::NEVER) => Self::NEVER,
            Self::Uniform(stamp) => Self::UNIFORM | u64::from(stamp.bits()) << 32,
            Self::Dense => Self::DENSE,
        }
    }
}

/// Offset of the table entry of a block; `None` if the block is out of range.
pub(super) fn entry_offset(index: BlockIndex) -> Option<u64> {
    (index.0 < MAX_BLOCKS).then(|| TABLE + index.0 * 8)
}

/// Offset of the array of a block, which must be in range.
pub(super) const fn array_offset(index: BlockIndex) -> u64 {
    ARRAYS + index.0 * ARRAY_BYTES
}

/// The preamble of a journal on a host with this page size.
pub(super) fn preamble(page_size: PageSize) -> [u8; PREAMBLE_BYTES] {
    let mut preamble = [0; PREAMBLE_BYTES];
    preamble[..8].copy_from_slice(&MAGIC);
    preamble[8..12].copy_from_slice(&VERSION.to_le_bytes());
    preamble[12..16].copy_from_slice(&low_u32(BLOCK_PAGES).to_le_bytes());
    preamble[16..24].copy_from_slice(&page_size.bytes().to_le_bytes());
    preamble[24..].copy_from_slice(&MAX_BLOCKS.to_le_bytes());
    preamble
}

/// Checks that this host can read a journal with this preamble.
pub(super) fn check_preamble(found: &[u8; PREAMBLE_BYTES], host: PageSize) -> Result<(), JournalError> {
    let expected = preamble(host);
    if found[..8] != MAGIC {
        return Err(JournalError::BadMagic);
    }
    let version = u32_at(found, 8);
    if version != VERSION {
        return Err(JournalError::Version(version));
    }
    if found[12..24] != expected[12..24] {
        let (page_bytes, block_pages) = (u64_at(found, 16), u32_at(found, 12));
        return Err(JournalError::PageSize { page_bytes, block_pages, host });
    }
    if *found != expected {
        return Err(JournalError::Damaged { what: "number of blocks", offset: 24 });
    }
    Ok(())
}

/// The little-endian u64 at `offset`, which must be in range.
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

/// The little-endian u32 at `offset`, which must be in range.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}
