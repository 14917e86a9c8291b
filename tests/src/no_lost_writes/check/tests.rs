use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::no_lost_writes::history::Checkpoint;

const PAGES: u64 = 6;

fn set(bits: u8) -> PageSet {
    let mut set = PageSet::of(PAGES);
    set.extend((0..PAGES).filter(|page| bits >> page & 1 == 1));
    set
}

/// Drawn times, flags and pages. The times are those before the call, during the call, and of the listing.
type Drawn = ((u64, u64, u64), (bool, bool, u64), (u8, u8));

fn history_of(drawn: &[Drawn]) -> History {
    let (mut time, mut generation) = (0, 0);
    let checkpoints =
        drawn.iter().map(|((idle, calling, listing), (exact, unchanged, more), (changed, marked))| {
            let called = time + idle;
            let returned = called + calling;
            time = returned + listing;
            // Other clients close generations too, so that an unchanged checkpoint may also name a new one.
            generation += if *unchanged { *more } else { 1 + *more };
            Checkpoint {
                called,
                returned,
                listed: time,
                exact: *exact,
                generation,
                unchanged: *unchanged,
                changed: set(*changed),
                conservative: set(*changed & *marked),
                coverage_exact: true,
                gaps: BTreeSet::new(),
            }
        });
    History::new(checkpoints.collect(), PAGES, 1).unwrap()
}

fn write(page: u32, begin: u64, end: u64) -> Write {
    Write { page, method: 0, begin, end }
}

/// A literal implementation of the contract, for each moment at which the write may have ended and each generation to
/// which it may belong. `None`: no checkpoint bounds its generation.
fn oracle_is_lost(history: &History, write: &Write) -> Option<bool> {
    let all = history.checkpoints();
    if !all.iter().any(|one| one.is_boundary() && one.called > write.end) {
        return None;
    }
    let generations = all.last()?.generation;
    let found = (write.begin..=write.end).any(|moment| {
        let later =
            all.iter().filter(|one| one.returned < moment).map(|one| one.generation).max().unwrap_or(0);
        let closing = all.iter().filter(|one| one.is_boundary() && one.called > moment);
        let until = closing.map(|one| one.generation).min().unwrap_or(generations);
        (later + 1..=until).any(|generation| {
            all.iter().enumerate().any(|(at, one)| {
                history.since(at) < generation
                    && generation <= one.generation
                    && one.changed.contains(u64::from(write.page))
            })
        })
    });
    Some(!found)
}

/// A literal implementation of unfounded pages, for each answer and page. Returns the exact and the conservative
/// ones.
fn oracle_unfounded(history: &History, writes: &[Write]) -> (u64, u64) {
    let all = history.checkpoints();
    let (mut exact, mut conservative) = (0, 0);
    for (at, one) in all.iter().enumerate().skip(1) {
        let from =
            all[..at].iter().rev().find(|before| before.is_boundary()).map_or(0, |before| before.called);
        for page in one.changed.iter() {
            let possible = |write: &&Write| {
                u64::from(write.page) == page
                    && (write.begin..=write.end).any(|end| from <= end && end <= one.listed)
            };
            if !writes.iter().any(|write| possible(&write)) {
                *(if one.conservative.contains(page) { &mut conservative } else { &mut exact }) += 1;
            }
        }
    }
    (exact, conservative)
}

fn drawn() -> impl Strategy<Value = Vec<Drawn>> {
    let times = (0_u64..6, 0_u64..4, 0_u64..3);
    let flags = (any::<bool>(), any::<bool>(), prop_oneof![3 => Just(0_u64), 1 => Just(2)]);
    prop::collection::vec((times, flags, (any::<u8>(), any::<u8>())), 1..8)
}

fn writes() -> impl Strategy<Value = Vec<Write>> {
    let one = (0..PAGES as u32, 0_u64..50, prop_oneof![4 => 0_u64..2, 1 => 0_u64..20]);
    prop::collection::vec(one.prop_map(|(page, begin, took)| write(page, begin, begin + took)), 0..40)
}

/// The history of a correct tracker. Each checkpoint scans each page at its own moment, and closes a generation that
/// contains the writes found. It may answer `unchanged` if it found none.
fn correct_tracker(mut history: Vec<Drawn>, writes: &[(u32, u64)], moments: &[u64]) -> History {
    let mut stamps = [0; PAGES as usize];
    let (mut time, mut closed, mut last_scan) = (0, 0, [None::<u64>; PAGES as usize]);
    let mut all = Vec::new();
    for (at, ((idle, calling, listing), (exact, may_skip, _), bits)) in history.iter_mut().enumerate() {
        let called = time + *idle;
        let returned = called + *calling;
        time = returned + *listing;
        // The time at which a page is scanned. A write at that time or before is found.
        let scan_time = |page: usize| called + moments[(at * 7 + page) % moments.len()] % (*calling + 1);
        let is_found = |page: usize| {
            writes.iter().any(|(wrote, end)| {
                *wrote as usize == page
                    && last_scan[page].is_none_or(|last| last < *end)
                    && *end <= scan_time(page)
            })
        };
        let found: Vec<_> = (0..PAGES as usize).map(is_found).collect();
        let unchanged = *may_skip && !found.contains(&true);
        let since = all.last().map_or(0, |one: &Checkpoint| one.generation);
        closed += u64::from(!unchanged);
        for (page, found) in found.into_iter().enumerate() {
            stamps[page] = if found { closed } else { stamps[page] };
            // Without a scan, no generation is closed, and earlier writes are still found later.
            last_scan[page] = if unchanged && !*exact { last_scan[page] } else { Some(scan_time(page)) };
        }
        let (mut changed, mut conservative) = (PageSet::of(PAGES), PageSet::of(PAGES));
        changed.extend((0..PAGES).filter(|page| stamps[*page as usize] > since));
        // Additional conservative pages.
        let more = if bits.0 & 3 == 0 { set(bits.1).without(&changed) } else { PageSet::of(PAGES) };
        changed.extend(more.iter());
        conservative.extend(more.iter());
        all.push(Checkpoint {
            called,
            returned,
            listed: time,
            exact: *exact,
            generation: closed,
            unchanged,
            changed,
            conservative,
            coverage_exact: true,
            gaps: BTreeSet::new(),
        });
    }
    History::new(all, PAGES, 1).unwrap()
}

proptest! {
    #[test]
    fn verdict_equals_the_oracle(drawn in drawn(), writes in writes()) {
        let history = history_of(&drawn);
        let verdict = check(&history, &writes);
        let expected: Vec<_> = writes.iter().map(|write| oracle_is_lost(&history, write)).collect();
        let count = |what| expected.iter().filter(|one| **one == what).count() as u64;
        prop_assert_eq!((verdict.lost, verdict.unchecked), (count(Some(true)), count(None)));
        prop_assert_eq!((verdict.unfounded_exact, verdict.unfounded_conservative), oracle_unfounded(&history, &writes));
        prop_assert_eq!(verdict.count(), writes.len() as u64);
    }

    #[test]
    fn correct_tracker_passes_the_check(
        drawn in drawn(),
        ends in prop::collection::vec((0..PAGES as u32, 0_u64..50, 0_u64..3, 0_u64..3), 0..60),
        moments in prop::collection::vec(0_u64..4, 1..20),
    ) {
        let history = correct_tracker(drawn, &ends.iter().map(|(page, end, ..)| (*page, *end)).collect::<Vec<_>>(), &moments);
        // The log bounds the end of each write by a time before and a time after it.
        let logged = ends.iter().map(|(page, end, before, after)| write(*page, end.saturating_sub(*before), end + after));
        let verdict = check(&history, &logged.collect::<Vec<_>>());
        prop_assert_eq!(verdict.lost, 0, "{}", verdict);
        prop_assert_eq!(verdict.unfounded_exact, 0, "{}", verdict);
    }
}

/// A checkpoint that is called 10 ns after the previous answer, returns 2 ns later, and is listed 1 ns later.
const fn plain(changed: u8) -> Drawn {
    ((10, 2, 1), (false, false, 0), (changed, 0))
}

#[test]
fn write_between_two_checkpoints_must_be_in_the_answer_of_the_second() {
    // Calls at 10, 23, 36; returns at 12, 25, 38; answers at 13, 26, 39.
    let history = history_of(&[plain(0), plain(0b010), plain(0b100)]);
    let verdict = |page, begin, end| check(&history, &[write(page, begin, end)]);
    assert_eq!(verdict(1, 14, 20).lost, 0);
    let lost = verdict(2, 14, 20);
    assert_eq!((lost.lost, lost.unchecked), (1, 0));
    let example = lost.lost_examples[0];
    assert_eq!((example.after, example.until, example.answers), (1, 2, (1, 1)));
    assert_eq!((example.since_return, example.before_call, example.found), (Some(2), 3, Some(2)));
    assert!(example.to_string().contains("page 2 by store, 14..20 (6 ns): in generations 2..=2"));
    // A write during the call of the second checkpoint is in its answer or in the next one.
    assert_eq!(verdict(2, 24, 24).lost, 0);
    assert_eq!(verdict(1, 24, 24).lost, 0);
    assert_eq!(verdict(0, 24, 24).lost, 1);
    assert_eq!(verdict(0, 37, 37).unchecked, 1, "no generation was closed after the write");
}

#[test]
fn unchanged_checkpoint_closes_a_generation_only_if_exact() {
    let history = |exact| {
        let idle = ((10, 2, 1), (exact, true, 0), (0, 0));
        history_of(&[plain(0), idle, plain(0b10)])
    };
    let verdict = check(&history(false), &[write(1, 14, 15)]);
    assert_eq!((verdict.lost, verdict.late), (0, 1), "{verdict}");
    let verdict = check(&history(true), &[write(1, 14, 15)]);
    assert_eq!((verdict.lost, verdict.lost_examples[0].found), (1, Some(2)), "{verdict}");
}

#[test]
fn unwritten_page_is_unfounded() {
    let marked = ((10, 2, 1), (false, false, 0), (0b111, 0b100));
    let history = history_of(&[plain(0b111), marked]);
    let verdict = check(&history, &[write(0, 14, 14)]);
    assert_eq!((verdict.exact, verdict.unfounded_exact, verdict.wrong), (2, 1, 1), "{verdict}");
    assert_eq!((verdict.conservative, verdict.unfounded_conservative), (1, 1), "{verdict}");
    assert_eq!(verdict.wrong_examples, [(1, 1)]);
}

#[test]
fn page_in_a_written_huge_page_is_founded() {
    let marked = ((10, 2, 1), (false, false, 0), (0b111, 0));
    let history = history_of(&[plain(0), marked]);
    let huge = History::new(history.checkpoints().to_vec(), PAGES, 2).unwrap();
    let verdict = check(&huge, &[write(0, 14, 14)]);
    assert_eq!((verdict.exact, verdict.unfounded_exact), (3, 1), "{verdict}");
}
