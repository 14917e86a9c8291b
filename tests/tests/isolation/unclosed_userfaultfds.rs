//! Userfaultfds of a user that its holder cannot close, because processes hold the locks of their address spaces (mmap_lock).

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use fdmap_client::Endpoint;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::HarnessResult;
use fdmap_tests::attack::{MAX_RELEASE, assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, root};
use fdmap_tests::mapper::LockHolder;
use fdmap_tests::raw::{RawSession, packet};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use super::attacker::Attacker;
use super::held_locks::tracked_holder;
use super::stopped_holders::is_holder;
use super::{ATTACKER, run};

/// Threads of a holder that close userfaultfds.
const CLOSERS: usize = 4;
/// Userfaultfds of one user that may wait to be closed.
const MAX_CLOSING: u64 = 4096;
/// Userfaultfds in one packet.
const USERFAULTFDS_PER_PACKET: u64 = 3;

/// Processes of the attacker that hold their locks. Their files have ended, so each thread that closes userfaultfds of the attacker waits
/// for one of them.
fn hold_closers(service: &Service) -> Vec<LockHolder> {
    let hold = |number| {
        let name = format!("held-{number}");
        let mut holder = tracked_holder(service, ATTACKER, &name);
        holder.hold().unwrap();
        run(service, ATTACKER, &["rm", &name]);
        holder
    };
    (0..CLOSERS).map(hold).collect()
}

/// Passes userfaultfds with requests that are invalid, in one session after the other, until the service accepts no session, or at most
/// `max`. Returns their number.
pub fn pass_with_invalid_requests(endpoint: &Endpoint, max: u64) -> u64 {
    let mut passed = 0;
    while passed < max {
        let Ok(session) = RawSession::greeted(endpoint) else { break };
        while passed < max {
            passed += USERFAULTFDS_PER_PACKET;
            if !is_open_after_invalid_request(&session).unwrap() {
                break;
            }
        }
    }
    passed
}

/// False if the service has ended the session.
fn is_open_after_invalid_request(session: &RawSession) -> HarnessResult<bool> {
    let userfaultfds =
        [(); USERFAULTFDS_PER_PACKET as usize].map(|()| Userfaultfd::create_user_mode_only().unwrap());
    // A request names at least one mapping.
    let file = Some(named("none").into());
    let track = v1::Track { file, mappings: Vec::new(), pagemap: true, maps: true, pid: 0 };
    session.send(&packet(Op::Track(track)), &userfaultfds.each_ref().map(|uffd| uffd.as_fd()))?;
    Ok(matches!(session.reply()?, Some((Reply::Error(error), _)) if !error.fatal))
}

#[test]
fn unclosed_userfaultfds_of_invalid_requests_are_limited() {
    require(root());
    assert_withstands(&mut service(&[]), |service| {
        let held = hold_closers(service);
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        let passed = attacker.attack("invalid-userfaultfds", 2 * MAX_CLOSING).unwrap();
        // Some are on their way to the holder, and not counted.
        let limit = MAX_CLOSING - 16..=MAX_CLOSING + 16;
        assert!(limit.contains(&passed), "{passed} userfaultfds are accepted");
        assert!(service.log().contains("refusing an fdpass connection"), "{}", service.log());
        (attacker, held)
    });
}

/// The holder is asked to end with each file, and is used again for the next one.
#[test]
fn user_whose_userfaultfds_cannot_be_closed_has_one_holder() {
    require(root());
    let service = service(&[]);
    let holders = || children_of(service.pid()).unwrap().into_iter().filter(|pid| is_holder(*pid)).count();
    let held = hold_closers(&service);
    assert_eq!(holders(), 1);
    drop(held);
    let began = Instant::now();
    while holders() > 0 {
        assert!(began.elapsed() < MAX_RELEASE, "the holder ends when all userfaultfds are closed");
        std::thread::sleep(Duration::from_millis(10));
    }
}
