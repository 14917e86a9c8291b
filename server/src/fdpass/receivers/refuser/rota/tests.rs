use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

const MAX_UNCLOSED: usize = 3;
const MAX_FULL: usize = 2;
const BLOCKED: Pong = Pong::Received { blocked: true };
const CLOSES: Pong = Pong::Received { blocked: false };

/// Processes by number.
struct Bench {
    rota: Rota<u32>,
    started: u32,
}

impl Bench {
    /// With one process.
    fn new() -> Self {
        let mut bench = Self { rota: Rota::new(MAX_UNCLOSED, MAX_FULL), started: 0 };
        assert_eq!(bench.look(|_| Pong::Nothing), Some(1));
        bench
    }

    /// The process that gets a connection.
    fn pass(&mut self) -> Option<u32> {
        let mut to = None;
        let is_passed = self.rota.pass(|process| {
            to = Some(*process);
            true
        });
        assert_eq!(is_passed, to.is_some());
        to
    }

    fn pass_all(&mut self, count: usize) -> Vec<Option<u32>> {
        (0..count).map(|_| self.pass()).collect()
    }

    /// Looks, and starts the process that is needed. Those that have ended are reaped at the next look.
    fn look(&mut self, mut answer: impl FnMut(u32) -> Pong) -> Option<u32> {
        self.rota.look(|process| answer(*process), |_| true)?;
        self.started += 1;
        self.rota.add(self.started);
        Some(self.started)
    }
}

#[test]
fn process_that_cannot_close_is_replaced_when_it_is_full() {
    let mut bench = Bench::new();
    assert_eq!(bench.pass_all(2), [Some(1); 2]);
    assert_eq!(bench.look(|_| BLOCKED), None, "one that is not full gets the next ones");
    assert_eq!(bench.pass_all(2), [Some(1), None]);
    let vacancy = bench.rota.look(|_| BLOCKED, |_| true);
    assert_eq!(vacancy, Some(Vacancy::Full(&1)));
    assert_eq!(bench.pass(), None, "the next process has not started");
    bench.rota.add(2);
    assert_eq!(bench.pass_all(MAX_UNCLOSED + 1), [Some(2), Some(2), Some(2), None]);
}

#[test]
fn full_processes_are_bounded_and_one_that_can_close_gets_the_next_connections() {
    let mut bench = Bench::new();
    for process in 1..=3 {
        assert_eq!(bench.pass_all(MAX_UNCLOSED + 1), [Some(process), Some(process), Some(process), None]);
        let expected = (process < 3).then_some(process + 1);
        assert_eq!(bench.look(|_| BLOCKED), expected, "{MAX_FULL} beside the current one");
    }
    for answer in [Pong::Nothing, BLOCKED] {
        assert_eq!(bench.look(|_| answer), None);
        assert_eq!(bench.pass(), None, "{answer:?}: all of them are full");
    }
    assert_eq!(bench.look(|process| if process == 1 { CLOSES } else { BLOCKED }), None);
    assert_eq!(bench.pass_all(MAX_UNCLOSED + 1), [Some(1), Some(1), Some(1), None]);
    // Two of them, one after the other.
    assert_eq!(bench.look(|process| if process == 1 { BLOCKED } else { CLOSES }), None);
    let next = bench.pass_all(MAX_UNCLOSED);
    assert_eq!(bench.look(|_| BLOCKED), None);
    let last = bench.pass_all(MAX_UNCLOSED);
    let all: BTreeSet<_> = next.into_iter().chain(last).collect();
    assert_eq!(all, BTreeSet::from([Some(2), Some(3)]));
}

#[test]
fn ended_processes_are_replaced_and_reaped() {
    let mut bench = Bench::new();
    bench.pass_all(MAX_UNCLOSED);
    assert_eq!(bench.look(|_| BLOCKED), Some(2));
    // The full one has ended: there is still one that gets connections.
    assert_eq!(bench.look(|process| if process == 1 { Pong::Ended } else { CLOSES }), None);
    assert_eq!(bench.pass(), Some(2));
    assert!(matches!(bench.rota.look(|_| Pong::Ended, |_| false), Some(Vacancy::Ended)));
    assert_eq!(bench.pass(), None);
    // Until a process starts, each look asks for it.
    bench.rota.add_ended(3);
    assert!(matches!(bench.rota.look(|_| CLOSES, |_| false), Some(Vacancy::Ended)));
    assert_eq!(bench.rota.ended, [1, 2, 3]);
    assert!(matches!(bench.rota.look(|_| CLOSES, |process| *process != 2), Some(Vacancy::Ended)));
    assert_eq!(bench.rota.ended, [2]);
}

#[test]
fn connection_that_a_process_does_not_take_counts_for_none() {
    let mut bench = Bench::new();
    for _ in 0..2 * MAX_UNCLOSED {
        assert!(!bench.rota.pass(|_| false));
    }
    assert_eq!(bench.pass_all(MAX_UNCLOSED), [Some(1); MAX_UNCLOSED]);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass,
    /// A look. Process n answers by bits 2n and 2n + 1.
    Look(u64),
}

fn answer(bits: u64, process: u32) -> Pong {
    match bits >> (2 * process % 64) & 3 {
        0 => Pong::Nothing,
        1 => CLOSES,
        2 => BLOCKED,
        _ => Pong::Ended,
    }
}

proptest! {
    /// No process gets more than it may have, the number of processes is bounded, and a connection waits only for a look, or while all
    /// processes are full.
    #[test]
    fn connections_are_spread_over_a_bounded_number_of_processes(
        steps in prop::collection::vec(prop_oneof![5 => Just(Step::Pass), 2 => any::<u64>().prop_map(Step::Look)], 0..200),
    ) {
        let mut bench = Bench::new();
        let mut alive = BTreeSet::from([1]);
        let mut unclosed = HashMap::<u32, usize>::new();
        for step in steps {
            match step {
                Step::Pass => match bench.pass() {
                    Some(process) => {
                        prop_assert!(alive.contains(&process));
                        let count = unclosed.entry(process).or_default();
                        *count += 1;
                        prop_assert!(*count <= MAX_UNCLOSED);
                    }
                    None => {
                        // A look finds another one, if there can be one.
                        let all_full = alive.len() == MAX_FULL + 1
                            && alive.iter().all(|process| unclosed.get(process) == Some(&MAX_UNCLOSED));
                        alive.extend(bench.look(|_| Pong::Nothing));
                        let mut takes = false;
                        bench.rota.pass(|_| { takes = true; false });
                        prop_assert_eq!(takes, !all_full);
                    }
                },
                Step::Look(bits) => {
                    for process in alive.clone() {
                        match answer(bits, process) {
                            Pong::Ended => { alive.remove(&process); }
                            Pong::Received { blocked: false } => { unclosed.remove(&process); }
                            _ => {}
                        }
                    }
                    alive.extend(bench.look(|process| answer(bits, process)));
                }
            }
            prop_assert!(alive.len() <= MAX_FULL + 1);
        }
    }
}
