//! Adoption of running processes: which memory is adopted, and that the process is not disturbed.
#![cfg(target_arch = "x86_64")]

mod busy;
mod calls;
mod fixture;

use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use fdmap_tests::blocked_syscall::BlockedSyscall;
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::test;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::Value;

use fixture::{Fixture, signal};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

#[test]
fn all_kinds_of_shared_memory_are_adopted() {
    let fixture = Fixture::new();
    let name = format!("/fdmap-adopt-{}", std::process::id());
    // The first System V segment of an IPC namespace has inode number 0.
    let kinds = [("closed", "own"), ("shm", &name[1..]), ("sysv", ""), ("first sysv", ""), ("anon", "")];
    for (kind, prefix) in kinds {
        let given = if kind == "shm" { &name } else { "own" };
        let mut process = match kind.strip_prefix("first ") {
            None => fixture.start(kind, given),
            Some(kind) => {
                let mut command = Command::new("unshare");
                command.arg("--ipc").arg(fixture.program.path()).args([kind, given]);
                BlockedSyscall::start(command).unwrap()
            }
        };
        if kind == "shm" {
            std::fs::remove_file(format!("/dev/shm{name}")).unwrap();
        }
        process.block("read", 0).unwrap();
        let adopted = fixture.adopt(&process, &["--all"]);
        assert_eq!(adopted["files"].as_array().unwrap().len(), 1, "{kind}: {adopted}");
        let file = &adopted["files"][0];
        assert!(file["file"]["name"].as_str().unwrap().starts_with(prefix), "{kind}: {adopted}");
        assert_eq!(
            (&file["already_registered"], &file["file"]["size_bytes"]),
            (&false.into(), &262_144.into())
        );
        process.send("x").unwrap();
        assert_eq!(process.result().unwrap().registers, "intact");
        fixture.tracks_writes(&mut process, &file["file"]);

        // Again: the service has the file and tracks the mapping.
        let pid = process.pid().to_string();
        let again = fixture.json(&["adopt", "--pid", &pid, "--all"]);
        assert_eq!(again["files"][0]["already_registered"], true, "{again}");
        let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--all", "--track"]);
        assert!(errors.contains("tracking"), "{errors}");

        let detached = fixture.json(&["detach", "--pid", &pid]);
        let one = &detached["detached"][0];
        assert_eq!((&one["mappings"], &one["deleted"]), (&1.into(), &true.into()), "{detached}");
        process.write(9).unwrap();
        assert_eq!(fixture.json(&["ls"]), serde_json::json!([]));
    }
    let process = fixture.start("anon", "");
    let errors = fixture.fails(7, &["adopt", "--pid", &process.pid().to_string()]);
    assert!(errors.contains("no shared memory of the selected kinds"), "{errors}");
}

/// The number of the process's memfd. Descriptors that the test runner leaves open precede it.
fn memfd_descriptor(process: &BlockedSyscall) -> String {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", process.pid())).unwrap();
    let mut paths = descriptors.map(|entry| entry.unwrap().path());
    let is_memfd =
        |path: &std::path::PathBuf| std::fs::read_link(path).unwrap().starts_with("/memfd:mine (deleted)");
    let path = paths.find(is_memfd).unwrap();
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

#[test]
fn one_descriptor_is_adopted_under_a_name() {
    let fixture = Fixture::new();
    let process = fixture.start("memfd", "mine");
    let pid = process.pid().to_string();
    let descriptor = memfd_descriptor(&process);
    let adopted = fixture.json(&["adopt", "--pid", &pid, "--fd", &descriptor, "--name", "yours"]);
    assert_eq!((&adopted["files"][0]["file"]["name"], &adopted["stop"]), (&"yours".into(), &Value::Null));
    // A file whose name is taken gets the pid appended.
    fixture.json(&["create", "theirs", "--size", "1M"]);
    let other = fixture.start("memfd", "theirs");
    let adopted = fixture.json(&["adopt", "--pid", &other.pid().to_string()]);
    assert_eq!(adopted["files"][0]["file"]["name"], format!("theirs-{}", other.pid()));
    let detached = fixture.json(&["detach", "--pid", &pid, "--keep-files"]);
    assert_eq!(detached["detached"][0]["deleted"], false);
    fixture.fails(7, &["adopt", "--pid", &pid, "--fd", "77"]);
    fixture.fails(7, &["adopt", "--pid", &pid, "--fd", "0"]);
}

/// Root could open the file for writing, and give it to any user.
#[test]
fn file_that_the_process_may_only_read_is_not_adopted() {
    let fixture = Fixture::new();
    let memfd = fdmap_sys::memfd::create("secret", None).unwrap();
    fdmap_sys::memfd::resize(memfd.as_fd(), 8192).unwrap();
    std::fs::File::from(memfd.try_clone().unwrap())
        .set_permissions(PermissionsExt::from_mode(0o644))
        .unwrap();
    let reads = fdmap_sys::fd::reopen(memfd.as_fd(), false).unwrap();
    let mut process = Command::new("sleep").arg("60").stdin(reads).uid(65534).gid(65534).spawn().unwrap();
    let pid = process.id().to_string();
    let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--uid", "1234"]);
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(errors.contains("descriptor 0 is not open for reading and writing"), "{errors}");
    assert!(!fixture.json(&["ls"]).to_string().contains("secret"), "the file was adopted");
}

/// The open of some files has effects. That of a FIFO for writing is seen by its readers, once it is closed.
#[test]
fn descriptor_of_no_shared_memory_is_refused_and_not_opened() {
    let fixture = Fixture::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    std::os::unix::fs::chown(&path, Some(65534), Some(65534)).unwrap();
    let reader = nix::fcntl::open(&path, OFlag::O_RDONLY | OFlag::O_NONBLOCK, Mode::empty()).unwrap();
    let mut command = Command::new("sleep");
    command.arg("60").stdin(reader.try_clone().unwrap()).uid(65534).gid(65534);
    let mut process = command.spawn().unwrap();
    let _guard = CleanupGuard::new(Cleanup::process(process.id())).unwrap();
    let errors = fixture.fails(7, &["adopt", "--pid", &process.id().to_string(), "--fd", "0"]);
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(errors.contains("descriptor 0 is no open file of shared memory"), "{errors}");
    let hung_up = || {
        let mut polled = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        nix::poll::poll(&mut polled, PollTimeout::ZERO).unwrap();
        polled[0].revents().unwrap().contains(PollFlags::POLLHUP)
    };
    assert!(!hung_up(), "the FIFO was opened for writing");
    drop(nix::fcntl::open(&path, OFlag::O_RDWR, Mode::empty()).unwrap());
    assert!(hung_up(), "an open for writing would have been noticed");
}

#[test]
fn untrackable_processes_are_refused_untouched() {
    let fixture = Fixture::new();
    let process = fixture.start("memfd", "traced");
    let tid = process.pid();
    let pid = tid.to_string();
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (seized, has_seized) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let _thread = fdmap_sys::ptrace::TracedThread::seize(tid).unwrap();
            seized.send(()).unwrap();
            let _ = stopped.recv();
        });
        has_seized.recv().unwrap();
        let errors = fixture.fails(7, &["adopt", "--pid", &pid, "--track"]);
        assert!(errors.contains("traces it already"), "{errors}");
        drop(stop);
    });

    let mut command = Command::new(fixture.program.path());
    command.args(["memfd", "filtered", "filtered"]);
    let filtered = BlockedSyscall::start(command).unwrap();
    let errors = fixture.fails(7, &["adopt", "--pid", &filtered.pid().to_string(), "--track"]);
    assert!(errors.contains("seccomp filter"), "{errors}");
    assert_eq!(fixture.json(&["ls"]), serde_json::json!([]), "nothing was adopted");
    // Without tracking no thread is stopped.
    fixture.json(&["adopt", "--pid", &filtered.pid().to_string()]);

    fixture.fails(7, &["adopt", "--pid", "2", "--all", "--track"]);
    fixture.fails(7, &["adopt", "--pid", "2147483000", "--all"]);
}

#[test]
fn users_adopt_their_own_processes_only() {
    let fixture = Fixture::with(&["--group", "65534"]);
    let as_nobody = |pid: u32| {
        let mut fdmap = fdmap_tests::service::fdmap_as(&fixture.service, 65534).unwrap();
        fdmap.args(["adopt", "--track", "--json", "--pid", &pid.to_string()]).output().unwrap()
    };
    let ours = fixture.start("memfd", "of-root");
    let output = as_nobody(ours.pid());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{errors}");

    let mut command = Command::new(fixture.program.path());
    command.args(["memfd", "of-a-user"]).uid(65534).gid(65534);
    let mut theirs = BlockedSyscall::start(command).unwrap();
    let before = theirs.state().unwrap();
    theirs.block("epoll_wait", 1000).unwrap();
    let output = as_nobody(theirs.pid());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let adopted: Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = theirs.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    assert_eq!(theirs.state().unwrap(), before);
    assert_eq!(adopted["files"][0]["file"]["access"]["uid"], 65534);
    fixture.tracks_writes(&mut theirs, &adopted["files"][0]["file"]);
}

#[test]
fn stopped_process_is_adopted_and_stays_stopped() {
    let fixture = Fixture::new();
    let mut process = fixture.start("memfd", "stopped");
    process.block("nanosleep", 1000).unwrap();
    signal(&process, Signal::SIGSTOP);
    process.wait_for_state('T').unwrap();
    let adopted = fixture.adopt(&process, &[]);
    std::thread::sleep(Duration::from_millis(50));
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap();
    assert!(stat.contains(") T "), "{stat}");
    signal(&process, Signal::SIGCONT);
    let result = process.result().unwrap();
    assert_eq!((result.value, result.registers.as_str()), (0, "intact"));
    fixture.tracks_writes(&mut process, &adopted["files"][0]["file"]);
}
