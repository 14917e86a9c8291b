//! Connections that break, and programs that are killed.

use std::process::{Child, Stdio};
use std::time::Duration;

use fdmap_tests::pattern::mix;
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::proxy::{Fault, Proxy};
use super::{Bed, PAGE, content_of, error_of, random, write_at};

/// Cuts and damaged bytes that one run makes.
const FAULTS: u64 = 50;

/// Connections break until the file has arrived: each is cut, or damaged so that TLS notices it, after some bytes.
#[test]
fn broken_connections_are_resumed() {
    let bed = Bed::new();
    let fd = bed.create("ram", 4096 * PAGE);
    let (mut faults, mut seed) = (0, 1);
    while faults < FAULTS {
        seed = mix(seed);
        write_at(&fd, 0, &random(seed, 4096 * 4096));
        let receiving = bed.receive(&["--keep"]);
        let fault = if seed & 1 == 0 { Fault::Cut(3 << 20) } else { Fault::Flip(3 << 20) };
        let proxy = Proxy::start(receiving.port, fault, seed);
        let (report, _) = bed.migrated(proxy.port, receiving, &["--paused", "--rounds", "1"]);
        let reconnections = report["reconnections"].as_u64().unwrap();
        println!("{fault:?}: {} faults, {reconnections} reconnections", proxy.faults());
        assert!(reconnections > 0 && reconnections <= proxy.faults(), "{report}");
        faults += proxy.faults();
        assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
        bed.json(&bed.source, &["fence", "ram", "--remove"]);
        bed.json(&bed.destination, &["delete", "ram"]);
    }
}

/// A file of random pages whose migration takes some seconds.
fn slow(bed: &Bed, options: &[&str]) -> (super::Receiving, Proxy, Child) {
    let fd = bed.create("ram", 4096 * PAGE);
    write_at(&fd, 0, &random(1, 4096 * 4096));
    let receiving = bed.receive(&["--keep", "--reconnect-within", "1s"]);
    let proxy = Proxy::start(receiving.port, Fault::Slow(1 << 15), 1);
    let mut command = bed.migrate(proxy.port, options);
    let source = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // In the middle of the first round.
    while bed.json(&bed.destination, &["ls"])[0]["allocated_bytes"].as_u64().unwrap_or(0) < 1 << 20 {
        std::thread::sleep(Duration::from_millis(10));
    }
    (receiving, proxy, source)
}

#[test]
fn killed_source_leaves_nothing_at_the_destination() {
    let bed = Bed::new();
    let (receiving, _proxy, mut source) = slow(&bed, &["--paused"]);
    source.kill().unwrap();
    source.wait().unwrap();
    let (status, _, error) = receiving.ended();
    assert!(status == Some(7) && error.contains("the source did not connect for 1s"), "{error}");
    bed.assert_not_migrated();
}

#[test]
fn killed_destination_leaves_the_source_as_it_was() {
    let bed = Bed::new();
    let (mut receiving, _proxy, source) = slow(&bed, &["--paused", "--reconnect-within", "1s"]);
    receiving.child.kill().unwrap();
    let error = error_of(&source.wait_with_output().unwrap(), 5);
    assert!(error.contains("lost the connection to https://localhost"), "{error}");
    assert!(bed.json(&bed.source, &["ls"])[0]["fence"].is_null());
    bed.json(&bed.source, &["checkpoint", "ram"]);
    // A killed process cannot delete what it received.
    bed.json(&bed.destination, &["delete", "ram"]);
}

#[test]
fn interrupt_of_either_program_ends_both() {
    for is_source in [true, false] {
        let bed = Bed::new();
        let options = ["--pause", "touch paused", "--resume", "touch resumed", "--reconnect-within", "1s"];
        let (receiving, _proxy, source) = slow(&bed, &options);
        let pid = if is_source { source.id() } else { receiving.child.id() };
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT).unwrap();
        let output = source.wait_with_output().unwrap();
        let error = error_of(&output, if is_source { 7 } else { 6 });
        let (status, _, destination) = receiving.ended();
        assert_eq!(status, Some(7), "{error}{destination}");
        let (there, here) = if is_source { (&destination, &error) } else { (&error, &destination) };
        assert!(here.contains("cancelled"), "{here}");
        let reason = if is_source { "the source" } else { "the destination ended the migration" };
        assert!(there.contains(reason), "{there}");
        assert!(!bed.folder.join("paused").exists());
        bed.assert_not_migrated();
    }
}

/// The destination has the file, and the source does not know that.
#[test]
fn source_stays_fenced_if_the_outcome_is_unknown() {
    let bed = Bed::new();
    let fd = bed.create("ram", 16 * PAGE);
    write_at(&fd, 0, &random(1, 16 * 4096));
    let mut receiving = bed.receive(&["--keep"]);
    // The service of the destination stops before the file is complete.
    let stop = format!("kill -STOP {}", bed.destination.pid());
    let mut command = bed.migrate(receiving.port, &["--pause", &stop, "--reconnect-within", "1s"]);
    command.args(["--resume", "touch resumed"]);
    let source = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while bed.json(&bed.source, &["ls"])[0]["fence"].is_null() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // It waits for the seals and the rights of the file.
    receiving.child.kill().unwrap();
    receiving.child.wait().unwrap();
    let error = error_of(&source.wait_with_output().unwrap(), 5);
    kill(Pid::from_raw(bed.destination.pid().cast_signed()), Signal::SIGCONT).unwrap();
    assert!(error.contains("It may have the file") && error.contains("fdmap fence --remove"), "{error}");
    assert!(!bed.folder.join("resumed").exists(), "the writers stay paused");
    assert!(bed.json(&bed.source, &["ls"])[0]["fence"].is_string());
    assert_eq!(bed.json(&bed.destination, &["ls"])[0]["name"], json!("ram"));
}

/// The destination is interrupted while it completes the file: it is too late, and both sides agree on that.
#[test]
fn interrupt_during_the_commit_comes_too_late() {
    let bed = Bed::new();
    let fd = bed.create("ram", 16 * PAGE);
    write_at(&fd, 0, &random(1, 16 * 4096));
    let receiving = bed.receive(&["--keep"]);
    let service = Pid::from_raw(bed.destination.pid().cast_signed());
    let pause = format!("kill -STOP {service}");
    let mut command = bed.migrate(receiving.port, &["--pause", &pause, "--resume", "touch resumed"]);
    let source = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while bed.json(&bed.source, &["ls"])[0]["fence"].is_null() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // It waits for its service.
    std::thread::sleep(Duration::from_millis(200));
    kill(Pid::from_raw(receiving.child.id().cast_signed()), Signal::SIGINT).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    kill(service, Signal::SIGCONT).unwrap();
    let output = source.wait_with_output().unwrap();
    let (status, received, error) = receiving.ended();
    assert_eq!(status, Some(0), "{error}");
    assert!(received.contains("\"ram\""), "{received}");
    error_of(&output, 0);
    assert!(!bed.folder.join("resumed").exists(), "the writers stay paused");
    assert!(bed.json(&bed.source, &["ls"])[0]["fence"].is_string());
    assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
}
