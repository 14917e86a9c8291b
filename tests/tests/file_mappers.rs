//! The service learns who maps a file from the file itself: it names processes that it could not ask, and waits for none.

use std::fs::DirEntry;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::tracking::{Coverage, GapKind};
use fdmap_client::proto::units::PageRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, children_of, read, root, temp_dir};
use fdmap_tests::mapper::{LockHolder, MapperKind, MapperProgram, path_of};
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{Command as AgentCommand, FileOf, WriterCommand};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
const SEARCH_TIMEOUT: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;
const PAGES: u64 = 16;
/// The pages that a mapper maps.
const MAPPED: PageRange = PageRange::first(2);

/// Creates a file whose pages all hold data, and closes the generation in which they were written.
async fn create(client: &Client, service: &Service, name: &str) -> OwnedFd {
    let file = CreateFile { name: name.to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let (file, _) = service.fdpass().unwrap().open(&named(name), true).unwrap();
    fill(&file);
    client.checkpoint(&named(name), true, None).await.unwrap();
    file
}

fn fill(file: &OwnedFd) {
    fdmap_sys::fd::write_at(file.as_fd(), 0, &[1; (PAGES * PAGE) as usize]).unwrap();
}

/// The processes and pages of untracked mappings that exist.
fn untracked(coverage: &Coverage) -> Vec<(Option<u32>, Option<PageRange>)> {
    let gaps = coverage.gaps.iter().filter(|gap| gap.kind == GapKind::UntrackedMapping);
    gaps.filter(|gap| gap.detail.starts_with("mapped at")).map(|gap| (gap.pid, gap.range)).collect()
}

/// True if there are more untracked mappings than the coverage lists.
fn lists_only_some(coverage: &Coverage) -> bool {
    coverage.gaps.iter().any(|gap| gap.kind == GapKind::UntrackedMapping && gap.range.is_none())
}

fn has_unknown_mappers(coverage: &Coverage) -> bool {
    coverage.gaps.iter().any(|gap| gap.kind == GapKind::UnknownMappers)
}

/// Asserts that GetCoverage and the next checkpoint name exactly this untracked mapping of two pages, and no unknown ones.
async fn assert_named(client: &Client, name: &str, pid: Option<u32>) {
    let now = client.coverage(&named(name)).await.unwrap().coverage;
    let closed = client.checkpoint(&named(name), true, None).await.unwrap();
    for coverage in [&now, &closed.coverage] {
        assert_eq!(untracked(coverage), [(pid, Some(MAPPED))], "{coverage:?}");
        assert!(!coverage.exact);
    }
    // The generation may begin with mappers that were unknown.
    let next = client.checkpoint(&named(name), true, None).await.unwrap();
    assert_eq!(untracked(&next.coverage), [(pid, Some(MAPPED))]);
    assert!(!has_unknown_mappers(&next.coverage), "{:?}", next.coverage);
    assert!(next.conservative_pages >= MAPPED.len());
}

#[test(flavor = "multi_thread")]
async fn each_untracked_mapper_is_named() {
    require(root());
    let program = MapperProgram::compile().unwrap();
    for probe in ["xarray", "syscalls"] {
        let service = Service::start(&["--probe", probe]).unwrap();
        let client = service.client().await.unwrap();
        for how in [MapperKind::Plain, MapperKind::LeaderEnded, MapperKind::Namespaces] {
            let name = format!("{how:?}");
            let file = create(&client, &service, &name).await;
            let mapper = program.map(&path_of(&file), how).unwrap();
            if probe == "syscalls" {
                await_named(&client, &name, mapper.pid).await;
            } else {
                assert_named(&client, &name, Some(mapper.pid)).await;
            }
        }
    }
}

/// Waits for a checkpoint that names this mapping: while a process of another test holds its mmap_lock, not all mappers are found. On
/// some hosts not even root may read the maps of process 1, and others are unknown.
async fn await_named(client: &Client, name: &str, pid: u32) {
    let began = Instant::now();
    loop {
        let coverage = client.checkpoint(&named(name), true, None).await.unwrap().coverage;
        if untracked(&coverage).contains(&(Some(pid), Some(MAPPED))) {
            return;
        }
        assert!(began.elapsed() < SEARCH_TIMEOUT, "{coverage:?}");
    }
}

#[test(flavor = "multi_thread")]
async fn mapper_outside_of_the_services_pid_namespace_is_reported_without_a_pid() {
    require(root());
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program("fdmapd").unwrap());
    command.args(["--probe", "xarray"]);
    let service = Service::start_command(command).unwrap();
    let client = service.client().await.unwrap();
    let file = create(&client, &service, "outside").await;
    let program = MapperProgram::compile().unwrap();
    let _mapper = program.map(&path_of(&file), MapperKind::Plain).unwrap();
    let now = client.coverage(&named("outside")).await.unwrap().coverage;
    assert_eq!(untracked(&now), [(None, Some(MAPPED))], "{now:?}");
    assert!(!has_unknown_mappers(&now), "{now:?}");
}

#[test(flavor = "multi_thread")]
async fn mapper_through_an_overlay_file_system_is_named() {
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let program = MapperProgram::compile().unwrap();
    let (folder, _guard) = temp_dir("fdmap-overlay-").unwrap();
    let (mapper, path) = program.map_through_overlay(&folder).unwrap();
    let file: OwnedFd = std::fs::File::options().read(true).write(true).open(path).unwrap().into();
    service.fdpass().unwrap().adopt(file.as_fd(), "overlaid", None).unwrap();
    fill(&file);
    client.checkpoint(&named("overlaid"), true, None).await.unwrap();
    let now = client.coverage(&named("overlaid")).await.unwrap().coverage;
    assert_eq!(untracked(&now), [(Some(mapper.pid), Some(MAPPED))], "{now:?}");
    assert!(!has_unknown_mappers(&now), "{now:?}");
}

#[test(flavor = "multi_thread")]
async fn process_that_holds_its_mmap_lock_delays_no_checkpoint() {
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let file = create(&client, &service, "held").await;
    let holder = require(LockHolder::start(&path_of(&file)));
    // The calls of the client have a timeout. Reading the maps of the process takes as long as it lives.
    assert_named(&client, "held", Some(holder.pid)).await;
    assert!(holder.holds(), "the lock is still held");
}

/// Threads of the service in uninterruptible sleep, and search processes.
fn waiting_for_processes(service: u32) -> Vec<String> {
    let status_of = |thread: std::io::Result<DirEntry>| read(thread.unwrap().path().join("status")).ok();
    let threads = std::fs::read_dir(format!("/proc/{service}/task")).unwrap().filter_map(status_of);
    let asleep = threads.filter(|status| status.contains("State:\tD"));
    let names = asleep.filter_map(|status| status.lines().next().map(str::to_owned));
    let children = children_of(service).unwrap().into_iter();
    let searches = children
        .filter_map(|pid| read(format!("/proc/{pid}/comm")).ok())
        .filter(|name| name == "fdmapd-mappers\n");
    names.chain(searches).collect()
}

#[test(flavor = "multi_thread")]
async fn process_that_holds_its_mmap_lock_leaves_mappers_unknown_without_the_walk() {
    require(root());
    let service = Service::start(&["--probe", "syscalls"]).unwrap();
    let client = service.client().await.unwrap();
    let file = create(&client, &service, "audited").await;
    let holder = require(LockHolder::start(&path_of(&file)));
    // The calls of the client have a timeout.
    for _ in 0..10 {
        let closed = client.checkpoint(&named("audited"), true, None).await.unwrap();
        assert!(has_unknown_mappers(&closed.coverage), "{:?}", closed.coverage);
    }
    // `fdmapd-mappers` waited, not a thread of the service, and has ended.
    let began = Instant::now();
    loop {
        let waiting = waiting_for_processes(service.pid());
        if waiting.is_empty() {
            break;
        }
        assert!(began.elapsed() < RELEASE_TIMEOUT, "{waiting:?} wait for the process");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(holder.holds(), "the lock is still held");
}

#[test(flavor = "multi_thread")]
async fn second_mapping_of_a_tracked_process_is_named_and_the_tracked_one_is_not() {
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let file = create(&client, &service, "twice").await;
    let mut agent = TestAgent::start(None).unwrap();
    for tracked in [true, false] {
        let file = FileOf::of(&service, "twice");
        agent.call(&AgentCommand::Writer(WriterCommand::Map { file, tracked })).unwrap();
    }
    let coverage = client.coverage(&named("twice")).await.unwrap();
    assert_eq!(coverage.mappings.len(), 1);
    assert_eq!(untracked(&coverage.coverage), [(Some(agent.pid()), Some(PageRange::first(PAGES)))]);
    agent.call(&AgentCommand::Writer(WriterCommand::Unmap(1))).unwrap();
    assert_eq!(untracked(&client.coverage(&named("twice")).await.unwrap().coverage), []);
    drop(file);
}

#[test(flavor = "multi_thread")]
async fn mappers_that_change_all_the_time_are_unknown_at_worst() {
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let file = create(&client, &service, "churn").await;
    let own = SharedMapping::shared(&file, 0, (2 * PAGE) as usize, true).unwrap();
    let program = MapperProgram::compile().unwrap();
    let _others = program.map(&path_of(&file), MapperKind::Churn(2)).unwrap();
    for _ in 0..200 {
        let coverage = client.coverage(&named("churn")).await.unwrap().coverage;
        let own = (Some(std::process::id()), Some(MAPPED));
        let named = untracked(&coverage).contains(&own);
        assert!(named || lists_only_some(&coverage) || has_unknown_mappers(&coverage), "{coverage:?}");
    }
    drop(own);
}

/// Prints the time of a checkpoint inside the service: `-- checkpoint_cost --nocapture`.
#[test(flavor = "multi_thread")]
async fn checkpoint_cost_with_many_mappers_is_printed() {
    const ROUNDS: usize = 25;
    let _host = HostLock::acquire().unwrap();
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let program = MapperProgram::compile().unwrap();
    for count in [1, 100, 4000] {
        let name = format!("mapped by {count}");
        let file = create(&client, &service, &name).await;
        let _mappers = program.map(&path_of(&file), MapperKind::Many(count)).unwrap();
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let closed = client.checkpoint(&named(&name), true, None).await.unwrap();
            assert!(closed.conservative_pages >= MAPPED.len() && !has_unknown_mappers(&closed.coverage));
            times.push(closed.duration);
        }
        times.sort_unstable();
        eprintln!("{count} processes: {:?}, at best {:?}", times[ROUNDS / 2], times[0]);
    }
}
