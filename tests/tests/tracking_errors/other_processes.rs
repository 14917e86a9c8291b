//! Mappings that another process registers for tracking, and memory that is not a memfd.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use fdmap_client::error::RefusalCode::{AlreadyExists, FailedPrecondition, InvalidArgument, NotFound};
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, ClientMapping, GapKind, MappingId, PageIndex};
use fdmap_client::{Client, ClientError, FdpassClient, Timeouts};
use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::credentials::become_user;
use fdmap_sys::testing::segment::Segment;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::service::{Service, copied, named, program};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{Command as AgentCommand, MemfdCommand};

use crate::fixture::{PAGE, assert_service_works, changed, create, refused, service};

fn inode(file: impl std::os::fd::AsFd) -> FileName {
    let stat = fd::stat(&file).unwrap();
    FileName::Inode { device: stat.st_dev, number: stat.st_ino }
}

fn whole(range: AddressRange) -> ClientMapping {
    ClientMapping { address: range.start, length_bytes: range.len(), first_page: PageIndex(0) }
}

/// An agent whose file is adopted and whose mapping is tracked by this process.
fn adopted(session: &mut FdpassClient, name: &str) -> (MemfdAgent, FileName, Vec<MappingId>) {
    let mut agent = MemfdAgent::start(64, None).unwrap();
    session.adopt(agent.file.as_fd(), name, None).unwrap();
    let file = inode(&agent.file);
    let uffd = agent.userfaultfd().unwrap();
    agent.call(MemfdCommand::CloseUserfaultfd).unwrap();
    let (pid, mapping) = (agent.agent.pid(), whole(agent.range));
    let ids = session.track_process(pid, &file, uffd.as_fd(), None, None, &[mapping]).unwrap();
    (agent, file, ids)
}

async fn next(client: &Client, name: &str) -> (Vec<u64>, Vec<GapKind>) {
    let before = client.coverage(&named(name)).await.unwrap().generation;
    let made = client.checkpoint(&named(name), true, None).await.unwrap();
    (changed(client, name, before).await, made.coverage.gaps.iter().map(|gap| gap.kind).collect())
}

#[test(flavor = "multi_thread")]
async fn process_is_tracked_and_detached_by_another() {
    require(root());
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let (mut agent, file, ids) = adopted(&mut session, "theirs");
    for _ in 0..3 {
        client.checkpoint(&named("theirs"), true, None).await.unwrap();
    }
    agent.write(7).unwrap();
    let (reported, gaps) = next(&client, "theirs").await;
    assert_eq!(reported, [7]);
    assert!(!gaps.contains(&GapKind::UntrackedMapping), "{gaps:?}");

    // The agent writes one page before the detach and one after it.
    agent.write(8).unwrap();
    let pid = agent.agent.pid();
    refused(session.detach(None, &file, &ids), NotFound, &["no tracked mapping"]);
    assert_eq!(session.detach(Some(pid), &file, &ids).unwrap(), 1);
    assert_eq!(session.detach(Some(pid), &file, &[]).unwrap(), 0, "no tracked mapping is left");
    agent.write(9).unwrap();
    let (reported, gaps) = next(&client, "theirs").await;
    assert!([8, 9].iter().all(|page| reported.contains(page)), "{reported:?}");
    assert!(gaps.contains(&GapKind::UntrackedMapping), "{gaps:?}");
    // The range is no longer registered, so another userfaultfd can register it.
    agent.track(UffdFeatures::empty()).unwrap();
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn write_after_detach_is_reported_despite_munmap() {
    require(root());
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let (mut agent, file, _) = adopted(&mut session, "theirs");
    for page in 0..64 {
        agent.write(page).unwrap();
    }
    for _ in 0..3 {
        client.checkpoint(&named("theirs"), true, None).await.unwrap();
    }
    session.detach(Some(agent.agent.pid()), &file, &[]).unwrap();
    agent.write(3).unwrap();
    agent.call(MemfdCommand::Unmap).unwrap();
    let (reported, _) = next(&client, "theirs").await;
    assert!(reported.contains(&3), "{reported:?}");
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn tracking_of_another_users_process_is_refused() {
    require(root());
    let service = Service::start(&["--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    let mut command = Command::new(copied(service.folder(), fdmap_tests::test_agent::PROGRAM).unwrap());
    command.uid(65534).gid(65534);
    let mut unprivileged = TestAgent::start_by(command, None).unwrap();
    let message = unprivileged
        .call(&AgentCommand::TrackFor { runtime_dir: service.folder().to_owned(), pid: std::process::id() });
    let message = message.unwrap_err().to_string();
    assert!(message.contains("user 65534 has no process"), "{message}");
    assert_service_works(&service, &client).await;
}

/// Code and text of the answers to Track and Detach about each process, to a user. The texts lack the number of the process.
fn answers_about(service: &Service, user: u32, pids: &[u32]) -> Vec<[String; 2]> {
    let answer = |pid: u32, result: Result<(), ClientError>| match result {
        Ok(()) => "ok".to_owned(),
        Err(ClientError::Refused { code, message }) => {
            format!("{code:?}: {}", message.replace(&format!("process {pid} "), "process PID "))
        }
        Err(other) => panic!("{other:?}"),
    };
    let request = || {
        become_user(user, 65534).unwrap();
        let mut session = FdpassClient::connect(&service.endpoint(), Timeouts::default()).unwrap();
        session.memfd_create("mine", "mine", 0).unwrap();
        let mine = named("mine");
        let nothing = ClientMapping { address: PAGE, length_bytes: PAGE, first_page: PageIndex(0) };
        let mut answers_about = |pid: u32| {
            let uffd = Userfaultfd::create_user_mode_only().unwrap();
            let tracked = session.track_process(pid, &mine, uffd.as_fd(), None, None, &[nothing]).map(drop);
            [answer(pid, tracked), answer(pid, session.detach(Some(pid), &mine, &[]).map(drop))]
        };
        pids.iter().map(|pid| answers_about(*pid)).collect()
    };
    std::thread::scope(|scope| scope.spawn(request).join().unwrap())
}

/// A process that waits until it is killed.
fn waiting_process_of(uid: u32) -> (LineProcess, u32) {
    let mut command = Command::new("cat");
    command.uid(uid).gid(65534);
    let process = LineProcess::start(command, None).unwrap();
    let pid = process.pid();
    (process, pid)
}

#[test(flavor = "multi_thread")]
async fn process_of_another_user_is_as_if_it_did_not_exist() {
    const ATTACKER: u32 = 65534;
    const VICTIM: u32 = 1234;
    require(root());
    let service = Service::start(&["--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    let access = Some(Access::private(VICTIM, 65534));
    let file = CreateFile { name: "ram".to_owned(), size_bytes: 64 * PAGE, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let mut command = Command::new(copied(service.folder(), fdmap_tests::test_agent::PROGRAM).unwrap());
    command.uid(VICTIM).gid(65534);
    let mut tracked = TestAgent::start_by(command, None).unwrap();
    tracked.map(&service, "ram", true).unwrap();
    let (_victim, victim_pid) = waiting_process_of(VICTIM);
    let (_root, root_pid) = waiting_process_of(0);
    let (ended, ended_pid) = waiting_process_of(VICTIM);
    ended.kill().unwrap();
    let (_own, own_pid) = waiting_process_of(ATTACKER);

    let pids = [u32::MAX >> 1, ended_pid, victim_pid, tracked.pid(), root_pid, 1, own_pid];
    let answers = answers_about(&service, ATTACKER, &pids);
    let (own, others) = answers.split_last().unwrap();
    let expected = "PermissionDenied: user 65534 has no process PID whose mappings may be tracked".to_owned();
    for (pid, answers) in pids.iter().zip(others) {
        assert_eq!(*answers, [expected.clone(), expected.clone()], "process {pid}");
    }
    // The requests themselves are valid.
    assert!(own[0] != expected && own[1] == "ok", "{own:?}");
}

#[test(flavor = "multi_thread")]
async fn missing_process_and_mapping_are_refused() {
    require(root());
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mut agent = MemfdAgent::start(64, None).unwrap();
    session.adopt(agent.file.as_fd(), "theirs", None).unwrap();
    let file = inode(&agent.file);
    let uffd = agent.userfaultfd().unwrap();
    let pid = agent.agent.pid();
    let none = session.detach(Some(u32::MAX >> 1), &file, &[]);
    refused(none, NotFound, &["process", "not found"]);
    let mut beyond = whole(agent.range);
    beyond.address += 64 * PAGE;
    let tracked = session.track_process(pid, &file, uffd.as_fd(), None, None, &[beyond]);
    assert!(tracked.is_err(), "{tracked:?}");
    // A userfaultfd of this process cannot register memory of another process.
    let own = Userfaultfd::create().unwrap();
    let tracked = session.track_process(pid, &file, own.as_fd(), None, None, &[whole(agent.range)]);
    assert!(tracked.is_err(), "{tracked:?}");
    let missing = FileName::Inode { device: 1, number: 2 };
    refused(session.open(&missing, false), NotFound, &["inode 2"]);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn memfd_create_matches_the_system_call() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let (made, info) = session.memfd_create("guest.1", "guest", 0).unwrap();
    assert_eq!((info.name.as_str(), info.size_bytes), ("guest.1", 0));
    assert_eq!(fd::link_target(made.as_fd()).unwrap(), "/memfd:guest (deleted)");
    assert_eq!(memfd::seals(made.as_fd()).unwrap() & 1, 1, "F_SEAL_SEAL is set without MFD_ALLOW_SEALING");
    memfd::resize(made.as_fd(), 64 * PAGE).unwrap();
    let mapping = SharedMapping::shared(&made, 0, (64 * PAGE) as usize, true).unwrap();
    assert!(mapping.write_at(5 * PAGE as usize, b"x"));
    let (reported, _) = next(&client, "guest.1").await;
    assert_eq!(reported, [5]);
    refused(session.memfd_create("guest.1", "guest", 0).map(drop), AlreadyExists, &["guest.1"]);
    refused(session.memfd_create("guest.2", "guest", 1 << 6).map(drop), InvalidArgument, &["0x40"]);
    refused(
        session.memfd_create("guest.2", &"x".repeat(250), 0).map(drop),
        InvalidArgument,
        &["memfd_create"],
    );
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn adopted_shared_memory_keeps_its_owner() {
    require(root());
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let segment = tempfile::Builder::new().prefix("fdmap-segment-").tempfile_in("/dev/shm").unwrap();
    std::os::unix::fs::chown(segment.path(), Some(65534), Some(65534)).unwrap();
    segment.as_file().set_len(64 * PAGE).unwrap();
    let before = fd::stat(segment.as_file()).unwrap();
    let info = session.adopt(segment.as_file().as_fd(), "", None).unwrap();
    assert_eq!(info.name, segment.path().file_name().unwrap().to_str().unwrap());
    let after = fd::stat(segment.as_file()).unwrap();
    assert_eq!((after.st_uid, after.st_mode), (before.st_uid, before.st_mode));
    client.checkpoint(&named(&info.name), true, None).await.unwrap();
    let mapping = SharedMapping::shared(segment.as_file(), 0, (64 * PAGE) as usize, true).unwrap();
    assert!(mapping.write_at(9 * PAGE as usize, b"x"));
    let (reported, _) = next(&client, &info.name).await;
    assert_eq!(reported, [9]);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn deleted_memfd_gets_its_owner_back() {
    require(root());
    let (service, client) = service().await;
    let memfd = memfd::create("adopted", None).unwrap();
    memfd::resize(memfd.as_fd(), PAGE).unwrap();
    nix::unistd::fchown(&memfd, Some(65534.into()), Some(65534.into())).unwrap();
    let before = fd::stat(&memfd).unwrap();
    service.fdpass().unwrap().adopt(memfd.as_fd(), "", None).unwrap();
    assert_ne!(fd::stat(&memfd).unwrap().st_uid, before.st_uid);
    client.delete(&named("adopted")).await.unwrap();
    let after = fd::stat(&memfd).unwrap();
    assert_eq!((after.st_uid, after.st_gid, after.st_mode), (before.st_uid, before.st_gid, before.st_mode));
    assert_service_works(&service, &client).await;
}

/// Attaches the segment, increments a byte of a page, and detaches the segment.
fn increment_briefly(segment: &Segment, page: u64) {
    let attached = segment.attach().unwrap();
    let at = (page * PAGE) as usize;
    attached.write(at, attached.read(at).unwrap().wrapping_add(1)).unwrap();
    Segment::detach(attached).unwrap();
}

/// Writes all of a new segment and transfers it to the service. Returns its name and a descriptor of it.
fn adopt_segment(segment: &Segment, service: &Service) -> (String, File) {
    let attached = segment.attach().unwrap();
    attached.write_all(0, &[7; 64 * PAGE as usize]).unwrap();
    let range = attached.range(0, attached.len());
    let path = format!("/proc/self/map_files/{:x}-{:x}", range.start, range.end);
    let opened = File::options().read(true).write(true).open(path).unwrap();
    let info = service.fdpass().unwrap().adopt(opened.as_fd(), "", None).unwrap();
    Segment::detach(attached).unwrap();
    (info.name, opened)
}

/// Maps memory that no other process maps, reads and writes a page, and unmaps the memory.
fn write_briefly(page: u64, map: impl Fn() -> SharedMapping) {
    let mapping = map();
    let at = (page * PAGE) as usize;
    assert!(mapping.read_at(at, &mut [0]));
    assert!(mapping.write_at(at, &[page as u8 + 1]));
}

#[test(flavor = "multi_thread")]
async fn short_lived_mapping_by_path_is_reported_every_time() {
    require(root());
    for arguments in [&[][..], &["--no-call-trace"]] {
        let service = Service::start(arguments).unwrap();
        let client = service.client().await.unwrap();
        create(&client, "ram").await;
        let segment = tempfile::Builder::new().prefix("fdmap-segment-").tempfile_in("/dev/shm").unwrap();
        segment.as_file().set_len(64 * PAGE).unwrap();
        fdmap_sys::fd::write_at(segment.as_file().as_fd(), 0, &[7; 64 * PAGE as usize]).unwrap();
        service.fdpass().unwrap().adopt(segment.as_file().as_fd(), "shared", None).unwrap();
        for _ in 0..3 {
            client.checkpoint(&named("shared"), true, None).await.unwrap();
        }
        for page in 1..5 {
            write_briefly(page, || {
                SharedMapping::shared(segment.as_file(), 0, (64 * PAGE) as usize, true).unwrap()
            });
            let (reported, _) = next(&client, "shared").await;
            assert!(reported.contains(&page), "page {page} with {arguments:?}: {reported:?}");
        }
        assert_service_works(&service, &client).await;
    }
}

#[test(flavor = "multi_thread")]
async fn short_lived_shmat_is_reported() {
    require(root());
    let segment = Segment::new(64 * PAGE as usize).unwrap();
    for arguments in [&[][..], &["--no-call-trace"]] {
        let service = Service::start(arguments).unwrap();
        let client = service.client().await.unwrap();
        create(&client, "ram").await;
        let (name, opened) = adopt_segment(&segment, &service);
        assert!(name.starts_with("SYSV"), "{name}");
        drop(opened);
        for _ in 0..3 {
            client.checkpoint(&named(&name), true, None).await.unwrap();
        }
        for page in 1..4 {
            increment_briefly(&segment, page);
            let (reported, _) = next(&client, &name).await;
            assert!(reported.contains(&page), "page {page} with {arguments:?}: {reported:?}");
        }
        assert_service_works(&service, &client).await;
    }
}

/// The atime of a segment has the resolution of a clock tick: a second attach within the tick leaves it as it is.
#[test(flavor = "multi_thread")]
async fn second_shmat_in_one_clock_tick_is_reported() {
    require(root());
    let segment = Segment::new(64 * PAGE as usize).unwrap();
    let (service, client) = service().await;
    let (name, opened) = adopt_segment(&segment, &service);
    // The writes before the adoption may be in progress for some seconds.
    while client.checkpoint(&named(&name), true, None).await.unwrap().conservative_pages != 0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let atime = || {
        let stat = fd::stat(&opened).unwrap();
        (stat.st_atime, stat.st_atime_nsec)
    };
    let mut in_one_tick = 0;
    for attempt in 0..500 {
        let page = 1 + attempt % 63;
        segment.attach_and_detach().unwrap();
        let before = atime();
        let closed = client.checkpoint(&named(&name), true, None).await.unwrap();
        increment_briefly(&segment, page);
        // A traced write explains a change of ctime.
        fd::write_at(opened.as_fd(), 0, b"x").unwrap();
        in_one_tick += u32::from(atime() == before);
        client.checkpoint(&named(&name), false, None).await.unwrap();
        let reported = changed(&client, &name, closed.generation).await;
        assert!(reported.contains(&page), "page {page}, {in_one_tick} in one tick: {reported:?}");
        if in_one_tick == 20 {
            break;
        }
    }
    eprintln!("{in_one_tick} writes in one tick with the checkpoint");
    assert_service_works(&service, &client).await;
}

/// The kernel reports its pid as 0 to the service, which must not take it for any other process.
#[test(flavor = "multi_thread")]
async fn client_outside_of_the_pid_namespace_of_the_service_tracks_nothing() {
    require(root());
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program("fdmapd").unwrap());
    let service = Service::start_command(command).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    let mut session = service.fdpass().unwrap();
    let mut mapped = session.map(&named("ram"), true).unwrap();
    let words = ["is in another pid namespace"];
    refused(mapped.track(), FailedPrecondition, &words);
    refused(session.untrack(&named("ram"), &[MappingId::new(1).unwrap()]), FailedPrecondition, &words);
    // It is an untracked mapping: its writes are reported conservatively.
    let made = client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert!(!made.coverage.exact);
}
