//! Root adopts the files of a process for the user of that process, who has a file of another user open for reading only: the user gets
//! no right to write to that file, in whichever way the process has it, and whatever the process changes meanwhile.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fdmap_client::proto::{Access, FileInfo, Right};
use fdmap_sys::fd::stat;
use fdmap_sys::memfd;
use fdmap_tests::HarnessError;
use fdmap_tests::attack::{assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::{read, root};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::mapper::path_of;
use fdmap_tests::programs::Compiled;
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::victim;
use nix::unistd::{Gid, Uid, fchown};
use rustix::fs::{XattrFlags, fsetxattr};
use serde_json::Value;
use tokio::runtime::Handle;

use super::ATTACKER;

/// Adoptions of a process that swaps files all the time.
const ATTEMPTS: usize = 60;
/// The descriptor that such a process swaps.
const SWAPPED: &str = "100";

/// Time for an execve(2).
const EXECUTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the program of the attacker.
fn start(program: &Compiled, kind: &str, file: &Path, more: &[&OsStr]) -> LineProcess {
    let mut command = Command::new(program.path());
    command.arg(kind).arg(file).arg(ATTACKER.to_string()).args(more);
    let mut process = LineProcess::start(command, None).unwrap();
    let line = process.receive().unwrap();
    assert!(line.starts_with("ok "), "{kind}: {line}");
    process
}

/// Starts a program of the attacker that executes sleep(1) with a set-user-ID bit: it has the descriptors of the attacker, and root's
/// rights.
fn start_set_user_id(program: &Compiled, file: &Path) -> LineProcess {
    let sleep = program.path().with_file_name("sleep");
    std::fs::copy("/bin/sleep", &sleep).unwrap();
    std::fs::set_permissions(&sleep, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let process = start(program, "executed", file, &[sleep.as_os_str()]);
    let began = Instant::now();
    let status = || read(format!("/proc/{}/status", process.pid())).unwrap();
    while !status().contains(&format!("Uid:\t{ATTACKER}\t0\t0\t0\n")) {
        assert!(began.elapsed() < EXECUTION_TIMEOUT, "{}", status());
        std::thread::sleep(Duration::from_millis(5));
    }
    process
}

/// Root adopts files of a process for the attacker.
fn adopt(service: &Service, process: &LineProcess, more: &[&str]) -> Output {
    let (pid, user) = (process.pid().to_string(), ATTACKER.to_string());
    let mut fdmap = fdmap_as(service, 0).unwrap();
    fdmap.args(["--json", "adopt", "--pid", &pid, "--uid", &user]).args(more).output().unwrap()
}

/// The number of files that were adopted, whether others were refused or not.
fn adopted_files(output: &Output) -> usize {
    let report: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    report.and_then(|report| report["files"].as_array().map(Vec::len)).unwrap_or(0)
}

/// A memfd of the victim's user that others may read.
fn readable_by_others() -> OwnedFd {
    let file = memfd::create("secret", None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    fchown(&file, Some(Uid::from_raw(victim::USER)), Some(Gid::from_raw(victim::GROUP))).unwrap();
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::File::from(file.try_clone().unwrap()).set_permissions(mode).unwrap();
    file
}

/// All files of the service that are this one.
async fn registered(service: &Service, file: &OwnedFd) -> Vec<FileInfo> {
    let stat = stat(file).unwrap();
    let mut files = service.client().await.unwrap().list().await.unwrap();
    files.retain(|info| (info.device, info.inode) == (stat.st_dev, stat.st_ino));
    files
}

/// Owner and mode of a file.
fn ownership(file: &OwnedFd) -> (u32, u32) {
    let stat = stat(file).unwrap();
    (stat.st_uid, stat.st_mode & 0o7777)
}

/// Root adopts what four processes of the attacker have of a memfd that the service does not know.
async fn attack(service: &Service, program: &Compiled) -> (OwnedFd, Vec<LineProcess>) {
    let file = readable_by_others();
    let before = ownership(&file);
    let kinds = ["descriptor", "mapping", "swapped-descriptors", "swapped-mappings", "forged-segment"];
    let start = |kind: &&str| start(program, kind, &path_of(&file), &[]);
    let mut processes: Vec<_> = kinds.iter().map(start).collect();
    processes.push(start_set_user_id(program, &path_of(&file)));
    let [descriptor, mapping, swapped_descriptors, swapped_mappings, forged, set_user_id] = &processes[..]
    else {
        unreachable!()
    };
    for process in [descriptor, mapping, set_user_id] {
        for more in [&[][..], &["--all"], &["--all", "--track"]] {
            let adopted = adopt(service, process, more);
            assert!(!adopted.status.success() && adopted_files(&adopted) == 0, "{more:?}: {adopted:?}");
            let found = registered(service, &file).await;
            assert!(found.is_empty(), "{more:?}: {found:?}");
        }
    }
    for (process, more) in
        [(swapped_descriptors, ["--fd", SWAPPED].as_slice()), (swapped_mappings, &["--all"])]
    {
        let mut adoptions = 0;
        for _ in 0..ATTEMPTS {
            adoptions += usize::from(adopted_files(&adopt(service, process, more)) > 0);
            let found = registered(service, &file).await;
            assert!(found.is_empty(), "{more:?}: {found:?}");
        }
        println!("{more:?}: {adoptions} of {ATTEMPTS} adoptions succeeded");
        assert!(adoptions > 0, "{more:?}: no file of the attacker was adopted");
    }
    // The segment is the attacker's own.
    let adopted = adopt(service, forged, &["--all"]);
    assert!(adopted_files(&adopted) == 1, "{adopted:?}");
    assert_eq!(ownership(&file), before);
    (file, processes)
}

#[test(flavor = "multi_thread")]
async fn user_whose_process_root_adopts_gets_no_right_to_write_to_files_of_others() {
    require(root());
    let program = require(Compiled::new("read_only_file"));
    let mut service = service(&[]);
    tokio::task::block_in_place(|| {
        assert_withstands(&mut service, |service| Handle::current().block_on(attack(service, &program)));
    });
}

/// Gives a file to the attacker's group, which may read it, with an ACL by which another user may write to it: the group bits of its
/// mode are the mask of the ACL.
fn set_acl(file: &OwnedFd) {
    let (user_obj, user, group_obj, mask, other) = (1, 2, 4, 16, 32);
    let no_id = u32::MAX;
    let entries = [
        (user_obj, 6, no_id),
        (user, 6, victim::USER + 1),
        (group_obj, 4, no_id),
        (mask, 6, no_id),
        (other, 4, no_id),
    ];
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        acl.extend(u16::to_le_bytes(tag));
        acl.extend(u16::to_le_bytes(permissions));
        acl.extend(id.to_le_bytes());
    }
    fchown(file, None, Some(Gid::from_raw(ATTACKER))).unwrap();
    let set = fsetxattr(file, "system.posix_acl_access", &acl, XattrFlags::empty());
    require(set.map_err(|error| HarnessError::Missing(format!("ACLs of tmpfs: {error}"))));
}

#[test(flavor = "multi_thread")]
async fn group_of_a_file_gets_no_right_by_the_mask_of_its_acl() {
    require(root());
    let program = require(Compiled::new("read_only_file"));
    let service = service(&[]);
    let file = readable_by_others();
    set_acl(&file);
    assert_eq!(ownership(&file), (victim::USER, 0o664));
    for kind in ["descriptor", "mapping"] {
        let process = start(&program, kind, &path_of(&file), &[]);
        for more in [&[][..], &["--all"]] {
            let adopted = adopt(&service, &process, more);
            assert!(
                !adopted.status.success() && adopted_files(&adopted) == 0,
                "{kind} {more:?}: {adopted:?}"
            );
            assert!(registered(&service, &file).await.is_empty(), "{kind} {more:?}");
        }
    }
}

/// The service has the file already, and its rights are those that its owner chose.
#[test(flavor = "multi_thread")]
async fn adoption_by_root_changes_no_rights_to_a_file_of_the_service() {
    require(root());
    let program = require(Compiled::new("read_only_file"));
    let service = service(&[]);
    let client = service.client().await.unwrap();
    create_file(&client, "readable", 8192).await.unwrap();
    let access = Access {
        other: [Right::Inspect, Right::Read].into_iter().collect(),
        ..Access::private(victim::USER, victim::GROUP)
    };
    client.set_access(&named("readable"), access).await.unwrap();
    let name = named(&format!("{}/readable", victim::USER));
    let (file, before) = service.fdpass().unwrap().open(&name, false).unwrap();
    for kind in ["descriptor", "mapping"] {
        let process = start(&program, kind, &path_of(&file), &[]);
        for more in [&[][..], &["--all"], &["--all", "--track"]] {
            // It may report that the service has the file.
            adopt(&service, &process, more);
            assert_eq!(client.get(&name).await.unwrap().access, before.access, "{kind} {more:?}");
            let mut open = fdmap_as(&service, ATTACKER).unwrap();
            let file = format!("{}/readable", victim::USER);
            let opened = open.args(["open", &file, "--write", "--", "true"]).output().unwrap();
            assert!(!opened.status.success(), "{kind} {more:?}: {opened:?}");
        }
    }
}
