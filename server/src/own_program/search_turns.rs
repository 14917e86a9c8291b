//! Turns of the searches of one kind: some searches run at the same time, and some of these for files of one owner. The next one is for
//! an owner with the fewest running searches: see [`Turns`].

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::turns::{Needs, Thread, Threads, Turns};

/// Limits on searches that run at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SearchLimits {
    pub(crate) all: u32,
    /// For files of one owner.
    pub(crate) per_owner: u32,
}

#[derive(Debug)]
pub(super) struct SearchTurns(Mutex<Turns<SyncSender<()>>>);

/// The drop ends the turn, and starts searches that waited for it.
struct Turn<'a> {
    turns: &'a SearchTurns,
    needs: Needs,
}

impl SearchTurns {
    pub(super) fn new(SearchLimits { all, per_owner }: SearchLimits) -> Self {
        Self(Mutex::new(Turns::new(Threads::new(per_owner, all), Threads::new(0, 0))))
    }

    /// Calls `search` when it is its turn. `None`: that was not before the deadline.
    pub(super) fn run<R>(&self, owner: u32, deadline: Instant, search: impl FnOnce() -> R) -> Option<R> {
        let _turn = self.wait(owner, deadline)?;
        Some(search())
    }

    fn wait(&self, owner: u32, deadline: Instant) -> Option<Turn<'_>> {
        let needs = Needs { thread: Thread::User(owner), turn: None, continues: false };
        let (start, started) = sync_channel(1);
        let queued = self.lock().start(needs, start).err();
        if let Some(number) = queued
            && started.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_err()
        {
            self.lock().cancel(number);
            // It may have started meanwhile.
            started.try_recv().ok()?;
        }
        Some(Turn { turns: self, needs })
    }

    fn lock(&self) -> MutexGuard<'_, Turns<SyncSender<()>>> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.turns.lock();
        for (_, start) in turns.end(self.needs) {
            // With the lock: a search that is canceled then has started or never does. The channel has room for this message.
            let _ = start.try_send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn search_that_gets_no_turn_ends_at_the_deadline() {
        let turns = SearchTurns::new(SearchLimits { all: 2, per_owner: 1 });
        let others = turns.run(1, Instant::now() + LONG, || {
            let waits = [Duration::ZERO, Duration::from_millis(10)];
            let same = waits.map(|wait| turns.run(1, Instant::now() + wait, || ()));
            (same, turns.run(2, Instant::now(), || 7))
        });
        assert_eq!(others, Some(([None, None], Some(7))));
        assert_eq!(turns.run(1, Instant::now() + LONG, || 8), Some(8));
        assert!(turns.lock().is_idle());
    }

    #[test]
    fn waiting_searches_all_start_when_others_end_or_panic() {
        const SEARCHES: usize = 40;
        let turns = SearchTurns::new(SearchLimits { all: 3, per_owner: 2 });
        let run = |number: usize| {
            turns.run(u32::try_from(number % 3).unwrap(), Instant::now() + LONG, || {
                std::thread::yield_now();
                assert!(!number.is_multiple_of(8), "planned panic");
            })
        };
        let began = Instant::now();
        let ended: Vec<_> = std::thread::scope(|scope| {
            let searches: Vec<_> = (0..SEARCHES).map(|number| scope.spawn(move || run(number))).collect();
            searches.into_iter().filter_map(|search| search.join().ok()).collect()
        });
        assert_eq!(ended, vec![Some(()); SEARCHES - SEARCHES / 8], "one got no turn");
        assert!(began.elapsed() < LONG, "one started at its deadline only");
        assert!(turns.lock().is_idle());
    }

    /// A turn that is given to a search at its deadline is not lost.
    #[test]
    fn turn_that_is_given_at_the_deadline_is_used_or_given_back() {
        let turns = SearchTurns::new(SearchLimits { all: 1, per_owner: 1 });
        std::thread::scope(|scope| {
            for number in 0..8 {
                let turns = &turns;
                scope.spawn(move || {
                    for round in 0..500 {
                        let deadline = Instant::now() + Duration::from_micros(round * 7 % 100);
                        turns.run(number, deadline, std::thread::yield_now);
                    }
                });
            }
        });
        assert!(turns.lock().is_idle());
    }
}
