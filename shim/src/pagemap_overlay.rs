//! The truth laid over what `/proc/PID/pagemap` says. Pure.

use fdmap_proto::PagemapEntry;

/// Bit 57: write-protected by a userfaultfd.
const UFFD_WP: u64 = 1 << 57;

/// One entry of a service file's page: what the kernel says, unless the page table has no page there; then what the file says.
/// `ours`: it is protected by the service, of which the program is to see nothing.
///
/// Where a page table holds no page of a shared file it holds nothing, or a marker of userfaultfd, which the kernel shows as
/// if it were swapped to a place that does not exist: neither is worth keeping.
pub const fn entry(kernel: u64, file: PagemapEntry, ours: bool) -> u64 {
    let hidden = if ours { UFFD_WP } else { 0 };
    if PagemapEntry(kernel).is_present() {
        return kernel & !hidden;
    }
    let kept = kernel & !hidden & (PagemapEntry::SOFT_DIRTY | UFFD_WP);
    match (file.is_present(), file.is_swap()) {
        // What cannot be told is told as data: who copies it loses nothing.
        (true, _) => kept | PagemapEntry::PRESENT | PagemapEntry::FILE,
        (false, true) => kept | file.0 & (PagemapEntry::SWAP | PagemapEntry::FILE | PagemapEntry::FRAME),
        (false, false) => kept,
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::{PageState, SwapSlot};
    use proptest::prelude::*;

    use super::*;

    const PRESENT: u64 = PagemapEntry::PRESENT | PagemapEntry::FILE;

    #[test]
    fn what_the_page_table_lost_is_told() {
        let slot = SwapSlot::new(1, 77);
        let swapped = PagemapEntry::encode(PageState::Swapped, slot);
        assert_eq!(PagemapEntry(entry(0, swapped, false)).slot(), slot);
        assert_eq!(entry(PagemapEntry::SOFT_DIRTY, swapped, false), swapped.0 | PagemapEntry::SOFT_DIRTY);
        assert_eq!(entry(0, PagemapEntry::encode(PageState::Resident, None), false), PRESENT);
        assert_eq!(entry(0, PagemapEntry::encode(PageState::Unknown, None), false), PRESENT);
        assert_eq!(entry(0, PagemapEntry::encode(PageState::Hole, None), false), 0);
    }

    #[test]
    fn marker_of_an_armed_hole_is_a_hole() {
        let marker = PagemapEntry::SWAP | UFFD_WP | 0x3e0;
        assert_eq!(entry(marker, PagemapEntry(0), true), 0);
        assert_eq!(entry(marker, PagemapEntry(0), false), UFFD_WP, "the program's own marks are its own");
    }

    proptest! {
        #[test]
        fn pages_that_are_mapped_stay_as_the_kernel_says(kernel in any::<u64>(), file in any::<u64>()) {
            let kernel = kernel | PagemapEntry::PRESENT;
            prop_assert_eq!(entry(kernel, PagemapEntry(file), false), kernel);
            prop_assert_eq!(entry(kernel, PagemapEntry(file), true), kernel & !UFFD_WP);
        }

        #[test]
        fn data_is_never_told_as_a_hole(kernel in any::<u64>(), file in any::<u64>(), ours in any::<bool>()) {
            let (told, file) = (PagemapEntry(entry(kernel, PagemapEntry(file), ours)), PagemapEntry(file));
            let data = file.is_present() || file.is_swap() || PagemapEntry(kernel).is_present();
            prop_assert_eq!(told.is_present() || told.is_swap(), data);
            prop_assert!(!(told.is_present() && told.is_swap()) || PagemapEntry(kernel).is_swap());
        }
    }
}
