//! Work of several threads, whose results one thread takes in order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Results that wait for an earlier one, per thread.
const MAX_WAITING_RESULTS: usize = 4;

struct State<R, E> {
    /// Next item that a thread takes.
    next: usize,
    /// Next result that is taken.
    taken: usize,
    results: BTreeMap<usize, R>,
    error: Option<E>,
    /// No thread takes a further item.
    has_ended: bool,
}

struct Shared<R, E> {
    state: Mutex<State<R, E>>,
    changed: Condvar,
}

impl<R, E> Shared<R, E> {
    fn lock(&self) -> MutexGuard<'_, State<R, E>> {
        // A thread that panics ends the others, by `Ending`.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State<R, E>>) -> MutexGuard<'a, State<R, E>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, error: Option<E>) {
        let mut state = self.lock();
        state.has_ended = true;
        state.error = state.error.take().or(error);
        self.changed.notify_all();
    }
}

/// Ends all threads when one returns or panics before its time.
struct Ending<'a, R, E>(&'a Shared<R, E>, bool);

impl<R, E> Drop for Ending<'_, R, E> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.end(None);
        }
    }
}

/// Has `workers` process all items, each a part of them, and passes the results to `take` in the order of the items. Holds at most
/// [`MAX_WAITING_RESULTS`] results for each worker.
///
/// # Errors
/// The first error of a worker or of `take`; no further item is begun then.
pub(crate) fn process<T, R, E, W>(
    items: &[T],
    workers: Vec<W>,
    mut take: impl FnMut(R) -> Result<(), E>,
) -> Result<(), E>
where
    T: Sync,
    R: Send,
    E: Send,
    W: FnMut(&T) -> Result<R, E> + Send,
{
    let ahead = workers.len() * MAX_WAITING_RESULTS;
    let state = State { next: 0, taken: 0, results: BTreeMap::new(), error: None, has_ended: false };
    let shared = Shared { state: Mutex::new(state), changed: Condvar::new() };
    std::thread::scope(|scope| {
        for worker in workers {
            let shared = &shared;
            scope.spawn(move || run(shared, items, worker, ahead));
        }
        let mut ending = Ending(&shared, false);
        for number in 0..items.len() {
            let mut state = shared.lock();
            let result = loop {
                if let Some(result) = state.results.remove(&number) {
                    break result;
                }
                if state.has_ended {
                    return;
                }
                state = shared.wait(state);
            };
            state.taken = number + 1;
            drop(state);
            shared.changed.notify_all();
            if let Err(error) = take(result) {
                return shared.end(Some(error));
            }
        }
        ending.1 = true;
    });
    match shared.state.into_inner().unwrap_or_else(PoisonError::into_inner).error {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn run<T, R, E>(
    shared: &Shared<R, E>,
    items: &[T],
    mut worker: impl FnMut(&T) -> Result<R, E>,
    ahead: usize,
) {
    let mut ending = Ending(shared, false);
    loop {
        let mut state = shared.lock();
        while !state.has_ended && state.next >= state.taken + ahead && state.next < items.len() {
            state = shared.wait(state);
        }
        let number = state.next;
        let Some(item) = items.get(number).filter(|_| !state.has_ended) else {
            ending.1 = true;
            return;
        };
        state.next += 1;
        drop(state);
        match worker(item) {
            Ok(result) => {
                shared.lock().results.insert(number, result);
                shared.changed.notify_all();
            }
            Err(error) => return shared.end(Some(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn results_are_taken_in_order_and_few_wait() {
        let items: Vec<usize> = (0..300).collect();
        let (begun, mut taken) = (AtomicUsize::new(0), Vec::new());
        let worker = || {
            |item: &usize| {
                begun.fetch_add(1, Ordering::SeqCst);
                if item.is_multiple_of(50) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok::<_, ()>(*item)
            }
        };
        process(&items, (0..3).map(|_| worker()).collect(), |item| {
            assert!(begun.load(Ordering::SeqCst) <= item + 1 + 3 * MAX_WAITING_RESULTS + 3);
            taken.push(item);
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, items);
    }

    #[test]
    fn first_error_ends_the_work() {
        let items: Vec<usize> = (0..1000).collect();
        let failing = |item: &usize| if *item == 7 { Err("worker") } else { Ok(*item) };
        assert_eq!(process(&items, vec![failing; 2], |_| Ok(())), Err("worker"));
        let working = |item: &usize| Ok(*item);
        let result = process(&items, vec![working; 2], |item| if item == 9 { Err("take") } else { Ok(()) });
        assert_eq!(result, Err("take"));
        assert_eq!(process(&[] as &[usize], vec![working], |_| Err("none")), Ok(()));
    }

    #[test]
    fn panic_of_a_worker_ends_the_others() {
        let items: Vec<usize> = (0..1000).collect();
        let worker = |item: &usize| {
            assert!(*item != 5, "planted");
            Ok::<_, ()>(*item)
        };
        let result = std::panic::catch_unwind(|| process(&items, vec![worker; 2], |_| Ok(())));
        assert!(result.is_err());
    }
}
