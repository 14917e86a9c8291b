//! Connections beyond the limit of their user, by thousands: few lines of the log count them all.

use std::time::{Duration, Instant};

use fdmap_tests::attack::{MAX_RELEASE, assert_restarts, assert_served, service};
use fdmap_tests::footprint::Footprint;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::Service;
use fdmap_tests::test;
use fdmap_tests::victim::Victim;

use super::ATTACKER;
use super::attacker::Attacker;

/// Connections to each socket.
const FLOOD: u64 = 10_000;
/// For each of the two sockets: refused connections, and those that a helper process closes for the service.
const MAX_LINES_PER_SECOND: u64 = 4;
/// Far more than a line about a refused connection has.
const MAX_LINE_BYTES: usize = 400;
/// Time after which the omitted connections are logged with the next refused one.
const LOGGED: Duration = Duration::from_millis(1100);

/// The lines of the log about refused connections, and the number of connections that they count.
fn refusals(service: &Service) -> (Vec<String>, u64) {
    let log = service.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("refusing")).map(str::to_owned).collect();
    let omitted = |line: &String| {
        let (_, rest) = line.split_once("omitted=").expect("the number of omitted lines");
        rest.split_whitespace().next().and_then(|count| count.parse::<u64>().ok()).expect("a number")
    };
    let count = lines.iter().map(|line| 1 + omitted(line)).sum();
    (lines, count)
}

#[test]
fn flood_of_refused_connections_is_counted_in_few_lines_of_the_log() {
    require(root());
    let mut service = service(&["--max-sessions-per-user", "8"]);
    let mut victim = Victim::start(&service).unwrap();
    assert_served(&mut victim, "before the attack");
    let footprint = Footprint::of(&service).unwrap();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    attacker.attack("sessions", 8).unwrap();
    let before = service.log().lines().count() - refusals(&service).0.len();
    let began = Instant::now();
    attacker.begin("refused-connections", FLOOD).unwrap();
    victim.assert_served("during the attack");
    assert_eq!(attacker.accepted().unwrap(), 2 * FLOOD, "connections that were made");
    std::thread::sleep(LOGGED);
    attacker.attack("refused-connections", 1).unwrap();
    while refusals(&service).1 < 2 * FLOOD {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", refusals(&service));
        std::thread::sleep(Duration::from_millis(100));
        attacker.attack("refused-connections", 1).unwrap();
    }
    let seconds = began.elapsed().as_secs() + 2;
    let (lines, count) = refusals(&service);
    eprintln!("{count} refused connections in {} lines within {seconds} s", lines.len());
    assert!(lines.len() as u64 <= MAX_LINES_PER_SECOND * seconds, "{lines:?}");
    assert!(lines.iter().all(|line| line.len() < MAX_LINE_BYTES), "{lines:?}");
    // Other lines would be about an effect of the flood.
    let others = service.log().lines().count() - before - lines.len();
    assert!(others as u64 <= MAX_LINES_PER_SECOND * seconds, "{}", service.log());
    attacker.kill().unwrap();
    assert_served(&mut victim, "after the attack");
    Footprint::wait_for(&service, &footprint, MAX_RELEASE).unwrap();

    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    attacker.attack("sessions", 8).unwrap();
    // Until it is killed.
    attacker.begin("refused-connections", u64::MAX).unwrap();
    victim.assert_served("during the next attack");
    assert_restarts(&mut service);
    attacker.kill().unwrap();
}
