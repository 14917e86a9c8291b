//! The course of an attack: the calls of a victim are answered in time before it, during it and after it, nothing is left when it
//! ends, and the service ends and starts again while it lasts.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::footprint::Footprint;
use crate::service::Service;
use crate::victim::{GROUP, Victim};

/// The user of the attacker.
pub const USER: u32 = 65_534;
pub const MAX_STOP: Duration = Duration::from_secs(5);
/// Within this time nothing of an attack is left: files end at the sweep after next, at the latest after 20 s, and idle threads after
/// 10 s.
pub const MAX_RELEASE: Duration = Duration::from_secs(40);

/// Rounds of the victim's calls during an attack.
const ROUNDS: usize = 5;

/// A service for attackers and victims, restarted with the same arguments.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn service(arguments: &[&str]) -> Service {
    let group = GROUP.to_string();
    let all = [&["--group", &group, "--unused-file-timeout", "1"], arguments].concat();
    Service::start_with_fd_store(&all).expect("a service")
}

/// The same without a descriptor store: it reads fork events, and its next process has no files.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn service_without_a_store() -> Service {
    Service::start(&["--group", &GROUP.to_string(), "--unused-file-timeout", "1"]).expect("a service")
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

/// Ends the service by SIGTERM while an attack lasts, and starts the next one.
///
/// # Panics
/// If it does not end in time, or if the next one does not serve a victim.
#[track_caller]
pub fn assert_restarts(service: &mut Service) {
    service.signal(Signal::SIGTERM);
    assert!(service.ended(MAX_STOP), "SIGTERM does not end the service");
    // The store keeps what it has received.
    service.kill().expect("the descriptor store");
    service.restart().expect("the next service");
    let mut victim = Victim::start(service).expect("a victim");
    assert_served(&mut victim, "after the restart");
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
    assert_restarts(service);
    end(service, lasting);
}
