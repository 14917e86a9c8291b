//! The course of an attack: the calls of a victim are answered in time before it, during it and after it, nothing is left when it
//! ends, and the service ends and starts again while it lasts.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fdmap_sys::pidfd;
use fdmap_sys::testing::calls::limit_descriptors;
use nix::sys::signal::Signal;

use crate::built_programs::program;
use crate::footprint::Footprint;
use crate::host::{children_of, read};
use crate::service::Service;
use crate::victim::{GROUP, MAX_DELAY, Victim};

/// The user of the attacker.
pub const USER: u32 = 65_534;
pub const MAX_STOP: Duration = Duration::from_secs(5);
/// Options, in seconds, by which unused files and idle helpers end soon after an attack.
const SHORT_TIMEOUTS: &[&str] = &["--unused-file-timeout", "1", "--helper-idle-timeout", "1"];
/// Within this time nothing of an attack is left: files end at the sweep after next, and idle threads after 10 s.
pub const MAX_RELEASE: Duration = Duration::from_secs(40);
/// Within this time an attack takes effect. The service disconnects a client that does not read its replies after 10 s.
const EFFECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the processes of a service to end after it and after the attack.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Rounds of the victim's calls during an attack.
const ROUNDS: usize = 5;
/// Descriptors that the service may open before an attack takes all of them.
const FREE_DESCRIPTORS: u64 = 64;
/// The time in which a service without free descriptors is watched, and what it may log then.
const WATCHED: Duration = Duration::from_secs(3);
const MAX_LOGGED: usize = 16 << 10;

/// A service for attackers and victims, restarted with the same arguments.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn service(arguments: &[&str]) -> Service {
    service_by(program("fdmapd").expect("fdmapd"), &[], arguments)
}

/// The same, started by a program with the arguments that it takes before those of the service.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn service_by(program: PathBuf, own_arguments: &[&str], arguments: &[&str]) -> Service {
    let group = GROUP.to_string();
    let all = [own_arguments, &["--group", &group], SHORT_TIMEOUTS, arguments].concat();
    Service::start_program_with_fd_store(program, &all).expect("a service")
}

/// The same without a descriptor store: it reads fork events, and its next process has no files.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn service_without_a_store() -> Service {
    let group = GROUP.to_string();
    Service::start(&[&["--group", &group], SHORT_TIMEOUTS].concat()).expect("a service")
}

/// Makes several rounds of calls.
///
/// # Panics
/// As [`Victim::assert_served`].
#[track_caller]
pub fn assert_served(victim: &mut Victim, moment: &str) {
    for _ in 0..ROUNDS {
        victim.assert_served(moment);
    }
}

/// Waits until an attack takes effect. Meanwhile, a victim that connects now is served.
///
/// # Panics
/// If it takes no effect, or as [`Victim::assert_served`].
#[track_caller]
pub fn await_effect(service: &Service, effect: &str, mut is_seen: impl FnMut() -> bool) {
    let mut victim = Victim::start(service).expect("a victim");
    let began = Instant::now();
    while !is_seen() {
        assert!(began.elapsed() < EFFECT_TIMEOUT, "no effect of the attack: {effect}");
        victim.assert_served(effect);
    }
}

/// Ends the service by SIGTERM while an attack lasts, and starts the next one.
///
/// # Panics
/// If it does not end in time, or if the next one does not serve a victim.
#[track_caller]
pub fn assert_restarts(service: &mut Service) {
    assert_restarts_after(service, Signal::SIGTERM);
}

/// The same with another signal.
///
/// # Panics
/// As [`assert_restarts`].
#[track_caller]
pub fn assert_restarts_after(service: &mut Service, signal: Signal) {
    service.signal(signal);
    assert!(service.ended(MAX_STOP), "{signal} does not end the service");
    // The store keeps what it has received.
    service.kill().expect("the descriptor store");
    service.restart().expect("the next service");
    let mut victim = Victim::start(service).expect("a victim");
    assert_served(&mut victim, "after the restart");
}

/// Asserts that processes end.
///
/// # Panics
/// If one does not.
#[track_caller]
pub fn assert_gone(pids: &[u32]) {
    let began = Instant::now();
    while let Some(left) = pids.iter().find(|pid| pidfd::owner(**pid).is_ok()) {
        assert!(began.elapsed() < END_TIMEOUT, "process {left} is left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes an attack twice: the first one ends, and the service ends during the second one. The drop of what `attack` returns ends it.
///
/// # Panics
/// If the service does not withstand the attack.
#[track_caller]
pub fn assert_withstands<A>(service: &mut Service, attack: impl FnMut(&Service) -> A) {
    assert_withstands_until(service, attack, |_, lasting| drop(lasting));
}

/// The same, where `end` ends the attack.
///
/// # Panics
/// If the service does not withstand the attack.
#[track_caller]
pub fn assert_withstands_until<A>(
    service: &mut Service,
    mut attack: impl FnMut(&Service) -> A,
    mut end: impl FnMut(&Service, A),
) {
    let mut victim = Victim::start(service).expect("a victim");
    assert_served(&mut victim, "before the attack");
    let before = Footprint::of(service).expect("the footprint");
    let lasting = attack(service);
    assert_served(&mut victim, "during the attack");
    end(service, lasting);
    assert_served(&mut victim, "after the attack");
    Footprint::wait_for(service, &before, MAX_RELEASE).expect("the footprint");

    let lasting = attack(service);
    victim.assert_served("during the next attack");
    let helpers = children_of(service.pid()).expect("the helpers of the service");
    assert_restarts(service);
    end(service, lasting);
    assert_gone(&helpers);
}

/// Where the service could open no descriptor, it logs little and uses little processor time.
///
/// # Panics
/// If it logs or uses more, or if `line` about a connection that it cannot accept does not follow `seen` bytes of the log.
#[track_caller]
fn assert_pauses(service: &Service, seen: usize, line: &str) {
    let began = Instant::now();
    while !service.log()[seen..].contains(line) {
        assert!(began.elapsed() < MAX_STOP, "{}", service.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    let (log, used) = (service.log().len(), processor_seconds(service.pid()));
    std::thread::sleep(WATCHED);
    let (logged, used) = (service.log().len() - log, processor_seconds(service.pid()) - used);
    assert!(logged < MAX_LOGGED, "{logged} bytes are logged in {WATCHED:?}");
    assert!(used < WATCHED.as_secs_f64() / 4.0, "{used} s of processor time are used in {WATCHED:?}");
}

/// Makes an attack twice that takes all descriptors of the service. No call is served before it ends, so the victim is served before and
/// after each attack, and by the service that starts during the second one. `line`: what the service logs.
///
/// # Panics
/// If the service does not withstand the attack.
#[track_caller]
pub fn assert_withstands_without_descriptors<A>(
    service: &mut Service,
    line: &str,
    mut attack: impl FnMut(&Service) -> A,
) {
    let mut victim = Victim::start(service).expect("a victim");
    assert_served(&mut victim, "before the attack");
    let before = Footprint::of(service).expect("the footprint");
    limit_descriptors(service.pid(), before.descriptors() + FREE_DESCRIPTORS).expect("a limit");
    let lasting = attack(service);
    assert_pauses(service, 0, line);
    drop(lasting);
    // A connection that waits may be accepted at the end of a pause.
    std::thread::sleep(MAX_DELAY);
    assert_served(&mut victim, "after the attack");
    Footprint::wait_for(service, &before, MAX_RELEASE).expect("the footprint");

    let seen = service.log().len();
    let lasting = attack(service);
    assert_pauses(service, seen, line);
    assert_restarts(service);
    drop(lasting);
}

/// Seconds of processor time that a process has used.
fn processor_seconds(pid: u32) -> f64 {
    let stat = read(format!("/proc/{pid}/stat")).expect("a process");
    // utime and stime, in ticks: the 12th and 13th field after the name.
    let fields: Vec<_> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let ticks: f64 = [11, 12].iter().map(|&field| fields[field].parse::<f64>().expect("ticks")).sum();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).expect("sysconf");
    ticks / per_second.expect("ticks of a second") as f64
}
