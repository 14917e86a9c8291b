use fdmap_proto::units::{to_u64, to_usize};
use proptest::prelude::*;

use fdmap_proto::runs::ChangedRun;

use super::*;

const PAGES: u64 = 3 * BLOCK_PAGES + 77;

/// The oracle: one stamp for each page.
#[derive(Clone, Debug)]
struct Oracle(Vec<DirtyStamp>);

impl Oracle {
    fn new() -> Self {
        Self(vec![DirtyStamp::NEVER; to_usize(PAGES)])
    }

    fn stamp(&mut self, ranges: &[PageRange], stamp: DirtyStamp) {
        for range in ranges {
            for page in range.start().0..range.end().0.min(PAGES) {
                let old = &mut self.0[to_usize(page)];
                let newer = (stamp.generation(), !stamp.is_conservative())
                    > (old.generation(), !old.is_conservative());
                if newer {
                    *old = stamp;
                }
            }
        }
    }

    /// The pages of `range` that were written after `since`. The flag is true for conservative pages.
    fn changed(&self, since: Generation, range: PageRange) -> Vec<(u64, bool)> {
        let pages = (range.start().0..range.end().0.min(PAGES)).map(|page| (page, self.0[to_usize(page)]));
        let changed = pages.filter(|(_, stamp)| stamp.generation() > since);
        changed.map(|(page, stamp)| (page, stamp.is_conservative())).collect()
    }
}

fn generation(number: u64) -> Generation {
    Generation::new(number).unwrap()
}

fn any_range() -> impl Strategy<Value = PageRange> {
    let len = prop_oneof![0..4_u64, 0..300_u64, 0..PAGES, Just(BLOCK_PAGES)];
    (0..PAGES, len, any::<bool>()).prop_map(|(start, len, whole)| {
        let start = if whole { start - start % BLOCK_PAGES } else { start };
        PageRange::at(PageIndex(start), len.min(PAGES - start))
    })
}

/// Ranges in arbitrary or sorted order, or single pages at regular distances, which make a block dense.
pub(in crate::tracking) fn any_ranges() -> impl Strategy<Value = Vec<PageRange>> {
    let some =
        (proptest::collection::vec(any_range(), 0..6), any::<bool>()).prop_map(|(mut ranges, sorted)| {
            if sorted {
                ranges.sort_by_key(|range| range.start());
            }
            ranges
        });
    let single = (0..PAGES, 1..9_u64, 0..2000_u64).prop_map(|(start, step, count)| {
        let pages = (0..count).map(|n| start + n * step).filter(|page| *page < PAGES);
        pages.map(|page| PageRange::at(PageIndex(page), 1)).collect()
    });
    prop_oneof![some, single]
}

pub(in crate::tracking) fn any_stamp() -> impl Strategy<Value = DirtyStamp> {
    (0..6_u64, any::<bool>())
        .prop_map(|(number, conservative)| DirtyStamp::new(generation(number), conservative))
}

fn check(
    map: &StampMap,
    oracle: &Oracle,
    since: Generation,
    until: Generation,
    range: PageRange,
) -> Result<(), TestCaseError> {
    let expected = oracle.changed(since, range);

    let runs: Vec<ChangedRun> = map.changed(since, range).collect();
    for pair in runs.windows(2) {
        let (end, next) = (pair[0].range.end(), pair[1].range.start());
        prop_assert!(
            end < next || (end == next && pair[0].conservative != pair[1].conservative),
            "{:?}",
            pair
        );
    }
    let pages = |run: &ChangedRun| {
        (run.range.start().0..run.range.end().0).map({
            let conservative = run.conservative;
            move |page| (page, conservative)
        })
    };
    prop_assert_eq!(&runs.iter().flat_map(pages).collect::<Vec<_>>(), &expected);

    let (changed, conservative) = map.changed_bits(since, range);
    for bitmap in [&changed, &conservative] {
        prop_assert!(bitmap.is_empty() || to_u64(bitmap.len()) == range.len().div_ceil(8));
        prop_assert!(bitmap.is_empty() || bitmap.iter().any(|byte| *byte != 0));
        prop_assert!(
            range.len().is_multiple_of(8) || bitmap.last().is_none_or(|last| last >> (range.len() % 8) == 0)
        );
    }
    let bit = |bitmap: &[u8], nth: u64| {
        bitmap.get(to_usize(nth / 8)).is_some_and(|byte| byte >> (nth % 8) & 1 == 1)
    };
    let got: Vec<(u64, bool)> = (0..range.len())
        .filter(|nth| bit(&changed, *nth))
        .map(|nth| (range.start().0 + nth, bit(&conservative, nth)))
        .collect();
    prop_assert_eq!(&got, &expected);

    let later = oracle.changed(until.max(since), range);
    let of = |pages: &[(u64, bool)], kind: bool| to_u64(pages.iter().filter(|(_, c)| *c == kind).count());
    let all = Counts { exact: of(&expected, false), conservative: of(&expected, true) };
    prop_assert_eq!(map.count(since, None, range), all);
    let bounded =
        Counts { exact: all.exact - of(&later, false), conservative: all.conservative - of(&later, true) };
    prop_assert_eq!(map.count(since, Some(until), range), bounded);

    let ever: Vec<u64> = map.ever(range).flat_map(|range| range.start().0..range.end().0).collect();
    let expected: Vec<u64> =
        oracle.changed(Generation::NONE, range).into_iter().map(|(page, _)| page).collect();
    prop_assert_eq!(ever, expected);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn stamps_equal_the_oracle(
        steps in proptest::collection::vec((any_ranges(), any_stamp()), 0..12),
        since in 0..7_u64, until in 0..7_u64, range in any_range(), cloned in 0..12_usize,
    ) {
        let (mut map, mut oracle) = (StampMap::default(), Oracle::new());
        let mut kept = None;
        for (nth, (ranges, stamp)) in steps.iter().enumerate() {
            if nth == cloned {
                kept = Some((map.clone(), oracle.clone()));
            }
            map.stamp_all(ranges, *stamp);
            oracle.stamp(ranges, *stamp);
        }
        for (page, stamp) in (0..).map(PageIndex).zip(&oracle.0) {
            prop_assert_eq!(map.stamp_of(page), *stamp, "page {}", page);
        }
        let (since, until) = (generation(since), generation(until));
        check(&map, &oracle, since, until, range)?;
        check(&map, &oracle, since, until, PageRange::first(PAGES + 5000))?;
        if let Some((map, oracle)) = kept {
            check(&map, &oracle, since, until, range)?;
        }
    }
}

#[test]
fn settled_stamps_take_less_than_a_byte_a_page() {
    let mut map = StampMap::default();
    let file = PageRange::first(1 << 20);
    map.stamp(file, DirtyStamp::new(generation(1), false));
    assert!(map.bytes() < 1 << 16, "{} bytes", map.bytes());

    // 16 of every 256 pages.
    let some: Vec<_> = (0..1 << 12).map(|nth| PageRange::at(PageIndex(nth * 256), 16)).collect();
    map.stamp_all(&some, DirtyStamp::new(generation(2), false));
    assert!(map.bytes() < 1 << 20, "{} bytes", map.bytes());

    let odd: Vec<_> = (0..1 << 19).map(|nth| PageRange::at(PageIndex(nth * 2), 1)).collect();
    map.stamp_all(&odd, DirtyStamp::new(generation(3), false));
    assert!(map.bytes() < (4 << 20) + (1 << 16), "{} bytes", map.bytes());

    // The other half, page by page: the blocks become uniform.
    for nth in 0..1 << 19 {
        map.stamp(PageRange::at(PageIndex(nth * 2 + 1), 1), DirtyStamp::new(generation(3), false));
    }
    assert!(map.bytes() < 1 << 16, "{} bytes", map.bytes());
}

#[test]
fn iterator_ignores_later_stamps() {
    let mut map = StampMap::default();
    map.stamp(PageRange::first(3 * BLOCK_PAGES), DirtyStamp::new(generation(1), false));
    let changed = map.changed(Generation::NONE, PageRange::first(u64::MAX));
    map.stamp(PageRange::at(PageIndex(7), 1), DirtyStamp::new(generation(2), true));
    let thread = std::thread::spawn(move || changed.collect::<Vec<_>>());
    let runs = thread.join().unwrap();
    assert_eq!(runs, [ChangedRun { range: PageRange::first(3 * BLOCK_PAGES), conservative: false }]);
}
