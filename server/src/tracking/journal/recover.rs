//! Reads the journal of an earlier process. Its contents are not trusted. pread allocates no memory for holes and
//! raises no signal.

use std::os::fd::BorrowedFd;

use fdmap_proto::units::{Generation, PageIndex, PageRange, PageSize, to_u64, to_usize};
use fdmap_sys::memfd::{self, MemfdKind};
use fdmap_sys::{fd, seek};

use super::super::dirty_stamp::DirtyStamp;
use super::super::stamps::{StampMap, Stamps};
use super::header::{HEADER_BYTES, JournalHeader};
use super::layout::{
    ARRAY_BYTES, ARRAYS, BlockEntry, HEADER_SEQUENCE, HEADER_SLOTS, HEADER_STRIDE, INTENT_BYTES,
    INTENT_SLOTS, INTENT_WORD, JournalError, MAX_BYTES, MAX_RECORD_BYTES, PREAMBLE_BYTES, RECORD_SEQUENCE,
    RECORD_SLOTS, RECORD_STRIDE, TABLE, array_offset, check_preamble, u32_at, u64_at,
};
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// The contents of a journal.
#[derive(Debug)]
pub struct RecoveredJournal {
    /// The last header that was written completely, or the default.
    pub header: JournalHeader,
    /// The last record that was written completely; empty if there is none.
    pub record: Vec<u8>,
    pub stamps: StampMap,
    /// The intent that was not settled. Written pages in its range may lack the stamp of its generation.
    pub intent: Option<(PageRange, Generation)>,
}

/// The contents of a journal, and the state that [`super::Journal`] continues with.
pub(super) struct Contents {
    pub(super) recovered: RecoveredJournal,
    pub(super) bytes: u64,
    /// Dense blocks.
    pub(super) dense: Vec<BlockIndex>,
    pub(super) header_sequence: u64,
    pub(super) record_sequence: u64,
    pub(super) intent_word: u64,
}

/// Reads a journal, and releases the arrays of blocks that are not dense.
pub(super) fn read(journal: BorrowedFd<'_>, page_size: PageSize) -> Result<Contents, JournalError> {
    if memfd::kind(journal)? != Some(MemfdKind::Shmem) {
        return Err(JournalError::NotMemfd);
    }
    let seals = memfd::seals(journal)?;
    if seals & memfd::SEAL_SHRINK == 0 {
        return Err(JournalError::Shrinkable(seals));
    }
    let bytes = u64::try_from(fd::stat(journal)?.st_size).unwrap_or(0);
    let mut preamble = [0; PREAMBLE_BYTES];
    read_exact(journal, 0, &mut preamble)?;
    check_preamble(&preamble, page_size)?;
    if !(ARRAYS..=MAX_BYTES).contains(&bytes) {
        let expected = if bytes < ARRAYS { ARRAYS } else { MAX_BYTES };
        return Err(JournalError::Length { bytes, expected });
    }
    let word = |offset| {
        let mut word = [0; 8];
        read_exact(journal, offset, &mut word)?;
        Ok::<_, JournalError>(u64::from_le_bytes(word))
    };
    let (header_sequence, record_sequence) = (word(HEADER_SEQUENCE)?, word(RECORD_SEQUENCE)?);
    let intent_word = word(INTENT_WORD)?;

    let (stamps, dense) = read_stamps(journal, bytes)?;
    let recovered = RecoveredJournal {
        header: read_header(journal, header_sequence)?,
        record: read_record(journal, record_sequence)?,
        stamps,
        intent: read_intent(journal, intent_word)?,
    };
    Ok(Contents { recovered, bytes, dense, header_sequence, record_sequence, intent_word })
}

fn read_exact(journal: BorrowedFd<'_>, offset: u64, out: &mut [u8]) -> Result<(), JournalError> {
    let read = to_u64(fd::read_at(journal, offset, out)?);
    let expected = to_u64(out.len());
    if read < expected {
        return Err(JournalError::Length { bytes: offset + read, expected: offset + expected });
    }
    Ok(())
}

fn read_header(journal: BorrowedFd<'_>, sequence: u64) -> Result<JournalHeader, JournalError> {
    let offset = HEADER_SLOTS + (sequence & 1) * HEADER_STRIDE;
    let mut bytes = [0; HEADER_BYTES];
    read_exact(journal, offset, &mut bytes)?;
    JournalHeader::decode(&bytes).map_err(|what| JournalError::Damaged { what, offset })
}

fn read_record(journal: BorrowedFd<'_>, sequence: u64) -> Result<Vec<u8>, JournalError> {
    let offset = RECORD_SLOTS + (sequence & 1) * RECORD_STRIDE;
    let mut len = [0; 8];
    read_exact(journal, offset, &mut len)?;
    let len = to_usize(u64::from_le_bytes(len));
    if len > MAX_RECORD_BYTES {
        return Err(JournalError::Damaged { what: "length of the record", offset });
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
        return Err(JournalError::Damaged { what: "slot of the intent", offset: INTENT_WORD });
    }
    let offset = INTENT_SLOTS + (word - 1) * INTENT_BYTES;
    let mut bytes = [0; to_usize(INTENT_BYTES)];
    read_exact(journal, offset, &mut bytes)?;
    let range = PageRange::new(PageIndex(u64_at(&bytes, 8)), PageIndex(u64_at(&bytes, 16)));
    match (range, Generation::new(u64_at(&bytes, 0))) {
        (Some(range), Some(generation)) => Ok(Some((range, generation))),
        _ => Err(JournalError::Damaged { what: "intent", offset }),
    }
}

/// Reads the stamps of all blocks, and which are dense. Holes in the table are blocks that were never stamped.
fn read_stamps(journal: BorrowedFd<'_>, bytes: u64) -> Result<(StampMap, Vec<BlockIndex>), JournalError> {
    let mut stamps = StampMap::default();
    let mut dense = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    each_extent(journal, TABLE, ARRAYS, |start, end| {
        let mut at = start - start % 8;
        while at < end {
            let len = to_usize(end - at).min(buffer.len()).next_multiple_of(8);
            read_exact(journal, at, &mut buffer[..len])?;
            let (words, _) = buffer[..len].as_chunks::<8>();
            for (offset, word) in (at..).step_by(8).zip(words) {
                let damaged = JournalError::Damaged { what: "entry of a block", offset };
                let index = BlockIndex((offset - TABLE) / 8);
                match BlockEntry::from_word(u64::from_le_bytes(*word)).ok_or(damaged)? {
                    BlockEntry::Uniform(DirtyStamp::NEVER) => {}
                    BlockEntry::Uniform(stamp) => stamps.stamp(index.pages(), stamp),
                    BlockEntry::Dense => {
                        stamps.put(index, &read_array(journal, index, bytes)?);
                        dense.push(index);
                    }
                }
            }
            at += to_u64(len);
        }
        Ok(())
    })?;
    release_orphans(journal, bytes, &dense)?;
    Ok((stamps, dense))
}

fn read_array(journal: BorrowedFd<'_>, index: BlockIndex, bytes: u64) -> Result<Stamps, JournalError> {
    let offset = array_offset(index);
    if offset + ARRAY_BYTES > bytes {
        return Err(JournalError::Length { bytes, expected: offset + ARRAY_BYTES });
    }
    let mut array = vec![0; to_usize(ARRAY_BYTES)];
    read_exact(journal, offset, &mut array)?;
    let mut stamps = [DirtyStamp::NEVER; to_usize(BLOCK_PAGES)];
    for (stamp, at) in stamps.iter_mut().zip((0..).step_by(4)) {
        let damaged = || JournalError::Damaged { what: "stamp of a page", offset: offset + to_u64(at) };
        *stamp = DirtyStamp::from_bits(u32_at(&array, at)).ok_or_else(damaged)?;
    }
    Ok(stamps)
}

/// Releases the arrays of blocks that are not dense. A process that is killed while a block becomes dense or uniform
/// leaves such an array. (Memory that was allocated but never written counts as a hole; it remains until the block is
/// dense again.)
fn release_orphans(journal: BorrowedFd<'_>, bytes: u64, dense: &[BlockIndex]) -> Result<(), JournalError> {
    let mut orphans = Vec::new();
    each_extent(journal, ARRAYS, bytes, |start, end| {
        // With large pages, an array can share a page with others, so an extent can include parts of several arrays.
        let blocks = (start - ARRAYS) / ARRAY_BYTES..(end - ARRAYS).div_ceil(ARRAY_BYTES);
        orphans.extend(blocks.map(BlockIndex).filter(|index| dense.binary_search(index).is_err()));
        Ok(())
    })?;
    for index in orphans {
        memfd::punch_hole(journal, array_offset(index), ARRAY_BYTES)?;
    }
    Ok(())
}

/// Calls `visit` for each extent of data in `start..end`.
fn each_extent(
    journal: BorrowedFd<'_>,
    start: u64,
    end: u64,
    mut visit: impl FnMut(u64, u64) -> Result<(), JournalError>,
) -> Result<(), JournalError> {
    let mut at = start;
    while at < end {
        let Some(data) = seek::next_data(journal, at)?.filter(|data| *data < end) else {
            return Ok(());
        };
        let hole = seek::next_hole(journal, data)?.unwrap_or(end).clamp(data, end);
        visit(data, hole)?;
        at = hole.max(data + 1);
    }
    Ok(())
}
