use proptest::prelude::*;

use super::Thread::{End, Unlimited, User};
use super::*;

/// Limits of users and of ends: per user, and of all.
const USERS: (u32, u32) = (2, 5);
const ENDS: (u32, u32) = (2, 4);

/// A thread, and the number of a file.
type Call = (Thread, u64);

fn turns<W>() -> Turns<W> {
    Turns::new(Threads::new(USERS.0, USERS.1), Threads::new(ENDS.0, ENDS.1))
}

fn needs(thread: Thread, file: u64) -> Needs {
    Needs { thread, turn: FileId::new(file).map(FileUse::Generations), continues: false }
}

/// Ends a call. Returns those that start.
fn end<W>(turns: &mut Turns<W>, needs: Needs) -> Vec<W> {
    turns.end(needs).into_iter().map(|(_, started)| started).collect()
}

#[test]
fn call_waits_for_its_thread_and_its_file() {
    const NONE: u64 = 0;
    // The running calls, the next one, and whether it can run.
    let cases: &[(&[Call], Call, bool)] = &[
        (&[], (User(1), 1), true),
        (&[(User(1), 1)], (User(2), 1), false),
        (&[(User(1), 1)], (Unlimited, 1), false),
        (&[(User(1), 1)], (End(2), 1), false),
        (&[(End(1), 1)], (User(2), 2), true),
        (&[(User(1), NONE); 2], (User(1), NONE), false),
        (&[(User(1), NONE); 2], (User(2), NONE), true),
        // Users and ends have threads of their own, and administrators have any number.
        (&[(User(1), NONE); 2], (End(1), 1), true),
        (&[(End(1), NONE); 2], (User(1), 1), true),
        (&[(Unlimited, NONE); 20], (Unlimited, NONE), true),
        (&[(Unlimited, NONE); 20], (User(1), NONE), true),
        // The ends of one owner do not take all threads, also not those of root.
        (&[(End(1), NONE); 2], (End(1), NONE), false),
        (&[(End(0), NONE); 2], (End(0), NONE), false),
        (&[(End(0), NONE); 2], (End(1), NONE), true),
        // All threads are in use.
        (&[End(1), End(1), End(2), End(3)].map(|thread| (thread, NONE)), (End(4), NONE), false),
        (&[User(1), User(1), User(2), User(2)].map(|thread| (thread, NONE)), (User(3), NONE), true),
        (&[User(1), User(1), User(2), User(2), User(3)].map(|thread| (thread, NONE)), (User(4), NONE), false),
    ];
    for (running, (thread, file), can_run) in cases {
        let mut turns = turns();
        for (thread, file) in *running {
            assert!(turns.start(needs(*thread, *file), ()).is_ok(), "{running:?}");
        }
        assert_eq!(turns.start(needs(*thread, *file), ()).is_ok(), *can_run, "{running:?} {thread:?} {file}");
    }
}

#[test]
fn ends_of_an_owner_with_the_fewest_threads_start_first() {
    let mut turns = turns();
    let of = |owner, file| needs(End(owner), file);
    // Owners 1 and 2 have all threads, and wait for more. Owner 3 requests last.
    for (at, (owner, file)) in [(1, 1), (1, 2), (2, 3), (2, 4)].into_iter().enumerate() {
        assert_eq!(turns.start(of(owner, file), at), Ok(at));
    }
    let waiting = [(1, 5), (1, 6), (2, 7), (3, 8), (3, 9)].into_iter().enumerate();
    let numbers: Vec<_> =
        waiting.map(|(at, (owner, file))| turns.start(of(owner, file), 10 + at).unwrap_err()).collect();
    assert_eq!(end(&mut turns, of(1, 1)), [13], "the first one of owner 3, who has no thread");
    assert_eq!(end(&mut turns, of(2, 3)), [10], "each owner has one: the end that waits longest");
    turns.cancel(numbers[2]);
    // It has started.
    turns.cancel(numbers[0]);
    assert_eq!(end(&mut turns, of(1, 2)), [11], "owners 1 and 3 have one");
    assert_eq!(end(&mut turns, of(2, 4)), [14]);
    for (owner, file) in [(3, 8), (1, 5), (1, 6), (3, 9)] {
        assert_eq!(end(&mut turns, of(owner, file)), []);
    }
    assert!(turns.is_idle());
}

#[test]
fn users_who_have_all_threads_delay_a_call_of_another_user_by_one_call() {
    let mut turns = turns();
    let of = |user| needs(User(user), 0);
    for user in [1, 1, 2, 2, 3] {
        assert!(turns.start(of(user), 0).is_ok());
    }
    for (waiter, user) in [(11, 1), (12, 1), (21, 2), (31, 3), (41, 4), (42, 4), (13, 1)] {
        assert!(turns.start(of(user), waiter).is_err());
    }
    let started = [1, 2, 1, 2, 3].map(|user| end(&mut turns, of(user)));
    assert_eq!(started, [[41], [11], [12], [21], [31]]);
}

#[test]
fn users_whose_calls_wait_for_a_file_are_served_in_turn() {
    const FILE: u64 = 1;
    // The calls in the order of their requests, of which the first one runs, and the order of their starts.
    let cases: &[(&[Thread], &[usize])] = &[
        (&[User(1), User(1), User(1), User(1), User(2)], &[0, 4, 1, 2, 3]),
        (&[User(1), User(1), User(1), User(1), Unlimited, Unlimited], &[0, 4, 1, 5, 2, 3]),
        (&[User(1), User(1), User(2), User(1), User(2), User(3)], &[0, 2, 5, 1, 4, 3]),
        (&[User(1); 4], &[0, 1, 2, 3]),
    ];
    for (calls, order) in cases {
        let mut turns = turns();
        let mut started: Vec<_> = calls
            .iter()
            .enumerate()
            .filter_map(|(at, thread)| turns.start(needs(*thread, FILE), at).ok())
            .collect();
        while started.len() < calls.len() {
            let ended = *started.last().unwrap();
            started.extend(end(&mut turns, needs(calls[ended], FILE)));
        }
        assert_eq!(started, *order, "{calls:?}");
    }
}

/// Two users make the next call when one ends. Neither these nor many calls at once delay another user for long.
#[test]
fn each_other_user_delays_a_call_by_one_call() {
    for others in [[User(1), User(2)], [User(1), User(1)], [User(1), Unlimited]] {
        let mut turns = turns();
        let mut running = (others[0], 0);
        assert!(turns.start(needs(running.0, 1), running).is_ok());
        let mut calls: Vec<_> = (0..10).map(|at| (others[at % 2], at)).collect();
        calls.extend([(User(3), 100), (User(3), 101)]);
        for call in calls {
            assert!(turns.start(needs(call.0, 1), call).is_err());
        }
        let mut started = Vec::new();
        for _ in 0..6 {
            let next = end(&mut turns, needs(running.0, 1));
            assert_eq!(next.len(), 1);
            // The user whose call has ended makes another one.
            assert!(turns.start(needs(running.0, 1), (running.0, 1)).is_err());
            running = next[0];
            started.push(running.1);
        }
        assert!(started.contains(&100) && started.contains(&101), "{others:?}: {started:?}");
    }
}

/// Page states that a call holds while it waits are few, however many calls of its user wait to begin.
#[test]
fn call_that_continues_comes_before_those_of_its_user_that_begin() {
    let mut turns = turns();
    let scan = |file| Needs { turn: FileId::new(file).map(FileUse::Scan), ..needs(User(1), 0) };
    let rest = Needs { continues: true, ..needs(User(1), 0) };
    for file in 1..=2 {
        assert!(turns.start(scan(file), 0).is_ok());
    }
    for (waiter, needs) in [(1, scan(3)), (2, needs(User(1), 0)), (3, rest), (4, rest), (5, scan(1))] {
        assert!(turns.start(needs, waiter).is_err());
    }
    assert_eq!(end(&mut turns, scan(1)), [3]);
    assert_eq!(end(&mut turns, rest), [4]);
    assert_eq!(end(&mut turns, rest), [1]);
    assert_eq!(end(&mut turns, scan(3)), [2]);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Start(Needs),
    /// The nth of the running calls.
    End(prop::sample::Index),
    /// The nth of the waiting calls.
    Cancel(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let thread = prop_oneof![Just(Unlimited), (0..4_u32).prop_map(User), (0..4_u32).prop_map(End)];
    // File 0 is none.
    let start = (thread, 0..6_u64, any::<bool>())
        .prop_map(|(thread, file, continues)| Step::Start(Needs { continues, ..needs(thread, file) }));
    let step = prop_oneof![
        4 => start,
        3 => any::<prop::sample::Index>().prop_map(Step::End),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
    ];
    prop::collection::vec(step, 0..120)
}

/// The rules, by counting the running calls.
fn can_run(running: &[(Needs, usize)], Needs { thread, turn, .. }: Needs) -> bool {
    let count = |is_counted: &dyn Fn(Thread) -> bool| {
        u32::try_from(running.iter().filter(|(needs, _)| is_counted(needs.thread)).count()).unwrap()
    };
    let of_it = count(&|other| other == thread);
    let has_thread = match thread {
        Unlimited => true,
        User(_) => of_it < USERS.0 && count(&|other| matches!(other, User(_))) < USERS.1,
        End(_) => of_it < ENDS.0 && count(&|other| matches!(other, End(_))) < ENDS.1,
    };
    has_thread && (turn.is_none() || running.iter().all(|(needs, _)| needs.turn != turn))
}

proptest! {
    /// No call that can run waits, none runs that cannot, and of calls with the same needs the first one starts first.
    #[test]
    fn calls_run_as_soon_as_they_can(steps in steps()) {
        let mut turns = turns();
        let (mut running, mut waiting) = (Vec::<(Needs, usize)>::new(), Vec::<(Needs, usize, u64)>::new());
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                Step::Start(needs) => match turns.start(needs, at) {
                    Ok(started) => {
                        prop_assert!(started == at && can_run(&running, needs));
                        running.push((needs, at));
                    }
                    Err(number) => waiting.push((needs, at, number)),
                },
                Step::End(nth) if !running.is_empty() => {
                    for (needs, started) in turns.end(running.swap_remove(nth.index(running.len())).0) {
                        prop_assert!(can_run(&running, needs));
                        let first = waiting.iter().position(|(waiting, ..)| *waiting == needs).unwrap();
                        prop_assert_eq!(waiting.remove(first).1, started);
                        running.push((needs, started));
                    }
                }
                Step::Cancel(nth) if !waiting.is_empty() => {
                    let (.., canceled) = waiting.remove(nth.index(waiting.len()));
                    turns.cancel(canceled);
                }
                Step::End(_) | Step::Cancel(_) => {}
            }
            prop_assert!(waiting.iter().all(|(needs, ..)| !can_run(&running, *needs)));
        }
        while let Some((needs, _)) = running.pop() {
            for started in turns.end(needs) {
                waiting.retain(|(_, at, _)| *at != started.1);
                running.push(started);
            }
        }
        prop_assert!(waiting.is_empty() && turns.is_idle());
    }
}
