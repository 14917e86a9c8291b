//! Running processes are adopted, and notice nothing.
#![cfg(target_arch = "x86_64")]

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::sitter::{Sat, Sitter};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// A service, and a program to be adopted.
struct Bed {
    service: Service,
    sitter: Compiled,
}

impl Bed {
    fn new() -> Option<Self> {
        Self::with(&[])
    }

    fn with(arguments: &[&str]) -> Option<Self> {
        require(root());
        let sitter = require(Compiled::new("sitter"));
        Some(Self { service: Service::start(arguments).unwrap(), sitter })
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(self.service.folder()).args(arguments);
        command.output().unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        said
    }

    fn sitter(&self, kind: &str, name: &str) -> Sitter {
        let mut command = Command::new(self.sitter.path());
        command.args([kind, name]);
        Sitter::start(command).unwrap()
    }

    #[track_caller]
    fn adopt(&self, sitter: &Sitter, more: &[&str]) -> Value {
        let pid = sitter.pid().to_string();
        let told = self.json(&[&["adopt", "--pid", &pid, "--track"], more].concat());
        eprintln!("{}", told["stop"]);
        told
    }

    /// What the sitter writes now is told exactly, and nothing else is: others on the host may make the service doubt all
    /// pages that hold data, but that is told apart.
    #[track_caller]
    fn sees_writes(&self, sitter: &mut Sitter, file: &Value) {
        let name = file["name"].as_str().unwrap();
        self.json(&["checkpoint", name]);
        let since = self.json(&["checkpoint", name])["generation"].to_string();
        sitter.write(5).unwrap();
        sitter.write(6).unwrap();
        self.json(&["checkpoint", name]);
        let told = self.json(&["dirty", name, "--since", &since]);
        let exact = serde_json::json!({ "conservative": false, "start": 5, "end": 7 });
        assert!(told["runs"].as_array().unwrap().contains(&exact), "{told}");
        assert_eq!(
            (&told["observed_pages"], &told["header"]["coverage"]["tracked_mappings"]),
            (&2.into(), &1.into())
        );
    }
}

/// Sits, is adopted in the midst of it, and is compared with what it was before.
fn undisturbed(bed: &Bed, call: &str, milliseconds: i64, wake: impl FnOnce(&mut Sitter)) -> (Sat, Value) {
    let mut sitter = bed.sitter("memfd", &format!("{call}-{}", milliseconds.max(0)));
    let before = sitter.state().unwrap();
    sitter.sit(call, milliseconds).unwrap();
    std::thread::sleep(Duration::from_millis(250));
    let told = bed.adopt(&sitter, &[]);
    wake(&mut sitter);
    let sat = sitter.sat().unwrap();
    assert_eq!(sat.registers, "intact", "{call}: {told}");
    assert_eq!(sitter.state().unwrap(), before, "signal mask, handlers and descriptors");
    let file = &told["files"][0];
    assert_eq!(file["tracked"].as_array().unwrap().len(), 1);
    bed.sees_writes(&mut sitter, &file["file"]);
    // The bound is for a machine that does other things as well; what is usual is printed.
    assert!(told["stop"]["microseconds"].as_u64().unwrap() < 100_000, "{told}");
    (sat, told)
}

/// As [`undisturbed`], in a call that ends by its time.
#[track_caller]
fn in_time(bed: &Bed, call: &str, result: i64, left: &str) {
    const TIME: f64 = 1500.0;
    let (sat, told) = undisturbed(bed, call, 1500, |_| ());
    assert_eq!(sat.result, result, "{call}: {told}");
    assert_eq!(told["stop"]["left"], left, "{call}");
    let over = sat.took - TIME;
    eprintln!("{call}: took {:.1} ms", sat.took);
    assert!((-4.0..TIME * 0.15).contains(&over), "{call} took {} ms: {told}", sat.took);
    if sat.socket_timeout >= 0 {
        assert_eq!(sat.socket_timeout, 1500);
    }
}

/// As [`undisturbed`], in a call that waits until it is woken.
#[track_caller]
fn when_woken(bed: &Bed, call: &str, result: i64, left: &str, wake: impl FnOnce(&mut Sitter)) {
    let (sat, told) = undisturbed(bed, call, -1, wake);
    assert_eq!(sat.result, result, "{call}: {told}");
    assert_eq!(told["stop"]["left"], left, "{call}");
}

const TIMED_OUT: i64 = -(nix::libc::ETIMEDOUT as i64);
const AGAIN: i64 = -(nix::libc::EAGAIN as i64);
const INTERRUPTED: i64 = -(nix::libc::EINTR as i64);

fn signal(sitter: &Sitter, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(sitter.pid()).unwrap()), signal).unwrap();
}

#[test]
fn calls_that_the_kernel_restarts_take_their_time() {
    let Some(bed) = Bed::new() else { return };
    in_time(&bed, "futex", TIMED_OUT, "restarted");
    in_time(&bed, "nanosleep", 0, "restarted");
    in_time(&bed, "poll", 0, "restarted");
    in_time(&bed, "ppoll", 0, "restarted");
    in_time(&bed, "spin", -5, "as-it-was");
}

#[test]
fn calls_that_end_with_eintr_take_their_time() {
    let Some(bed) = Bed::new() else { return };
    let rest = "made-again-with-the-rest";
    in_time(&bed, "epoll_wait", 0, rest);
    in_time(&bed, "epoll_pwait2", 0, rest);
    in_time(&bed, "sigtimedwait", AGAIN, rest);
    in_time(&bed, "semtimedop", AGAIN, rest);
}

#[test]
fn sockets_with_timeouts_take_their_time() {
    let Some(bed) = Bed::new() else { return };
    // Longer than a thread with such a call is waited for.
    for call in ["recv", "accept"] {
        let (sat, told) = undisturbed(&bed, call, 4000, |_| ());
        assert_eq!((sat.result, sat.socket_timeout), (AGAIN, 4000), "{call}: {told}");
        assert_eq!(told["stop"]["left"], "made-again-with-the-rest");
        assert!((3990.0..4600.0).contains(&sat.took), "{call} took {} ms", sat.took);
    }
    // One that ends before is not disturbed, unless it is caught in the act.
    let (sat, told) = undisturbed(&bed, "recv", 1500, |_| ());
    assert_eq!((sat.result, sat.socket_timeout), (AGAIN, 1500));
    assert!((1490.0..1700.0).contains(&sat.took), "{} ms: {told}", sat.took);
}

#[test]
fn calls_without_an_end_are_woken() {
    let Some(bed) = Bed::new() else { return };
    let send = |sitter: &mut Sitter| sitter.send("x").unwrap();
    when_woken(&bed, "read", 1, "restarted", send);
    let newline = |sitter: &mut Sitter| sitter.send("state\n").unwrap();
    let said_state = |call: &str, left: &str| {
        let (sat, told) = {
            let mut sitter = bed.sitter("memfd", &format!("{call}-forever"));
            sitter.sit(call, -1).unwrap();
            let told = bed.adopt(&sitter, &[]);
            newline(&mut sitter);
            let sat = sitter.sat().unwrap();
            sitter.expect("state").unwrap();
            bed.sees_writes(&mut sitter, &told["files"][0]["file"]);
            (sat, told)
        };
        assert_eq!((sat.result, sat.registers.as_str()), (1, "intact"), "{call}");
        assert_eq!(told["stop"]["left"], left, "{call}");
    };
    said_state("poll", "restarted");
    said_state("epoll_wait", "made-again");
    said_state("epoll_pwait2", "made-again");
    when_woken(&bed, "sigtimedwait", i64::from(Signal::SIGUSR1 as i32), "made-again", |sitter| {
        signal(sitter, Signal::SIGUSR1);
    });
    for (call, left) in [("futex", "restarted"), ("recv", "restarted")] {
        when_woken(&bed, call, INTERRUPTED, left, |sitter| signal(sitter, Signal::SIGUSR2));
    }
}

#[test]
fn signals_with_handlers_end_calls_as_ever() {
    let Some(bed) = Bed::new() else { return };
    for call in ["epoll_wait", "epoll_pwait2", "sigtimedwait"] {
        let mut sitter = bed.sitter("memfd", call);
        sitter.sit(call, 20_000).unwrap();
        let pid = sitter.pid();
        std::thread::scope(|scope| {
            let adopting = scope.spawn(|| bed.json(&["adopt", "--pid", &pid.to_string(), "--track"]));
            // The tool stays with it by then.
            std::thread::sleep(Duration::from_millis(1500));
            signal(&sitter, Signal::SIGUSR2);
            assert_eq!(adopting.join().unwrap()["stop"]["left"], "made-again-with-the-rest");
        });
        let sat = sitter.sat().unwrap();
        assert_eq!((sat.result, sat.registers.as_str()), (INTERRUPTED, "intact"), "{call}");
        assert!((1400.0..4000.0).contains(&sat.took), "{call}: {} ms", sat.took);
    }
}

#[test]
fn signals_without_handlers_do_not_end_calls() {
    let Some(bed) = Bed::new() else { return };
    for call in ["epoll_wait", "epoll_pwait2"] {
        let mut sitter = bed.sitter("memfd", &format!("{call}-ignores"));
        sitter.sit(call, 3000).unwrap();
        let pid = sitter.pid();
        std::thread::scope(|scope| {
            let adopting = scope.spawn(|| bed.json(&["adopt", "--pid", &pid.to_string(), "--track"]));
            // The tool stays with it by then.
            std::thread::sleep(Duration::from_millis(1500));
            signal(&sitter, Signal::SIGWINCH);
            assert_eq!(adopting.join().unwrap()["stop"]["left"], "made-again-with-the-rest");
        });
        let sat = sitter.sat().unwrap();
        assert_eq!((sat.result, sat.registers.as_str()), (0, "intact"), "{call}");
        assert!((3000.0..7000.0).contains(&sat.took), "{call}: {} ms", sat.took);
    }
}

#[test]
fn tool_that_is_interrupted_leaves_the_call_whole() {
    let Some(bed) = Bed::new() else { return };
    let mut sitter = bed.sitter("memfd", "interrupted");
    sitter.sit("epoll_wait", 3000).unwrap();
    let mut command = Command::new(program("fdmap").unwrap());
    command.arg("--runtime-dir").arg(bed.service.folder());
    command.args(["adopt", "--track", "--pid", &sitter.pid().to_string()]).stdout(Stdio::null());
    let mut tool = command.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    assert!(tool.try_wait().unwrap().is_none(), "it stays until the call ends");
    kill(Pid::from_raw(i32::try_from(tool.id()).unwrap()), Signal::SIGINT).unwrap();
    tool.wait().unwrap();
    let sat = sitter.sat().unwrap();
    // Its time began anew, which is said in the docs.
    assert_eq!((sat.result, sat.registers.as_str()), (0, "intact"));
    assert!((2990.0..6500.0).contains(&sat.took), "{} ms", sat.took);
}

#[test]
fn tool_that_is_killed_at_any_moment_harms_nobody() {
    let Some(bed) = Bed::new() else { return };
    let mut killed = 0;
    for round in 0..60 {
        let mut sitter = bed.sitter("memfd", &format!("round-{round}"));
        sitter.sit("futex", 300).unwrap();
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(bed.service.folder());
        command.args(["adopt", "--track", "--pid", &sitter.pid().to_string()]).stdout(Stdio::null());
        let mut tool = command.spawn().unwrap();
        std::thread::sleep(Duration::from_micros(2000 + 300 * round));
        tool.kill().unwrap();
        killed += usize::from(!tool.wait().unwrap().success());
        let sat = sitter.sat().unwrap();
        assert_eq!((sat.result, sat.registers.as_str()), (TIMED_OUT, "intact"), "round {round}");
        assert!(sat.took < 500.0, "{} ms", sat.took);
    }
    eprintln!("killed {killed} times");
}

#[test]
fn all_kinds_of_shared_memory_are_adopted() {
    let Some(bed) = Bed::new() else { return };
    let name = format!("/fdmap-adopt-{}", std::process::id());
    for (kind, own) in [("closed", "sitter"), ("shm", &name[1..]), ("sysv", ""), ("anon", "")] {
        let given = if kind == "shm" { &name } else { "sitter" };
        let mut sitter = bed.sitter(kind, given);
        if kind == "shm" {
            std::fs::remove_file(format!("/dev/shm{name}")).unwrap();
        }
        sitter.sit("read", 0).unwrap();
        let told = bed.adopt(&sitter, &["--all"]);
        assert_eq!(told["files"].as_array().unwrap().len(), 1, "{kind}: {told}");
        let file = &told["files"][0];
        assert!(file["file"]["name"].as_str().unwrap().starts_with(own), "{kind}: {told}");
        assert_eq!((&file["was_here"], &file["file"]["size_bytes"]), (&false.into(), &262_144.into()));
        sitter.send("x").unwrap();
        assert_eq!(sitter.sat().unwrap().registers, "intact");
        bed.sees_writes(&mut sitter, &file["file"]);

        // Once more: it is there, and tracked already.
        let pid = sitter.pid().to_string();
        let again = bed.json(&["adopt", "--pid", &pid, "--all"]);
        assert_eq!(again["files"][0]["was_here"], true, "{again}");
        let said = bed.fails(7, &["adopt", "--pid", &pid, "--all", "--track"]);
        assert!(said.contains("tracking"), "{said}");

        let released = bed.json(&["release", "--pid", &pid]);
        let one = &released["released"][0];
        assert_eq!((&one["mappings"], &one["deleted"]), (&1.into(), &true.into()), "{released}");
        sitter.write(9).unwrap();
        assert_eq!(bed.json(&["ls"]), serde_json::json!([]));
    }
    let sitter = bed.sitter("anon", "");
    assert!(bed.fails(7, &["adopt", "--pid", &sitter.pid().to_string()]).contains("no such shared memory"));
}

#[test]
fn one_descriptor_is_adopted_under_a_name() {
    let Some(bed) = Bed::new() else { return };
    let sitter = bed.sitter("memfd", "mine");
    let pid = sitter.pid().to_string();
    let told = bed.json(&["adopt", "--pid", &pid, "--fd", "3", "--name", "yours"]);
    assert_eq!((&told["files"][0]["file"]["name"], &told["stop"]), (&"yours".into(), &Value::Null));
    // Another one with a name that is taken gets one of its own.
    bed.json(&["create", "theirs", "--size", "1M"]);
    let other = bed.sitter("memfd", "theirs");
    let told = bed.json(&["adopt", "--pid", &other.pid().to_string()]);
    assert_eq!(told["files"][0]["file"]["name"], format!("theirs-{}", other.pid()));
    let released = bed.json(&["release", "--pid", &pid, "--keep"]);
    assert_eq!(released["released"][0]["deleted"], false);
    bed.fails(7, &["adopt", "--pid", &pid, "--fd", "77"]);
    bed.fails(7, &["adopt", "--pid", &pid, "--fd", "0"]);
}

#[test]
fn processes_that_cannot_be_stopped_are_refused_untouched() {
    let Some(bed) = Bed::new() else { return };
    let sitter = bed.sitter("memfd", "traced");
    let tid = sitter.pid();
    let pid = tid.to_string();
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (seized, has_seized) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let _tracee = fdmap_sys::ptrace::Tracee::seize(tid).unwrap();
            seized.send(()).unwrap();
            let _ = stopped.recv();
        });
        has_seized.recv().unwrap();
        let said = bed.fails(7, &["adopt", "--pid", &pid, "--track"]);
        assert!(said.contains("traced already"), "{said}");
        drop(stop);
    });

    let mut command = Command::new(bed.sitter.path());
    command.args(["memfd", "filtered", "filtered"]);
    let filtered = Sitter::start(command).unwrap();
    let said = bed.fails(7, &["adopt", "--pid", &filtered.pid().to_string(), "--track"]);
    assert!(said.contains("seccomp filter"), "{said}");
    assert_eq!(bed.json(&["ls"]), serde_json::json!([]), "nothing was done");
    // Without tracking there is no need to stop it.
    bed.json(&["adopt", "--pid", &filtered.pid().to_string()]);

    bed.fails(7, &["adopt", "--pid", "2", "--all", "--track"]);
    bed.fails(7, &["adopt", "--pid", "2147483000", "--all"]);
}

#[test]
fn users_adopt_their_own_processes_only() {
    let Some(bed) = Bed::with(&["--group", "65534"]) else { return };
    let as_nobody = |pid: u32| {
        let mut fdmap = fdmap_tests::service::fdmap_as(&bed.service, 65534).unwrap();
        fdmap.args(["adopt", "--track", "--json", "--pid", &pid.to_string()]).output().unwrap()
    };
    let ours = bed.sitter("memfd", "of-root");
    let output = as_nobody(ours.pid());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_ne!(output.status.code(), Some(0), "{said}");

    let mut command = Command::new(bed.sitter.path());
    command.args(["memfd", "of-a-user"]).uid(65534).gid(65534);
    let mut theirs = Sitter::start(command).unwrap();
    let before = theirs.state().unwrap();
    theirs.sit("epoll_wait", 1000).unwrap();
    let output = as_nobody(theirs.pid());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let sat = theirs.sat().unwrap();
    assert_eq!((sat.result, sat.registers.as_str()), (0, "intact"));
    assert_eq!(theirs.state().unwrap(), before);
    assert_eq!(told["files"][0]["file"]["access"]["uid"], 65534);
    bed.sees_writes(&mut theirs, &told["files"][0]["file"]);
}

#[test]
fn stopped_process_is_adopted_and_stays_stopped() {
    let Some(bed) = Bed::new() else { return };
    let mut sitter = bed.sitter("memfd", "stopped");
    sitter.sit("nanosleep", 1000).unwrap();
    signal(&sitter, Signal::SIGSTOP);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", sitter.pid())).unwrap();
    while !stat().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let told = bed.adopt(&sitter, &[]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(stat().contains(") T "), "{}", stat());
    signal(&sitter, Signal::SIGCONT);
    let sat = sitter.sat().unwrap();
    assert_eq!((sat.result, sat.registers.as_str()), (0, "intact"));
    bed.sees_writes(&mut sitter, &told["files"][0]["file"]);
}

/// A program that does all sorts of things by itself.
fn busy(program: &Compiled, arguments: &[&str]) -> Sitter {
    let mut command = Command::new(program.path());
    command.args(arguments);
    Sitter::start(command).unwrap()
}

/// Has it tell whether anything went wrong.
fn found_no_errors(mut busy: Sitter) {
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

/// Adopts a program and releases it, many times.
fn again_and_again(arguments: &[&str], rounds: usize) {
    let Some(bed) = Bed::new() else { return };
    let program = require(Compiled::new("busy"));
    let busy = busy(&program, arguments);
    let pid = busy.pid().to_string();
    let (mut times, mut left) = (Vec::new(), std::collections::BTreeMap::new());
    for _ in 0..rounds {
        let told = bed.json(&["adopt", "--pid", &pid, "--track"]);
        times.push(told["stop"]["microseconds"].as_u64().unwrap());
        *left.entry(told["stop"]["left"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        let name = told["files"][0]["file"]["name"].as_str().unwrap().to_owned();
        bed.json(&["checkpoint", &name]);
        let released = bed.json(&["release", "--pid", &pid]);
        assert_eq!(released["released"][0]["mappings"], 1, "{released}");
    }
    times.sort_unstable();
    let (median, longest) = (times[rounds / 2], times[rounds - 1]);
    eprintln!("stopped for: median {median} us, longest {longest} us; {left:?}");
    found_no_errors(busy);
}

#[test]
fn busy_program_is_adopted_a_hundred_times() {
    again_and_again(&[], 100);
}

#[test]
fn single_thread_in_calls_that_end_with_eintr_is_adopted_again_and_again() {
    again_and_again(&["alone"], 30);
}

#[test]
fn program_that_becomes_another_one_meanwhile_is_unharmed() {
    let Some(bed) = Bed::new() else { return };
    let program = require(Compiled::new("busy"));
    let busy = busy(&program, &["execs"]);
    let pid = busy.pid().to_string();
    let mut adopted = 0;
    for _ in 0..100 {
        let output = bed.run(&["adopt", "--pid", &pid, "--track"]);
        // What it had is gone by the time that it is looked for, or to be tracked; the word for it is an error's.
        assert!(matches!(output.status.code(), Some(0 | 6 | 7)), "{output:?}");
        adopted += usize::from(output.status.success());
    }
    eprintln!("{adopted} of 100 times in between");
    found_no_errors(busy);
}

#[test]
fn files_with_more_mappings_than_one_request_has_room_for_are_tracked() {
    let Some(bed) = Bed::new() else { return };
    let program = require(Compiled::new("busy"));
    let busy = busy(&program, &["many"]);
    let pid = busy.pid().to_string();
    let told = bed.json(&["adopt", "--pid", &pid, "--all", "--track"]);
    let files = told["files"].as_array().unwrap();
    let mut counts: Vec<_> = files.iter().map(|file| file["tracked"].as_array().unwrap().len()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 3, 3, 3, 150], "{told}");
    eprintln!("{}", told["stop"]);
    let released = bed.json(&["release", "--pid", &pid])["released"].clone();
    assert!(released.as_array().unwrap().iter().all(|file| file["deleted"] == true), "{released}");
    found_no_errors(busy);
}
