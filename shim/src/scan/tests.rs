use fdmap_proto::PageState;
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;

/// Page by page, as the documentation has it: the regions and where it ended.
fn naive(argument: &Argument, pages: &[u64]) -> (Vec<Region>, u64) {
    let (mut regions, mut told): (Vec<Region>, u64) = (Vec::new(), 0);
    for (nth, categories) in (0..).zip(pages) {
        let start = nth * PAGE;
        let turned = categories ^ argument.category_inverted;
        let all = (0..9).all(|bit| argument.category_mask >> bit & 1 == 0 || turned >> bit & 1 == 1);
        let any = (0..9).any(|bit| argument.category_anyof_mask & turned >> bit << bit & 1 << bit != 0);
        if !all || (argument.category_anyof_mask != 0 && !any) || argument.vec_len == 0 {
            continue;
        }
        if argument.max_pages != 0 && told == argument.max_pages {
            return (regions, start);
        }
        let categories = categories & argument.return_mask;
        match regions.last_mut() {
            Some(last) if last.end == start && last.categories == categories => last.end += PAGE,
            _ if regions.len() as u64 == argument.vec_len => return (regions, start),
            _ => regions.push(Region { start, end: start + PAGE, categories }),
        }
        told += 1;
    }
    (regions, pages.len() as u64 * PAGE)
}

/// The same by runs of equal pages, which is how it is used.
fn by_runs(argument: &Argument, pages: &[u64]) -> (Vec<Region>, u64) {
    let mut found = Found::new(argument, PAGE);
    let mut start = 0;
    for run in pages.chunk_by(|a, b| a == b) {
        let end = start + run.len() as u64 * PAGE;
        if argument.wants(run[0])
            && let Err(Stopped(at)) = found.push(start, end, run[0])
        {
            return (found.regions().to_vec(), at);
        }
        start = end;
    }
    (found.regions().to_vec(), start)
}

prop_compose! {
    fn arguments()(
        vec_len in 0_u64..5,
        max_pages in 0_u64..12,
        masks in prop::array::uniform4(0_u64..8),
    ) -> Argument {
        // Few bits, so that they meet.
        let [category_inverted, category_mask, category_anyof_mask, return_mask] = masks.map(|mask| mask << 2);
        Argument { vec_len, max_pages, category_inverted, category_mask, category_anyof_mask, return_mask, ..Argument::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn runs_are_told_as_pages_are(argument in arguments(), pages in prop::collection::vec(0_u64..8, 0..24)) {
        let pages: Vec<_> = pages.into_iter().map(|bits| bits << 2).collect();
        prop_assert_eq!(by_runs(&argument, &pages), naive(&argument, &pages));
    }

    #[test]
    fn limits_are_kept(argument in arguments(), pages in prop::collection::vec(0_u64..8, 0..24)) {
        let pages: Vec<_> = pages.into_iter().map(|bits| bits << 2).collect();
        let (regions, _) = by_runs(&argument, &pages);
        prop_assert!(regions.len() as u64 <= argument.vec_len);
        let told: u64 = regions.iter().map(|region| (region.end - region.start) / PAGE).sum();
        prop_assert!(argument.max_pages == 0 || told <= argument.max_pages);
        prop_assert!(regions.iter().all(|region| region.start < region.end));
    }

    #[test]
    fn data_is_never_told_as_a_hole(kernel in 0_u64..512, file in any::<u64>(), ours in any::<bool>()) {
        let file = PagemapEntry(file);
        let told = categories(kernel, file, ours);
        let data = file.is_present() || file.is_swap() || kernel & IS_PRESENT != 0;
        prop_assert_eq!(told & (IS_PRESENT | IS_SWAPPED) != 0, data);
        prop_assert!(!ours || told & (IS_WRITTEN | IS_WPALLOWED) == 0);
    }
}

#[test]
fn lost_pages_are_told_and_marks_are_hidden() {
    let swapped = PagemapEntry::encode(PageState::Swapped, None);
    let marker = IS_WPALLOWED | IS_WRITTEN | IS_SWAPPED;
    assert_eq!(categories(marker, PagemapEntry(0), true), 0);
    assert_eq!(categories(marker, PagemapEntry(0), false), IS_WPALLOWED | IS_WRITTEN);
    assert_eq!(categories(0, swapped, true), IS_SWAPPED | IS_FILE);
    assert_eq!(categories(IS_PRESENT | IS_FILE | IS_WRITTEN, swapped, true), IS_PRESENT | IS_FILE);
}
