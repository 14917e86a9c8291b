//! What of a file's writes must outlive the service: a memfd that is passed on to its next process.
//!
//! A process may be killed at any instruction, and the next one finds what was written up to there: the stores of a process
//! that is gone stay in the file's pages in the order of the program. So this only has to keep the compiler from reordering
//! them, and never to change in place what does not change by one aligned store. It does not outlive the kernel.
//!
//! All numbers are little-endian. The layout is fixed and the file sparse, only as long as it has to be:
//!
//! | at | what |
//! |---|---|
//! | 0 | the head: magic `FDMAPJ1\0`; u32 version; u32 pages in a block; u64 bytes in a page; u64 blocks in the table |
//! | 0x1000 | u64 sequence number of the hot data |
//! | 0x1008 | u64 sequence number of the record |
//! | 0x1010 | u64: 0 if nothing is intended, 1 or 2 if the first or the second intent is |
//! | 0x2000 | two intents: u64 generation, u64 first page, u64 page after the last |
//! | 0x3000 | two times the hot data, 4096 bytes from one to the other: u64 open generation, u64 pages of the file, i64 seconds and i64 nanoseconds of its ctime, u64 flags; 64 answers, the latest first: u64 request, u32 generation, u32 whether it was unchanged |
//! | 0x10000 | two times the record, 0x50000 bytes from one to the other: u64 length, then up to 256 KiB |
//! | 0x100000 | the table, for each block of 4096 pages: u32 kind (0 never stamped, 1 uniform, 2 dense), u32 stamp |
//! | 0x2100000 | for each block 4096 stamps of u32, which count if it is dense |
//!
//! - Hot data and record: the lowest bit of the sequence number is the copy that counts. The other one is written, then the
//!   number goes up by one store.
//! - Intent: it is written where the last one is not, then the word tells of it by one store. Settling clears the word.
//! - Stamps: the word of a block, or that of a page of a dense block, changes by one store. Before a block becomes dense its
//!   array is filled; when it is uniform again, the word changes first, and then the array's memory is let go. Arrays that
//!   were left over by a process that was killed in between are let go when the journal is opened.
//!
//! The file is sealed against shrinking, since touching a mapping past the end of its file raises a signal. Memory is taken
//! by `fallocate` and by `pwrite` before it is touched by a mapping, so that want of it is an error and no signal either.

mod hot;
mod layout;
mod recover;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Place;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use fdmap_proto::units::{Generation, PageRange, PageSize, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};

pub use hot::{ANSWERS, Answered, Hot};
pub use layout::{JournalError, MOST_RECORD_BYTES};
pub use recover::Recovered;

use self::layout::{
    ARRAY_BYTES, ARRAYS, Entry, FIXED_END, HOT_SEQUENCE, HOT_SLOTS, HOT_STRIDE, INTENT_BYTES, INTENT_SLOTS,
    INTENT_WORD, RECORD_SEQUENCE, RECORD_SLOTS, RECORD_STRIDE, TABLE, TABLE_STEP, array_offset, entry_offset,
};
use super::split::by_block;
use super::stamp::PageStamp;
use super::stamps::{covers, inside, put};
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// Pages in a block.
const PAGES: usize = to_usize(BLOCK_PAGES);
/// Blocks whose arrays are mapped together: 16 MiB, of which only those take memory that are dense.
const CHUNK_BLOCKS: u64 = 1024;
const CHUNK_BYTES: u64 = CHUNK_BLOCKS * ARRAY_BYTES;

/// The journal of one file. There must be one process, and one `Journal`, at a time that writes to it.
#[derive(Debug)]
pub struct Journal {
    file: OwnedFd,
    /// Everything but the arrays.
    head: SharedMapping,
    /// The arrays of dense blocks, by block / [`CHUNK_BLOCKS`].
    chunks: BTreeMap<u64, SharedMapping>,
    /// The file's length.
    bytes: u64,
    /// Whether a step of the table has its memory.
    table: Vec<bool>,
    hot_sequence: u64,
    record_sequence: u64,
    intent_word: u64,
}

impl Journal {
    /// Makes a journal. `name` is for people; `page_size` is that of the host.
    ///
    /// # Errors
    /// [`JournalError::Syscall`] if there is no memory, descriptor or address range for it.
    pub fn create(name: &str, page_size: PageSize) -> Result<Self, JournalError> {
        let file = memfd::create(name, None)?;
        memfd::resize(file.as_fd(), ARRAYS)?;
        memfd::add_seals(file.as_fd(), memfd::SEAL_SHRINK)?;
        let journal = Self::map(file, ARRAYS, [0; 3])?;
        // Without it the rest is no journal.
        fd::write_at(journal.file.as_fd(), 0, &layout::head(page_size))?;
        Ok(journal)
    }

    /// Goes on with the journal that another process left behind, and tells what is in it.
    ///
    /// # Errors
    /// [`JournalError`] if it is none, is damaged, or was made on another host or by another version.
    pub fn open(file: OwnedFd, page_size: PageSize) -> Result<(Self, Recovered), JournalError> {
        let contents = recover::read(file.as_fd(), page_size)?;
        let words = [contents.hot_sequence, contents.record_sequence, contents.intent_word];
        Ok((Self::map(file, contents.bytes, words)?, contents.recovered))
    }

    fn map(
        file: OwnedFd,
        bytes: u64,
        [hot_sequence, record_sequence, intent_word]: [u64; 3],
    ) -> Result<Self, JournalError> {
        memfd::allocate(file.as_fd(), 0, FIXED_END)?;
        let head = SharedMapping::shared(&file, 0, to_usize(ARRAYS), true)?;
        let table = vec![false; to_usize((ARRAYS - TABLE) / TABLE_STEP)];
        let chunks = BTreeMap::new();
        Ok(Self { file, head, chunks, bytes, table, hot_sequence, record_sequence, intent_word })
    }

    /// The memfd, to be passed on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    #[cfg(test)]
    fn bytes_used(&self) -> Result<u64, JournalError> {
        Ok(u64::try_from(fd::stat(&self.file)?.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Replaces the hot data.
    pub fn write_hot(&mut self, hot: &Hot) {
        let next = self.hot_sequence.wrapping_add(1);
        self.head.write_at(to_usize(HOT_SLOTS + (next & 1) * HOT_STRIDE), &hot.encode());
        self.publish(HOT_SEQUENCE, next);
        self.hot_sequence = next;
    }

    /// Replaces the record, bytes that mean something to its user only.
    ///
    /// # Errors
    /// [`JournalError::RecordTooLong`] beyond [`MOST_RECORD_BYTES`]; [`JournalError::Syscall`] if there is no memory for
    /// it. The record stays as it was then.
    pub fn write_record(&mut self, record: &[u8]) -> Result<(), JournalError> {
        if record.len() > MOST_RECORD_BYTES {
            return Err(JournalError::RecordTooLong(record.len()));
        }
        let next = self.record_sequence.wrapping_add(1);
        let slot = RECORD_SLOTS + (next & 1) * RECORD_STRIDE;
        fd::write_at(self.file.as_fd(), slot, &to_u64(record.len()).to_le_bytes())?;
        fd::write_at(self.file.as_fd(), slot + 8, record)?;
        self.publish(RECORD_SEQUENCE, next);
        self.record_sequence = next;
        Ok(())
    }

    /// Says that the kernel's marks on `range` are about to be cleared, to be stamped as `generation`. Until it is settled,
    /// who opens the journal is told so. There is one intent at a time; another one takes its place.
    pub fn intend(&mut self, range: PageRange, generation: Generation) {
        let next = if self.intent_word == 1 { 2 } else { 1 };
        let slot = to_usize(INTENT_SLOTS + (next - 1) * INTENT_BYTES);
        let words = [generation.get(), range.start().0, range.end().0];
        for (word, at) in words.iter().zip((slot..).step_by(8)) {
            self.head.write_at(at, &word.to_le_bytes());
        }
        self.publish(INTENT_WORD, next);
        self.intent_word = next;
    }

    /// Says that what was intended is done.
    pub fn settle(&mut self) {
        self.publish(INTENT_WORD, 0);
        self.intent_word = 0;
    }

    /// Stamps the pages of `ranges`, just as [`super::StampMap::stamp_all`] does.
    ///
    /// # Errors
    /// [`JournalError::TooFar`] for pages that no journal has room for, [`JournalError::Syscall`] if there is no memory,
    /// [`JournalError::Damaged`] if somebody else has written to the journal. Some of the pages are not stamped then: what
    /// was intended must not be settled.
    pub fn stamp_all(&mut self, ranges: &[PageRange], stamp: PageStamp) -> Result<(), JournalError> {
        if stamp == PageStamp::NEVER {
            return Ok(());
        }
        for (index, ranges) in by_block(ranges) {
            self.take_table(index)?;
            match self.entry(index)? {
                Entry::Uniform(old) if old.newer_of(stamp) == old => {}
                Entry::Uniform(old) => self.stamp_uniform(index, ranges, old, stamp)?,
                Entry::Dense => self.stamp_dense(index, ranges, stamp)?,
            }
        }
        Ok(())
    }

    /// Stamps pages of a block of which all pages have the stamp `old`.
    fn stamp_uniform(
        &mut self,
        index: BlockIndex,
        ranges: &[PageRange],
        old: PageStamp,
        stamp: PageStamp,
    ) -> Result<(), JournalError> {
        if covers(ranges, index) {
            self.set_entry(index, Entry::Uniform(stamp));
            return Ok(());
        }
        let mut stamps = [old; PAGES];
        put(&mut stamps, index, ranges, stamp);
        if stamps.iter().all(|new| *new == stamps[0]) {
            self.set_entry(index, Entry::Uniform(stamps[0]));
            return Ok(());
        }
        self.chunk(index)?;
        memfd::allocate(self.file.as_fd(), array_offset(index), ARRAY_BYTES)?;
        for (word, stamp) in self.array(index)?.iter().zip(&stamps) {
            word.store(stamp.bits().to_le(), Ordering::Relaxed);
        }
        self.set_entry(index, Entry::Dense);
        Ok(())
    }

    /// Stamps pages of a block of which each has a stamp of its own.
    fn stamp_dense(
        &mut self,
        index: BlockIndex,
        ranges: &[PageRange],
        stamp: PageStamp,
    ) -> Result<(), JournalError> {
        let array = self.array(index)?;
        let newer_at = |word: &AtomicU32| {
            let old = PageStamp::from_bits(u32::from_le(word.load(Ordering::Relaxed)));
            old.map_or(stamp, |old| old.newer_of(stamp))
        };
        let whole = covers(ranges, index);
        if !whole || array.iter().any(|word| newer_at(word) != stamp) {
            for range in ranges {
                for word in &array[inside(index, *range)] {
                    word.store(newer_at(word).bits().to_le(), Ordering::Relaxed);
                }
            }
            let first = array[0].load(Ordering::Relaxed);
            if first != stamp.bits().to_le() || array.iter().any(|word| word.load(Ordering::Relaxed) != first)
            {
                return Ok(());
            }
        }
        self.set_entry(index, Entry::Uniform(stamp));
        memfd::punch_hole(self.file.as_fd(), array_offset(index), ARRAY_BYTES)?;
        Ok(())
    }

    /// Sees to it that the table has memory for the entry of a block.
    fn take_table(&mut self, index: BlockIndex) -> Result<(), JournalError> {
        let offset = entry_offset(index).ok_or(JournalError::TooFar(index))? - TABLE;
        let step = &mut self.table[to_usize(offset / TABLE_STEP)];
        if !*step {
            memfd::allocate(self.file.as_fd(), TABLE + offset - offset % TABLE_STEP, TABLE_STEP)?;
            *step = true;
        }
        Ok(())
    }

    /// The word of a block that there is room for.
    fn entry_word(&self, index: BlockIndex) -> &AtomicU64 {
        &self.head.atomic_u64s(to_usize(TABLE), to_usize((ARRAYS - TABLE) / 8))[to_usize(index.0)]
    }

    fn entry(&self, index: BlockIndex) -> Result<Entry, JournalError> {
        let word = u64::from_le(self.entry_word(index).load(Ordering::Relaxed));
        let offset = TABLE + index.0 * 8;
        Entry::from_word(word).ok_or(JournalError::Damaged { what: "the entry of a block", offset })
    }

    fn set_entry(&self, index: BlockIndex, entry: Entry) {
        store_in_order(self.entry_word(index), entry.word());
    }

    /// Tells of what was written before.
    fn publish(&self, offset: u64, value: u64) {
        store_in_order(&self.head.atomic_u64s(to_usize(offset), 1)[0], value);
    }

    /// The mapped arrays of the blocks around `index`.
    fn chunk(&mut self, index: BlockIndex) -> Result<&SharedMapping, JournalError> {
        let nth = index.0 / CHUNK_BLOCKS;
        let start = ARRAYS + nth * CHUNK_BYTES;
        match self.chunks.entry(nth) {
            Place::Occupied(chunk) => Ok(chunk.into_mut()),
            Place::Vacant(place) => {
                if self.bytes < start + CHUNK_BYTES {
                    memfd::resize(self.file.as_fd(), start + CHUNK_BYTES)?;
                    self.bytes = start + CHUNK_BYTES;
                }
                let len = to_usize(CHUNK_BYTES);
                Ok(place.insert(SharedMapping::shared(&self.file, start, len, true)?))
            }
        }
    }

    /// The stamps of a block.
    fn array(&mut self, index: BlockIndex) -> Result<&[AtomicU32], JournalError> {
        let offset = to_usize(index.0 % CHUNK_BLOCKS * ARRAY_BYTES);
        Ok(self.chunk(index)?.atomic_u32s(offset, PAGES))
    }
}

/// Stores a word after everything that was stored before, and before everything that is stored later: by the program, which
/// is what a process that is killed leaves behind. That needs no barrier of the processor.
fn store_in_order(word: &AtomicU64, value: u64) {
    compiler_fence(Ordering::SeqCst);
    word.store(value.to_le(), Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod crash;
#[cfg(test)]
mod tests;
