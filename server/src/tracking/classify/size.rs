//! Changes of the file's size.

use fdmap_proto::units::{PageIndex, PageRange};

use crate::tracking::baseline::InodeBaseline;

/// The pages that a change of the size removed or added, or of which it shows more: their content changed.
///
/// Writes through mappings can change bytes of the last page that are past the end of the file. When the file grows, they become content.
/// A growth that ends within the page is a write of that page.
pub(crate) fn resized(before: &InodeBaseline, now: &InodeBaseline) -> Option<PageRange> {
    let shows_whole_page = now.pages > before.pages || now.pages == before.pages && !now.partial_page;
    let shown = u64::from(before.partial_page && shows_whole_page);
    let first = before.pages.min(now.pages).saturating_sub(shown);
    PageRange::new(PageIndex(first), PageIndex(before.pages.max(now.pages))).filter(|range| !range.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_between_both_sizes_changed() {
        let pages = |start, len| Some(PageRange::at(PageIndex(start), len));
        for (before, partial_page, now, now_partial, changed) in [
            (4, false, 4, false, None),
            (4, false, 9, true, pages(4, 5)),
            (9, false, 4, false, pages(4, 5)),
            (0, false, 1, false, pages(0, 1)),
            (4, false, 4, true, None),
            (4, true, 4, true, None),
            (4, true, 4, false, pages(3, 1)),
            (4, true, 9, false, pages(3, 6)),
            (4, true, 9, true, pages(3, 6)),
            (9, true, 4, true, pages(4, 5)),
        ] {
            let baseline = InodeBaseline { pages: before, partial_page, ..InodeBaseline::default() };
            let observed = InodeBaseline { pages: now, partial_page: now_partial, ..baseline };
            assert_eq!(
                resized(&baseline, &observed),
                changed,
                "{before} {partial_page} -> {now} {now_partial}"
            );
        }
    }
}
