//! Programs that run at full speed while they are adopted.

use std::process::Command;
use std::time::Instant;

use fdmap_tests::blocked_syscall::BlockedSyscall;
use fdmap_tests::harness::require;
use fdmap_tests::programs::Compiled;
use fdmap_tests::test;

use crate::fixture::Fixture;

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
        let line = busy.expect("").unwrap_or_else(|error| panic!("{error}, after {lines:?}"));
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
        let detached = fixture.json(&["detach", "--pid", &pid]);
        assert_eq!(detached["detached"][0]["mappings"], 1, "{detached}");
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

/// A stop at the entry of a handler has the registers of the interrupted call, and is in no call.
#[test]
fn thread_that_handles_signals_is_adopted_repeatedly() {
    adopt_repeatedly(&["ticks"], 100);
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
    assert!(adopted > 0, "no adoption succeeded");
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
    let detached = fixture.json(&["detach", "--pid", &pid])["detached"].clone();
    assert!(detached.as_array().unwrap().iter().all(|file| file["deleted"] == true), "{detached}");
    assert_no_errors(busy);
}
