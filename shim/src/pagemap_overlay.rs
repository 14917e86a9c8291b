//! Correction of `/proc/PID/pagemap` entries with the page states of a service file. Pure.

use fdmap_proto::PagemapEntry;

/// Bit 57: write-protected by a userfaultfd.
const UFFD_WP: u64 = 1 << 57;

/// Returns the corrected entry of a page of a service file: the kernel's entry if the page table maps the page, else an entry made
/// from the page's state in the file. `tracked_by_service` hides the write protection set by the service.
///
/// A page table entry of a shared file that maps no page is empty or a userfaultfd marker. The kernel reports a marker as a page
/// swapped to a location that does not exist, so neither value is kept.
pub const fn corrected_entry(kernel: u64, file: PagemapEntry, tracked_by_service: bool) -> u64 {
    let hidden = if tracked_by_service { UFFD_WP } else { 0 };
    if PagemapEntry(kernel).is_present() {
        return kernel & !hidden;
    }
    let kept = kernel & !hidden & (PagemapEntry::SOFT_DIRTY | UFFD_WP);
    match (file.is_present(), file.is_swap()) {
        // Unknown states are reported as present, so that a program that copies present pages loses no data.
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
    fn state_missing_in_the_page_table_comes_from_the_file() {
        let slot = SwapSlot::new(1, 77);
        let swapped = PagemapEntry::encode(PageState::Swapped, slot);
        assert_eq!(PagemapEntry(corrected_entry(0, swapped, false)).slot(), slot);
        assert_eq!(
            corrected_entry(PagemapEntry::SOFT_DIRTY, swapped, false),
            swapped.0 | PagemapEntry::SOFT_DIRTY
        );
        assert_eq!(corrected_entry(0, PagemapEntry::encode(PageState::Resident, None), false), PRESENT);
        assert_eq!(corrected_entry(0, PagemapEntry::encode(PageState::Unknown, None), false), PRESENT);
        assert_eq!(corrected_entry(0, PagemapEntry::encode(PageState::Hole, None), false), 0);
    }

    #[test]
    fn userfaultfd_marker_of_a_hole_is_a_hole() {
        let marker = PagemapEntry::SWAP | UFFD_WP | 0x3e0;
        assert_eq!(corrected_entry(marker, PagemapEntry(0), true), 0);
        assert_eq!(
            corrected_entry(marker, PagemapEntry(0), false),
            UFFD_WP,
            "the program's own write protection stays visible"
        );
    }

    proptest! {
        #[test]
        fn entry_of_a_mapped_page_is_the_kernels(kernel in any::<u64>(), file in any::<u64>()) {
            let kernel = kernel | PagemapEntry::PRESENT;
            prop_assert_eq!(corrected_entry(kernel, PagemapEntry(file), false), kernel);
            prop_assert_eq!(corrected_entry(kernel, PagemapEntry(file), true), kernel & !UFFD_WP);
        }

        #[test]
        fn data_is_never_reported_as_a_hole(kernel in any::<u64>(), file in any::<u64>(), tracked in any::<bool>()) {
            let (corrected, file) = (PagemapEntry(corrected_entry(kernel, PagemapEntry(file), tracked)), PagemapEntry(file));
            let data = file.is_present() || file.is_swap() || PagemapEntry(kernel).is_present();
            prop_assert_eq!(corrected.is_present() || corrected.is_swap(), data);
            prop_assert!(!(corrected.is_present() && corrected.is_swap()) || PagemapEntry(kernel).is_swap());
        }
    }
}
