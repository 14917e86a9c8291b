//! Reading a journal that another process left behind.
//!
//! Nothing in it is trusted, and it is read by pread: that takes no memory where the journal has none, and raises no signal.

use std::os::fd::BorrowedFd;

use fdmap_proto::units::{Generation, PageIndex, PageRange, PageSize, to_u64, to_usize};
use fdmap_sys::memfd::{self, MemfdKind};
use fdmap_sys::{fd, seek};

use super::super::stamp::PageStamp;
use super::super::stamps::{StampMap, Stamps};
use super::hot::{HOT_BYTES, Hot};
use super::layout::{
    ARRAY_BYTES, ARRAYS, Entry, HEAD_BYTES, HOT_SEQUENCE, HOT_SLOTS, HOT_STRIDE, INTENT_BYTES, INTENT_SLOTS,
    INTENT_WORD, JournalError, MOST_BYTES, MOST_RECORD_BYTES, RECORD_SEQUENCE, RECORD_SLOTS, RECORD_STRIDE,
    TABLE, array_offset, check_head, u32_at, u64_at,
};
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// What the last process to write to a journal had put into it.
#[derive(Debug)]
pub struct Recovered {
    /// The last [`Hot`] that was written whole, or the default.
    pub hot: Hot,
    /// The last record that was written whole, or none.
    pub record: Vec<u8>,
    /// All stamps.
    pub stamps: StampMap,
    /// What was intended and not settled: the stamps of these pages may be older than they should be.
    pub intent: Option<(PageRange, Generation)>,
}

/// What a journal holds, beyond what is recovered.
pub(super) struct Contents {
    pub(super) recovered: Recovered,
    pub(super) bytes: u64,
    pub(super) hot_sequence: u64,
    pub(super) record_sequence: u64,
    pub(super) intent_word: u64,
}

/// Reads all of it, and lets go of arrays that no entry of the table refers to any more.
pub(super) fn read(journal: BorrowedFd<'_>, page_size: PageSize) -> Result<Contents, JournalError> {
    if memfd::kind(journal)? != Some(MemfdKind::Shmem) {
        return Err(JournalError::NotMemfd);
    }
    let seals = memfd::seals(journal)?;
    if seals & memfd::SEAL_SHRINK == 0 {
        return Err(JournalError::Shrinkable(seals));
    }
    let bytes = u64::try_from(fd::stat(journal)?.st_size).unwrap_or(0);
    let mut head = [0; HEAD_BYTES];
    read_exact(journal, 0, &mut head)?;
    check_head(&head, page_size)?;
    if !(ARRAYS..=MOST_BYTES).contains(&bytes) {
        let expected = if bytes < ARRAYS { ARRAYS } else { MOST_BYTES };
        return Err(JournalError::Length { bytes, expected });
    }
    let word = |offset| {
        let mut word = [0; 8];
        read_exact(journal, offset, &mut word)?;
        Ok::<_, JournalError>(u64::from_le_bytes(word))
    };
    let (hot_sequence, record_sequence) = (word(HOT_SEQUENCE)?, word(RECORD_SEQUENCE)?);
    let intent_word = word(INTENT_WORD)?;

    let recovered = Recovered {
        hot: read_hot(journal, hot_sequence)?,
        record: read_record(journal, record_sequence)?,
        stamps: read_stamps(journal, bytes)?,
        intent: read_intent(journal, intent_word)?,
    };
    Ok(Contents { recovered, bytes, hot_sequence, record_sequence, intent_word })
}

fn read_exact(journal: BorrowedFd<'_>, offset: u64, out: &mut [u8]) -> Result<(), JournalError> {
    let read = to_u64(fd::read_at(journal, offset, out)?);
    let expected = to_u64(out.len());
    if read < expected {
        return Err(JournalError::Length { bytes: offset + read, expected: offset + expected });
    }
    Ok(())
}

fn read_hot(journal: BorrowedFd<'_>, sequence: u64) -> Result<Hot, JournalError> {
    let offset = HOT_SLOTS + (sequence & 1) * HOT_STRIDE;
    let mut bytes = [0; HOT_BYTES];
    read_exact(journal, offset, &mut bytes)?;
    Hot::decode(&bytes).map_err(|what| JournalError::Damaged { what, offset })
}

fn read_record(journal: BorrowedFd<'_>, sequence: u64) -> Result<Vec<u8>, JournalError> {
    let offset = RECORD_SLOTS + (sequence & 1) * RECORD_STRIDE;
    let mut len = [0; 8];
    read_exact(journal, offset, &mut len)?;
    let len = to_usize(u64::from_le_bytes(len));
    if len > MOST_RECORD_BYTES {
        return Err(JournalError::Damaged { what: "the length of the record", offset });
    }
    let mut record = vec![0; len];
    read_exact(journal, offset + 8, &mut record)?;
    Ok(record)
}

fn read_intent(journal: BorrowedFd<'_>, word: u64) -> Result<Option<(PageRange, Generation)>, JournalError> {
    if word == 0 {
        return Ok(None);
    }
    if word > 2 {
        return Err(JournalError::Damaged { what: "the slot of the intent", offset: INTENT_WORD });
    }
    let offset = INTENT_SLOTS + (word - 1) * INTENT_BYTES;
    let mut bytes = [0; to_usize(INTENT_BYTES)];
    read_exact(journal, offset, &mut bytes)?;
    let range = PageRange::new(PageIndex(u64_at(&bytes, 8)), PageIndex(u64_at(&bytes, 16)));
    match (range, Generation::new(u64_at(&bytes, 0))) {
        (Some(range), Some(generation)) => Ok(Some((range, generation))),
        _ => Err(JournalError::Damaged { what: "the intent", offset }),
    }
}

/// The stamps of all blocks. What the table has no memory for was never stamped.
fn read_stamps(journal: BorrowedFd<'_>, bytes: u64) -> Result<StampMap, JournalError> {
    let mut stamps = StampMap::default();
    let mut dense = Vec::new();
    let mut piece = vec![0; 1 << 16];
    each_extent(journal, TABLE, ARRAYS, |start, end| {
        let mut at = start - start % 8;
        while at < end {
            let len = to_usize(end - at).min(piece.len()).next_multiple_of(8);
            read_exact(journal, at, &mut piece[..len])?;
            let (words, _) = piece[..len].as_chunks::<8>();
            for (offset, word) in (at..).step_by(8).zip(words) {
                let damaged = JournalError::Damaged { what: "the entry of a block", offset };
                let index = BlockIndex((offset - TABLE) / 8);
                match Entry::from_word(u64::from_le_bytes(*word)).ok_or(damaged)? {
                    Entry::Uniform(PageStamp::NEVER) => {}
                    Entry::Uniform(stamp) => stamps.stamp(index.pages(), stamp),
                    Entry::Dense => {
                        stamps.put(index, &read_array(journal, index, bytes)?);
                        dense.push(index);
                    }
                }
            }
            at += to_u64(len);
        }
        Ok(())
    })?;
    let_go_of_orphans(journal, bytes, &dense)?;
    Ok(stamps)
}

fn read_array(journal: BorrowedFd<'_>, index: BlockIndex, bytes: u64) -> Result<Stamps, JournalError> {
    let offset = array_offset(index);
    if offset + ARRAY_BYTES > bytes {
        return Err(JournalError::Length { bytes, expected: offset + ARRAY_BYTES });
    }
    let mut array = vec![0; to_usize(ARRAY_BYTES)];
    read_exact(journal, offset, &mut array)?;
    let mut stamps = [PageStamp::NEVER; to_usize(BLOCK_PAGES)];
    for (stamp, at) in stamps.iter_mut().zip((0..).step_by(4)) {
        let damaged = || JournalError::Damaged { what: "the stamp of a page", offset: offset + to_u64(at) };
        *stamp = PageStamp::from_bits(u32_at(&array, at)).ok_or_else(damaged)?;
    }
    Ok(stamps)
}

/// A process that was killed right before a block became dense, or right after it ceased to be, leaves its array behind.
/// (Memory that was taken and never touched counts as a hole; it stays until the block is dense again.)
fn let_go_of_orphans(journal: BorrowedFd<'_>, bytes: u64, dense: &[BlockIndex]) -> Result<(), JournalError> {
    let mut orphans = Vec::new();
    each_extent(journal, ARRAYS, bytes, |start, end| {
        // An array may share its page with others where pages are large, so that not all of an extent is its own.
        let blocks = (start - ARRAYS) / ARRAY_BYTES..(end - ARRAYS).div_ceil(ARRAY_BYTES);
        orphans.extend(blocks.map(BlockIndex).filter(|index| dense.binary_search(index).is_err()));
        Ok(())
    })?;
    for index in orphans {
        memfd::punch_hole(journal, array_offset(index), ARRAY_BYTES)?;
    }
    Ok(())
}

/// Calls `of` with each part from `start` up to `end` that the journal has memory for.
fn each_extent(
    journal: BorrowedFd<'_>,
    start: u64,
    end: u64,
    mut of: impl FnMut(u64, u64) -> Result<(), JournalError>,
) -> Result<(), JournalError> {
    let mut at = start;
    while at < end {
        let Some(data) = seek::next_data(journal, at)?.filter(|data| *data < end) else {
            return Ok(());
        };
        let hole = seek::next_hole(journal, data)?.unwrap_or(end).clamp(data, end);
        of(data, hole)?;
        at = hole.max(data + 1);
    }
    Ok(())
}
