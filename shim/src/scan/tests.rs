use fdmap_proto::PageState;
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;

/// Reference implementation, page by page: returns the regions and the end address of the walk.
fn oracle(argument: &PmScanArg, pages: &[u64]) -> (Vec<PageRegion>, u64) {
    let (mut regions, mut reported): (Vec<PageRegion>, u64) = (Vec::new(), 0);
    for (nth, categories) in (0..).zip(pages) {
        let start = nth * PAGE;
        let inverted = categories ^ argument.category_inverted;
        let all = (0..9).all(|bit| argument.category_mask >> bit & 1 == 0 || inverted >> bit & 1 == 1);
        let any = (0..9).any(|bit| argument.category_anyof_mask & inverted >> bit << bit & 1 << bit != 0);
        if !all || (argument.category_anyof_mask != 0 && !any) || argument.vec_len == 0 {
            continue;
        }
        if argument.max_pages != 0 && reported == argument.max_pages {
            return (regions, start);
        }
        let categories = categories & argument.return_mask;
        let full = regions.len() as u64 == argument.vec_len;
        match regions.last_mut() {
            Some(last) if last.end == start && last.categories == categories => last.end += PAGE,
            _ if full => return (regions, start),
            _ => regions.push(PageRegion { start, end: start + PAGE, categories }),
        }
        reported += 1;
    }
    (regions, pages.len() as u64 * PAGE)
}

/// The same with [`ScanOutput`], by runs of equal pages.
fn scan_by_runs(argument: &PmScanArg, pages: &[u64]) -> (Vec<PageRegion>, u64) {
    let mut output = ScanOutput::new(argument, PAGE);
    let mut start = 0;
    for run in pages.chunk_by(|a, b| a == b) {
        let end = start + run.len() as u64 * PAGE;
        if selects(argument, run[0])
            && let Err(LimitReached(at)) = output.push(start, end, run[0])
        {
            return (output.regions().to_vec(), at);
        }
        start = end;
    }
    (output.regions().to_vec(), start)
}

prop_compose! {
    fn arguments()(
        vec_len in 0_u64..5,
        max_pages in 0_u64..12,
        masks in prop::array::uniform4(0_u64..8),
    ) -> PmScanArg {
        // Few bits, so that masks and categories often overlap.
        let [category_inverted, category_mask, category_anyof_mask, return_mask] = masks.map(|mask| mask << 2);
        PmScanArg { vec_len, max_pages, category_inverted, category_mask, category_anyof_mask, return_mask, ..PmScanArg::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn scan_by_runs_equals_scan_by_pages(argument in arguments(), pages in prop::collection::vec(0_u64..8, 0..24)) {
        let pages: Vec<_> = pages.into_iter().map(|bits| bits << 2).collect();
        prop_assert_eq!(scan_by_runs(&argument, &pages), oracle(&argument, &pages));
    }

    #[test]
    fn limits_are_respected(argument in arguments(), pages in prop::collection::vec(0_u64..8, 0..24)) {
        let pages: Vec<_> = pages.into_iter().map(|bits| bits << 2).collect();
        let (regions, _) = scan_by_runs(&argument, &pages);
        prop_assert!(regions.len() as u64 <= argument.vec_len);
        let reported: u64 = regions.iter().map(|region| (region.end - region.start) / PAGE).sum();
        prop_assert!(argument.max_pages == 0 || reported <= argument.max_pages);
        prop_assert!(regions.iter().all(|region| region.start < region.end));
    }

    #[test]
    fn data_is_never_reported_as_a_hole(kernel in 0_u64..512, file in any::<u64>(), tracked in any::<bool>()) {
        let file = PagemapEntry(file);
        let corrected = corrected_categories(kernel, file, tracked);
        let data = file.is_present() || file.is_swap() || kernel & IS_PRESENT != 0;
        prop_assert_eq!(corrected & (IS_PRESENT | IS_SWAPPED) != 0, data);
        prop_assert!(!tracked || corrected & (IS_WRITTEN | IS_WPALLOWED) == 0);
    }
}

#[test]
fn states_come_from_the_file_and_write_protection_is_hidden() {
    let swapped = PagemapEntry::encode(PageState::Swapped, None);
    let marker = IS_WPALLOWED | IS_WRITTEN | IS_SWAPPED;
    assert_eq!(corrected_categories(marker, PagemapEntry(0), true), 0);
    assert_eq!(corrected_categories(marker, PagemapEntry(0), false), IS_WPALLOWED | IS_WRITTEN);
    assert_eq!(corrected_categories(0, swapped, true), IS_SWAPPED | IS_FILE);
    assert_eq!(corrected_categories(IS_PRESENT | IS_FILE | IS_WRITTEN, swapped, true), IS_PRESENT | IS_FILE);
}
