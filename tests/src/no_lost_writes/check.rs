//! Compares logged writes with the pages reported to a consumer. Pure.
//!
//! **The rule.** The contract assigns a write to a generation by the time at which the write ends. If it ends after
//! the checkpoint that closed `g - 1` returned, and before the checkpoint that closes `g` is called, it belongs to
//! `g`. If it ends during the checkpoint that closes `g`, it belongs to `g` or `g + 1`. The log bounds the end of a
//! write by `[begin, end]`: `begin` was read before the write, and `end` after it. Consider the sequential
//! checkpoints `c[0], c[1], ...` of one consumer:
//!
//! - Every `c[j]` that returned before `begin` had closed its generation before the write ended, so that the write
//!   belongs to a later generation. This also holds for `unchanged`, which names the last closed generation.
//! - For every `c[k]` that was called after `end` and closes a generation, the write belongs to that generation or an
//!   earlier one. A checkpoint that answers `unchanged` closes no generation and gives no bound, unless it was
//!   `exact`: it then read every page table and found no write that a later generation could contain.
//!
//! Let `j` be the last checkpoint of the first kind and `k` the first of the second kind. The generation of the write
//! is in `(g[j], g[k]]`. Answer `i` covers the generations in `(g[i-1], g[i]]`, and possibly some later ones, on
//! which a consumer must not rely. The service stores one stamp for each page, and stamps only grow, so that a write
//! in `(g[i-1], g[i]]` is in answer `i` whatever was written to its page later. Hence: **a write is lost if its page
//! is in none of the answers `i`, `j < i <= k`, with `g[i-1] < g[i]`.** Most writes take a few nanoseconds, so that
//! `k` is `j + 1` and there is one such answer. A write without a `k` is not checked.
//!
//! Over-reporting is allowed if it is marked, so that the converse alone fails no test. Page `p` in answer `i` is
//! *unfounded* if no write to it, or to its huge page, can have ended between the call of the last boundary before
//! `c[i]` and the arrival of answer `i`. With exact coverage, unfounded pages must be marked as conservative.

use std::collections::BTreeMap;
use std::fmt;

use fdmap_proto::GapKind;

use super::history::History;
use super::log::Write;
use super::method::Method;
use super::pages::PageSet;

#[cfg(test)]
mod tests;

/// Maximum number of lost writes, and of unfounded pages, that a verdict lists.
const MAX_EXAMPLES: usize = 8;

/// A write that no answer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The write.
    pub write: Write,
    /// The write belongs to a later generation than this one.
    pub after: u64,
    /// The write belongs to this generation or an earlier one.
    pub until: u64,
    /// Nanoseconds from the return of the previous checkpoint to the begin of the write; `None` if there was none.
    pub since_return: Option<u64>,
    /// Nanoseconds from the end of the write to the call of the checkpoint that should have closed its generation.
    pub before_call: u64,
    /// The first and the last answer that should have reported the page.
    pub answers: (usize, usize),
    /// The first later answer that reports the page.
    pub found: Option<usize>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Write { page, method, begin, end } = self.write;
        let method =
            Method::of_number(method).map_or_else(|| method.to_string(), |method| method.to_string());
        write!(f, "page {page} by {method}, {begin}..{end} ({} ns): ", end - begin)?;
        write!(f, "in generations {}..={}, ", self.after + 1, self.until)?;
        match self.since_return {
            Some(since) => write!(f, "{since} ns after the previous checkpoint returned, ")?,
            None => write!(f, "before any checkpoint, ")?,
        }
        write!(f, "{} ns before the next was called; ", self.before_call)?;
        write!(f, "in none of answers {}..={}", self.answers.0, self.answers.1)?;
        self.found.map_or(Ok(()), |found| write!(f, ", only in answer {found}"))
    }
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Number of writes by each method.
    pub writes: BTreeMap<Method, u64>,
    /// Writes after which no generation was closed. They cannot be checked.
    pub unchecked: u64,
    /// Writes reported only after a checkpoint that answered `unchanged` although they had ended before it.
    pub late: u64,
    /// Lost writes.
    pub lost: u64,
    /// The first lost writes.
    pub lost_examples: Vec<Lost>,
    /// Exact pages, over all answers except the first.
    pub exact: u64,
    /// Exact pages that are unfounded.
    pub unfounded_exact: u64,
    /// Unfounded exact pages in answers with exact coverage.
    pub wrong: u64,
    /// The first of these pages: answer, page.
    pub wrong_examples: Vec<(usize, u64)>,
    /// Conservative pages, over all answers except the first.
    pub conservative: u64,
    /// Conservative pages that are unfounded.
    pub unfounded_conservative: u64,
    /// Number of all checkpoints, of those that closed no generation, and of those with exact coverage.
    pub checkpoints: (usize, usize, usize),
    /// Number of answers with gaps of each kind.
    pub gaps: BTreeMap<GapKind, u64>,
}

impl Verdict {
    /// All writes.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.writes.values().sum()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, unchanged, exact) = self.checkpoints;
        write!(f, "{} writes (", self.count())?;
        for (place, (method, count)) in self.writes.iter().enumerate() {
            write!(f, "{}{method} {count}", if place == 0 { "" } else { ", " })?;
        }
        write!(f, "), {} lost, {} late, {} unchecked; ", self.lost, self.late, self.unchecked)?;
        write!(f, "{all} checkpoints ({unchanged} unchanged, {exact} with exact coverage")?;
        for (kind, count) in &self.gaps {
            write!(f, ", {kind} in {count}")?;
        }
        write!(f, "); ")?;
        write!(f, "exact pages {}, unfounded {}; ", self.exact, self.unfounded_exact)?;
        write!(f, "conservative pages {}, unfounded {}", self.conservative, self.unfounded_conservative)?;
        for lost in &self.lost_examples {
            write!(f, "\n  lost: {lost}")?;
        }
        for (answer, page) in &self.wrong_examples {
            write!(f, "\n  exact under exact coverage, but not written: page {page} in answer {answer}")?;
        }
        Ok(())
    }
}

/// Checks writes, in any order, against one consumer's history.
///
/// # Panics
/// If the page of a write is not in the file, or its method is unknown.
#[must_use]
pub fn check<'a>(history: &History, writes: impl IntoIterator<Item = &'a Write>) -> Verdict {
    let checkpoints = history.checkpoints();
    let mut verdict = Verdict {
        checkpoints: (
            checkpoints.len(),
            checkpoints.iter().filter(|one| one.unchanged).count(),
            checkpoints.iter().filter(|one| one.coverage_exact).count(),
        ),
        ..Verdict::default()
    };
    for gap in checkpoints.iter().flat_map(|one| &one.gaps) {
        *verdict.gaps.entry(*gap).or_default() += 1;
    }
    let bounds = Bounds::of(history);
    let mut founded = Founded::of(history);
    let mut counts = vec![0; super::method::METHODS.len()];
    for write in writes {
        assert!(u64::from(write.page) < history.pages() && write.begin <= write.end, "{write:?}");
        counts[write.method as usize] += 1;
        founded.add(write);
        let Some((first, last)) = bounds.answers(write) else {
            verdict.unchecked += 1;
            continue;
        };
        let page = u64::from(write.page);
        if !(first..=last).any(|at| bounds.must_report(at) && checkpoints[at].changed.contains(page)) {
            verdict.lost += 1;
            if verdict.lost_examples.len() < MAX_EXAMPLES {
                verdict.lost_examples.push(lost(history, write, (first, last)));
            }
        } else if !(first..=bounds.next(write.end)).any(|at| checkpoints[at].changed.contains(page)) {
            verdict.late += 1;
        }
    }
    verdict.writes =
        super::method::METHODS.iter().copied().zip(counts).filter(|(_, count)| *count != 0).collect();
    founded.count_unfounded(history, &mut verdict);
    verdict
}

fn lost(history: &History, write: &Write, answers: (usize, usize)) -> Lost {
    let checkpoints = history.checkpoints();
    let (first, last) = answers;
    let page = u64::from(write.page);
    Lost {
        write: *write,
        after: history.since(first),
        until: checkpoints[last].generation,
        since_return: first.checked_sub(1).map(|before| write.begin - checkpoints[before].returned),
        before_call: checkpoints[last].called - write.end,
        answers,
        found: (last + 1..checkpoints.len()).find(|at| checkpoints[*at].changed.contains(page)),
    }
}

/// The answers that should report a write.
struct Bounds {
    called: Vec<u64>,
    returned: Vec<u64>,
    /// For each checkpoint, the first boundary at or after it.
    boundary: Vec<Option<usize>>,
    /// For each checkpoint, whether its answer must report a generation.
    must_report: Vec<bool>,
}

impl Bounds {
    fn of(history: &History) -> Self {
        let checkpoints = history.checkpoints();
        let mut boundary = vec![None; checkpoints.len()];
        let mut next = None;
        for (at, checkpoint) in checkpoints.iter().enumerate().rev() {
            if checkpoint.is_boundary() {
                next = Some(at);
            }
            boundary[at] = next;
        }
        let must_report =
            |(at, one): (usize, &super::history::Checkpoint)| history.since(at) < one.generation;
        Self {
            called: checkpoints.iter().map(|one| one.called).collect(),
            returned: checkpoints.iter().map(|one| one.returned).collect(),
            boundary,
            must_report: checkpoints.iter().enumerate().map(must_report).collect(),
        }
    }

    /// The index of the first checkpoint called after `time`, or the number of checkpoints.
    fn next(&self, time: u64) -> usize {
        self.called.partition_point(|called| *called <= time)
    }

    /// The first and the last answer that may report the write.
    fn answers(&self, write: &Write) -> Option<(usize, usize)> {
        let last = self.boundary.get(self.next(write.end)).copied().flatten()?;
        Some((self.returned.partition_point(|returned| *returned < write.begin), last))
    }

    fn must_report(&self, at: usize) -> bool {
        self.must_report[at]
    }
}

/// The pages that may be reported.
struct Founded {
    /// For each checkpoint, the call of the last boundary before it.
    from: Vec<u64>,
    /// For each checkpoint, the time at which its answer was complete.
    listed: Vec<u64>,
    /// For each checkpoint, the huge pages that may have been written in between. For most files, a huge page is one
    /// page.
    written: Vec<PageSet>,
    granularity: u64,
}

impl Founded {
    fn of(history: &History) -> Self {
        let granularity = history.granularity();
        let mut before = 0;
        let mut from = Vec::new();
        for checkpoint in history.checkpoints() {
            from.push(before);
            if checkpoint.is_boundary() {
                before = checkpoint.called;
            }
        }
        let listed: Vec<_> = history.checkpoints().iter().map(|one| one.listed).collect();
        let written = vec![PageSet::of(history.pages().div_ceil(granularity)); listed.len()];
        Self { from, listed, written, granularity }
    }

    fn add(&mut self, write: &Write) {
        let first = self.listed.partition_point(|listed| *listed < write.begin);
        let end = self.from.partition_point(|from| *from <= write.end);
        for written in self.written.get_mut(first..end).into_iter().flatten() {
            written.insert(u64::from(write.page) / self.granularity);
        }
    }

    fn count_unfounded(&self, history: &History, verdict: &mut Verdict) {
        // The first answer reports writes from before the start of the log.
        for (at, checkpoint) in history.checkpoints().iter().enumerate().skip(1) {
            for page in checkpoint.changed.iter() {
                let conservative = checkpoint.conservative.contains(page);
                let unfounded = !self.written[at].contains(page / self.granularity);
                let (count, counted) = if conservative {
                    (&mut verdict.conservative, &mut verdict.unfounded_conservative)
                } else {
                    (&mut verdict.exact, &mut verdict.unfounded_exact)
                };
                *count += 1;
                *counted += u64::from(unfounded);
                if unfounded && !conservative && checkpoint.coverage_exact {
                    verdict.wrong += 1;
                    if verdict.wrong_examples.len() < MAX_EXAMPLES {
                        verdict.wrong_examples.push((at, page));
                    }
                }
            }
        }
    }
}
