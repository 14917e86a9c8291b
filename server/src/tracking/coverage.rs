//! The gaps of coverage, by generation. Pure.

use std::collections::VecDeque;

use fdmap_proto::tracking::{Coverage, CoverageGap, Effect, GapKind};
use fdmap_proto::units::{Generation, PageRange};

/// Gaps that are remembered; of older ones only that they were is.
const MOST: usize = 256;

/// A gap of one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// What was not observed exactly.
    pub kind: GapKind,
    /// What became of it.
    pub effect: Effect,
    /// Who, if that is known.
    pub pid: Option<u32>,
    /// Which pages; `None`: all.
    pub range: Option<PageRange>,
    /// For people.
    pub detail: String,
}

impl Missed {
    /// What would close the gap.
    const fn remedy(&self) -> &'static str {
        match self.kind {
            GapKind::UntrackedMapping => {
                "track the mapping, or close the file once all who need it have mapped it"
            }
            GapKind::EndedMapping => "untrack mappings before they end, as the client library does on drop",
            GapKind::DescriptorWrite => {
                "write through tracked mappings, or run the service where it can trace system calls"
            }
            GapKind::UnnotifiedDescriptor => {
                "close the file once it is mapped, or run the service where it can trace system calls"
            }
            GapKind::DirectIo => "run the service with the xarray probe",
            GapKind::Pinned => "none is needed: the pages are told until they are released",
            GapKind::LostEvents => "none is needed: the next generation has its own signals",
            GapKind::UnknownMappers => "run the service as root and in the host's pid namespace",
        }
    }
}

/// The gaps of all generations of a file. Cloning it costs as much as it holds, which is bounded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GapLog {
    /// In the order in which they were first seen; those that go on are extended in place.
    gaps: VecDeque<(Missed, Generation, Generation)>,
    /// Gaps that are not remembered one by one.
    forgotten: Option<Forgotten>,
}

/// Gaps that there were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Forgotten {
    /// The last generation that had any.
    last: Generation,
    /// Writes may be missing.
    ignored: bool,
}

impl GapLog {
    /// Adds what was missed in `generation`, which is none before the last one that was added.
    pub fn add(&mut self, generation: Generation, missed: Vec<Missed>) {
        for missed in missed {
            let before = self.gaps.iter_mut().rev().find(|(gap, _, last)| {
                *gap == missed && (*last == generation || last.next() == Some(generation))
            });
            match before {
                Some((.., last)) => *last = generation,
                None => self.gaps.push_back((missed, generation, generation)),
            }
        }
        while self.gaps.len() > MOST {
            if let Some((missed, _, last)) = self.gaps.pop_front() {
                self.forget(last, missed.effect == Effect::Ignored);
            }
        }
    }

    /// There were gaps up to `last`, of which nothing else is known; `ignored`: some left writes out.
    pub fn forget(&mut self, last: Generation, ignored: bool) {
        let before = self.forgotten.unwrap_or(Forgotten { last, ignored });
        self.forgotten = Some(Forgotten { last: last.max(before.last), ignored: ignored || before.ignored });
    }

    /// True if there were gaps ever.
    #[must_use]
    pub fn any(&self) -> bool {
        self.forgotten.is_some() || !self.gaps.is_empty()
    }

    /// True if writes were left out ever.
    #[must_use]
    pub fn any_ignored(&self) -> bool {
        let ignored = |(gap, ..): &(Missed, Generation, Generation)| gap.effect == Effect::Ignored;
        self.forgotten.is_some_and(|forgotten| forgotten.ignored) || self.gaps.iter().any(ignored)
    }

    /// What generations after `since` rest on, up to `until`, the last closed one.
    #[must_use]
    pub fn coverage(&self, since: Generation, until: Generation, tracked: u64, granularity: u64) -> Coverage {
        let mut gaps: Vec<CoverageGap> = Vec::new();
        if let Some(Forgotten { last, ignored }) = self.forgotten.filter(|forgotten| forgotten.last > since) {
            gaps.push(CoverageGap {
                kind: GapKind::LostEvents,
                effect: if ignored { Effect::Ignored } else { Effect::Conservative },
                pid: None,
                range: None,
                detail: "there were gaps that are not remembered: too many, or the service was started anew"
                    .to_owned(),
                remedy: "ask after each checkpoint".to_owned(),
                first: since.next().unwrap_or(since),
                last: Some(last),
            });
        }
        gaps.extend(self.gaps.iter().filter(|(.., last)| *last > since).map(|(missed, first, last)| {
            CoverageGap {
                kind: missed.kind,
                effect: missed.effect,
                pid: missed.pid,
                range: missed.range,
                detail: missed.detail.clone(),
                remedy: missed.remedy().to_owned(),
                first: *first,
                last: (*last != until).then_some(*last),
            }
        }));
        Coverage { exact: gaps.is_empty(), gaps, tracked_mappings: tracked, granularity_pages: granularity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(number: u64) -> Generation {
        Generation::new(number).unwrap()
    }

    fn missed(pid: u32) -> Missed {
        Missed {
            kind: GapKind::UntrackedMapping,
            effect: Effect::Conservative,
            pid: Some(pid),
            range: None,
            detail: String::new(),
        }
    }

    fn spans(log: &GapLog, since: u64, until: u64) -> Vec<(Option<u32>, u64, Option<u64>)> {
        let coverage = log.coverage(generation(since), generation(until), 0, 1);
        assert_eq!(coverage.exact, coverage.gaps.is_empty());
        coverage.gaps.iter().map(|gap| (gap.pid, gap.first.get(), gap.last.map(Generation::get))).collect()
    }

    #[test]
    fn gap_that_goes_on_is_one_gap() {
        let mut log = GapLog::default();
        log.add(generation(1), vec![missed(7)]);
        log.add(generation(2), vec![missed(7), missed(8)]);
        log.add(generation(4), vec![missed(7)]);
        assert_eq!(spans(&log, 0, 4), [(Some(7), 1, Some(2)), (Some(8), 2, Some(2)), (Some(7), 4, None)]);
        assert_eq!(spans(&log, 2, 4), [(Some(7), 4, None)]);
        assert!(spans(&log, 4, 5).is_empty());
    }

    #[test]
    fn forgotten_gaps_are_still_said_to_have_been() {
        let mut log = GapLog::default();
        for pid in 0..300 {
            log.add(generation(u64::from(pid) + 1), vec![missed(pid)]);
        }
        let coverage = log.coverage(generation(0), generation(300), 0, 1);
        assert_eq!(coverage.gaps.len(), MOST + 1);
        assert_eq!(coverage.gaps[0].last, Some(generation(44)));
        assert_eq!(coverage.gaps[0].effect, Effect::Conservative, "all of them were");
        assert!(log.any() && !log.any_ignored());
        assert_eq!(log.coverage(generation(44), generation(300), 0, 1).gaps.len(), MOST);
    }

    #[test]
    fn writes_that_were_left_out_are_never_forgotten() {
        let mut log = GapLog::default();
        assert!(!log.any() && log.coverage(generation(0), generation(9), 0, 1).exact);
        log.forget(generation(5), true);
        log.forget(generation(3), false);
        assert!(log.any() && log.any_ignored());
        let gaps = log.coverage(generation(2), generation(9), 0, 1).gaps;
        assert_eq!(gaps.len(), 1);
        assert_eq!(
            (gaps[0].effect, gaps[0].first, gaps[0].last),
            (Effect::Ignored, generation(3), Some(generation(5)))
        );
        assert!(log.coverage(generation(5), generation(9), 0, 1).exact);
    }
}
