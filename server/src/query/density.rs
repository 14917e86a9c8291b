//! Sizes of messages, and the choice between runs and bitmaps for the next one.

use fdmap_proto::units::{PageIndex, PageRange};

/// Runs or changes in one message: a few hundred KiB.
pub(super) const MAX_RUNS: usize = 8192;
/// Pages in one message of entries, or of bitmaps with slots: 128 KiB, which stays in the processor's cache from encoding to
/// sending, and from receiving to decoding. Messages four times as long double the time of a scan (docs/performance.md).
pub(super) const MAX_ENTRY_PAGES: u64 = 16 << 10;
/// Pages in one message of bitmaps: at most 160 KiB.
pub(super) const MAX_BITMAP_PAGES: u64 = 1 << 18;

/// Runs in a window of [`MAX_ENTRY_PAGES`] pages above which bitmaps take less time: one run for each 32 pages. Beyond
/// the scan, a run takes 57 to 90 ns, and a page in bitmaps with slots 2 to 6 ns (docs/performance.md).
pub(super) const MAX_WINDOW_RUNS: u64 = MAX_ENTRY_PAGES / 32;

/// The first pages of `rest` that one message of runs reports: whole windows with few runs, or up to the end of the last run that
/// the message has room for. Empty if the first window has many. `runs` are the runs of `rest`.
///
/// Windows start at multiples of [`MAX_ENTRY_PAGES`]. A run counts in the window where it starts.
pub(super) fn sparse_part(runs: impl Iterator<Item = PageRange>, rest: PageRange) -> PageRange {
    let window_of = |page: PageIndex| page.0 / MAX_ENTRY_PAGES;
    let until = |end| PageRange::new(rest.start(), end).unwrap_or_default();
    let (mut window, mut runs_in_window) = (window_of(rest.start()), 0);
    let mut sparse_until = rest.start();
    for (nth, run) in runs.enumerate() {
        if window_of(run.start()) != window {
            (window, runs_in_window) = (window_of(run.start()), 0);
            sparse_until = PageIndex(window * MAX_ENTRY_PAGES);
        }
        runs_in_window += 1;
        if runs_in_window > MAX_WINDOW_RUNS {
            return until(sparse_until);
        }
        if nth + 1 == MAX_RUNS {
            return until(run.end());
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: u64 = MAX_ENTRY_PAGES;

    /// Runs of `pages` pages each from `start` on.
    fn runs(start: u64, count: u64, pages: u64) -> impl Iterator<Item = PageRange> {
        (0..count).map(move |nth| PageRange::at(PageIndex(start + nth * pages), pages))
    }

    fn part(runs: impl Iterator<Item = PageRange>, start: u64, end: u64) -> (u64, u64) {
        let rest = PageRange::new(PageIndex(start), PageIndex(end)).unwrap();
        let part = sparse_part(runs, rest);
        (part.start().0, part.end().0)
    }

    #[test]
    fn long_runs_are_one_part() {
        assert_eq!(part(runs(7, 1, 1 << 50), 7, 7 + (1 << 50)), (7, 7 + (1 << 50)));
        assert_eq!(part(runs(0, 512, 32), 0, W), (0, W));
        assert_eq!(part(runs(0, 0, 1), 5, 10 * W), (5, 10 * W), "no run in a selected state");
    }

    #[test]
    fn window_of_short_runs_ends_the_part() {
        assert_eq!(part(runs(0, 4 * W, 1), 0, 4 * W), (0, 0));
        let dense_third = runs(0, 1, 2 * W + 9).chain(runs(2 * W + 9, 600, 1));
        assert_eq!(part(dense_third, 0, 3 * W), (0, 2 * W));
        let behind_a_gap = runs(3, 2, 1).chain(runs(5 * W + 100, 600, 2));
        assert_eq!(part(behind_a_gap, 3, 9 * W), (3, 5 * W));
        let at_the_start = runs(W - 100, 100, 1).chain(runs(W, 1, W));
        assert_eq!(part(at_the_start, W - 100, 2 * W), (W - 100, 2 * W), "few runs, however short");
    }

    #[test]
    fn message_has_room_for_a_bounded_number_of_runs() {
        let all = runs(0, 20_000, 32);
        let (start, end) = part(all, 0, 20_000 * 32);
        assert_eq!((start, end), (0, MAX_RUNS as u64 * 32));
        assert_eq!(part(runs(end, 10, 32), end, end + 320), (end, end + 320));
    }
}
