//! Pages that a device or the kernel may write to without a page table: they count as written in the next generation too.

use fdmap_proto::tracking::{CoverageGap, GapKind};
use fdmap_proto::units::PageRange;

use super::{gap, pins_not_observed};
use crate::tracking::observe::{PinScan, PinnedPages};
use crate::tracking::ranges;

/// What happens to the redirty set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RedirtyUpdate {
    /// The pages were pinned when they could last be checked, and may still be.
    Keep,
    Replace(PinnedPages),
}

/// Judges a search for pins. `before` are the pages of the redirty set until now: they are conservative in this generation, so
/// they are a gap of it. A pin that was found now is a gap too. A reference that was found now makes pages conservative in the
/// next generation only.
pub(crate) fn pins(scan: PinScan, before: &PinnedPages) -> (RedirtyUpdate, Vec<CoverageGap>) {
    let (update, pinned, unobserved) = match scan {
        PinScan::NoCandidates => (RedirtyUpdate::Replace(PinnedPages::default()), Vec::new(), false),
        PinScan::Unavailable { supported: true } => (RedirtyUpdate::Keep, Vec::new(), true),
        PinScan::Unavailable { supported: false } => {
            (RedirtyUpdate::Replace(PinnedPages::default()), Vec::new(), true)
        }
        PinScan::Found(found) => {
            let pinned = found.dma.clone();
            (RedirtyUpdate::Replace(found), pinned, false)
        }
    };
    let mut dma = [pinned, before.dma.clone()].concat();
    ranges::normalize(&mut dma);
    let mut gaps = Vec::new();
    gaps.extend(pinned_gap(&dma, "may be pinned for DMA"));
    gaps.extend(pinned_gap(&before.referenced, "had extra references, as of a write in progress"));
    gaps.extend(unobserved.then(pins_not_observed));
    (update, gaps)
}

fn pinned_gap(pages: &[PageRange], why: &str) -> Option<CoverageGap> {
    let hull = ranges::hull(pages);
    let detail = || format!("{} pages {why}", ranges::pages(pages));
    (!hull.is_empty()).then(|| gap(GapKind::Pinned, None, Some(hull), detail()))
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::Effect;
    use fdmap_proto::units::PageIndex;

    use super::*;

    fn kinds(scan: PinScan, before: &PinnedPages) -> (RedirtyUpdate, Vec<GapKind>) {
        let (update, gaps) = pins(scan, before);
        (update, gaps.iter().map(|gap| gap.kind).collect())
    }

    #[test]
    fn redirty_set_survives_only_a_failed_scan() {
        let dma = vec![PageRange::at(PageIndex(2), 1), PageRange::at(PageIndex(8), 2)];
        let pinned = PinnedPages { dma, referenced: Vec::new() };
        let referenced = PinnedPages { dma: Vec::new(), referenced: vec![PageRange::at(PageIndex(1), 1)] };
        let replaced = |pages: &PinnedPages| RedirtyUpdate::Replace(pages.clone());
        let none = PinnedPages::default();
        for (scan, update, expected) in [
            (PinScan::NoCandidates, replaced(&none), vec![]),
            (PinScan::Unavailable { supported: true }, RedirtyUpdate::Keep, vec![GapKind::DirectIo]),
            (PinScan::Unavailable { supported: false }, replaced(&none), vec![GapKind::DirectIo]),
            (PinScan::Found(referenced.clone()), replaced(&referenced), vec![]),
            (PinScan::Found(pinned.clone()), replaced(&pinned), vec![GapKind::Pinned]),
        ] {
            assert_eq!(kinds(scan.clone(), &none), (update, expected), "{scan:?}");
        }
        let (_, gaps) = pins(PinScan::Found(pinned), &none);
        assert_eq!(gaps[0].range, Some(PageRange::at(PageIndex(2), 8)));
        assert!(gaps[0].detail.starts_with("3 pages"), "{}", gaps[0].detail);
    }

    #[test]
    fn pages_of_the_set_are_a_gap_of_the_generation_in_which_they_are_conservative() {
        let at = |page| vec![PageRange::at(PageIndex(page), 1)];
        let before = PinnedPages { dma: at(3), referenced: at(5) };
        for scan in [PinScan::NoCandidates, PinScan::Found(PinnedPages::default())] {
            assert_eq!(kinds(scan, &before).1, [GapKind::Pinned, GapKind::Pinned]);
        }
        let (_, gaps) = pins(PinScan::Found(PinnedPages { dma: at(4), referenced: at(9) }), &before);
        let expected = [
            (PageRange::at(PageIndex(3), 2), "2 pages may be pinned for DMA"),
            (PageRange::at(PageIndex(5), 1), "1 pages had extra references"),
        ];
        assert_eq!(gaps.len(), expected.len());
        for (gap, (range, words)) in gaps.iter().zip(expected) {
            assert_eq!((gap.effect, gap.range), (Effect::Conservative, Some(range)));
            assert!(gap.detail.starts_with(words), "{}", gap.detail);
        }
    }
}
