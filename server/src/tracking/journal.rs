//! The journal of one file: the state that outlives a process of the service, in a memfd that is passed to the next
//! process.
//!
//! A process may be killed at any instruction. Its earlier stores remain in the pages of the memfd, in program order,
//! so the next process finds everything that was written before. The journal therefore only keeps the compiler from
//! reordering stores, and changes data in place only if one aligned store is enough. The journal does not survive a
//! reboot.
//!
//! All integers are little-endian. The layout is fixed; the file is sparse and grows on demand.
//!
//! | offset | content |
//! |---|---|
//! | 0 | preamble: magic `FDMAPJ1\0`; u32 version; u32 pages per block; u64 bytes per page; u64 blocks in the table |
//! | 0x1000 | u64 sequence number of the header |
//! | 0x1008 | u64 sequence number of the record |
//! | 0x1010 | u64: 0 if there is no intent, 1 or 2 if the first or the second intent is valid |
//! | 0x2000 | two intents: u64 generation, u64 first page, u64 page after the last |
//! | 0x3000 | two headers, 4096 bytes apart: u64 open generation, u64 pages of the file, i64 seconds and i64 nanoseconds of its ctime, u64 flags; 64 replies, the latest first: u64 idempotency key, u32 generation, u32 1 if nothing was written |
//! | 0x10000 | two records, 0x50000 bytes apart: u64 length, then up to 256 KiB |
//! | 0x100000 | the table, for each block of 4096 pages: u32 kind (0 never stamped, 1 uniform, 2 dense), u32 stamp |
//! | 0x2100000 | the arrays, for each block 4096 stamps of u32, which are valid if the block is dense |
//!
//! - Header and record: the lowest bit of the sequence number selects the valid copy. An update writes the other copy, then
//!   increments the number with one store.
//! - Intent: an update writes the intent that is not valid, then the word at 0x1010 with one store. Settling clears the word.
//! - Stamps: the word of a block, or of a page in a dense block, changes with one store. Before a block becomes dense, its array is
//!   filled. When it becomes uniform, its word changes first, then the memory of the array is released. Opening a journal releases
//!   arrays that a process left behind when it was killed in between.
//!
//! The file is sealed against shrinking, because an access to a mapping beyond the end of its file raises SIGBUS.
//! Memory is allocated by `fallocate` or `pwrite` before a mapping accesses it, so a lack of memory is an error and not
//! a signal.

mod header;
mod layout;
mod recover;

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use fdmap_proto::units::{Generation, PageRange, PageSize, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};

pub use header::{CheckpointReply, JournalHeader};
pub use layout::{JournalError, MAX_RECORD_BYTES};
pub use recover::RecoveredJournal;

use self::layout::{
    ARRAY_BYTES, ARRAYS, BlockEntry, FIXED_END, HEADER_SEQUENCE, HEADER_SLOTS, HEADER_STRIDE, INTENT_BYTES,
    INTENT_SLOTS, INTENT_WORD, RECORD_SEQUENCE, RECORD_SLOTS, RECORD_STRIDE, TABLE, TABLE_STEP, array_offset,
    entry_offset,
};
use super::dirty_stamp::DirtyStamp;
use super::split::by_block;
use super::stamps::{covers, inside, put};
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// Pages in a block.
const PAGES: usize = to_usize(BLOCK_PAGES);
/// Blocks whose arrays share a mapping of 16 MiB. Only the arrays of dense blocks occupy memory.
const CHUNK_BLOCKS: u64 = 1024;
const CHUNK_BYTES: u64 = CHUNK_BLOCKS * ARRAY_BYTES;

/// The journal of one file. At any time, only one process and one `Journal` may write to it.
#[derive(Debug)]
pub struct Journal {
    file: OwnedFd,
    /// Everything before the arrays.
    head: SharedMapping,
    /// The arrays of dense blocks, by block / [`CHUNK_BLOCKS`].
    chunks: BTreeMap<u64, SharedMapping>,
    /// Length of the file.
    bytes: u64,
    /// Dense blocks.
    dense: u64,
    /// True for each step of the table whose memory is allocated.
    table: Vec<bool>,
    header_sequence: u64,
    record_sequence: u64,
    intent_word: u64,
}

impl Journal {
    /// Creates a journal. `name` appears in /proc; `page_size` is the base page size of the host.
    ///
    /// # Errors
    /// [`JournalError::Syscall`] if memory, descriptors or address space are exhausted.
    pub fn create(name: &str, page_size: PageSize) -> Result<Self, JournalError> {
        let file = memfd::create(name, None)?;
        memfd::resize(file.as_fd(), ARRAYS)?;
        memfd::add_seals(file.as_fd(), memfd::SEAL_SHRINK)?;
        let journal = Self::map(file, ARRAYS, [0; 3])?;
        // Until the preamble is written, the file is not a journal.
        fd::write_at(journal.file.as_fd(), 0, &layout::preamble(page_size))?;
        Ok(journal)
    }

    /// Opens the journal of an earlier process, and returns its contents.
    ///
    /// # Errors
    /// [`JournalError`] if the file is not a journal, is damaged, or has another page size or version.
    pub fn open(file: OwnedFd, page_size: PageSize) -> Result<(Self, RecoveredJournal), JournalError> {
        let contents = recover::read(file.as_fd(), page_size)?;
        let words = [contents.header_sequence, contents.record_sequence, contents.intent_word];
        let mut journal = Self::map(file, contents.bytes, words)?;
        journal.dense = to_u64(contents.dense.len());
        // The process that made these blocks dense has allocated their table entries.
        for offset in contents.dense.into_iter().filter_map(entry_offset) {
            journal.table[to_usize((offset - TABLE) / TABLE_STEP)] = true;
        }
        Ok((journal, contents.recovered))
    }

    fn map(
        file: OwnedFd,
        bytes: u64,
        [header_sequence, record_sequence, intent_word]: [u64; 3],
    ) -> Result<Self, JournalError> {
        memfd::allocate(file.as_fd(), 0, FIXED_END)?;
        let head = SharedMapping::shared(&file, 0, to_usize(ARRAYS), true)?;
        let table = vec![false; to_usize((ARRAYS - TABLE) / TABLE_STEP)];
        let (chunks, dense) = (BTreeMap::new(), 0);
        Ok(Self { file, head, chunks, bytes, dense, table, header_sequence, record_sequence, intent_word })
    }

    /// The memfd, which must be passed to the next process.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Blocks whose pages have different stamps. Each has an array.
    #[must_use]
    pub const fn dense(&self) -> u64 {
        self.dense
    }

    /// True if all pages of a block have one stamp, and it is older than `stamp`.
    #[must_use]
    pub fn is_uniform_before(&self, index: BlockIndex, stamp: DirtyStamp) -> bool {
        let Some(offset) = entry_offset(index) else { return false };
        // A mapping must not access memory that is not allocated.
        if !self.table[to_usize((offset - TABLE) / TABLE_STEP)] {
            return true;
        }
        matches!(self.entry(index), Ok(BlockEntry::Uniform(old)) if old.newer_of(stamp) != old)
    }

    #[cfg(test)]
    fn bytes_used(&self) -> Result<u64, JournalError> {
        Ok(u64::try_from(fd::stat(&self.file)?.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    pub fn write_header(&mut self, header: &JournalHeader) {
        let next = self.header_sequence.wrapping_add(1);
        self.head.write_at(to_usize(HEADER_SLOTS + (next & 1) * HEADER_STRIDE), &header.encode());
        self.publish(HEADER_SEQUENCE, next);
        self.header_sequence = next;
    }

    /// Replaces the record. The journal does not interpret its bytes.
    ///
    /// # Errors
    /// [`JournalError::RecordTooLong`] beyond [`MAX_RECORD_BYTES`]; [`JournalError::Syscall`] if memory is exhausted.
    /// The old record then remains valid.
    pub fn write_record(&mut self, record: &[u8]) -> Result<(), JournalError> {
        if record.len() > MAX_RECORD_BYTES {
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

    /// Records the intent to clear the kernel's written bits in `range` and to stamp the written pages with
    /// `generation`. A process that opens the journal before [`settle`](Self::settle) finds the intent. A new intent
    /// replaces the old one.
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

    /// Removes the intent, after all its pages are stamped.
    pub fn settle(&mut self) {
        self.publish(INTENT_WORD, 0);
        self.intent_word = 0;
    }

    /// Stamps the pages of `ranges`, like [`super::StampMap::stamp_all`].
    ///
    /// # Errors
    /// [`JournalError::BlockOutOfRange`] for pages beyond the table, [`JournalError::Syscall`] if memory is exhausted,
    /// [`JournalError::Damaged`] if another process wrote to the journal. Some pages may then lack the stamp, so the
    /// intent must not be settled.
    pub fn stamp_all(&mut self, ranges: &[PageRange], stamp: DirtyStamp) -> Result<(), JournalError> {
        if stamp == DirtyStamp::NEVER {
            return Ok(());
        }
        for (index, ranges) in by_block(ranges) {
            self.allocate_entry(index)?;
            match self.entry(index)? {
                BlockEntry::Uniform(old) if old.newer_of(stamp) == old => {}
                BlockEntry::Uniform(old) => self.stamp_uniform(index, ranges, old, stamp)?,
                BlockEntry::Dense => self.stamp_dense(index, ranges, stamp)?,
            }
        }
        Ok(())
    }

    /// Stamps pages of a block whose pages all have the stamp `old`.
    fn stamp_uniform(
        &mut self,
        index: BlockIndex,
        ranges: &[PageRange],
        old: DirtyStamp,
        stamp: DirtyStamp,
    ) -> Result<(), JournalError> {
        if covers(ranges, index) {
            self.set_entry(index, BlockEntry::Uniform(stamp));
            return Ok(());
        }
        let mut stamps = [old; PAGES];
        put(&mut stamps, index, ranges, stamp);
        if stamps.iter().all(|new| *new == stamps[0]) {
            self.set_entry(index, BlockEntry::Uniform(stamps[0]));
            return Ok(());
        }
        self.chunk(index)?;
        memfd::allocate(self.file.as_fd(), array_offset(index), ARRAY_BYTES)?;
        for (word, stamp) in self.array(index)?.iter().zip(&stamps) {
            word.store(stamp.bits().to_le(), Ordering::Relaxed);
        }
        self.set_entry(index, BlockEntry::Dense);
        self.dense += 1;
        Ok(())
    }

    /// Stamps pages of a block that has an array.
    fn stamp_dense(
        &mut self,
        index: BlockIndex,
        ranges: &[PageRange],
        stamp: DirtyStamp,
    ) -> Result<(), JournalError> {
        let array = self.array(index)?;
        let newer_at = |word: &AtomicU32| {
            let old = DirtyStamp::from_bits(u32::from_le(word.load(Ordering::Relaxed)));
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
        self.set_entry(index, BlockEntry::Uniform(stamp));
        self.dense -= 1;
        memfd::punch_hole(self.file.as_fd(), array_offset(index), ARRAY_BYTES)?;
        Ok(())
    }

    /// Allocates memory for the table entry of a block.
    fn allocate_entry(&mut self, index: BlockIndex) -> Result<(), JournalError> {
        let offset = entry_offset(index).ok_or(JournalError::BlockOutOfRange(index))? - TABLE;
        let step = &mut self.table[to_usize(offset / TABLE_STEP)];
        if !*step {
            memfd::allocate(self.file.as_fd(), TABLE + offset - offset % TABLE_STEP, TABLE_STEP)?;
            *step = true;
        }
        Ok(())
    }

    /// The table word of a block, which must be in range.
    fn entry_word(&self, index: BlockIndex) -> &AtomicU64 {
        &self.head.atomic_u64s(to_usize(TABLE), to_usize((ARRAYS - TABLE) / 8))[to_usize(index.0)]
    }

    fn entry(&self, index: BlockIndex) -> Result<BlockEntry, JournalError> {
        let word = u64::from_le(self.entry_word(index).load(Ordering::Relaxed));
        let offset = TABLE + index.0 * 8;
        BlockEntry::from_word(word).ok_or(JournalError::Damaged { what: "entry of a block", offset })
    }

    fn set_entry(&self, index: BlockIndex, entry: BlockEntry) {
        store_in_order(self.entry_word(index), entry.word());
    }

    /// Makes earlier stores valid by storing a sequence number or the intent word.
    fn publish(&self, offset: u64, value: u64) {
        store_in_order(&self.head.atomic_u64s(to_usize(offset), 1)[0], value);
    }

    /// The mapping that contains the array of a block.
    fn chunk(&mut self, index: BlockIndex) -> Result<&SharedMapping, JournalError> {
        let nth = index.0 / CHUNK_BLOCKS;
        let start = ARRAYS + nth * CHUNK_BYTES;
        match self.chunks.entry(nth) {
            btree_map::Entry::Occupied(chunk) => Ok(chunk.into_mut()),
            btree_map::Entry::Vacant(vacant) => {
                if self.bytes < start + CHUNK_BYTES {
                    memfd::resize(self.file.as_fd(), start + CHUNK_BYTES)?;
                    self.bytes = start + CHUNK_BYTES;
                }
                let len = to_usize(CHUNK_BYTES);
                Ok(vacant.insert(SharedMapping::shared(&self.file, start, len, true)?))
            }
        }
    }

    fn array(&mut self, index: BlockIndex) -> Result<&[AtomicU32], JournalError> {
        let offset = to_usize(index.0 % CHUNK_BLOCKS * ARRAY_BYTES);
        Ok(self.chunk(index)?.atomic_u32s(offset, PAGES))
    }
}

/// Stores a word after all earlier stores and before all later stores of the program. A killed process leaves its
/// stores in program order, so no CPU barrier is needed.
fn store_in_order(word: &AtomicU64, value: u64) {
    compiler_fence(Ordering::SeqCst);
    word.store(value.to_le(), Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod crash;
#[cfg(test)]
mod tests;
