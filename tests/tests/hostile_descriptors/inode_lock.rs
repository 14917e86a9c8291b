//! A process that holds the lock of an inode (i_rwsem) for ever, by a write from memory that a FUSE daemon does not serve. Calls that
//! change the inode fail in time, and those of other users wait for nothing.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use fdmap_client::ClientError;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::Access;
use fdmap_sys::{fd, memfd};
use fdmap_tests::attack::{USER as ATTACKER, assert_gone, assert_restarts};
use fdmap_tests::doctor::has_capability;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::victim::{self, GROUP, Victim};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, fchown};

use super::{call, service};

/// A call of `fdmap` that is blocked takes until its timeout of 30 s.
const MAX_CALL: Duration = Duration::from_secs(5);
/// 500 ms, the start of a helper, and that of `fdmap`.
const MAX_REFUSAL: Duration = Duration::from_secs(2);
/// Time for helpers to answer and to end: an idle one ends after 10 s.
const SETTLED: Duration = Duration::from_secs(20);
/// The promised number of helpers of one user.
const MAX_HELPERS: usize = 4;
/// Exit codes of `fdmap`.
const OK: Option<i32> = Some(0);
const REFUSED: Option<i32> = Some(6);

/// Runs `fdmap`. Returns its exit code and its errors.
#[track_caller]
fn run(service: &Service, user: u32, arguments: &[&str]) -> (Option<i32>, String) {
    let started = Instant::now();
    let mut child = call(service, user, arguments);
    while child.try_wait().unwrap().is_none() && started.elapsed() < MAX_CALL {
        std::thread::sleep(Duration::from_millis(2));
    }
    let elapsed = started.elapsed();
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(elapsed <= MAX_REFUSAL, "{arguments:?} took {elapsed:?} {errors}");
    (output.status.code(), errors)
}

#[track_caller]
fn assert_ok(service: &Service, user: u32, arguments: &[&str]) {
    let (code, errors) = run(service, user, arguments);
    assert_eq!(code, OK, "{arguments:?}: {errors}");
}

#[track_caller]
fn assert_refused(service: &Service, user: u32, arguments: &[&str], reason: &str) {
    let (code, errors) = run(service, user, arguments);
    assert_eq!(code, REFUSED, "{arguments:?}: {errors}");
    assert!(errors.contains(reason) && errors.contains(arguments[1]), "{arguments:?}: {errors}");
}

/// Calls of another user, also those that change inodes, wait for nothing.
#[track_caller]
fn assert_others_served(service: &Service, moment: &str) {
    Victim::start(service).unwrap().assert_served(moment);
    for arguments in [
        &["create", "changed", "--size", "64K"][..],
        &["resize", "changed", "128K"],
        &["seal", "changed", "grow"],
        &["seal-writers", "changed"],
        &["rm", "changed"],
    ] {
        assert_ok(service, victim::USER, arguments);
    }
}

/// A file of the attacker, whose inode it can lock.
fn created(service: &Service, name: &str) -> LockHolder {
    assert_ok(service, ATTACKER, &["create", name, "--size", "64K"]);
    let (file, _) = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/{name}")), true).unwrap();
    LockHolder::prepare_as(&path_of(&file), ATTACKER).unwrap()
}

/// A memfd of the attacker, whose inode it can lock.
fn passed() -> (OwnedFd, LockHolder) {
    let file = memfd::create("passed", None).unwrap();
    memfd::resize(file.as_fd(), 1 << 16).unwrap();
    fchmod(&file, Mode::from_bits_truncate(0o640)).unwrap();
    fchown(&file, Some(Uid::from_raw(ATTACKER)), Some(Gid::from_raw(GROUP))).unwrap();
    let holder = LockHolder::prepare_as(&path_of(&file), ATTACKER).unwrap();
    (file, holder)
}

/// Adopts a file for the attacker.
fn adopt(service: &Service, file: &OwnedFd, name: &str) -> Result<(), ClientError> {
    let started = Instant::now();
    let access = Access::private(ATTACKER, GROUP);
    let adopted = service.fdpass().unwrap().adopt(file.as_fd(), name, Some(access));
    assert!(started.elapsed() <= MAX_REFUSAL, "Adopt took {:?}", started.elapsed());
    adopted.map(drop)
}

/// Owner, group and permissions.
fn ownership(file: &OwnedFd) -> (u32, u32, u32) {
    let stat = fd::stat(file).unwrap();
    (stat.st_uid, stat.st_gid, stat.st_mode & 0o777)
}

const ATTACKERS: (u32, u32, u32) = (ATTACKER, GROUP, 0o640);
const SERVICES: (u32, u32, u32) = (0, 0, 0o600);

/// The helpers of the attacker.
fn helpers(service: &Service) -> Vec<u32> {
    let name = format!("fdmapd\0inode-helper\0{ATTACKER}\0");
    let mut children = children_of(service.pid()).unwrap();
    children.retain(|pid| read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == name));
    children
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < SETTLED, "not so after {SETTLED:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn locked_inodes_block_no_other_user_and_their_own_calls_fail_in_time() {
    require(root());
    let service = service();
    assert_others_served(&service, "before");
    let mut holders = Vec::new();
    for name in ["resized", "sealed", "writer-sealed", "deleted"] {
        let mut holder = require(Ok(created(&service, name)));
        holder.hold_inode().unwrap();
        holders.push(holder);
    }
    let (file, mut holder) = passed();
    holder.hold_inode().unwrap();
    let reason = "a process holds the lock of the inode";
    assert_refused(&service, ATTACKER, &["resize", "resized", "128K"], reason);
    let log = service.log();
    assert!(log.contains(&format!("file=\"{ATTACKER}/resized\"")), "{log}");
    incidents::assert_reported(
        &service,
        "inode-helper-late",
        "a process holds the lock of the inode of a file",
    );
    assert_others_served(&service, "during Resize");
    assert_refused(&service, ATTACKER, &["seal", "sealed", "grow"], reason);
    assert_refused(&service, ATTACKER, &["seal-writers", "writer-sealed"], reason);
    let adopted = adopt(&service, &file, "passed").unwrap_err();
    assert_eq!(adopted.refusal(), Some(RefusalCode::Unavailable), "{adopted}");
    assert!(adopted.to_string().contains("cannot adopt file \"passed\""), "{adopted}");
    holders.push(holder);
    // Another call about one of these files needs no helper, and without one fails at once.
    assert_refused(&service, ATTACKER, &["resize", "resized", "256K"], "an earlier call on this inode");
    assert_refused(&service, ATTACKER, &["resize", "deleted", "256K"], "4 calls on inodes");
    for arguments in
        [&["stat", "resized"][..], &["pages", "resized"], &["checkpoint", "resized"], &["rm", "deleted"]]
    {
        assert_ok(&service, ATTACKER, arguments);
    }
    assert_others_served(&service, "while all helpers of the attacker are late");
    let blocked = helpers(&service);
    assert_eq!(blocked.len(), MAX_HELPERS);
    for holder in &mut holders {
        holder.release().unwrap();
    }
    // The late calls take effect, but for Adopt, which is undone.
    let info = |name: &str| {
        let file = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/{name}")), false);
        file.unwrap().1
    };
    wait_until("resized", || info("resized").size_bytes == 128 << 10);
    wait_until("sealed", || !info("sealed").seals.is_empty());
    wait_until("writer-sealed", || !info("writer-sealed").seals.is_empty());
    wait_until("given back", || adopt(&service, &file, "passed").is_ok());
    assert_eq!(ownership(&file), SERVICES);
    wait_until("ended", || blocked.iter().all(|pid| !helpers(&service).contains(pid)));
    assert_ok(&service, ATTACKER, &["resize", "resized", "64K"]);
    assert_ok(&service, ATTACKER, &["rm", "passed"]);
    assert_eq!(ownership(&file), ATTACKERS);
    wait_until("idle helpers ended", || helpers(&service).is_empty());
    assert_gone(&blocked);
}

#[test]
fn deleted_file_gets_its_owner_back_when_its_inode_is_released() {
    require(root());
    let service = service();
    let mut files: Vec<_> = (0..=MAX_HELPERS).map(|_| passed()).collect();
    for (at, (file, holder)) in files.iter_mut().enumerate() {
        adopt(&service, file, &format!("passed-{at}")).unwrap();
        assert_eq!(ownership(file), SERVICES);
        holder.hold_inode().unwrap();
    }
    // Also with more files than helpers.
    for at in 0..files.len() {
        let name = format!("passed-{at}");
        assert_ok(&service, ATTACKER, &["rm", &name]);
        let (code, errors) = run(&service, ATTACKER, &["stat", &name]);
        assert_eq!(code, Some(3), "{errors}");
    }
    assert_eq!(helpers(&service).len(), MAX_HELPERS);
    assert_others_served(&service, "while the owners wait");
    for (at, (file, holder)) in files.iter_mut().enumerate() {
        let again = adopt(&service, file, "again").unwrap_err();
        assert_eq!(again.refusal(), Some(RefusalCode::Unavailable), "{at}: {again}");
        assert_eq!(ownership(file), SERVICES);
        holder.release().unwrap();
    }
    for (at, (file, _)) in files.iter().enumerate() {
        wait_until(&format!("owner of {at}"), || ownership(file) == ATTACKERS);
    }
    wait_until("adopted again", || adopt(&service, &files[0].0, "again").is_ok());
    assert_ok(&service, ATTACKER, &["rm", "again"]);
    assert_eq!(ownership(&files[0].0), ATTACKERS);
}

/// The helpers outlive the service.
#[test]
fn service_ends_during_the_attack_and_owners_get_their_inodes_back() {
    require(root());
    let mut service = service();
    let (mut adopted, mut refused) = (passed(), passed());
    adopt(&service, &adopted.0, "adopted").unwrap();
    adopted.1.hold_inode().unwrap();
    refused.1.hold_inode().unwrap();
    assert_ok(&service, ATTACKER, &["rm", "adopted"]);
    adopt(&service, &refused.0, "refused").unwrap_err();
    let mut resized = created(&service, "resized");
    resized.hold_inode().unwrap();
    assert_refused(&service, ATTACKER, &["resize", "resized", "128K"], "lock of the inode");
    let children = children_of(service.pid()).unwrap();
    assert_restarts(&mut service);
    assert_eq!((ownership(&adopted.0), ownership(&refused.0)), (SERVICES, ATTACKERS));
    for holder in [&mut adopted.1, &mut refused.1, &mut resized] {
        holder.release().unwrap();
    }
    assert_gone(&children);
    assert_eq!((ownership(&adopted.0), ownership(&refused.0)), (ATTACKERS, ATTACKERS));
}

/// No probe takes the lock, where there is cachestat(2).
#[test]
fn page_states_of_a_file_whose_inode_is_locked_wait_for_nothing() {
    require(root());
    for probe in ["xarray", "syscalls"] {
        let mut service =
            Service::start_with_fd_store(&["--group", &GROUP.to_string(), "--probe", probe]).unwrap();
        if probe == "syscalls" && !has_capability(&service, "cachestat") {
            // lseek(2) waits.
            continue;
        }
        let mut holder = created(&service, "held");
        holder.write(0, 1).unwrap();
        holder.hold_inode().unwrap();
        for arguments in [&["pages", "held"][..], &["checkpoint", "held"], &["stat", "held"]] {
            assert_ok(&service, ATTACKER, arguments);
        }
        assert_others_served(&service, probe);
        assert_restarts(&mut service);
        holder.release().unwrap();
    }
}

/// A size that may still be set is charged, and a former one until the new one is set.
#[test]
fn late_resize_is_charged_until_its_result_is_known() {
    require(root());
    let service =
        Service::start(&["--group", &GROUP.to_string(), "--max-bytes-per-user", &(1 << 20).to_string()])
            .unwrap();
    let create = |name: &str| run(&service, ATTACKER, &["create", name, "--size", "512K"]).0;
    let mut grown = created(&service, "grown");
    grown.hold_inode().unwrap();
    assert_refused(&service, ATTACKER, &["resize", "grown", "768K"], "lock of the inode");
    assert_eq!(create("other"), REFUSED, "768K may be used");
    assert_ok(&service, ATTACKER, &["access", "grown", "--mode", "640"]);
    grown.release().unwrap();
    wait_until("grown", || run(&service, ATTACKER, &["resize", "grown", "768K"]).0 == OK);
    assert_eq!(create("other"), REFUSED, "768K are used");
    let (file, _) = service.fdpass().unwrap().open(&named(&format!("{ATTACKER}/grown")), true).unwrap();
    let mut shrunk = LockHolder::prepare_as(&path_of(&file), ATTACKER).unwrap();
    shrunk.hold_inode().unwrap();
    assert_refused(&service, ATTACKER, &["resize", "grown", "64K"], "lock of the inode");
    assert_eq!(create("other"), REFUSED, "768K may still be used");
    shrunk.release().unwrap();
    wait_until("shrunk", || create("other") == OK);
}

/// Nothing keeps the owner of a lock from ending it by force.
#[test]
fn killed_process_releases_the_inode() {
    require(root());
    let service = service();
    let mut holder = created(&service, "held");
    holder.hold_inode().unwrap();
    assert_refused(&service, ATTACKER, &["resize", "held", "128K"], "lock of the inode");
    drop(holder);
    wait_until("resized", || run(&service, ATTACKER, &["resize", "held", "256K"]).0 == OK);
}
