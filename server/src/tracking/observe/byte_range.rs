//! Byte ranges of a file. Pure.

/// A length that extends to the highest offset: `FDMAP_TO_THE_END` of `bpf/write_record.h`.
pub(crate) const TO_THE_END: u64 = u64::MAX;

/// A byte range of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ByteRange {
    pub(crate) offset: u64,
    /// `offset + length` never overflows.
    pub(crate) length: u64,
}

impl ByteRange {
    /// A range that would exceed 64 bits ends at the highest offset.
    #[must_use]
    pub(crate) const fn new(offset: u64, length: u64) -> Self {
        let end = if length == TO_THE_END { u64::MAX } else { offset.saturating_add(length) };
        Self { offset, length: end - offset }
    }

    #[must_use]
    pub(crate) const fn end(self) -> u64 {
        self.offset + self.length
    }

    /// True if the ranges overlap, touch, or have at most `gap` bytes between them. `later` must not begin before
    /// `self`.
    pub(crate) const fn meets(self, later: Self, gap: u64) -> bool {
        later.offset <= self.end().saturating_add(gap)
    }

    pub(crate) fn join(&mut self, other: Self) {
        let end = self.end().max(other.end());
        self.offset = self.offset.min(other.offset);
        self.length = end - self.offset;
    }
}

/// Sorts the ranges and merges those with at most `gap` bytes between them.
pub(crate) fn join(ranges: &mut Vec<ByteRange>, gap: u64) {
    ranges.sort_unstable();
    ranges.dedup_by(|later, range| {
        let meets = range.meets(*later, gap);
        if meets {
            range.join(*later);
        }
        meets
    });
}
