//! What a dump has read and stored.

use serde::Serialize;

use super::super::progress::PageSources;

/// Pages by origin, and what was stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DumpCounts {
    /// Pages that were read from memory.
    pub memory_pages: u64,
    /// Swapped pages that were read from their swap slots.
    pub slot_pages: u64,
    /// Swapped pages whose slots the kernel marks as zero.
    pub zero_slot_pages: u64,
    /// Swapped pages that were read through the file, which swaps them in.
    pub swapped_in_pages: u64,
    /// Those of them that were swapped out again at once, as far as the kernel did so.
    pub evicted_pages: u64,
    /// Pages that are in the parent image.
    pub parent_pages: u64,
    /// Pages that were read and are zero; they are not stored.
    pub zero_pages: u64,
    /// Pages that were stored.
    pub stored_pages: u64,
    /// Size of the stored content, bytes.
    pub stored_bytes: u64,
}

impl DumpCounts {
    /// For the progress.
    pub(super) const fn sources(&self) -> PageSources {
        PageSources {
            memory_pages: self.memory_pages,
            swap_pages: self.slot_pages + self.zero_slot_pages + self.swapped_in_pages,
            zero_pages: self.zero_pages + self.zero_slot_pages,
            parent_pages: self.parent_pages,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        let Self { memory_pages, slot_pages, zero_slot_pages, swapped_in_pages, evicted_pages, .. } = other;
        self.memory_pages += memory_pages;
        self.slot_pages += slot_pages;
        self.zero_slot_pages += zero_slot_pages;
        self.swapped_in_pages += swapped_in_pages;
        self.evicted_pages += evicted_pages;
        self.parent_pages += other.parent_pages;
        self.zero_pages += other.zero_pages;
        self.stored_pages += other.stored_pages;
        self.stored_bytes += other.stored_bytes;
    }
}
