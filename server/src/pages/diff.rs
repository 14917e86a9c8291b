//! Differences between two snapshots of one file.

use fdmap_proto::runs::{Change, Run};
use fdmap_proto::units::{PageIndex, PageRange};
use im::ordmap::DiffItem;

use super::blocks::BlockRange;
use super::map::Snapshot;
use super::runs::{RunOptions, Runs};

/// The changes between two snapshots in `range`. Blocks that both snapshots share are skipped.
#[must_use]
pub fn diff(
    before: &Snapshot,
    after: &Snapshot,
    range: PageRange,
    distinguish_swap_cached: bool,
) -> Differences {
    let around = BlockRange::around(range);
    // Opaque ranges have no blocks to compare, so add them.
    let mut parts: Vec<BlockRange> = before.opaque(around).chain(after.opaque(around)).collect();
    for item in before.blocks().diff(after.blocks()) {
        let index = match item {
            DiffItem::Add(index, _) | DiffItem::Remove(index, _) => index,
            DiffItem::Update { old: (index, _), .. } => index,
        };
        parts.push(index.alone());
    }
    parts.retain(|part| !part.pages().intersect(range).is_empty());
    BlockRange::join(&mut parts);
    Differences {
        before: before.clone(),
        after: after.clone(),
        range,
        distinguish_swap_cached,
        parts: parts.into_iter(),
        inside: None,
        pending: None,
    }
}

/// Changes in ascending order, each of maximal length.
#[derive(Debug)]
pub struct Differences {
    before: Snapshot,
    after: Snapshot,
    range: PageRange,
    distinguish_swap_cached: bool,
    /// Blocks that may differ and are not compared yet.
    parts: std::vec::IntoIter<BlockRange>,
    inside: Option<Pair>,
    pending: Option<Change>,
}

/// Two run iterators over the same pages.
#[derive(Debug)]
struct Pair {
    runs: [Runs; 2],
    /// The runs that contain the next page.
    now: [Option<Run>; 2],
    next: PageIndex,
}

impl Pair {
    fn piece(&mut self) -> Option<Change> {
        loop {
            for (now, runs) in self.now.iter_mut().zip(&mut self.runs) {
                if now.is_none_or(|run| run.range.end() <= self.next) {
                    *now = runs.next();
                }
            }
            let [Some(before), Some(after)] = self.now else {
                return None;
            };
            let start = self.next;
            let end = before.range.end().min(after.range.end());
            self.next = end;
            let slot_before = before.slot_of(start);
            let slot_after = after.slot_of(start);
            if before.state != after.state || slot_before != slot_after {
                let range = PageRange::new(start, end).unwrap_or_default();
                return Some(Change {
                    range,
                    before: before.state,
                    slot_before,
                    after: after.state,
                    slot_after,
                });
            }
        }
    }
}

impl Differences {
    fn piece(&mut self) -> Option<Change> {
        loop {
            if let Some(pair) = &mut self.inside {
                if let Some(change) = pair.piece() {
                    return Some(change);
                }
                self.inside = None;
            }
            let range = self.parts.next()?.pages().intersect(self.range);
            let options =
                RunOptions { distinguish_swap_cached: self.distinguish_swap_cached, ..RunOptions::default() };
            let runs = [&self.before, &self.after].map(|side| Runs::new(side.clone(), None, range, options));
            self.inside = Some(Pair { runs, now: [None, None], next: range.start() });
        }
    }
}

fn goes_on(change: &Change, next: &Change) -> bool {
    let pages = change.range.len();
    let follows =
        |first: Option<fdmap_proto::SwapSlot>, then| first.and_then(|slot| slot.plus(pages)) == then;
    change.range.end() == next.range.start()
        && (change.before, change.after) == (next.before, next.after)
        && follows(change.slot_before, next.slot_before)
        && follows(change.slot_after, next.slot_after)
}

impl Iterator for Differences {
    type Item = Change;

    fn next(&mut self) -> Option<Change> {
        loop {
            let Some(piece) = self.piece() else {
                return self.pending.take();
            };
            match &mut self.pending {
                Some(change) if goes_on(change, &piece) => {
                    change.range =
                        PageRange::new(change.range.start(), piece.range.end()).unwrap_or(change.range);
                }
                pending => {
                    if let Some(change) = pending.replace(piece) {
                        return Some(change);
                    }
                }
            }
        }
    }
}
