//! The effect of adoption on the system call of the stopped thread.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_tests::blocked_syscall::{BlockedSyscall, CallResult};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::fixture::{Fixture, Lateness, signal};

const ETIMEDOUT: i64 = -(nix::libc::ETIMEDOUT as i64);
const EAGAIN: i64 = -(nix::libc::EAGAIN as i64);
const EINTR: i64 = -(nix::libc::EINTR as i64);

/// Calls with a timeout that end with EINTR when a tracer stops them, and their results when the timeout expires.
const TIMED_CALLS: [(&str, &str, i64); 6] = [
    ("epoll_wait", "epoll_wait", 0),
    ("epoll_pwait2", "epoll_pwait2", 0),
    ("sigtimedwait", "rt_sigtimedwait", EAGAIN),
    ("semtimedop", "semtimedop", EAGAIN),
    ("recv", "recvfrom", EAGAIN),
    ("accept", "accept", EAGAIN),
];

/// Adopts a process that blocks in a call, and compares its state with the state before.
#[track_caller]
fn adopt_in_call(
    fixture: &Fixture,
    (call, milliseconds): (&str, i64),
    more: &[&str],
    wake: impl FnOnce(&mut BlockedSyscall),
) -> (CallResult, Value) {
    let mut process = fixture.start("memfd", &format!("{call}-{}", milliseconds.max(0)));
    let before = process.state().unwrap();
    process.block(call, milliseconds).unwrap();
    // A call that is made again in full takes half as long again.
    std::thread::sleep(Duration::from_millis(milliseconds.clamp(500, 2000).unsigned_abs() / 2));
    let lateness = Lateness::measure();
    let adopted = fixture.adopt(&process, more);
    let lateness = lateness.longest();
    wake(&mut process);
    let result = process.result().unwrap();
    assert_eq!(result.registers, "intact", "{call}: {adopted}");
    assert_eq!(process.state().unwrap(), before, "signal mask, handlers and descriptors");
    let file = &adopted["files"][0];
    assert_eq!(file["tracked"].as_array().unwrap().len(), 1);
    fixture.tracks_writes(&mut process, &file["file"]);
    // A stop takes microseconds, and the tracer and the thread must be scheduled in turn: twice to stop it, and for two calls with
    // two stops each. The usual duration is printed.
    let allowed = Duration::from_millis(100) + lateness * 10;
    let stopped = Duration::from_micros(adopted["stop"]["duration_us"].as_u64().unwrap());
    assert!(stopped < allowed, "stopped for {stopped:?}, threads ran up to {lateness:?} late: {adopted}");
    (result, adopted)
}

/// The call ends by its timeout, which the stop does not change.
#[track_caller]
fn keeps_timeout(fixture: &Fixture, call: &str, value: i64, outcome: &str) {
    const TIMEOUT: f64 = 1500.0;
    let (result, adopted) = adopt_in_call(fixture, (call, 1500), &[], |_| ());
    assert_eq!(result.value, value, "{call}: {adopted}");
    assert_eq!(adopted["stop"]["outcome"], outcome, "{call}");
    let excess = result.milliseconds - TIMEOUT;
    eprintln!("{call}: took {:.1} ms", result.milliseconds);
    assert!((-4.0..TIMEOUT * 0.49).contains(&excess), "{call} took {} ms: {adopted}", result.milliseconds);
}

/// The call blocks until it is woken.
#[track_caller]
fn ends_when_woken(
    fixture: &Fixture,
    call: &str,
    value: i64,
    outcome: &str,
    wake: impl FnOnce(&mut BlockedSyscall),
) {
    let (result, adopted) = adopt_in_call(fixture, (call, -1), &[], wake);
    assert_eq!(result.value, value, "{call}: {adopted}");
    assert_eq!(adopted["stop"]["outcome"], outcome, "{call}");
}

#[test]
fn calls_that_the_kernel_restarts_keep_their_timeout() {
    let fixture = Fixture::new();
    keeps_timeout(&fixture, "futex", ETIMEDOUT, "restarted");
    keeps_timeout(&fixture, "nanosleep", 0, "restarted");
    keeps_timeout(&fixture, "poll", 0, "restarted");
    keeps_timeout(&fixture, "ppoll", 0, "restarted");
    keeps_timeout(&fixture, "spin", -5, "unchanged");
}

#[test]
fn thread_in_a_timed_wait_blocks_adoption_and_is_named() {
    const TIMEOUT: i64 = 4000;
    let fixture = Fixture::new();
    let refused = |(call, name, value): (&str, &str, i64)| {
        let mut process = fixture.start("memfd", call);
        let before = process.state().unwrap();
        process.block(call, TIMEOUT).unwrap();
        let pid = process.pid().to_string();
        let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--track"]);
        for part in [&format!("thread {pid} blocks adoption"), &format!("timed {name}"), "--allow-eintr"] {
            assert!(errors.contains(part), "{call}: {errors}");
        }
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (value, "intact"), "{call}");
        assert!(result.milliseconds >= 3996.0, "{call} took {} ms", result.milliseconds);
        assert!([-1, TIMEOUT].contains(&result.socket_timeout), "{call}: {}", result.socket_timeout);
        assert_eq!(process.state().unwrap(), before);
    };
    std::thread::scope(|scope| {
        for call in TIMED_CALLS {
            scope.spawn(move || refused(call));
        }
    });
}

#[test]
fn allow_eintr_ends_a_timed_wait_with_eintr() {
    let fixture = Fixture::new();
    for (call, _, _) in TIMED_CALLS {
        let (result, adopted) = adopt_in_call(&fixture, (call, 8000), &["--allow-eintr"], |_| ());
        assert_eq!(result.value, EINTR, "{call}: {adopted}");
        assert_eq!(adopted["stop"]["outcome"], "interrupted", "{call}");
        assert!([-1, 8000].contains(&result.socket_timeout), "{call}: {}", result.socket_timeout);
    }
}

#[test]
fn end_of_a_short_timed_wait_is_awaited() {
    let fixture = Fixture::new();
    for call in ["recv", "epoll_wait"] {
        let (result, adopted) = adopt_in_call(&fixture, (call, 1500), &["--allow-eintr"], |_| ());
        assert!([EAGAIN, 0].contains(&result.value), "{call}: {adopted}");
        assert!(result.milliseconds >= 1490.0, "{} ms: {adopted}", result.milliseconds);
        // It was stopped in its next call, or when the result of this one was complete.
        let (outcome, next) = (&adopted["stop"]["outcome"], &adopted["stop"]["syscall"]);
        let waited = outcome == "unchanged" || outcome == "restarted" && *next == nix::libc::SYS_read;
        // Stopped at the very end of its time, recv(2) of a unix socket returns EINTR, and is made again in full.
        let again = outcome == "reissued" && result.milliseconds >= 2.0 * 1490.0;
        assert!(waited || again, "{call}: {} ms: {adopted}", result.milliseconds);
    }
}

#[test]
fn thread_outside_of_a_timed_wait_is_preferred() {
    let fixture = Fixture::new();
    for (call, _, value) in TIMED_CALLS {
        let mut process = fixture.start("memfd", call);
        process.start_thread().unwrap();
        process.block(call, 1500).unwrap();
        let adopted = fixture.adopt(&process, &["--allow-eintr"]);
        assert_ne!(adopted["stop"]["tid"], process.pid(), "{call}: {adopted}");
        assert_eq!(adopted["stop"]["outcome"], "restarted", "{call}");
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (value, "intact"), "{call}: {adopted}");
        assert!(result.milliseconds >= 1490.0, "{} ms: {adopted}", result.milliseconds);
        fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
    }
}

#[test]
fn worker_thread_gets_no_injected_call() {
    let fixture = Fixture::new();
    let mut process = fixture.start("memfd", "poller");
    process.start_sqpoll_thread().unwrap();
    let threads = std::fs::read_dir(format!("/proc/{}/task", process.pid())).unwrap().count();
    assert_eq!(threads, 2, "the process has a thread of io_uring");
    process.block("nanosleep", 1000).unwrap();
    let adopted = fixture.adopt(&process, &[]);
    assert_eq!(adopted["stop"]["tid"], process.pid(), "{adopted}");
    let result = process.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"), "{adopted}");
    fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
}

#[test]
fn untimed_calls_are_restarted_in_full() {
    let fixture = Fixture::new();
    ends_when_woken(&fixture, "read", 1, "restarted", |process| process.send("x").unwrap());
    for (call, outcome) in [("poll", "restarted"), ("epoll_wait", "reissued"), ("epoll_pwait2", "reissued")] {
        let mut process = fixture.start("memfd", &format!("{call}-untimed"));
        process.block(call, -1).unwrap();
        let adopted = fixture.adopt(&process, &[]);
        // The line wakes the call and is the next command.
        process.send("state\n").unwrap();
        let result = process.result().unwrap();
        process.expect("state").unwrap();
        fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
        assert_eq!((result.value, result.registers.as_str()), (1, "intact"), "{call}");
        assert_eq!(adopted["stop"]["outcome"], outcome, "{call}");
    }
    let sigusr1 = i64::from(Signal::SIGUSR1 as i32);
    ends_when_woken(&fixture, "sigtimedwait", sigusr1, "reissued", |process| {
        signal(process, Signal::SIGUSR1)
    });
    for (call, outcome) in
        [("futex", "restarted"), ("recv", "restarted"), ("accept", "restarted"), ("semtimedop", "reissued")]
    {
        ends_when_woken(&fixture, call, EINTR, outcome, |process| signal(process, Signal::SIGUSR2));
    }
}

#[test]
fn signal_with_a_handler_ends_a_reissued_call() {
    let fixture = Fixture::new();
    for call in ["epoll_wait", "epoll_pwait2", "sigtimedwait"] {
        let mut process = fixture.start("memfd", call);
        process.block(call, -1).unwrap();
        assert_eq!(fixture.adopt(&process, &[])["stop"]["outcome"], "reissued");
        std::thread::sleep(Duration::from_millis(500));
        let signalled = Instant::now();
        signal(&process, Signal::SIGUSR2);
        let result = process.result().unwrap();
        let after = signalled.elapsed();
        assert_eq!((result.value, result.registers.as_str()), (EINTR, "intact"), "{call}");
        assert!(result.milliseconds >= 500.0, "{call}: {} ms", result.milliseconds);
        assert!(after < Duration::from_millis(2500), "{call} ended {after:?} after the signal");
    }
}

#[test]
fn ignored_signal_does_not_end_a_reissued_call() {
    let fixture = Fixture::new();
    for call in ["epoll_wait", "epoll_pwait2"] {
        let mut process = fixture.start("memfd", &format!("{call}-ignores"));
        process.block(call, -1).unwrap();
        let pid = process.pid().to_string();
        // One signal while fdmap works, one afterwards.
        let mut tool = fixture.command(&["adopt", "--track", "--pid", &pid]).spawn().unwrap();
        while tool.try_wait().unwrap().is_none() {
            signal(&process, Signal::SIGWINCH);
        }
        assert!(tool.wait().unwrap().success());
        signal(&process, Signal::SIGWINCH);
        std::thread::sleep(Duration::from_millis(500));
        process.send("state\n").unwrap();
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (1, "intact"), "{call}");
        assert!(result.milliseconds > 500.0, "{call}: {} ms", result.milliseconds);
    }
}

#[test]
fn interrupted_tool_leaves_the_call_whole() {
    let fixture = Fixture::new();
    let mut process = fixture.start("memfd", "interrupted");
    process.block("epoll_wait", 3000).unwrap();
    let pid = process.pid().to_string();
    let mut tool =
        fixture.command(&["adopt", "--track", "--pid", &pid]).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    assert!(tool.try_wait().unwrap().is_none(), "fdmap waits for a thread outside of a timed call");
    kill(Pid::from_raw(i32::try_from(tool.id()).unwrap()), Signal::SIGINT).unwrap();
    tool.wait().unwrap();
    let result = process.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    assert!((2990.0..4150.0).contains(&result.milliseconds), "{} ms", result.milliseconds);
}

/// True while fdmap traces the process, which has one thread.
fn is_traced(process: &BlockedSyscall) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    status.lines().any(|line| line.starts_with("TracerPid:") && line != "TracerPid:\t0")
}

#[test]
fn killed_tool_harms_no_process() {
    let fixture = Fixture::new();
    // Tools that ended by the kill, and kills during which the thread was traced.
    let (mut killed, mut within) = (0, 0);
    for round in 0..60 {
        let mut process = fixture.start("memfd", &format!("round-{round}"));
        // Shows how late a call ends on this machine without fdmap.
        let mut control = fixture.start("memfd", "control");
        control.block("futex", 300).unwrap();
        process.block("futex", 300).unwrap();
        let pid = process.pid().to_string();
        let mut tool =
            fixture.command(&["adopt", "--track", "--pid", &pid]).stdout(Stdio::null()).spawn().unwrap();
        let mut traced = false;
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(2000 + 300 * round));
        } else {
            // The thread is traced for less than a millisecond, and when that begins depends on the machine.
            while !traced && tool.try_wait().unwrap().is_none() {
                traced = is_traced(&process);
            }
        }
        tool.kill().unwrap();
        within += usize::from(traced && is_traced(&process));
        killed += usize::from(tool.wait().unwrap().signal() == Some(Signal::SIGKILL as i32));
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (ETIMEDOUT, "intact"), "round {round}");
        let late = control.result().unwrap().milliseconds - 300.0;
        assert!(result.milliseconds < 1000.0 + late, "{} ms, {late} ms late", result.milliseconds);
    }
    eprintln!("killed {killed} times, {within} times while the thread was traced");
    assert!(within > 0, "no kill fell into the time between seize and detach; {killed} came before the end");
}
