//! Access to the service: health and reflection, shared snapshots, mapped files, restarts.

use std::os::fd::AsFd as _;
use std::process::Command;
use std::time::Duration;

use fdmap_client::Client;
use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{Access, FileName, Lifetime, PageIndex, PageRange, PageState, ProbeKind};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{Errno, memfd};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::pages_of;
use fdmap_tests::raw::channel;
use fdmap_tests::service::{Service, copied, named, program};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use tokio_stream::StreamExt as _;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

async fn create(client: &Client, name: &str, pages: u64) {
    let (name, size_bytes) = (name.to_owned(), pages * PAGE);
    client.create(CreateFile { name, size_bytes, ..CreateFile::default() }).await.unwrap();
}

#[test]
async fn health_and_reflection_answer() {
    let service = Service::start(&[]).unwrap();
    let channel = channel(&service.endpoint(), 1 << 16).await.unwrap();
    let mut health = HealthClient::new(channel.clone());
    for name in ["", "fdmap.v1.Files", "fdmap.v1.Pages", "fdmap.v1.Host"] {
        let answer =
            health.check(HealthCheckRequest { service: name.to_owned() }).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{name}");
    }
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let stream = tokio_stream::once(request);
    let mut answers =
        ServerReflectionClient::new(channel).server_reflection_info(stream).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) =
        answers.next().await.unwrap().unwrap().message_response
    else {
        panic!("expected a list of services");
    };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["fdmap.v1.Files", "fdmap.v1.Pages", "fdmap.v1.Host", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(!names.contains(&"fdmap.v1.Migration"), "fdmapd does not serve it: {names:?}");
}

#[test]
async fn shared_snapshot_equals_the_scan() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    let client = service.client().await.unwrap();
    let pages = 20_000;
    create(&client, "shared", pages).await;
    let cgroup = Cgroup::with_limit(pages * PAGE / 2).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&service, "shared").unwrap();
    agent.fill(Pattern { seed: 2, percent: 85 }, 0, pages).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;

    let (scan, _) = pages_of(&client, "shared").await.unwrap();
    assert!(scan.iter().filter(|(state, _)| state.is_swapped()).count() > 3000);
    let mut fdpass = service.fdpass().unwrap();
    let entries = fdpass.snapshot(&named("shared"), None, BodyLayout::Entries, Duration::ZERO).unwrap();
    let states = fdpass.snapshot(&named("shared"), None, BodyLayout::States, Duration::ZERO).unwrap();
    assert_eq!(entries.header().provenance.probe, ProbeKind::Xarray);
    assert_eq!((entries.header().file_pages, entries.header().range), (pages, PageRange::first(pages)));
    for (page, (state, slot)) in (0..pages).map(PageIndex).zip(&scan) {
        let entry = entries.entry(page).unwrap();
        assert_eq!((entry.state(), entry.slot()), (*state, *slot), "page {page}");
        assert_eq!(states.state(page), Some(*state), "page {page}");
    }
    assert_eq!(entries.state(PageIndex(pages)), None);
    assert_eq!(states.entry(PageIndex(0)), None, "a state of two bits contains no entry");
    let part = PageRange::new(PageIndex(99), PageIndex(105));
    let part = fdpass.snapshot(&named("shared"), part, BodyLayout::Entries, Duration::ZERO).unwrap();
    assert_eq!(part.entry(PageIndex(104)), entries.entry(PageIndex(104)));
    assert_eq!((part.entry(PageIndex(98)), part.entry(PageIndex(105))), (None, None));
    // The snapshot is memory of the service. No client can write to it.
    assert!(SharedMapping::shared(entries.as_fd(), 0, 4096, true).is_err());
    // Root may reopen the file for writing, but the seals bind root too.
    let writable = fdmap_sys::fd::reopen(entries.as_fd(), true).unwrap();
    assert_eq!(nix::unistd::write(&writable, b"x"), Err(nix::errno::Errno::EPERM));
    assert!(SharedMapping::shared(writable.as_fd(), 0, 4096, true).is_err());
}

#[test]
async fn shared_snapshots_of_a_user_are_bounded() {
    require(root());
    let service = Service::start(&["--max-shared-snapshot-bytes", "100000", "--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    let access = Access::from_mode(65534, 65534, 0o600);
    let (name, size_bytes) = ("bounded".to_owned(), 10_000 * PAGE);
    let file = CreateFile { name, size_bytes, access: Some(access), ..CreateFile::default() };
    client.create(file).await.unwrap();
    // 10,000 entries take 80,000 bytes. One snapshot fits into the limit, two at once do not, two in sequence do.
    let fdmap = copied(service.folder(), "fdmap").unwrap();
    let run = |layout: &str| {
        let mut command = Command::new(&fdmap);
        use std::os::unix::process::CommandExt as _;
        command.arg("--runtime-dir").arg(service.folder()).args(["snapshot", "bounded", "--layout", layout]);
        command.uid(65534).gid(65534).output().unwrap()
    };
    for _ in 0..5 {
        assert!(run("entries").status.success());
    }
    client.resize(&named("65534/bounded"), 20_000 * PAGE).await.unwrap();
    let refused = run("entries");
    assert_eq!(refused.status.code(), Some(6));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("more than the limit of 100000"));
    assert!(run("states").status.success(), "5,000 bytes fit");
}

#[test]
async fn mapped_file_is_shared_between_clients() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "memory", 10).await;
    let mut fdpass = service.fdpass().unwrap();
    let one = fdpass.map(&named("memory"), true).unwrap();
    let two = fdpass.map(&named("memory"), false).unwrap();
    assert!(one.write_at(5 * PAGE + 1, b"hello"));
    let mut read = [0; 5];
    assert!(two.read_at(5 * PAGE + 1, &mut read));
    assert_eq!(&read, b"hello");
    assert!(!two.write_at(0, b"x"), "read-only");
    assert!(!one.write_at(10 * PAGE - 1, b"xx"), "past the end");
    let (pages, _) = pages_of(&client, "memory").await.unwrap();
    assert_eq!(pages[5].0, PageState::Resident);
    client.delete(&named("memory")).await.unwrap();
    assert!(one.write_at(0, b"still here"), "existing mappings survive the deletion");
}

#[test]
async fn killed_service_is_replaced_and_a_second_one_is_refused() {
    let service = Service::start(&[]).unwrap();
    let mut second = Command::new(program("fdmapd").unwrap());
    let second = second.arg("--runtime-dir").arg(service.folder()).output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another fdmapd"));
    assert!(service.fdpass().is_ok(), "the first service still works");

    let folder = service.folder().to_owned();
    service.signal(Signal::SIGKILL);
    let mut service = service;
    assert!(service.ended(Duration::from_secs(5)));
    assert!(folder.join("fdmap.sock").exists(), "a killed service leaves its sockets behind");
    let mut next =
        Command::new(program("fdmapd").unwrap()).arg("--runtime-dir").arg(&folder).spawn().unwrap();
    for attempt in 0.. {
        if service.fdpass().is_ok() {
            break;
        }
        assert!(attempt < 500, "the next service does not start");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(next.id() as i32), Signal::SIGTERM).unwrap();
    assert!(next.wait().unwrap().success());
    assert!(!folder.join("fdmap.sock").exists() && !folder.join("fdpass.sock").exists());
}

/// A file that is kept, of `uid`.
fn kept(name: String, uid: u32) -> CreateFile {
    CreateFile {
        name,
        size_bytes: PAGE,
        access: Some(Access::private(uid, uid)),
        lifetime: Some(Lifetime::Kept),
        ..CreateFile::default()
    }
}

/// The names of stored descriptors are one string of the environment of the next service, of 128 KiB at most.
#[test]
async fn more_files_than_the_store_takes_do_not_stop_a_restart() {
    const USER: u32 = 1001;
    const OF_USER: u32 = 1200;
    const OF_ROOT: u32 = 1200;
    require(root());
    // The test has two descriptors of each one in the store.
    let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, descriptors, descriptors).unwrap();
    let service = Service::start_with_fd_store(&[]).unwrap();
    let client = service.client().await.unwrap();
    for number in 0..OF_USER {
        client.create(kept(format!("{number}"), USER)).await.unwrap();
    }
    client.create(kept("other".to_owned(), USER + 1)).await.unwrap();
    for number in 0..OF_ROOT {
        client.create(kept(format!("{number}"), 0)).await.unwrap();
    }
    let stored_files = || {
        let names = service.fd_store().names();
        names.iter().filter(|name| name.ends_with(".file")).count()
    };
    service.kill().unwrap();
    let stored = stored_files();
    assert!(stored < (OF_USER + OF_ROOT) as usize, "the store has no room for all: {stored}");

    service.restart().unwrap();
    let client = service.client().await.unwrap();
    let files = client.list().await.unwrap();
    assert_eq!(files.len(), stored);
    let of = |uid| files.iter().filter(|file| file.access.uid == uid).count();
    assert!(of(USER) >= 1024, "a user has as many as the quota allows: {}", of(USER));
    assert_eq!(of(USER + 1), 1, "one user leaves room for the next one");
    assert!(of(0) >= 1000, "{}", of(0));

    // The room of deleted files is used again.
    for file in files.iter().filter(|file| file.access.uid == 0) {
        client.delete(&FileName::Id(file.id)).await.unwrap();
    }
    for number in 0..OF_ROOT {
        client.create(kept(format!("again{number}"), 0)).await.unwrap();
    }
    service.kill().unwrap();
    assert_eq!(stored_files(), stored);
}

#[test]
async fn service_stops_while_clients_are_connected() {
    let mut service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let mut watch = client.watch().await.unwrap();
    watch.next().await.unwrap();
    let _session = service.fdpass().unwrap();
    service.signal(Signal::SIGTERM);
    assert!(service.ended(Duration::from_secs(8)), "a watch delays the stop by the grace period only");
}

/// Starts a service as a user without privileges.
fn unprivileged(arguments: &[&str]) -> fdmap_tests::HarnessResult<Service> {
    // The program file is needed only until the service runs.
    let (folder, _removed) = fdmap_tests::host::temp_dir("fdmap-unprivileged-")?;
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&folder, open).unwrap();
    let mut command = Command::new(copied(&folder, "fdmapd").unwrap());
    command.args(arguments);
    Service::start_as(65534, command)
}

/// Any user could have put a socket there.
#[test]
async fn stranger_in_a_shared_directory_is_not_trusted() {
    require(root());
    let service = unprivileged(&[]).unwrap();
    service.client().await.unwrap();
    let path = service.folder();
    let set = |mode, owner| {
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    set(0o1777, 0);
    let refused = service.client().await.map(drop).unwrap_err();
    let error = fdmap_proto::error_chain(&refused);
    assert!(error.contains("user 65534 listens there"), "{error}");
    let refused = service.fdpass().map(drop).unwrap_err();
    let error = fdmap_proto::error_chain(&refused);
    assert!(error.contains("user 65534 listens there"), "{error}");
    // As the owner of the directory it is trusted, and where only root can write.
    for (mode, owner) in [(0o1777, 65534), (0o755, 0)] {
        set(mode, owner);
        service.client().await.unwrap();
        service.fdpass().unwrap();
    }
    set(0o755, 65534);
}

#[test]
async fn unprivileged_service_uses_syscalls_and_reports_what_is_missing() {
    require(root());
    let service = unprivileged(&[]).unwrap();
    let client = service.client().await.unwrap();
    let info = client.host_info().await.unwrap();
    assert_eq!((info.probe, info.uid), (ProbeKind::Syscalls, 65534));
    let walk = info.capabilities.iter().find(|capability| capability.name == "xarray-walk").unwrap();
    assert_eq!(walk.availability, fdmap_client::grpc::Availability::Unavailable);
    assert!(!walk.detail.is_empty() && walk.impact.contains("swap slots"), "{walk:?}");
    create(&client, "plain", 10).await;
    let mapped = service.fdpass().unwrap().map(&named("plain"), true).unwrap();
    assert!(mapped.write_at(3 * PAGE, b"x"));
    let (pages, provenance) = pages_of(&client, "plain").await.unwrap();
    let data: Vec<_> = pages.iter().map(|(state, _)| *state == PageState::Resident).collect();
    assert_eq!(data, [false, false, false, true, false, false, false, false, false, false]);
    assert_eq!(provenance.probe, ProbeKind::Syscalls);

    // A memfd of another user: the service cannot become the owner of the inode, and mincore would misreport its
    // pages.
    let memfd = memfd::create("roots", None).unwrap();
    memfd::resize(memfd.as_fd(), PAGE).unwrap();
    let error = service.fdpass().unwrap().adopt(memfd.as_fd(), "roots", None).unwrap_err();
    assert_eq!(error.refusal(), Some(RefusalCode::FailedPrecondition));
    assert_eq!(fdmap_sys::fd::stat(&memfd).unwrap().st_uid, 0, "the inode is unchanged");

    let forced = unprivileged(&["--probe", "xarray"]).unwrap_err();
    assert!(fdmap_proto::error_chain(&forced).contains("xarray probe does not work here"), "{forced}");
}

#[test]
async fn opened_descriptor_has_its_own_file_description() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "own", 4).await;
    let mut fdpass = service.fdpass().unwrap();
    let (one, _) = fdpass.open(&named("own"), true).unwrap();
    let (two, _) = fdpass.open(&named("own"), true).unwrap();
    nix::unistd::lseek(&one, 100, nix::unistd::Whence::SeekSet).unwrap();
    assert_eq!(
        nix::unistd::lseek(&two, 0, nix::unistd::Whence::SeekCur).unwrap(),
        0,
        "offsets are not shared"
    );
    // inotify reports writes through this descriptor, unlike writes through the descriptor of memfd_create.
    let inotify = nix::sys::inotify::Inotify::init(nix::sys::inotify::InitFlags::IN_NONBLOCK).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&one));
    inotify.add_watch(path.as_str(), nix::sys::inotify::AddWatchFlags::IN_MODIFY).unwrap();
    nix::sys::uio::pwrite(&two, b"x", 0).unwrap();
    assert_eq!(inotify.read_events().unwrap().len(), 1);
    let (read_only, _) = fdpass.open(&named("own"), false).unwrap();
    assert_eq!(nix::unistd::write(&read_only, b"x").unwrap_err(), Errno::EBADF);
}
