//! A process that holds the lock of its own address space (mmap_lock) delays no call of others: it is tracked, or has only mapped a
//! file and never connected.

use std::os::fd::AsFd as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::memfd;
use fdmap_tests::attack::{
    MAX_RELEASE, assert_served, assert_withstands_until, service, service_without_a_store,
};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::incidents;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::victim::Victim;

use super::{ATTACKER, reads_forks_of, run};

/// Longer than the time between two sweeps, in which the service looks for the users of each file.
const SWEPT: Duration = Duration::from_secs(12);

/// Starts a process of the attacker that has mapped a file, which `user` has adopted and tracked.
pub fn tracked_holder(service: &Service, user: u32, name: &str) -> LockHolder {
    let file = memfd::create(name, None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    let holder = require(LockHolder::prepare_as(&path_of(&file), ATTACKER));
    run(service, user, &["adopt", "--pid", &holder.pid.to_string(), "--track"]);
    holder
}

/// A process that `user` tracks holds its lock.
fn hold_tracked(service: &Service, user: u32) -> LockHolder {
    let mut holder = tracked_holder(service, user, "held");
    holder.hold().unwrap();
    // A call on the address space, which does not return.
    let checkpoint = checkpoint(service, user, "held");
    assert_served(&mut Victim::start(service).unwrap(), "during a call");
    assert_made(checkpoint);
    let reason = "a process of the user holds the lock of its address space";
    incidents::assert_reported(service, "holder-late", reason);
    holder
}

/// The process still holds its lock. It ends.
#[track_caller]
fn end(mut holder: LockHolder) {
    assert!(holder.holds(), "the attack lasted");
    holder.release().unwrap();
}

/// Root tracks the process of the attacker.
#[test]
fn process_that_holds_its_mmap_lock_delays_no_call_of_others() {
    require(root());
    let attack = |service: &Service| hold_tracked(service, 0);
    assert_withstands_until(&mut service(&[]), attack, |service, holder| {
        end(holder);
        // A file of root stays otherwise.
        run(service, 0, &["rm", "held"]);
    });
}

/// The attacker tracks its process. Only a service without a descriptor store reads fork events.
#[test]
fn process_that_holds_its_mmap_lock_delays_no_call_of_others_without_a_store() {
    require(root());
    let attack = |service: &Service| {
        let holder = hold_tracked(service, ATTACKER);
        assert!(reads_forks_of(service, ATTACKER), "no process reads the fork events of the attacker");
        holder
    };
    assert_withstands_until(&mut service_without_a_store(), attack, |_, holder| end(holder));
}

/// Begins a checkpoint of a file of the user.
fn checkpoint(service: &Service, user: u32, file: &str) -> Child {
    let mut command = fdmap_as(service, user).unwrap();
    command.args(["checkpoint", file, "--json"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// The answer to a checkpoint that was begun.
#[track_caller]
fn assert_made(checkpoint: Child) -> String {
    let made = checkpoint.wait_with_output().unwrap();
    assert!(made.status.success(), "a checkpoint of the mapped file: {made:?}");
    String::from_utf8(made.stdout).unwrap()
}

/// True if a field of this name has the pid as its value.
fn has_pid(text: &str, field: &str, pid: u32) -> bool {
    text.split(field).skip(1).any(|rest| {
        let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse() == Ok(pid)
    })
}

/// A process that has only mapped a file of its user holds its lock. Others are served until the service finds it, and
/// for `at_least`.
fn hold_unconnected(service: &Service, at_least: Duration) -> LockHolder {
    run(service, ATTACKER, &["create", "own", "--size", "64K"]);
    let (file, _) = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/own")), true).unwrap();
    let mut holder = require(LockHolder::prepare_as(&path_of(&file), ATTACKER));
    drop(file);
    let owner = std::fs::metadata(format!("/proc/{}", holder.pid)).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&owner), ATTACKER);
    holder.write(0, 1).unwrap();
    holder.hold().unwrap();

    let mut victim = Victim::start(service).unwrap();
    let (began, pid) = (Instant::now(), holder.pid);
    let mut is_found = false;
    while !is_found || began.elapsed() < at_least {
        assert!(began.elapsed() < MAX_RELEASE, "no call reaches the process");
        let checkpoint = checkpoint(service, ATTACKER, "own");
        assert_served(&mut victim, "during a call");
        let (answer, log) = (assert_made(checkpoint), service.log());
        is_found |=
            [(answer, "\"pid\":"), (log, "pid=")].iter().any(|(text, field)| has_pid(text, field, pid));
    }
    holder
}

/// It has mapped a file of its user, and is found as a mapper of the file, or by the search for the users of all files.
#[test]
fn unconnected_process_that_holds_its_mmap_lock_delays_no_call_of_others() {
    require(root());
    for probe in [&[][..], &["--probe", "syscalls"]] {
        // Of the first attack.
        let mut at_least = SWEPT;
        let attack = |service: &Service| hold_unconnected(service, std::mem::take(&mut at_least));
        assert_withstands_until(&mut service(probe), attack, |service, holder| {
            end(holder);
            run(service, ATTACKER, &["rm", "own"]);
        });
    }
}
