//! Subordinate user ids of one user, by which it could have several shares of what the service grants.

use std::path::PathBuf;
use std::time::Instant;

use fdmap_sys::testing::mounts;
use fdmap_tests::attack::{MAX_STOP, assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::test;
use nix::mount::{MsFlags, mount};

use super::ATTACKER;
use super::attacker::Attacker;

/// The attacker, and users whose ids are subordinate to it.
const USERS: [u32; 5] = [ATTACKER, 700_000, 700_001, 700_002, 765_535];
/// The limit of sessions.
const MAX_SESSIONS: u64 = 64;

/// Runs a test where /etc/subuid is another file, in a mount namespace of its own.
fn with_subordinate_users(entries: &str, test: impl FnOnce() + Send) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), entries).unwrap();
    let run = || {
        mounts::make_private().unwrap();
        let none: Option<&PathBuf> = None;
        mount(Some(file.path()), "/etc/subuid", none, MsFlags::MS_BIND, none).unwrap();
        test();
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

#[test]
fn subordinate_users_share_the_limits_of_their_owner() {
    require(root());
    with_subordinate_users("65534:700000:65536\n", || {
        let mut service = service(&["--max-sessions-per-user", &MAX_SESSIONS.to_string()]);
        assert_withstands(&mut service, |service| {
            let began = Instant::now();
            let mut first = Attacker::start(service, ATTACKER).unwrap();
            while first.attack("sessions", MAX_SESSIONS).unwrap() == 0 {
                assert!(began.elapsed() < MAX_STOP, "ended sessions still count");
            }
            let mut attackers: Vec<_> =
                USERS[1..].iter().map(|user| Attacker::start(service, *user).unwrap()).collect();
            attackers.insert(0, first);
            let accepted: Vec<_> =
                attackers.iter_mut().map(|one| one.attack("sessions", MAX_SESSIONS).unwrap()).collect();
            // A gRPC connection counts as well.
            assert!(accepted.iter().sum::<u64>() <= MAX_SESSIONS, "{accepted:?}");
            assert!(accepted[0] > 0, "{accepted:?}");
            attackers
        });
    });
}
