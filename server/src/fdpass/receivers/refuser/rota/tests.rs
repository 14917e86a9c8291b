use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const MAX_UNCLOSED: usize = 3;
const MAX_FULL: usize = 2;

/// What a process does when it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// It does not answer yet.
    Nothing,
    /// It has closed none.
    Blocks,
    /// It has closed all that it had when it was asked before.
    Closes,
    Ends,
}

/// Processes by number.
struct Bench {
    rota: Rota<u32>,
    started: u32,
    processes: BTreeMap<u32, Process>,
}

#[derive(Debug, Default)]
struct Process {
    unclosed: usize,
    /// How many it had when it was asked. `None`: it was not, or has answered.
    asked: Option<usize>,
}

impl Process {
    fn ask(&mut self, does: Does) -> Heard {
        let nothing = Heard { pong: Pong::Nothing, asked: false };
        let before = match (does, self.asked) {
            (Does::Ends, _) => return Heard { pong: Pong::Ended, ..nothing },
            (Does::Nothing, Some(_)) => return nothing,
            (_, None) => None,
            (Does::Blocks, Some(before)) => Some(before),
            (Does::Closes, Some(before)) => {
                self.unclosed -= before;
                Some(0)
            }
        };
        self.asked = Some(self.unclosed);
        let received =
            |unclosed| Pong::Received { blocked: false, unclosed: u32::try_from(unclosed).unwrap() };
        Heard { pong: before.map_or(Pong::Nothing, received), asked: true }
    }
}

impl Bench {
    /// With one process.
    fn new() -> Self {
        let rota = Rota::new(MAX_UNCLOSED, MAX_FULL);
        let mut bench = Self { rota, started: 0, processes: BTreeMap::new() };
        assert_eq!(bench.look(|_| Does::Nothing), Some(1));
        bench
    }

    /// The process that gets a connection.
    fn pass(&mut self) -> Option<u32> {
        let (has_room, mut to) = (self.rota.has_room(), None);
        let is_passed = self.rota.pass(|process| {
            to = Some(*process);
            true
        });
        if let Some(process) = to.and_then(|process| self.processes.get_mut(&process)) {
            process.unclosed += 1;
        }
        assert_eq!((is_passed, has_room), (to.is_some(), to.is_some()));
        to
    }

    fn pass_all(&mut self, count: usize) -> Vec<Option<u32>> {
        (0..count).map(|_| self.pass()).collect()
    }

    /// Looks, and starts the process that is needed. Those that have ended are reaped at the next look.
    fn look(&mut self, mut does: impl FnMut(u32) -> Does) -> Option<u32> {
        let processes = &mut self.processes;
        let ask = |process: &mut u32| processes.entry(*process).or_default().ask(does(*process));
        self.rota.look(ask, |_| true)?;
        self.started += 1;
        self.rota.add(self.started);
        self.processes.insert(self.started, Process::default());
        Some(self.started)
    }
}

fn ends(_: &mut u32) -> Heard {
    Heard { pong: Pong::Ended, asked: false }
}

#[test]
fn process_that_cannot_close_is_replaced_when_it_is_full() {
    let mut bench = Bench::new();
    assert_eq!(bench.pass_all(2), [Some(1); 2]);
    assert_eq!(bench.look(|_| Does::Blocks), None, "one that is not full gets the next ones");
    assert_eq!(bench.pass_all(2), [Some(1), None]);
    let vacancy = bench.rota.look(|_| Heard { pong: Pong::Nothing, asked: false }, |_| true);
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
        assert_eq!(bench.look(|_| Does::Blocks), expected, "{MAX_FULL} beside the current one");
    }
    for does in [Does::Nothing, Does::Blocks] {
        assert_eq!(bench.look(|_| does), None);
        assert_eq!(bench.pass(), None, "{does:?}: all of them are full");
    }
    assert_eq!(bench.look(|process| if process == 1 { Does::Closes } else { Does::Blocks }), None);
    assert_eq!(bench.pass_all(MAX_UNCLOSED + 1), [Some(1), Some(1), Some(1), None]);
    // Two of them, one after the other.
    assert_eq!(bench.look(|process| if process == 1 { Does::Blocks } else { Does::Closes }), None);
    let next = bench.pass_all(MAX_UNCLOSED);
    assert_eq!(bench.look(|_| Does::Blocks), None);
    let last = bench.pass_all(MAX_UNCLOSED);
    let all: BTreeSet<_> = next.into_iter().chain(last).collect();
    assert_eq!(all, BTreeSet::from([Some(2), Some(3)]));
}

#[test]
fn ended_processes_are_replaced_and_reaped() {
    let mut bench = Bench::new();
    bench.pass_all(MAX_UNCLOSED);
    assert_eq!(bench.look(|_| Does::Blocks), Some(2));
    // The full one has ended: there is still one that gets connections.
    assert_eq!(bench.look(|process| if process == 1 { Does::Ends } else { Does::Closes }), None);
    assert_eq!(bench.pass(), Some(2));
    assert!(matches!(bench.rota.look(ends, |_| false), Some(Vacancy::Ended)));
    assert_eq!(bench.pass(), None);
    // Until a process starts, each look asks for it.
    bench.rota.add_ended(3);
    assert!(matches!(bench.rota.look(ends, |_| false), Some(Vacancy::Ended)));
    assert_eq!(bench.rota.ended, [1, 2, 3]);
    assert!(matches!(bench.rota.look(ends, |process| *process != 2), Some(Vacancy::Ended)));
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

/// An answer says nothing about connections that were passed after the question.
#[test]
fn connections_that_are_passed_faster_than_a_process_answers_are_counted() {
    let mut bench = Bench::new();
    assert_eq!(bench.pass(), Some(1));
    assert_eq!(bench.look(|_| Does::Closes), None, "it is asked");
    assert_eq!(bench.pass_all(2), [Some(1); 2]);
    assert_eq!(bench.look(|_| Does::Closes), None, "it has closed the first");
    assert_eq!(bench.pass_all(2), [Some(1), None]);
    assert_eq!(bench.processes[&1].unclosed, MAX_UNCLOSED);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass,
    /// A look. What process n does is in bits 2n and 2n + 1.
    Look(u64),
}

fn does(bits: u64, process: u32) -> Does {
    match bits >> (2 * process % 64) & 3 {
        0 => Does::Nothing,
        1 => Does::Blocks,
        2 => Does::Closes,
        _ => Does::Ends,
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![5 => Just(Step::Pass), 2 => any::<u64>().prop_map(Step::Look)];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// No process has more than it may have, the number of processes is bounded, and a connection waits only for a look, or while all
    /// processes are full.
    #[test]
    fn connections_are_spread_over_a_bounded_number_of_processes(steps in steps()) {
        let mut bench = Bench::new();
        for step in steps {
            match step {
                Step::Pass => {
                    if bench.pass().is_none() {
                        let is_full = |process: &Process| process.unclosed == MAX_UNCLOSED;
                        let all_full =
                            bench.processes.len() == MAX_FULL + 1 && bench.processes.values().all(is_full);
                        bench.look(|_| Does::Nothing);
                        prop_assert_eq!(bench.rota.has_room(), !all_full);
                    }
                }
                Step::Look(bits) => {
                    let started = bench.look(|process| does(bits, process));
                    bench.processes.retain(|process, _| {
                        Some(*process) == started || does(bits, *process) != Does::Ends
                    });
                }
            }
            prop_assert!(bench.processes.values().all(|process| process.unclosed <= MAX_UNCLOSED));
            prop_assert!(bench.processes.len() <= MAX_FULL + 1);
        }
    }
}
