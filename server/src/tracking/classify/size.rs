//! Changes of the file's size.

use fdmap_proto::units::{PageIndex, PageRange};

/// The pages that a change of the size removed or added: their content changed.
pub(crate) fn resized(before: u64, now: u64) -> Option<PageRange> {
    PageRange::new(PageIndex(before.min(now)), PageIndex(before.max(now))).filter(|range| !range.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_between_both_sizes_changed() {
        let pages = |start, len| Some(PageRange::at(PageIndex(start), len));
        for (before, now, changed) in
            [(4, 4, None), (4, 9, pages(4, 5)), (9, 4, pages(4, 5)), (0, 1, pages(0, 1))]
        {
            assert_eq!(resized(before, now), changed, "{before} -> {now}");
        }
    }
}
