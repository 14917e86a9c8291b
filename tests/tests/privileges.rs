//! Least privilege: which capabilities the service and its helpers have, and that a helper that a client takes over reaches no
//! other process, file or socket.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::ptrace::{Registers, ResumeUntil, Stop, TracedThread};
use fdmap_tests::HarnessError;
use fdmap_tests::certificates::Certificates;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root, temp_dir};
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, copied, named};
use fdmap_tests::test;
use nix::libc;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const UNPRIVILEGED: u32 = 65534;
/// Time for the service to notice that a helper has ended.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(10);

/// What `/proc/PID/status` says of a thread.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Confinement {
    effective: u64,
    permitted: u64,
    inheritable: u64,
    ambient: u64,
    no_new_privileges: bool,
    /// 2: filtered system calls.
    seccomp: u64,
}

/// The different ones of all threads of a process.
fn confinement_of(pid: u32) -> BTreeSet<Confinement> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.map(|thread| confinement_in(&read(thread.unwrap().path().join("status")).unwrap())).collect()
}

fn confinement_in(status: &str) -> Confinement {
    let word = |name: &str, radix: u32| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        u64::from_str_radix(line.unwrap().trim(), radix).unwrap()
    };
    Confinement {
        effective: word("CapEff", 16),
        permitted: word("CapPrm", 16),
        inheritable: word("CapInh", 16),
        ambient: word("CapAmb", 16),
        no_new_privileges: word("NoNewPrivs", 10) == 1,
        seccomp: word("Seccomp", 10),
    }
}

const fn with(capabilities: Capabilities, seccomp: u64) -> Confinement {
    let bits = capabilities.bits();
    Confinement {
        effective: bits,
        permitted: bits,
        inheritable: 0,
        ambient: 0,
        no_new_privileges: true,
        seccomp,
    }
}

/// The children of the service with this name.
fn helpers(service: &Service, name: &str) -> Vec<u32> {
    let mut children = children_of(service.pid()).unwrap();
    children
        .retain(|pid| read(PathBuf::from(format!("/proc/{pid}/comm"))).is_ok_and(|comm| comm.trim() == name));
    children
}

#[track_caller]
fn assert_confined(service: &Service, name: &str) {
    assert_confined_with(service, name, Capabilities::empty());
}

#[track_caller]
fn assert_confined_with(service: &Service, name: &str, capabilities: Capabilities) {
    let helpers = helpers(service, name);
    assert!(!helpers.is_empty(), "no {name} runs");
    for pid in helpers {
        let all = confinement_of(pid);
        assert_eq!(all, [with(capabilities, 2)].into(), "{name}");
        assert_eq!(std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), PathBuf::from("/"));
    }
}

#[test(flavor = "multi_thread")]
async fn service_and_helpers_have_only_the_capabilities_that_they_need() {
    require(root());
    let kept = Capabilities::CHOWN
        | Capabilities::DAC_OVERRIDE
        | Capabilities::DAC_READ_SEARCH
        | Capabilities::FOWNER
        | Capabilities::SYS_PTRACE;
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "ram", 64 << 10).await.unwrap();
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    // Tracking starts the companion, and guards and scans start threads.
    mapped.track().unwrap();
    client.checkpoint(&named("ram"), true, None).await.unwrap();
    client.resize(&named("ram"), 128 << 10).await.unwrap();
    let status = read(format!("/proc/{}/status", service.pid())).unwrap();
    assert!(status.contains(&format!("CapBnd:\t{:016x}\n", kept.bits())), "{status}");
    for thread in confinement_of(service.pid()) {
        assert!(thread == with(kept, 0) || thread == with(Capabilities::empty(), 0), "{thread:?}");
    }
    assert_confined(&service, "fdmapd-receiver");
    assert_confined(&service, "fdmapd-forks");
    assert_confined_with(&service, "fdmapd-inode", Capabilities::CHOWN | Capabilities::FOWNER);
}

#[test]
fn service_on_tcp_keeps_the_capability_to_bind() {
    require(root());
    let certificates = Certificates::new("ours");
    let path = |file: &str| certificates.path(file).to_str().unwrap().to_owned();
    let (certificate, key, authority) = (path("service"), path("service.key"), path("ca"));
    let tcp = ["--tcp", "127.0.0.1:0", "--tls-cert", &certificate, "--tls-key", &key];
    let peers = ["--tls-client-ca", &authority, "--tls-peer", "vmm.test=1000"];
    let keeps = |arguments: &[&str]| {
        let service = Service::start(arguments).unwrap();
        let all = confinement_of(service.pid());
        all.iter().any(|thread| thread.permitted & Capabilities::NET_BIND_SERVICE.bits() != 0)
    };
    assert!(keeps(&[&tcp[..], &peers].concat()));
    assert!(!keeps(&[]));
}

/// It opens files of processes of other users, and nothing else needs a capability.
#[test(flavor = "multi_thread")]
async fn holder_of_tracked_address_spaces_keeps_two_capabilities() {
    require(root());
    let kept = Capabilities::SYS_PTRACE | Capabilities::DAC_READ_SEARCH;
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "ram", 64 << 10).await.unwrap();
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    // A harvest is made by another thread of it.
    assert!(mapped.write_at(0, b"written"));
    client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert_confined_with(&service, "fdmapd-holder", kept);
    let helpers = helpers(&service, "fdmapd-holder");
    let threads = |pid: &u32| std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    assert!(helpers.iter().all(|pid| threads(pid) > 1), "each is looked at");
    let coverage = client.coverage(&named("ram")).await.unwrap();
    assert_eq!(coverage.mappings.len(), 1, "an address space is tracked all the while: {coverage:?}");
}

#[test]
fn service_of_an_ordinary_user_confines_its_helpers() {
    require(root());
    let (folder, _guard) = temp_dir("fdmap-privileges").unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let service = Service::start_as(UNPRIVILEGED, Command::new(copied(&folder, "fdmapd").unwrap())).unwrap();
    let mut session = service.fdpass().unwrap();
    session.memfd_create("ram", "ram", 0).unwrap();
    assert_eq!(confinement_of(service.pid()), [with(Capabilities::empty(), 0)].into());
    assert_confined(&service, "fdmapd-receiver");
}

/// Its helpers inherit CAP_CHOWN, though they are other programs of an ordinary user.
#[test(flavor = "multi_thread")]
async fn service_of_an_ordinary_user_adopts_for_others_by_cap_chown() {
    require(root());
    let (folder, _guard) = temp_dir("fdmap-privileges").unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!(
        "chown {UNPRIVILEGED} \"$2\" && exec setpriv --reuid {UNPRIVILEGED} --regid {UNPRIVILEGED} --clear-groups \
         --inh-caps=-all,+chown --ambient-caps=-all,+chown --bounding-set=-all,+chown {} \"$@\"",
        copied(&folder, "fdmapd").unwrap().display()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]);
    let service = Service::start_command(command).unwrap();
    let memfd = fdmap_sys::memfd::create("passed", None).unwrap();
    fdmap_sys::memfd::resize(memfd.as_fd(), 64 << 10).unwrap();
    let owner = || fdmap_sys::fd::stat(&memfd).unwrap().st_uid;
    service.fdpass().unwrap().adopt(memfd.as_fd(), "passed", None).unwrap();
    assert_eq!(owner(), UNPRIVILEGED);
    assert_confined_with(&service, "fdmapd-inode", Capabilities::CHOWN);
    service.client().await.unwrap().delete(&named("passed")).await.unwrap();
    assert_eq!(owner(), 0);
}

/// Makes the main thread of a process call this. Returns the result, unless the process is about to be killed.
fn inject(pid: u32, number: libc::c_long, arguments: [u64; 2]) -> i64 {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let deadline = Instant::now() + NOTICE_TIMEOUT;
    let thread = TracedThread::seize(pid).unwrap();
    assert_eq!(thread.stop(deadline).unwrap(), Some(true), "it waits in poll");
    let registers = thread.registers().unwrap();
    let instruction = registers.rip - 2;
    assert_eq!(thread.instruction_at(instruction), Some(SYSCALL));
    let [rdi, rsi] = arguments;
    let rax = number.cast_unsigned();
    thread
        .set_registers(&Registers { rip: instruction, rax, orig_rax: u64::MAX, rdi, rsi, ..registers })
        .unwrap();
    for _ in 0..2 {
        thread.resume(ResumeUntil::Syscall, 0).unwrap();
        // Entry and exit of the call.
        assert_eq!(thread.wait(deadline).unwrap(), Some(Stop::Syscall));
    }
    let result = thread.registers().unwrap().rax.cast_signed();
    thread.set_registers(&registers).unwrap();
    thread.detach(0).unwrap();
    result
}

/// As code of a client would, that runs in the receiver.
#[test]
fn receiver_that_reaches_for_a_socket_a_file_or_a_process_is_killed_and_replaced() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let receiver = || {
        let session = service.fdpass().unwrap();
        let receivers = helpers(&service, "fdmapd-receiver");
        assert_eq!(receivers.len(), 1);
        (session, receivers[0])
    };
    let (_session, pid) = receiver();
    for number in [libc::SYS_sync, libc::SYS_chdir, libc::SYS_socketpair, libc::SYS_memfd_create] {
        assert_eq!(inject(pid, number, [0, 0]), -i64::from(libc::ENOSYS), "call {number}");
    }
    let unix = libc::AF_UNIX.cast_unsigned().into();
    for (number, arguments) in [
        (libc::SYS_socket, [unix, 1]),
        (libc::SYS_connect, [0, 0]),
        (libc::SYS_openat, [0, 0]),
        (libc::SYS_execve, [0, 0]),
        (libc::SYS_ptrace, [0, 1]),
        (libc::SYS_kill, [1, 0]),
        (libc::SYS_unshare, [0, 0]),
    ] {
        let (_session, pid) = receiver();
        inject(pid, number, arguments);
        let ended = format!("a receiver of descriptors ended user=0 pid={pid}");
        let killed = Instant::now();
        while PathBuf::from(format!("/proc/{pid}")).exists() {
            assert!(killed.elapsed() < NOTICE_TIMEOUT, "call {number}: {pid} has not ended");
            std::thread::sleep(Duration::from_millis(10));
        }
        // At most one line in a second.
        if number == libc::SYS_socket {
            let log = service.log();
            let line = log.lines().find(|line| line.contains(&ended));
            assert!(line.is_some_and(|line| line.contains("SIGSYS")), "{log}");
        }
    }
}

/// `systemd-analyze security` rates how much of the host a unit can reach: 10 is everything, and up to 3 is well protected.
#[test]
fn unit_file_is_rated_below_3() {
    require(match Command::new("systemd-analyze").arg("--version").output() {
        Ok(_) => Ok(()),
        Err(error) => Err(HarnessError::Missing(format!("systemd-analyze: {error}"))),
    });
    let (folder, _removed) = temp_dir("fdmap-unit-").unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/fdmapd.service.in");
    let unit = folder.join("fdmapd.service");
    std::fs::write(&unit, read(source).unwrap().replace("@PREFIX@", "/usr/local")).unwrap();
    // The threshold is in tenths. Exposure above it is a failure.
    let rated = |unit: &Path| {
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=yes", "--no-pager", "--threshold=29"]).arg(unit);
        command.output().unwrap()
    };
    let output = rated(&unit);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let bare = folder.join("bare.service");
    std::fs::write(&bare, "[Service]\nExecStart=/usr/local/sbin/fdmapd\n").unwrap();
    assert!(!rated(&bare).status.success(), "a unit without protection passes");
}
