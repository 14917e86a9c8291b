//! The stamps of 4096 pages.

use std::sync::Arc;

use fdmap_proto::units::{Generation, PageIndex, PageRange, low_u32, to_u64, to_usize};

use super::super::dirty_stamp::DirtyStamp;
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, Bits, BlockIndex, Plane};

const PAGES: usize = to_usize(BLOCK_PAGES);
/// Blocks with more runs store one stamp for each page. Up to this number, runs take at most half a byte a page.
const MOST_RUNS: usize = 256;

/// A stamp for each page of a block.
pub(in crate::tracking) type Stamps = [DirtyStamp; PAGES];

/// The stamps of one block, in the most compact of three forms, or in a form that was the most compact recently.
#[derive(Clone, Debug)]
pub(super) struct StampBlock {
    form: Form,
    newest: Generation,
    /// Pages that were stamped in place since the form was chosen.
    restamped: u64,
}

#[derive(Clone, Debug)]
enum Form {
    Uniform(DirtyStamp),
    /// In ascending order; the first run starts at page 0.
    Runs(Arc<[Run]>),
    Dense(Arc<Stamps>),
}

/// Pages with equal stamps, up to the start of the next run.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u16,
    stamp: DirtyStamp,
}

/// The pages of a block that were written in a range of generations.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub(super) all: Bits,
    /// The conservative pages among `all`.
    pub(super) conservative: Bits,
}

impl StampBlock {
    pub(super) fn uniform(stamp: DirtyStamp) -> Self {
        Self { form: Form::Uniform(stamp), newest: stamp.generation(), restamped: 0 }
    }

    pub(super) fn new(stamps: &Stamps) -> Self {
        Self { form: Form::shortest(stamps), newest: newest_of(stamps), restamped: 0 }
    }

    /// The newest generation of any page.
    pub(super) const fn newest(&self) -> Generation {
        self.newest
    }

    /// Stamps the pages of `ranges` in this block, whose index is `index`.
    pub(super) fn stamp(&mut self, index: BlockIndex, ranges: &[PageRange], stamp: DirtyStamp) {
        match &mut self.form {
            // Clones keep the old array.
            Form::Dense(stamps) => {
                let stamps = Arc::make_mut(stamps);
                self.restamped += put(stamps, index, ranges, stamp);
                self.newest = self.newest.max(stamp.generation());
                // The search for runs costs about as much as stamping this many pages.
                if self.restamped >= BLOCK_PAGES / 8 {
                    self.restamped = 0;
                    if let Some(form) = Form::short(stamps) {
                        self.form = form;
                    }
                }
            }
            Form::Uniform(old) if old.newer_of(stamp) == *old => {}
            _ => {
                let mut stamps = self.stamps();
                put(&mut stamps, index, ranges, stamp);
                *self = Self::new(&stamps);
            }
        }
    }

    pub(super) fn get(&self, page: u64) -> DirtyStamp {
        match &self.form {
            Form::Uniform(stamp) => *stamp,
            Form::Runs(runs) => {
                let after = runs.partition_point(|run| u64::from(run.start) <= page);
                after.checked_sub(1).map_or(DirtyStamp::NEVER, |at| runs[at].stamp)
            }
            Form::Dense(stamps) => stamps[to_usize(page)],
        }
    }

    /// The pages that were written after `since`, up to and including `until`.
    pub(super) fn written(&self, since: Generation, until: Generation) -> Written {
        let wanted = Wanted::new(since, until);
        match &self.form {
            Form::Uniform(stamp) if !wanted.has(*stamp) => Written::default(),
            Form::Uniform(stamp) if stamp.is_conservative() => {
                Written { all: Bits::All, conservative: Bits::All }
            }
            Form::Uniform(_) => Written { all: Bits::All, conservative: Bits::None },
            Form::Runs(runs) => Written::of_runs(runs, wanted),
            Form::Dense(stamps) => Written::of_stamps(stamps, wanted),
        }
    }

    /// Heap memory in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        // An Arc has two counters.
        const ARC: usize = 2 * size_of::<usize>();
        match &self.form {
            Form::Uniform(_) => 0,
            Form::Runs(runs) => ARC + size_of_val(&**runs),
            Form::Dense(_) => ARC + size_of::<Stamps>(),
        }
    }

    fn stamps(&self) -> Stamps {
        match &self.form {
            Form::Uniform(stamp) => [*stamp; PAGES],
            Form::Runs(runs) => {
                let mut stamps = [DirtyStamp::NEVER; PAGES];
                for (run, end) in with_ends(runs) {
                    stamps[usize::from(run.start)..end].fill(run.stamp);
                }
                stamps
            }
            Form::Dense(stamps) => **stamps,
        }
    }
}

impl Form {
    fn shortest(stamps: &Stamps) -> Self {
        Self::short(stamps).unwrap_or_else(|| Self::Dense(Arc::new(*stamps)))
    }

    /// `None` if one stamp for each page is the most compact form.
    fn short(stamps: &Stamps) -> Option<Self> {
        let breaks = stamps.iter().zip(&stamps[1..]).filter(|(a, b)| a != b).count();
        if breaks == 0 {
            return Some(Self::Uniform(stamps[0]));
        }
        if breaks >= MOST_RUNS {
            return None;
        }
        let mut runs = Vec::with_capacity(breaks + 1);
        runs.push(Run { start: 0, stamp: stamps[0] });
        for (start, pair) in (1_u16..).zip(stamps.windows(2)) {
            if pair[0] != pair[1] {
                runs.push(Run { start, stamp: pair[1] });
            }
        }
        Some(Self::Runs(runs.into()))
    }
}

fn newest_of(stamps: &Stamps) -> Generation {
    stamps.iter().copied().fold(DirtyStamp::NEVER, DirtyStamp::newer_of).generation()
}

/// Each run with its end.
fn with_ends(runs: &[Run]) -> impl Iterator<Item = (Run, usize)> {
    let ends = runs.iter().skip(1).map(|run| usize::from(run.start)).chain([PAGES]);
    runs.iter().copied().zip(ends)
}

/// Stamps the pages of `ranges` in the block `index`, and returns their number.
pub(in crate::tracking) fn put(
    stamps: &mut Stamps,
    index: BlockIndex,
    ranges: &[PageRange],
    stamp: DirtyStamp,
) -> u64 {
    let mut count = 0;
    for range in ranges {
        let here = &mut stamps[inside(index, *range)];
        count += to_u64(here.len());
        // Many ranges have one page, for which the setup of a vectorized loop is too expensive.
        if let [old] = here {
            *old = old.newer_of(stamp);
            continue;
        }
        for old in here {
            *old = old.newer_of(stamp);
        }
    }
    count
}

/// True if the first of `ranges` covers the whole block. If they are sorted and do not overlap, no other range can.
pub(in crate::tracking) fn covers(ranges: &[PageRange], index: BlockIndex) -> bool {
    ranges.first().is_some_and(|range| range.covers(index.pages()))
}

/// The pages of `range` in the block, relative to its first page.
pub(in crate::tracking) fn inside(index: BlockIndex, range: PageRange) -> std::ops::Range<usize> {
    let first = index.first_page().0;
    let at = |page: PageIndex| to_usize(page.0.saturating_sub(first).min(BLOCK_PAGES));
    at(range.start())..at(range.end())
}

/// The encoded stamps of a range of generations.
#[derive(Clone, Copy)]
struct Wanted {
    first: u32,
    /// The number of stamps, less one.
    span: u32,
}

impl Wanted {
    /// Generations after `since`, up to and including `until`; empty if `until` is not after `since`.
    fn new(since: Generation, until: Generation) -> Self {
        let first = (low_u32(since.get()) << 1) + 2;
        let last = (low_u32(until.get()) << 1) + 1;
        match last.checked_sub(first) {
            Some(span) => Self { first, span },
            // No stamp has these bits.
            None => Self { first: u32::MAX, span: 0 },
        }
    }

    const fn has(self, stamp: DirtyStamp) -> bool {
        stamp.bits().wrapping_sub(self.first) <= self.span
    }
}

impl Written {
    fn of_runs(runs: &[Run], wanted: Wanted) -> Self {
        let (mut all, mut conservative): (Plane, Plane) = ([0; BLOCK_LEAVES], [0; BLOCK_LEAVES]);
        for (run, end) in with_ends(runs).filter(|(run, _)| wanted.has(run.stamp)) {
            set(&mut all, usize::from(run.start), end);
            if run.stamp.is_conservative() {
                set(&mut conservative, usize::from(run.start), end);
            }
        }
        Self { all: Bits::new(&all), conservative: Bits::new(&conservative) }
    }

    fn of_stamps(stamps: &Stamps, wanted: Wanted) -> Self {
        let (mut all, mut conservative): (Plane, Plane) = ([0; BLOCK_LEAVES], [0; BLOCK_LEAVES]);
        let (leaves, _) = stamps.as_chunks::<64>();
        for (leaf, stamps) in leaves.iter().enumerate() {
            // Most leaves of a large file have no match, which a vectorized loop finds quickly.
            if !stamps.iter().fold(false, |any, stamp| any | wanted.has(*stamp)) {
                continue;
            }
            for (page, stamp) in stamps.iter().enumerate() {
                let has = u64::from(wanted.has(*stamp));
                all[leaf] |= has << page;
                conservative[leaf] |= (has & u64::from(stamp.bits())) << page;
            }
        }
        Self { all: Bits::new(&all), conservative: Bits::new(&conservative) }
    }
}

/// Sets the bits `start..end`.
fn set(plane: &mut Plane, start: usize, end: usize) {
    for (leaf, word) in plane.iter_mut().enumerate().take(end.div_ceil(64)).skip(start / 64) {
        let from = start.saturating_sub(leaf * 64);
        let upto = (end - leaf * 64).min(64);
        *word |= (u64::MAX >> (64 - (upto - from))) << from;
    }
}
