//! Holders that do not receive their messages, as ones that are frozen or swapped out: requests of their user delay no call of others.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use fdmap_client::Endpoint;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::HarnessResult;
use fdmap_tests::attack::{assert_withstands, await_effect, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::raw::{RawSession, packet};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::ATTACKER;
use super::attacker::Attacker;

/// A holder gets few messages before it is stopped.
const INTERVAL: Duration = Duration::from_millis(20);
/// Holders that are replaced before the attack has taken effect.
const REPLACED: u64 = 3;

/// The attack, with a thread that stops each holder of the attacker. The drop ends both.
struct StoppedHolders {
    _attacker: Attacker,
    ends: Arc<AtomicBool>,
    stopper: Option<JoinHandle<Vec<u32>>>,
}

impl StoppedHolders {
    fn start(service: &Service) -> Self {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        let (pid, ends) = (service.pid(), Arc::new(AtomicBool::new(false)));
        let is_ending = Arc::clone(&ends);
        let stopper = std::thread::spawn(move || {
            let mut stopped = Vec::new();
            while !is_ending.load(Ordering::Relaxed) {
                let mut holders = children_of(pid).unwrap();
                holders.retain(|holder| !stopped.contains(holder) && is_holder(*holder));
                signal(&holders, Signal::SIGSTOP);
                stopped.extend(holders);
                std::thread::sleep(INTERVAL);
            }
            stopped
        });
        let processors = std::thread::available_parallelism().unwrap().get() as u64;
        attacker.attack("refused-userfaultfds", 2 * processors).unwrap();
        Self { _attacker: attacker, ends, stopper: Some(stopper) }
    }
}

impl Drop for StoppedHolders {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(Ok(mut stopped)) = self.stopper.take().map(JoinHandle::join) {
            stopped.retain(|holder| is_holder(*holder));
            signal(&stopped, Signal::SIGCONT);
        }
    }
}

/// True for a holder of the attacker.
pub fn is_holder(pid: u32) -> bool {
    let arguments = format!("fdmapd\0space-holder\0{ATTACKER}\0");
    read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(&arguments))
}

fn signal(holders: &[u32], signal: Signal) {
    for pid in holders {
        // Fails if it has ended.
        let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
    }
}

/// Passes userfaultfds that the service refuses, in as many sessions all the time.
pub fn pass_refused_userfaultfds(endpoint: &Endpoint, sessions: u64) -> HarnessResult<u64> {
    for _ in 0..sessions {
        let session = RawSession::greeted(endpoint)?;
        std::thread::spawn(move || while is_refused(&session) {});
    }
    Ok(sessions)
}

/// False if the session has ended.
fn is_refused(session: &RawSession) -> bool {
    let uffd = Userfaultfd::create_user_mode_only().unwrap();
    let mapping = v1::ClientMapping { address: 1 << 20, length_bytes: 4096, ..Default::default() };
    let (file, mappings) = (Some(named("none").into()), vec![mapping]);
    let track = v1::Track { file, mappings, pagemap: false, maps: false, pid: 0 };
    let sent = session.send(&packet(Op::Track(track)), &[uffd.as_fd()]);
    sent.is_ok() && session.reply().is_ok_and(|reply| reply.is_some())
}

/// The holder that is to close the userfaultfds is started by the first one, and its queue is full after some hundreds.
#[test]
fn refused_userfaultfds_of_a_user_with_stopped_holders_delay_no_call_of_others() {
    require(root());
    assert_withstands(&mut service(&[]), |service| {
        let replaced = || incidents::count(service, "holder-replaced");
        let before = replaced();
        let attack = StoppedHolders::start(service);
        await_effect(service, "holders are replaced", || replaced() >= before + REPLACED);
        attack
    });
}
