//! A process that holds the lock of its own address space (mmap_lock) delays no call of others: it is tracked, or has only mapped a
//! file and never connected.

use std::os::fd::AsFd as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::memfd;
use fdmap_tests::attack::{MAX_RELEASE, MAX_STOP, assert_restarts, assert_served, service};
use fdmap_tests::footprint::Footprint;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::incidents;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::victim::{GROUP, Victim};
use nix::sys::signal::Signal;

use super::{ATTACKER, reads_forks_of};

/// Longer than the time between two sweeps, in which the service looks for the users of each file.
const SWEPT: Duration = Duration::from_secs(12);

#[track_caller]
fn run(service: &Service, user: u32, arguments: &[&str]) {
    let output = fdmap_as(service, user).unwrap().args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// Starts a process of the attacker that has mapped a file, which `user` has adopted and tracked.
fn tracked_holder(service: &Service, user: u32) -> LockHolder {
    let file = memfd::create("held", None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    let holder = require(LockHolder::prepare_as(&path_of(&file), ATTACKER));
    run(service, user, &["adopt", "--pid", &holder.pid.to_string(), "--track"]);
    holder
}

/// A process holds its lock and releases it: the service serves others during and after that, and nothing is left. Returns another
/// one, which holds its lock.
fn withstands_held_lock(service: &Service, tracked_by: u32) -> LockHolder {
    let mut victim = Victim::start(service).unwrap();
    assert_served(&mut victim, "before the attack");
    let before = Footprint::of(service).unwrap();
    let mut holder = tracked_holder(service, tracked_by);
    holder.hold().unwrap();
    assert_served(&mut victim, "during the attack");
    // A call on the address space, which does not return.
    run(service, tracked_by, &["checkpoint", "held"]);
    incidents::assert_reported(
        service,
        "holder-late",
        "a process of the user holds the lock of its address space",
    );
    assert!(holder.holds());
    holder.release().unwrap();
    assert_served(&mut victim, "after the attack");
    drop(holder);
    if tracked_by == 0 {
        // A file of root stays otherwise.
        run(service, 0, &["rm", "held"]);
    }
    Footprint::wait_for(service, &before, MAX_RELEASE).unwrap();

    let mut holder = tracked_holder(service, tracked_by);
    holder.hold().unwrap();
    assert_served(&mut victim, "during the next attack");
    holder
}

/// Root tracks the process of the attacker.
#[test]
fn process_that_holds_its_mmap_lock_delays_no_call_of_others() {
    require(root());
    let mut service = service(&[]);
    let mut holder = withstands_held_lock(&service, 0);
    assert_restarts(&mut service);
    assert!(holder.holds());
    holder.release().unwrap();
    assert_served(&mut Victim::start(&service).unwrap(), "after the attack");
}

/// The attacker tracks its process. Only a service without a descriptor store reads fork events.
#[test]
fn process_that_holds_its_mmap_lock_delays_no_call_of_others_without_a_store() {
    require(root());
    let group = GROUP.to_string();
    let mut service = Service::start(&["--group", &group, "--unused-file-timeout", "1"]).unwrap();
    let mut holder = withstands_held_lock(&service, ATTACKER);
    assert!(reads_forks_of(&service, ATTACKER), "no process reads the fork events of the attacker");
    service.signal(Signal::SIGTERM);
    assert!(service.ended(MAX_STOP), "SIGTERM does not end the service");
    assert!(holder.holds());
    service.restart().unwrap();
    service.fdpass().unwrap();
    holder.release().unwrap();
}

/// Begins a checkpoint of a file of the attacker.
fn checkpoint(service: &Service, file: &str) -> Child {
    let mut command = fdmap_as(service, ATTACKER).unwrap();
    command.args(["checkpoint", file, "--json"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// True if a field of this name has the pid as its value.
fn has_pid(text: &str, field: &str, pid: u32) -> bool {
    text.split(field).skip(1).any(|rest| {
        let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse() == Ok(pid)
    })
}

/// It has mapped a file of its user, and is found as a mapper of the file, or by the search for the users of all files.
#[test]
fn unconnected_process_that_holds_its_mmap_lock_delays_no_call_of_others() {
    require(root());
    for probe in [&[][..], &["--probe", "syscalls"]] {
        let mut service = service(probe);
        let mut victim = Victim::start(&service).unwrap();
        assert_served(&mut victim, "before the attack");
        run(&service, ATTACKER, &["create", "own", "--size", "64K"]);
        let (file, _) = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/own")), true).unwrap();
        let mut holder = require(LockHolder::prepare_as(&path_of(&file), ATTACKER));
        drop(file);
        let owner = std::fs::metadata(format!("/proc/{}", holder.pid)).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&owner), ATTACKER);
        holder.write(0, 1).unwrap();
        holder.hold().unwrap();

        let (began, pid) = (Instant::now(), holder.pid);
        let mut is_found = false;
        while !is_found || began.elapsed() < SWEPT {
            assert!(began.elapsed() < MAX_RELEASE, "no call reaches the process");
            let checkpoint = checkpoint(&service, "own");
            assert_served(&mut victim, "during the attack");
            let made = checkpoint.wait_with_output().unwrap();
            assert!(made.status.success(), "a checkpoint of the mapped file: {made:?}");
            let (answer, log) = (String::from_utf8(made.stdout).unwrap(), service.log());
            is_found |=
                [(answer, "\"pid\":"), (log, "pid=")].iter().any(|(text, field)| has_pid(text, field, pid));
        }
        assert!(holder.holds());
        assert_restarts(&mut service);
        assert!(holder.holds(), "the service ended while the lock was held");
        holder.release().unwrap();
        assert_served(&mut Victim::start(&service).unwrap(), "after the attack");
    }
}
