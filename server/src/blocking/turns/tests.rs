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
    Needs { thread, file: FileId::new(file) }
}

/// Ends a call. Returns those that start.
fn end(turns: &mut Turns<usize>, needs: Needs) -> Vec<usize> {
    turns.end(needs);
    std::iter::from_fn(|| turns.next()).map(|(_, started)| started).collect()
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
            assert!(turns.start(needs(*thread, *file), ()).is_some(), "{running:?}");
        }
        assert_eq!(
            turns.start(needs(*thread, *file), ()).is_some(),
            *can_run,
            "{running:?} {thread:?} {file}"
        );
    }
}

#[test]
fn ends_of_an_owner_with_the_fewest_threads_start_first() {
    let mut turns = turns();
    let of = |owner, file| needs(End(owner), file);
    // Owners 1 and 2 have all threads, and wait for more. Owner 3 requests last.
    for (at, (owner, file)) in [(1, 1), (1, 2), (2, 3), (2, 4)].into_iter().enumerate() {
        assert_eq!(turns.start(of(owner, file), at), Some(at));
    }
    for (at, (owner, file)) in [(1, 5), (1, 6), (2, 7), (3, 8), (3, 9)].into_iter().enumerate() {
        assert_eq!(turns.start(of(owner, file), 10 + at), None);
    }
    assert_eq!(end(&mut turns, of(1, 1)), [13], "the first one of owner 3, who has no thread");
    assert_eq!(end(&mut turns, of(2, 3)), [10], "each owner has one: the end that waits longest");
    turns.forget(|waiter| *waiter == 12);
    assert_eq!(end(&mut turns, of(1, 2)), [11], "owners 1 and 3 have one");
    assert_eq!(end(&mut turns, of(2, 4)), [14]);
    for (owner, file) in [(3, 8), (1, 5), (1, 6), (3, 9)] {
        assert_eq!(end(&mut turns, of(owner, file)), []);
    }
    assert!(turns.is_idle());
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
            .filter_map(|(at, thread)| turns.start(needs(*thread, FILE), at))
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
        assert!(turns.start(needs(running.0, 1), running).is_some());
        let mut calls: Vec<_> = (0..10).map(|at| (others[at % 2], at)).collect();
        calls.extend([(User(3), 100), (User(3), 101)]);
        for call in calls {
            assert_eq!(turns.start(needs(call.0, 1), call), None);
        }
        let mut started = Vec::new();
        for _ in 0..6 {
            turns.end(needs(running.0, 1));
            let (_, next) = turns.next().unwrap();
            assert!(turns.next().is_none());
            // The user whose call has ended makes another one.
            assert_eq!(turns.start(needs(running.0, 1), (running.0, 1)), None);
            started.push(next.1);
            running = next;
        }
        assert!(started.contains(&100) && started.contains(&101), "{others:?}: {started:?}");
    }
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
    let start = (thread, 0..6_u64).prop_map(|(thread, file)| Step::Start(needs(thread, file)));
    let step = prop_oneof![
        4 => start,
        3 => any::<prop::sample::Index>().prop_map(Step::End),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
    ];
    prop::collection::vec(step, 0..120)
}

/// The rules, by counting the running calls.
fn can_run(running: &[(Needs, usize)], Needs { thread, file }: Needs) -> bool {
    let count = |is_counted: &dyn Fn(Thread) -> bool| {
        u32::try_from(running.iter().filter(|(needs, _)| is_counted(needs.thread)).count()).unwrap()
    };
    let of_it = count(&|other| other == thread);
    let has_thread = match thread {
        Unlimited => true,
        User(_) => of_it < USERS.0 && count(&|other| matches!(other, User(_))) < USERS.1,
        End(_) => of_it < ENDS.0 && count(&|other| matches!(other, End(_))) < ENDS.1,
    };
    has_thread && (file.is_none() || running.iter().all(|(needs, _)| needs.file != file))
}

proptest! {
    /// No call that can run waits, none runs that cannot, and of calls with the same needs the first one starts first.
    #[test]
    fn calls_run_as_soon_as_they_can(steps in steps()) {
        let mut turns = turns();
        let (mut running, mut waiting) = (Vec::<(Needs, usize)>::new(), Vec::<(Needs, usize)>::new());
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                Step::Start(needs) => match turns.start(needs, at) {
                    Some(started) => {
                        prop_assert!(started == at && can_run(&running, needs));
                        running.push((needs, at));
                    }
                    None => waiting.push((needs, at)),
                },
                Step::End(nth) if !running.is_empty() => {
                    turns.end(running.swap_remove(nth.index(running.len())).0);
                    while let Some((needs, started)) = turns.next() {
                        prop_assert!(can_run(&running, needs));
                        let first = waiting.iter().position(|(waiting, _)| *waiting == needs).unwrap();
                        prop_assert_eq!(waiting.remove(first), (needs, started));
                        running.push((needs, started));
                    }
                }
                Step::Cancel(nth) if !waiting.is_empty() => {
                    let (_, canceled) = waiting.remove(nth.index(waiting.len()));
                    turns.forget(|waiter| *waiter == canceled);
                }
                Step::End(_) | Step::Cancel(_) => {}
            }
            prop_assert!(waiting.iter().all(|(needs, _)| !can_run(&running, *needs)));
        }
        while let Some((needs, _)) = running.pop() {
            turns.end(needs);
            while let Some(started) = turns.next() {
                waiting.retain(|waiter| *waiter != started);
                running.push(started);
            }
        }
        prop_assert!(waiting.is_empty() && turns.is_idle());
    }
}
