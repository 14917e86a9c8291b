//! Calls that are not counted: they began before the file was followed, or had no room.

use fdmap_sys::testing::blocked::{sleeps_in_call, wait_for_call};

use super::*;
use crate::tracking::observe::task_search::RETRY_INTERVAL;

#[test]
fn earlier_call_is_noticed_and_reported_when_it_ends() {
    let trace = start();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let (sender, thread) = std::sync::mpsc::channel();
    let fd = file();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            sender.send(nix::unistd::gettid()).unwrap();
            splice(&pipe, &fd, None, 100)
        });
        let was_in_call = wait_for_call(thread.recv().unwrap(), nix::libc::SYS_splice);
        let followed = follow(&trace, fd.as_fd());
        let drains = [trace.drain(followed), trace.drain(followed)];
        assert_eq!(write(&fill, 50), Ok(50));
        assert_eq!(waiting.join().unwrap(), Ok(50));
        assert!(was_in_call, "the thread never called splice");
        assert_eq!(drains.map(|traced| traced.lost), [true, true], "the call is in progress");
        let traced = trace.drain(followed);
        assert_eq!(traced.ended, [EVERYTHING]);
        let end = Instant::now() + Duration::from_secs(10);
        while trace.drain(followed).lost {
            assert!(Instant::now() < end, "the call has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(trace.drain(followed), TracedWrites::default());
    });
}

#[test]
fn earlier_call_whose_descriptor_was_closed_is_noticed_until_the_drain_after_its_end() {
    let trace = start();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let (sender, thread) = std::sync::mpsc::channel();
    let fd = file();
    let own = fd.try_clone().unwrap();
    std::thread::scope(|scope| {
        let (pipe, target) = (&pipe, own.as_raw_fd());
        let waiting = scope.spawn(move || {
            sender.send(nix::unistd::gettid()).unwrap();
            calls::splice_to_number(pipe.as_fd(), target, 100)
        });
        let was_in_call = wait_for_call(thread.recv().unwrap(), nix::libc::SYS_splice);
        drop(own);
        let followed = follow(&trace, fd.as_fd());
        let drains = [trace.drain(followed), trace.drain(followed)];
        assert_eq!(write(&fill, 50), Ok(50));
        assert_eq!(waiting.join().unwrap(), Ok(50));
        assert!(was_in_call, "the thread never called splice");
        assert_eq!(drains.map(|traced| traced.lost), [true, true], "the call is in progress");
        assert!(trace.drain(followed).lost, "the call has ended without a record");
        let end = Instant::now() + Duration::from_secs(10);
        while trace.drain(followed).lost {
            assert!(Instant::now() < end, "the call has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn call_by_a_descriptor_beyond_the_table_is_no_write() {
    let (trace, fd, ended) = (start(), file(), AtomicBool::new(false));
    let followed_without_calls = || {
        let followed = follow(&trace, fd.as_fd());
        let lost = trace.drain(followed).lost;
        trace.unfollow(followed);
        !lost
    };
    let found_none = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                for number in [-1, i32::MAX] {
                    assert_eq!(calls::write_to_number(number), Err(Errno::EBADF));
                }
            }
        });
        // Ends the thread also if this one panics.
        let _end = SetOnDrop(&ended);
        (0..MAX_ATTEMPTS).filter(|_| followed_without_calls()).count()
    });
    // Other tests make calls that may concern any file. Without the rule, the task is found in nearly all attempts.
    assert!(found_none > MAX_ATTEMPTS / 2, "{found_none}");
}

#[test]
fn stopped_task_is_in_no_call() {
    let (trace, fd) = (start(), file());
    let (pipe, _fill) = nix::unistd::pipe().unwrap();
    // SAFETY: the child makes system calls only.
    let child = match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let _ = calls::splice_to_number(pipe.as_fd(), fd.as_raw_fd(), 100);
            calls::exit_now(0)
        }
        ForkResult::Parent { child } => child,
    };
    let call = nix::libc::SYS_splice;
    let was_in_call = wait_for_call(child, call);
    // The kernel makes the call again when the child continues. Its registers are those of the call.
    kill(child, Signal::SIGSTOP).unwrap();
    waitpid(child, Some(WaitPidFlag::WUNTRACED)).unwrap();
    let was_in_call = was_in_call && sleeps_in_call(child, call);
    let followed = follow(&trace, fd.as_fd());
    let lost = (0..5).any(|_| trace.drain(followed).lost);
    kill(child, Signal::SIGKILL).unwrap();
    waitpid(child, None).unwrap();
    assert!(was_in_call, "the child was never stopped in its call");
    assert!(!lost, "a stopped task cannot write");
}

#[test]
fn calls_without_room_are_in_progress_until_a_search_finds_none() {
    // More than the calls in flight of one file that have room.
    const CALLS: usize = 260;
    let bench = Bench::new();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let uncounted = || bench.trace.counters.uncounted(bench.followed.slot()).0;
    std::thread::scope(|scope| {
        for _ in 0..CALLS {
            scope.spawn(|| splice(&pipe, &bench.fd, None, 100));
        }
        let end = Instant::now() + Duration::from_secs(10);
        while uncounted() < 4 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let drains = [bench.trace.drain(bench.followed), bench.trace.drain(bench.followed)];
        drop(fill);
        assert_eq!(uncounted(), 4);
        assert!(drains.iter().all(|traced| traced.lost && traced.mapped), "calls are in progress");
    });
    // The next drain searches again, and finds no call. Those that have ended since the last drain may have left no record.
    std::thread::sleep(2 * RETRY_INTERVAL);
    assert!(bench.trace.drain(bench.followed).lost, "calls have ended since the last drain");
    let end = Instant::now() + Duration::from_secs(10);
    while bench.trace.drain(bench.followed).lost {
        assert!(Instant::now() < end, "the calls have ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    pwrite(&bench.fd, 1, 0);
    assert_eq!(bench.ended(), [bytes(0, 1)]);
}
