//! Helpers of the service that end, or are killed since they do not answer, are replaced, logged and counted.

use fdmap_tests::attack::service;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::raw::RawSession;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{ATTACKER, run};

/// The helpers of the service whose arguments begin with these.
fn helpers(service: &Service, arguments: &str) -> Vec<Pid> {
    let has_arguments = |pid: &u32| {
        read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.replace('\0', " ").starts_with(arguments))
    };
    let mut helpers = children_of(service.pid()).unwrap();
    helpers.retain(has_arguments);
    helpers.into_iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}

/// The only one.
fn helper(service: &Service, arguments: &str) -> Pid {
    let helpers = helpers(service, arguments);
    let [helper] = helpers[..] else { panic!("{arguments}: {helpers:?}") };
    helper
}

#[test]
fn inode_helper_that_is_killed_is_reported() {
    require(root());
    let service = service(&[]);
    let arguments = format!("fdmapd inode-helper {ATTACKER} ");
    run(&service, ATTACKER, &["create", "own", "--size", "64K"]);
    // A use of the file, which ends otherwise.
    let _file = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/own")), false).unwrap();
    run(&service, ATTACKER, &["seal", "own", "grow"]);
    let killed = helper(&service, &arguments);
    kill(killed, Signal::SIGKILL).unwrap();
    let reason = "a process that makes calls on inodes ended";
    incidents::assert_reported(&service, "inode-helper-ended", reason);
    run(&service, ATTACKER, &["seal", "own", "shrink"]);
    // The other one may not be reaped yet.
    assert!(helpers(&service, &arguments).iter().any(|helper| *helper != killed));
    assert_eq!(incidents::count(&service, "inode-helper-ended"), 1);
}

/// A client keeps its session, so the receiver is not ended for another reason.
#[test]
fn receiver_that_does_not_answer_is_killed_and_reported() {
    require(root());
    let service = service(&[]);
    let session = RawSession::greeted(&service.endpoint()).unwrap();
    kill(helper(&service, "fdmapd fdpass-receiver 0 "), Signal::SIGSTOP).unwrap();
    incidents::assert_reported(&service, "receiver-replaced", "a receiver of descriptors does not answer");
    incidents::assert_reported(
        &service,
        "receiver-killed",
        "a receiver of descriptors was killed, with its sessions: it did not answer",
    );
    assert_eq!(incidents::count(&service, "receiver-ended"), 0);
    assert!(session.reply().unwrap().is_none(), "the session has ended");
}
