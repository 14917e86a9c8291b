//! Memory of files that a user fills and leaves: it is charged to the user's cgroup, and comes back when the user ends, however often the
//! service was started again meanwhile.

use std::time::{Duration, Instant};

use fdmap_tests::attack::{MAX_RELEASE, assert_restarts, assert_served, service};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::footprint::Footprint;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::test;
use fdmap_tests::victim::Victim;

use super::attacker::Attacker;
use super::{ATTACKER, withstands};

/// Files of a user, by default.
const MAX_FILES: u64 = 1024;
/// MiB.
const FILLED: u64 = 64;
/// MiB that files of a user hold before the user gets no further one.
const LIMIT: u64 = FILLED * 3 / 2;
/// The attacker is a container that ends and is started again so often.
const ROUNDS: usize = 4;
/// MiB of all containers together. No memory is swapped out, even if none came back.
const CONTAINERS: u64 = (ROUNDS as u64 + 2) * FILLED;

/// Fills a file, as soon as the service admits it. Returns the memory of all attackers.
fn fill(attacker: &mut Attacker, cgroup: &Cgroup) -> u64 {
    let began = Instant::now();
    while attacker.attack("memory", FILLED).unwrap() == 0 {
        assert!(began.elapsed() < MAX_RELEASE, "files of ended attackers still count");
        std::thread::sleep(Duration::from_millis(100));
    }
    cgroup.usage().unwrap()
}

/// The service restarts while each attacker has a filled file, and has the files of the ended ones again.
#[test]
fn memory_of_a_user_comes_back_after_four_restarts() {
    require(root());
    let _host = HostLock::acquire().unwrap();
    let mut service = service(&["--max-allocated-bytes-per-user", &(LIMIT << 20).to_string()]);
    let cgroup = require(Cgroup::with_limit(CONTAINERS << 20));
    let mut victim = Victim::start(&service).unwrap();
    assert_served(&mut victim, "before the attack");
    let before = Footprint::of(&service).unwrap();
    drop(victim);
    for round in 0..ROUNDS {
        let mut attacker = Attacker::start_in(&service, ATTACKER, Some(&cgroup)).unwrap();
        let charged = fill(&mut attacker, &cgroup);
        eprintln!("round {round}: {} MiB", charged >> 20);
        assert!(charged > FILLED << 20, "round {round}: {charged} bytes are charged");
        assert!(charged < (LIMIT + FILLED) << 20, "round {round}: {charged} bytes are charged");
        assert_served(&mut Victim::start(&service).unwrap(), "during the attack");
        assert_restarts(&mut service);
        let charged = cgroup.usage().unwrap();
        assert!(charged > FILLED << 20, "round {round}: {charged} bytes are charged after the restart");
        attacker.kill().unwrap();
    }
    let mut victim = Victim::start(&service).unwrap();
    assert_served(&mut victim, "after the attack");
    let began = Instant::now();
    while cgroup.usage().unwrap() > (FILLED << 20) / 8 {
        assert!(began.elapsed() < MAX_RELEASE, "{} bytes stay", cgroup.usage().unwrap());
        std::thread::sleep(Duration::from_millis(100));
    }
    Footprint::wait_for(&service, &before, MAX_RELEASE).unwrap();
}

/// They end at once, when the attacker is killed.
#[test]
fn as_many_ephemeral_files_as_a_user_may_have_delay_no_other_user() {
    withstands(&[], |attacker| {
        let began = Instant::now();
        let mut created = attacker.attack("files", MAX_FILES + 100).unwrap();
        // Those of an earlier attacker may still count.
        while created < MAX_FILES {
            assert!(began.elapsed() < MAX_RELEASE, "{created} files");
            created += attacker.attack("files", MAX_FILES + 100 - created).unwrap();
        }
        assert_eq!(created, MAX_FILES);
    });
}
