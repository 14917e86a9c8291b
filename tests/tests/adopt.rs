//! Adoption of running processes: what is adopted, and that the process does not notice.
#![cfg(target_arch = "x86_64")]

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fdmap_tests::blocked_syscall::{BlockedSyscall, CallResult};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// A service, and the program to adopt.
struct Fixture {
    service: Service,
    program: Compiled,
}

impl Fixture {
    fn new() -> Self {
        Self::with(&[])
    }

    fn with(arguments: &[&str]) -> Self {
        require(root());
        let program = require(Compiled::new("blocked_syscall"));
        Self { service: Service::start(arguments).unwrap(), program }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(self.service.folder()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must fail with this exit code. Returns its standard error.
    #[track_caller]
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        errors
    }

    fn start(&self, kind: &str, name: &str) -> BlockedSyscall {
        let mut command = Command::new(self.program.path());
        command.args([kind, name]);
        BlockedSyscall::start(command).unwrap()
    }

    #[track_caller]
    fn adopt(&self, process: &BlockedSyscall, more: &[&str]) -> Value {
        let pid = process.pid().to_string();
        let adopted = self.json(&[&["adopt", "--pid", &pid, "--track"], more].concat());
        eprintln!("{}", adopted["stop"]);
        adopted
    }

    /// What the process writes is reported as written, and nothing else is. Other processes of the host may make the service
    /// report all pages with data, but as conservative.
    #[track_caller]
    fn tracks_writes(&self, process: &mut BlockedSyscall, file: &Value) {
        let name = file["name"].as_str().unwrap();
        self.json(&["checkpoint", name]);
        let since = self.json(&["checkpoint", name])["generation"].to_string();
        process.write(5).unwrap();
        process.write(6).unwrap();
        self.json(&["checkpoint", name]);
        let dirty = self.json(&["dirty", name, "--since", &since]);
        let written = serde_json::json!({ "conservative": false, "start": 5, "end": 7 });
        assert!(dirty["runs"].as_array().unwrap().contains(&written), "{dirty}");
        assert_eq!(
            (&dirty["observed_pages"], &dirty["header"]["coverage"]["tracked_mappings"]),
            (&2.into(), &1.into())
        );
    }
}

const ETIMEDOUT: i64 = -(nix::libc::ETIMEDOUT as i64);
const EAGAIN: i64 = -(nix::libc::EAGAIN as i64);
const EINTR: i64 = -(nix::libc::EINTR as i64);

/// Calls with a timeout that end with EINTR when a tracer stops them, and what they return when the time is over.
const TIMED_CALLS: [(&str, &str, i64); 6] = [
    ("epoll_wait", "epoll_wait", 0),
    ("epoll_pwait2", "epoll_pwait2", 0),
    ("sigtimedwait", "rt_sigtimedwait", EAGAIN),
    ("semtimedop", "semtimedop", EAGAIN),
    ("recv", "recvfrom", EAGAIN),
    ("accept", "accept", EAGAIN),
];

fn signal(process: &BlockedSyscall, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process.pid()).unwrap()), signal).unwrap();
}

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
    std::thread::sleep(Duration::from_millis(250));
    let adopted = fixture.adopt(&process, more);
    wake(&mut process);
    let result = process.result().unwrap();
    assert_eq!(result.registers, "intact", "{call}: {adopted}");
    assert_eq!(process.state().unwrap(), before, "signal mask, handlers and descriptors");
    let file = &adopted["files"][0];
    assert_eq!(file["tracked"].as_array().unwrap().len(), 1);
    fixture.tracks_writes(&mut process, &file["file"]);
    // The bound allows for a loaded machine; the usual duration is printed.
    assert!(adopted["stop"]["duration_us"].as_u64().unwrap() < 100_000, "{adopted}");
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
    assert!((-4.0..TIMEOUT * 0.15).contains(&excess), "{call} took {} ms: {adopted}", result.milliseconds);
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
        assert!((3996.0..4600.0).contains(&result.milliseconds), "{call} took {} ms", result.milliseconds);
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
        assert!((1490.0..1700.0).contains(&result.milliseconds), "{} ms: {adopted}", result.milliseconds);
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
        assert!((1490.0..1725.0).contains(&result.milliseconds), "{} ms: {adopted}", result.milliseconds);
        fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
    }
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
        signal(&process, Signal::SIGUSR2);
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (EINTR, "intact"), "{call}");
        assert!((500.0..4000.0).contains(&result.milliseconds), "{call}: {} ms", result.milliseconds);
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
    assert!(tool.try_wait().unwrap().is_none(), "it waits for a better thread");
    kill(Pid::from_raw(i32::try_from(tool.id()).unwrap()), Signal::SIGINT).unwrap();
    tool.wait().unwrap();
    let result = process.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    assert!((2990.0..3450.0).contains(&result.milliseconds), "{} ms", result.milliseconds);
}

#[test]
fn killed_tool_harms_no_process() {
    let fixture = Fixture::new();
    let mut killed = 0;
    for round in 0..60 {
        let mut process = fixture.start("memfd", &format!("round-{round}"));
        // Shows how late a call ends on this machine without fdmap.
        let mut control = fixture.start("memfd", "control");
        control.block("futex", 300).unwrap();
        process.block("futex", 300).unwrap();
        let pid = process.pid().to_string();
        let mut tool =
            fixture.command(&["adopt", "--track", "--pid", &pid]).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(2000 + 300 * round));
        tool.kill().unwrap();
        killed += usize::from(!tool.wait().unwrap().success());
        let result = process.result().unwrap();
        assert_eq!((result.value, result.registers.as_str()), (ETIMEDOUT, "intact"), "round {round}");
        let late = control.result().unwrap().milliseconds - 300.0;
        assert!(result.milliseconds < 500.0 + late, "{} ms, {late} ms late", result.milliseconds);
    }
    eprintln!("killed {killed} times");
}

#[test]
fn all_kinds_of_shared_memory_are_adopted() {
    let fixture = Fixture::new();
    let name = format!("/fdmap-adopt-{}", std::process::id());
    // The first System V segment of an IPC namespace has inode number 0.
    let kinds = [("closed", "own"), ("shm", &name[1..]), ("sysv", ""), ("first sysv", ""), ("anon", "")];
    for (kind, prefix) in kinds {
        let given = if kind == "shm" { &name } else { "own" };
        let mut process = match kind.strip_prefix("first ") {
            None => fixture.start(kind, given),
            Some(kind) => {
                let mut command = Command::new("unshare");
                command.arg("--ipc").arg(fixture.program.path()).args([kind, given]);
                BlockedSyscall::start(command).unwrap()
            }
        };
        if kind == "shm" {
            std::fs::remove_file(format!("/dev/shm{name}")).unwrap();
        }
        process.block("read", 0).unwrap();
        let adopted = fixture.adopt(&process, &["--all"]);
        assert_eq!(adopted["files"].as_array().unwrap().len(), 1, "{kind}: {adopted}");
        let file = &adopted["files"][0];
        assert!(file["file"]["name"].as_str().unwrap().starts_with(prefix), "{kind}: {adopted}");
        assert_eq!(
            (&file["already_registered"], &file["file"]["size_bytes"]),
            (&false.into(), &262_144.into())
        );
        process.send("x").unwrap();
        assert_eq!(process.result().unwrap().registers, "intact");
        fixture.tracks_writes(&mut process, &file["file"]);

        // Again: the service has the file and tracks the mapping.
        let pid = process.pid().to_string();
        let again = fixture.json(&["adopt", "--pid", &pid, "--all"]);
        assert_eq!(again["files"][0]["already_registered"], true, "{again}");
        let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--all", "--track"]);
        assert!(errors.contains("tracking"), "{errors}");

        let detached = fixture.json(&["release", "--pid", &pid]);
        let one = &detached["released"][0];
        assert_eq!((&one["mappings"], &one["deleted"]), (&1.into(), &true.into()), "{detached}");
        process.write(9).unwrap();
        assert_eq!(fixture.json(&["ls"]), serde_json::json!([]));
    }
    let process = fixture.start("anon", "");
    let errors = fixture.fails(7, &["adopt", "--pid", &process.pid().to_string()]);
    assert!(errors.contains("no such shared memory"), "{errors}");
}

#[test]
fn one_descriptor_is_adopted_under_a_name() {
    let fixture = Fixture::new();
    let process = fixture.start("memfd", "mine");
    let pid = process.pid().to_string();
    let adopted = fixture.json(&["adopt", "--pid", &pid, "--fd", "3", "--name", "yours"]);
    assert_eq!((&adopted["files"][0]["file"]["name"], &adopted["stop"]), (&"yours".into(), &Value::Null));
    // A file whose name is taken gets the pid appended.
    fixture.json(&["create", "theirs", "--size", "1M"]);
    let other = fixture.start("memfd", "theirs");
    let adopted = fixture.json(&["adopt", "--pid", &other.pid().to_string()]);
    assert_eq!(adopted["files"][0]["file"]["name"], format!("theirs-{}", other.pid()));
    let detached = fixture.json(&["release", "--pid", &pid, "--keep"]);
    assert_eq!(detached["released"][0]["deleted"], false);
    fixture.fails(7, &["adopt", "--pid", &pid, "--fd", "77"]);
    fixture.fails(7, &["adopt", "--pid", &pid, "--fd", "0"]);
}

#[test]
fn untrackable_processes_are_refused_untouched() {
    let fixture = Fixture::new();
    let process = fixture.start("memfd", "traced");
    let tid = process.pid();
    let pid = tid.to_string();
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (seized, has_seized) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let _thread = fdmap_sys::ptrace::TracedThread::seize(tid).unwrap();
            seized.send(()).unwrap();
            let _ = stopped.recv();
        });
        has_seized.recv().unwrap();
        let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--track"]);
        assert!(errors.contains("traces it already"), "{errors}");
        drop(stop);
    });

    let mut command = Command::new(fixture.program.path());
    command.args(["memfd", "filtered", "filtered"]);
    let filtered = BlockedSyscall::start(command).unwrap();
    let errors = fixture.fails(7, &["adopt", "--pid", &filtered.pid().to_string(), "--track"]);
    assert!(errors.contains("seccomp filter"), "{errors}");
    assert_eq!(fixture.json(&["ls"]), serde_json::json!([]), "nothing was adopted");
    // Without tracking no thread is stopped.
    fixture.json(&["adopt", "--pid", &filtered.pid().to_string()]);

    fixture.fails(7, &["adopt", "--pid", "2", "--all", "--track"]);
    fixture.fails(7, &["adopt", "--pid", "2147483000", "--all"]);
}

#[test]
fn users_adopt_their_own_processes_only() {
    let fixture = Fixture::with(&["--group", "65534"]);
    let as_nobody = |pid: u32| {
        let mut fdmap = fdmap_tests::service::fdmap_as(&fixture.service, 65534).unwrap();
        fdmap.args(["adopt", "--track", "--json", "--pid", &pid.to_string()]).output().unwrap()
    };
    let ours = fixture.start("memfd", "of-root");
    let output = as_nobody(ours.pid());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{errors}");

    let mut command = Command::new(fixture.program.path());
    command.args(["memfd", "of-a-user"]).uid(65534).gid(65534);
    let mut theirs = BlockedSyscall::start(command).unwrap();
    let before = theirs.state().unwrap();
    theirs.block("epoll_wait", 1000).unwrap();
    let output = as_nobody(theirs.pid());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let adopted: Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = theirs.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    assert_eq!(theirs.state().unwrap(), before);
    assert_eq!(adopted["files"][0]["file"]["access"]["uid"], 65534);
    fixture.tracks_writes(&mut theirs, &adopted["files"][0]["file"]);
}

#[test]
fn stopped_process_is_adopted_and_stays_stopped() {
    let fixture = Fixture::new();
    let mut process = fixture.start("memfd", "stopped");
    process.block("nanosleep", 1000).unwrap();
    signal(&process, Signal::SIGSTOP);
    process.wait_for_state('T');
    let adopted = fixture.adopt(&process, &[]);
    std::thread::sleep(Duration::from_millis(50));
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap();
    assert!(stat.contains(") T "), "{stat}");
    signal(&process, Signal::SIGCONT);
    let result = process.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
}

fn start_busy(program: &Compiled, arguments: &[&str]) -> BlockedSyscall {
    let mut command = Command::new(program.path());
    command.args(arguments);
    BlockedSyscall::start(command).unwrap()
}

/// Ends the program, which must have found no error.
fn assert_no_errors(mut busy: BlockedSyscall) {
    busy.send("end\n").unwrap();
    let mut lines = String::new();
    loop {
        let line = busy.expect("").unwrap();
        lines.push_str(&line);
        lines.push('\n');
        if let Some(counts) = line.strip_prefix("errors ") {
            assert!(counts.starts_with("0 "), "{lines}");
            return;
        }
    }
}

/// Adopts a program and detaches it, many times.
fn adopt_repeatedly(arguments: &[&str], rounds: usize) {
    let fixture = Fixture::new();
    let program = require(Compiled::new("busy"));
    let busy = start_busy(&program, arguments);
    let pid = busy.pid().to_string();
    let (mut times, mut outcomes) = (Vec::new(), std::collections::BTreeMap::new());
    let began = Instant::now();
    for _ in 0..rounds {
        let adopted = fixture.json(&["adopt", "--pid", &pid, "--track"]);
        times.push(adopted["stop"]["duration_us"].as_u64().unwrap());
        *outcomes.entry(adopted["stop"]["outcome"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        let name = adopted["files"][0]["file"]["name"].as_str().unwrap().to_owned();
        fixture.json(&["checkpoint", &name]);
        let detached = fixture.json(&["release", "--pid", &pid]);
        assert_eq!(detached["released"][0]["mappings"], 1, "{detached}");
    }
    times.sort_unstable();
    let (median, longest) = (times[rounds / 2], times[rounds - 1]);
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("stopped for: median {median} us, longest {longest} us; {outcomes:?}; {seconds:.1} s");
    assert_no_errors(busy);
}

#[test]
fn busy_program_is_adopted_a_hundred_times() {
    adopt_repeatedly(&[], 100);
}

#[test]
fn single_thread_in_short_timed_waits_is_adopted_repeatedly() {
    adopt_repeatedly(&["alone"], 30);
}

#[test]
fn program_that_calls_execve_meanwhile_is_unharmed() {
    let fixture = Fixture::new();
    let program = require(Compiled::new("busy"));
    let busy = start_busy(&program, &["execs"]);
    let pid = busy.pid().to_string();
    let mut adopted = 0;
    for _ in 0..100 {
        let output = fixture.run(&["adopt", "--pid", &pid, "--track"]);
        // The execve may unmap the memory before it is opened or tracked, which is an error.
        assert!(matches!(output.status.code(), Some(0 | 6 | 7)), "{output:?}");
        adopted += usize::from(output.status.success());
    }
    eprintln!("{adopted} of 100 adoptions succeeded");
    assert_no_errors(busy);
}

#[test]
fn mappings_beyond_one_request_are_tracked() {
    let fixture = Fixture::new();
    let program = require(Compiled::new("busy"));
    let busy = start_busy(&program, &["many"]);
    let pid = busy.pid().to_string();
    let adopted = fixture.json(&["adopt", "--pid", &pid, "--all", "--track"]);
    let files = adopted["files"].as_array().unwrap();
    let mut counts: Vec<_> = files.iter().map(|file| file["tracked"].as_array().unwrap().len()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 3, 3, 3, 150], "{adopted}");
    eprintln!("{}", adopted["stop"]);
    let detached = fixture.json(&["release", "--pid", &pid])["released"].clone();
    assert!(detached.as_array().unwrap().iter().all(|file| file["deleted"] == true), "{detached}");
    assert_no_errors(busy);
}
