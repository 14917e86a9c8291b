//! Files of users end with their last user, in whichever way it holds them, and with their memory. Kept files stay.

mod user;

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::{Access, FileName, Lifetime, OwnedName};
use fdmap_client::{Client, ClientError};
use fdmap_sys::{fd, memfd};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, read, root};
use fdmap_tests::incidents;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::mapper::LockHolder;
use fdmap_tests::service::{Service, copied, named};
use fdmap_tests::test;
use nix::sys::signal::Signal;

fn main() -> ExitCode {
    user::main().unwrap_or_else(fdmap_tests::harness::main)
}

const USER: u32 = 65534;
/// Group of the sockets.
const GROUP: u32 = 65534;
const MIB: u64 = 1 << 20;
/// Time between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Two sweeps, and time for a loaded host.
const MAX_END: Duration = Duration::from_secs(40);

fn start_service(arguments: &[&str]) -> Service {
    let group = GROUP.to_string();
    Service::start(&[&["--group", &group], arguments].concat()).unwrap()
}

fn user(service: &Service) -> LineProcess {
    user::start(service, USER, GROUP, None).unwrap()
}

fn call(user: &mut LineProcess, command: &str) {
    user.call(command).unwrap_or_else(|error| panic!("{command}: {error}"));
}

async fn names(client: &Client) -> Vec<String> {
    let mut names: Vec<_> = client.list().await.unwrap().into_iter().map(|file| file.name).collect();
    names.sort();
    names
}

/// Waits until the service has these files, in the order of their names.
async fn wait_for(client: &Client, expected: &[&str]) {
    let began = Instant::now();
    loop {
        let found = names(client).await;
        if found == expected {
            return;
        }
        assert!(
            expected.iter().all(|name| found.contains(&(*name).to_owned())),
            "{found:?} lacks one of {expected:?}"
        );
        assert!(began.elapsed() < MAX_END, "{found:?} instead of {expected:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The name of a file of [`USER`].
fn of_user(name: &str) -> FileName {
    FileName::Owned(OwnedName { name: name.to_owned(), uid: USER })
}

fn file(name: &str, lifetime: Option<Lifetime>) -> CreateFile {
    CreateFile { name: name.to_owned(), size_bytes: MIB, lifetime, ..CreateFile::default() }
}

#[test(flavor = "multi_thread")]
async fn files_of_users_end_with_their_last_user() {
    require(root());
    let service = start_service(&["--unused-file-timeout", "25"]);
    let client = service.client().await.unwrap();
    let mut user = user(&service);
    for name in ["opened", "mapped", "hidden", "inherited", "closed", "given"] {
        call(&mut user, &format!("create {name}"));
    }
    for name in ["adopted", "adopted and closed"] {
        call(&mut user, &format!("adopt {}", name.replace(' ', "-")));
    }
    for command in
        ["map mapped", "hide hidden", "bequeath inherited", "release closed", "release adopted-and-closed"]
    {
        call(&mut user, command);
    }
    client.create(file("root", None)).await.unwrap();
    client.create(file("temporary", Some(Lifetime::Ephemeral))).await.unwrap();
    drop(service.fdpass().unwrap().open(&named("temporary"), true).unwrap());
    let access = Some(Access::private(USER, GROUP));
    let for_user = CreateFile { access, ..file("never-opened", None) };
    client.create(for_user.clone()).await.unwrap();
    client.create(CreateFile { name: "opened-later".to_owned(), ..for_user }).await.unwrap();
    client.set_access(&of_user("given"), Access::private(0, 0)).await.unwrap();
    assert_eq!(client.get(&named("given")).await.unwrap().lifetime, Lifetime::Ephemeral, "still");

    tokio::time::sleep(SWEEP_INTERVAL + Duration::from_secs(3)).await;
    call(&mut user, "open opened-later");
    assert!(names(&client).await.contains(&"never-opened".to_owned()), "it has 25 s");
    let used = ["adopted", "given", "hidden", "inherited", "mapped", "opened", "opened-later", "root"];
    wait_for(&client, &used).await;
    tokio::time::sleep(3 * SWEEP_INTERVAL).await;
    assert_eq!(names(&client).await, used, "each has a user, or is kept");

    for name in ["mapped", "hidden", "inherited"] {
        call(&mut user, &format!("release {name}"));
    }
    wait_for(&client, &["adopted", "given", "opened", "opened-later", "root"]).await;
    user.kill().unwrap();
    wait_for(&client, &["root"]).await;
}

#[test(flavor = "multi_thread")]
async fn memory_comes_back_when_its_user_ends() {
    const FILLED: u64 = 64;
    let _host = HostLock::acquire().unwrap();
    let service = Service::start_with_fd_store(&["--group", &GROUP.to_string()]).unwrap();
    let cgroup = require(Cgroup::with_limit(2 * FILLED * MIB));
    for round in 0..2 {
        let mut user = user::start(&service, USER, GROUP, Some(&cgroup)).unwrap();
        call(&mut user, "create ram");
        call(&mut user, &format!("fill ram {FILLED}"));
        assert!(cgroup.usage().unwrap() > FILLED * MIB);
        service.kill().unwrap();
        service.restart().unwrap();
        user.kill().unwrap();
        let began = Instant::now();
        while cgroup.usage().unwrap() > FILLED / 8 * MIB {
            assert!(began.elapsed() < MAX_END, "round {round}: {} bytes stay", cgroup.usage().unwrap());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    assert_eq!(names(&service.client().await.unwrap()).await, [""; 0]);
    assert_eq!(service.fd_store().names(), [""; 0], "nothing stays in the FD store");
}

#[test(flavor = "multi_thread")]
async fn lifetime_is_kept_over_restarts() {
    require(root());
    let service =
        Service::start_with_fd_store(&["--group", &GROUP.to_string(), "--allow-keep", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    client.create(file("root", None)).await.unwrap();
    let mut user = user(&service);
    call(&mut user, "create mapped");
    call(&mut user, "map mapped");
    call(&mut user, "create closed");
    call(&mut user, "release closed");
    call(&mut user, "keep kept");
    call(&mut user, "release kept");
    service.kill().unwrap();
    service.restart().unwrap();
    let client = service.client().await.unwrap();
    assert_eq!(names(&client).await, ["closed", "kept", "mapped", "root"]);
    assert_eq!(client.get(&of_user("mapped")).await.unwrap().lifetime, Lifetime::Ephemeral);
    assert_eq!(client.get(&of_user("kept")).await.unwrap().lifetime, Lifetime::Kept);
    // The restarted service gives files that no process has open their time again.
    let began = Instant::now();
    wait_for(&client, &["kept", "mapped", "root"]).await;
    assert!(began.elapsed() > Duration::from_secs(20), "{:?}", began.elapsed());
    user.kill().unwrap();
    wait_for(&client, &["kept", "root"]).await;
}

#[test(flavor = "multi_thread")]
async fn process_that_holds_its_mmap_lock_does_not_stop_the_sweep() {
    let held = memfd::create("held", None).unwrap();
    memfd::resize(held.as_fd(), 2 * 4096).unwrap();
    let path =
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&held)));
    let holder = require(LockHolder::start(&path));
    let service = start_service(&[]);
    let client = service.client().await.unwrap();
    let mut user = user(&service);
    call(&mut user, "create closed");
    call(&mut user, "release closed");
    call(&mut user, "create opened");
    wait_for(&client, &["opened"]).await;
    assert!(holder.holds(), "the lock is still held");
}

/// Without the count of the kernel, the service reads `/proc` of all processes.
#[test(flavor = "multi_thread")]
async fn search_for_users_waits_for_no_process() {
    let held = memfd::create("held", None).unwrap();
    memfd::resize(held.as_fd(), 2 * 4096).unwrap();
    let path =
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&held)));
    let holder = require(LockHolder::start(&path));
    let mut service = start_service(&["--probe", "syscalls"]);
    let client = service.client().await.unwrap();
    let mut user = user(&service);
    call(&mut user, "create closed");
    call(&mut user, "release closed");
    call(&mut user, "create mapped");
    call(&mut user, "map mapped");
    let began = Instant::now();
    let waits = format!("pid={}", holder.pid);
    while !service.log().contains(&waits) {
        assert!(began.elapsed() < MAX_END, "the log names the process that the search waits for");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    incidents::assert_reported(&service, "search-late", "the search for their users did not end");
    tokio::time::sleep(2 * SWEEP_INTERVAL).await;
    assert_eq!(names(&client).await, ["closed", "mapped"], "every file counts as used");
    drop(holder);
    wait_for(&client, &["mapped"]).await;
    service.signal(Signal::SIGTERM);
    assert!(service.ended(Duration::from_secs(5)));
}

#[test(flavor = "multi_thread")]
async fn stopped_search_does_not_outlive_the_service() {
    let held = memfd::create("held", None).unwrap();
    memfd::resize(held.as_fd(), 2 * 4096).unwrap();
    let path =
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&held)));
    let _holder = require(LockHolder::start(&path));
    let mut service = start_service(&["--probe", "syscalls"]);
    let mut user = user(&service);
    call(&mut user, "create closed");
    call(&mut user, "release closed");
    let began = Instant::now();
    let search = loop {
        let children = fdmap_tests::host::children_of(service.pid()).unwrap();
        let named = |pid: &&u32| {
            read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "fdmapd-search")
        };
        if let Some(search) = children.iter().find(named) {
            break *search;
        }
        assert!(began.elapsed() < MAX_END, "no search runs");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let status = read(format!("/proc/{search}/status")).unwrap();
    // CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE.
    assert!(status.contains(&format!("CapEff:\t{:016x}\n", 1_u64 << 2 | 1 << 19)), "{status}");
    assert!(status.contains("NoNewPrivs:\t1\n") && status.contains("Seccomp:\t2\n"), "{status}");
    service.signal(Signal::SIGKILL);
    assert!(service.ended(Duration::from_secs(5)));
    let killed = Instant::now();
    while std::fs::exists(format!("/proc/{search}")).unwrap() {
        assert!(killed.elapsed() < Duration::from_secs(5), "the search waits for the lock");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test(flavor = "multi_thread")]
async fn users_keep_files_only_with_permission() {
    require(root());
    let refused =
        "user 65534 may not keep files: they end with their last user. `fdmapd --allow-keep` permits it";
    for (arguments, permitted) in [
        (&[][..], false),
        (&["--allow-keep", "1", "--allow-keep", "@1"], false),
        (&["--allow-keep", "1", "--allow-keep", "65534"], true),
        (&["--allow-keep", "@65534"], true),
        (&["--allow-keep", "all"], true),
    ] {
        let service = start_service(arguments);
        let mut user = user(&service);
        call(&mut user, "create ephemeral");
        match user.call("keep kept") {
            Ok(_) => assert!(permitted, "{arguments:?}"),
            Err(error) => {
                assert!(!permitted && error.to_string().contains(refused), "{arguments:?}: {error}")
            }
        }
        let created = fdmap(&service, &["--json", "create", "by-command", "--size", "64K", "--keep"]);
        assert_eq!(created.status.success(), permitted, "{arguments:?}: {created:?}");
        let text =
            String::from_utf8_lossy(if permitted { &created.stdout } else { &created.stderr }).into_owned();
        assert!(text.contains(if permitted { "\"lifetime\":\"kept\"" } else { refused }), "{text}");
        let client = service.client().await.unwrap();
        let lifetime = client.get(&of_user("ephemeral")).await.unwrap().lifetime;
        assert_eq!(lifetime, Lifetime::Ephemeral, "{arguments:?}");
    }
    let error = Service::start(&["--allow-keep", "no such user"]).unwrap_err();
    assert!(error.to_string().contains("neither a user"), "{error}");
}

/// Runs `fdmap` as [`USER`].
fn fdmap(service: &Service, arguments: &[&str]) -> Output {
    use std::os::unix::process::CommandExt as _;
    let mut command = Command::new(copied(service.folder(), "fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).args(arguments).uid(USER).gid(GROUP);
    command.output().unwrap()
}

#[test(flavor = "multi_thread")]
async fn names_of_a_file_are_no_users() {
    require(root());
    let folder = tempfile_in_shm();
    let path = |name: &str| folder.path().join(name);
    for name in ["opened", "closed", "linked", "unlinked"] {
        std::fs::write(path(name), [1; 4096]).unwrap();
        std::os::unix::fs::chown(path(name), Some(USER), None).unwrap();
    }
    let service = start_service(&[]);
    let client = service.client().await.unwrap();
    let mut user = user(&service);
    for name in ["opened", "closed", "linked", "unlinked"] {
        call(&mut user, &format!("adopt {name} {}", path(name).display()));
    }
    // Another process opens it by its other name, and both names are removed.
    std::fs::hard_link(path("unlinked"), path("other")).unwrap();
    let by_other_name = std::fs::File::open(path("other")).unwrap();
    std::fs::hard_link(path("linked"), path("another")).unwrap();
    for name in ["unlinked", "other"] {
        std::fs::remove_file(path(name)).unwrap();
    }
    for name in ["closed", "linked", "unlinked"] {
        call(&mut user, &format!("release {name}"));
    }
    wait_for(&client, &["linked", "opened", "unlinked"]).await;
    tokio::time::sleep(3 * SWEEP_INTERVAL).await;
    assert_eq!(names(&client).await, ["linked", "opened", "unlinked"]);
    drop(by_other_name);
    std::fs::remove_file(path("another")).unwrap();
    wait_for(&client, &["opened"]).await;
    assert!(std::fs::exists(path("closed")).unwrap(), "its file system keeps it");
}

#[test(flavor = "multi_thread")]
async fn user_at_the_limit_gets_files_as_soon_as_others_have_no_user() {
    require(root());
    let service = start_service(&["--max-files-per-user", "3"]);
    let client = service.client().await.unwrap();
    let mut user = user(&service);
    for name in ["a", "b", "c"] {
        call(&mut user, &format!("create {name}"));
    }
    let error = user.call("create d").unwrap_err();
    assert!(
        error.to_string().contains("user 65534 has 3 files; 1 more would exceed the limit of 3"),
        "{error}"
    );
    // Ephemeral files of administrators are limited, too: a program that creates memfds without end must leave some to others.
    for nth in 0..5 {
        client.create(file(&format!("kept-{nth}"), None)).await.unwrap();
    }
    let mut ephemeral = Vec::new();
    for nth in 0..3 {
        let name = format!("ephemeral-{nth}");
        client.create(file(&name, Some(Lifetime::Ephemeral))).await.unwrap();
        ephemeral.push(service.fdpass().unwrap().open(&named(&name), true).unwrap());
    }
    let error = client.create(file("fourth", Some(Lifetime::Ephemeral))).await.unwrap_err();
    let exhausted = matches!(&error, ClientError::Refused { code: RefusalCode::ResourceExhausted, message, .. }
        if message.contains("user 0 has 3 ephemeral files"));
    assert!(exhausted, "{error}");
    for name in ["a", "b", "c"] {
        call(&mut user, &format!("release {name}"));
    }
    let began = Instant::now();
    while user.call("create d").is_err() {
        assert!(began.elapsed() < Duration::from_secs(8), "the limit causes sweeps");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let stat = fd::stat(&ephemeral[0].0).unwrap();
    assert_eq!(u64::try_from(stat.st_size).unwrap(), MIB);
}

/// Ephemeral files, as ordinary users create them.
#[test]
fn user_at_the_limit_leaves_files_to_other_users() {
    const OTHER: u32 = 1234;
    const LIMIT: usize = 3;
    require(root());
    let service = start_service(&["--max-files-per-user", &LIMIT.to_string()]);
    let mut users = [USER, OTHER].map(|uid| (uid, user::start(&service, uid, GROUP, None).unwrap()));
    for (uid, user) in &mut users {
        for nth in 0..LIMIT {
            call(user, &format!("create file-{nth}"));
        }
        for request in ["create another", "adopt another"] {
            let error = user.call(request).unwrap_err().to_string();
            let expected = format!("user {uid} has {LIMIT} files; 1 more would exceed the limit of {LIMIT}");
            assert!(error.contains(&expected), "{request}: {error}");
        }
    }
    // Each file of the second user works, while the first one is at its limit.
    let [_, (_, other)] = &mut users;
    for nth in 0..LIMIT {
        call(other, &format!("fill file-{nth} 1"));
    }
}

fn tempfile_in_shm() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}
