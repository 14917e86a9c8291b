//! Where the slots of a swap area are on its block device, and which slots are read together. Pure.

use fdmap_sys::fiemap::{EXTENT_LAST, EXTENT_MERGED, EXTENT_UNWRITTEN, FileExtent};

use super::super::PAGE_BYTES;

/// Flags of extents whose bytes on the device are those that the kernel swaps to. It swaps to unwritten extents, too.
const PLAIN: u32 = EXTENT_LAST | EXTENT_UNWRITTEN | EXTENT_MERGED;

/// Consecutive slots, and where the first of them is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    slot: u64,
    slots: u64,
    /// Offset on the device, bytes.
    physical: u64,
}

/// Where the slots of an area are: parts in ascending order of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout(Vec<Part>);

/// A range of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceRange {
    /// Bytes.
    pub(super) offset: u64,
    pub(super) pages: u64,
}

impl Layout {
    /// An area that is a whole block device.
    pub(super) fn device(slots: u64) -> Self {
        Self(vec![Part { slot: 0, slots, physical: 0 }])
    }

    /// An area that is a file. `None` if an extent is of a kind that the kernel does not swap to, or does not consist of whole pages: then
    /// the kernel skips parts of it, and slots are no pages of the file.
    pub(super) fn file(extents: &[FileExtent]) -> Option<Self> {
        let mut parts = Vec::with_capacity(extents.len());
        let mut end = 0;
        for extent in extents {
            let FileExtent { logical, physical, length, flags } = *extent;
            let is_whole = [logical, physical, length].iter().all(|bytes| bytes.is_multiple_of(PAGE_BYTES));
            if flags & !PLAIN != 0 || !is_whole || length == 0 || logical < end {
                return None;
            }
            end = logical.checked_add(length)?;
            physical.checked_add(length)?;
            parts.push(Part { slot: logical / PAGE_BYTES, slots: length / PAGE_BYTES, physical });
        }
        Some(Self(parts))
    }

    /// The device ranges of consecutive slots, in order. `None` if the area lacks one of them.
    pub(super) fn ranges(&self, slot: u64, slots: u64) -> Option<Vec<DeviceRange>> {
        let end = slot.checked_add(slots)?;
        let mut ranges = Vec::new();
        let mut at = slot;
        while at < end {
            let number = self.0.partition_point(|part| part.slot <= at).checked_sub(1)?;
            let part = self.0[number];
            let inside = at - part.slot;
            let pages = part.slots.checked_sub(inside).filter(|left| *left > 0)?.min(end - at);
            ranges.push(DeviceRange { offset: part.physical + inside * PAGE_BYTES, pages });
            at += pages;
        }
        Some(ranges)
    }
}

/// Consecutive slots of one area, each with the position of its page in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) first: u64,
    pub(super) positions: Vec<usize>,
}

/// Sorts slots of one area, and joins consecutive ones. A slot that is requested twice begins a new run.
pub(super) fn runs(mut slots: Vec<(u64, usize)>) -> Vec<SlotRun> {
    slots.sort_unstable();
    let mut runs: Vec<SlotRun> = Vec::new();
    for (slot, position) in slots {
        match runs.last_mut() {
            Some(run) if run.first + fdmap_proto::units::to_u64(run.positions.len()) == slot => {
                run.positions.push(position);
            }
            _ => runs.push(SlotRun { first: slot, positions: vec![position] }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extent(logical: u64, physical: u64, length: u64) -> FileExtent {
        FileExtent { logical: logical << 12, physical: physical << 12, length: length << 12, flags: 0 }
    }

    #[test]
    fn slots_are_found_in_the_extents_of_a_file() {
        let layout = Layout::file(&[extent(0, 1000, 8), extent(8, 500, 4), extent(20, 2000, 1)]).unwrap();
        let range = |offset: u64, pages| DeviceRange { offset: offset << 12, pages };
        assert_eq!(layout.ranges(0, 8), Some(vec![range(1000, 8)]));
        assert_eq!(layout.ranges(7, 3), Some(vec![range(1007, 1), range(500, 2)]));
        assert_eq!(layout.ranges(20, 1), Some(vec![range(2000, 1)]));
        for (slot, slots) in [(11, 2), (12, 1), (20, 2), (21, 1), (u64::MAX, 2)] {
            assert_eq!(layout.ranges(slot, slots), None, "{slot} {slots}");
        }
        assert_eq!(Layout::device(10).ranges(3, 7), Some(vec![range(3, 7)]));
        assert_eq!(Layout::device(10).ranges(3, 8), None);
    }

    #[test]
    fn extents_that_are_no_whole_pages_on_the_device_are_refused() {
        let plain = FileExtent { flags: PLAIN, ..extent(0, 10, 2) };
        assert!(Layout::file(&[plain]).is_some());
        for (field, extents) in [
            ("logical", vec![FileExtent { logical: 1024, ..plain }]),
            ("physical", vec![FileExtent { physical: 1024, ..plain }]),
            ("length", vec![FileExtent { length: 5120, ..plain }]),
            ("empty", vec![FileExtent { length: 0, ..plain }]),
            // FIEMAP_EXTENT_DELALLOC, FIEMAP_EXTENT_ENCODED, FIEMAP_EXTENT_SHARED
            ("delayed", vec![FileExtent { flags: 4, ..plain }]),
            ("encoded", vec![FileExtent { flags: 8, ..plain }]),
            ("shared", vec![FileExtent { flags: 0x2000, ..plain }]),
            ("overlapping", vec![plain, extent(1, 50, 1)]),
            ("too long", vec![FileExtent { physical: u64::MAX << 12, ..plain }]),
        ] {
            assert_eq!(Layout::file(&extents), None, "{field}");
        }
    }

    proptest! {
        #[test]
        fn runs_have_each_slot_with_its_position(slots in proptest::collection::vec(0_u64..60, 0..60)) {
            let numbered: Vec<_> = slots.iter().copied().zip(0..).collect();
            let runs = runs(numbered.clone());
            let mut found: Vec<_> = runs
                .iter()
                .flat_map(|run| (run.first..).zip(run.positions.iter().copied()))
                .collect();
            prop_assert!(found.is_sorted_by_key(|(slot, _)| *slot));
            found.sort_unstable_by_key(|(_, position)| *position);
            prop_assert_eq!(found, numbered);
        }

        #[test]
        fn ranges_agree_with_a_table(lengths in proptest::collection::vec((1_u64..5, 0_u64..3), 1..8), slot in 0_u64..40, slots in 0_u64..20) {
            let (mut extents, mut table, mut logical) = (Vec::new(), std::collections::BTreeMap::new(), 0);
            for (number, (length, skip)) in (1_u64..).zip(lengths) {
                logical += skip;
                extents.push(extent(logical, number * 1000, length));
                table.extend((0..length).map(|at| (logical + at, number * 1000 + at)));
                logical += length;
            }
            let expected: Option<Vec<u64>> = (slot..slot + slots).map(|slot| table.get(&slot).copied()).collect();
            let found = Layout::file(&extents).unwrap().ranges(slot, slots);
            let pages = |range: DeviceRange| (0..range.pages).map(move |page| (range.offset >> 12) + page);
            prop_assert_eq!(found.map(|ranges| ranges.into_iter().flat_map(pages).collect::<Vec<_>>()), expected);
        }
    }
}
