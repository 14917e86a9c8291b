//! Pages that a device or the kernel may write to without a page table: they count as written in the next generation too.

use fdmap_proto::tracking::{CoverageGap, GapKind};

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

pub(crate) fn pins(scan: PinScan) -> (RedirtyUpdate, Option<CoverageGap>) {
    match scan {
        PinScan::NoCandidates => (RedirtyUpdate::Replace(PinnedPages::default()), None),
        PinScan::Unavailable { supported: true } => (RedirtyUpdate::Keep, Some(pins_not_observed())),
        PinScan::Unavailable { supported: false } => {
            (RedirtyUpdate::Replace(PinnedPages::default()), Some(pins_not_observed()))
        }
        PinScan::Found(pinned) => {
            let hull = ranges::hull(&pinned.dma);
            let gap = (!hull.is_empty()).then(|| {
                let detail = format!("{} pages may be pinned for DMA", ranges::pages(&pinned.dma));
                gap(GapKind::Pinned, None, Some(hull), detail)
            });
            (RedirtyUpdate::Replace(pinned), gap)
        }
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::units::{PageIndex, PageRange};

    use super::*;

    #[test]
    fn redirty_set_survives_only_a_failed_scan() {
        let dma = vec![PageRange::at(PageIndex(2), 1), PageRange::at(PageIndex(8), 2)];
        let pinned = PinnedPages { dma, referenced: Vec::new() };
        let referenced = PinnedPages { dma: Vec::new(), referenced: vec![PageRange::at(PageIndex(1), 1)] };
        let replaced = |pages: &PinnedPages| RedirtyUpdate::Replace(pages.clone());
        let none = PinnedPages::default();
        for (scan, update, kind) in [
            (PinScan::NoCandidates, replaced(&none), None),
            (PinScan::Unavailable { supported: true }, RedirtyUpdate::Keep, Some(GapKind::DirectIo)),
            (PinScan::Unavailable { supported: false }, replaced(&none), Some(GapKind::DirectIo)),
            (PinScan::Found(referenced.clone()), replaced(&referenced), None),
            (PinScan::Found(pinned.clone()), replaced(&pinned), Some(GapKind::Pinned)),
        ] {
            let (got, gap) = pins(scan.clone());
            assert_eq!((got, gap.map(|gap| gap.kind)), (update, kind), "{scan:?}");
        }
        let (_, gap) = pins(PinScan::Found(pinned));
        let gap = gap.unwrap();
        assert_eq!(gap.range, Some(PageRange::at(PageIndex(2), 8)));
        assert!(gap.detail.starts_with("3 pages"), "{}", gap.detail);
    }
}
