//! Operations that take over 1 s are logged while they run: with their phase, their file, and the process that they wait for.

use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_sys::fd::write_at;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::fixture::PAGE;

const SLOW: &str = "an operation is slow and still runs";
const ENDED: &str = "a slow operation ended";
/// Time in which a slow operation is logged: 1 s, the interval of the search for slow ones, and time for a loaded host.
const LOGGED: Duration = Duration::from_secs(10);

/// The first line of the log that contains all of these.
fn line_with(service: &Service, fields: &[&str]) -> Option<String> {
    let log = service.log();
    log.lines().find(|line| fields.iter().all(|field| line.contains(field))).map(str::to_owned)
}

/// The first line of the log with this text about an operation on the file `ram` of root.
fn line_of(service: &Service, text: &str, operation: &str) -> Option<String> {
    line_with(service, &[text, &format!("operation=\"{operation}\""), "file=\"0/ram\""])
}

/// As [`line_of`]. Waits for the line.
#[track_caller]
fn logged(service: &Service, text: &str, operation: &str) -> String {
    logged_with(service, &[text, &format!("operation=\"{operation}\""), "file=\"0/ram\""])
}

/// As [`line_with`]. Waits for the line.
#[track_caller]
fn logged_with(service: &Service, fields: &[&str]) -> String {
    let began = Instant::now();
    loop {
        if let Some(line) = line_with(service, fields) {
            return line;
        }
        assert!(began.elapsed() < LOGGED, "no line with {fields:?}:\n{}", service.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
fn assert_fields(line: &str, fields: &[&str]) {
    for field in fields {
        assert!(line.contains(field), "{field:?} is not in {line:?}");
    }
}

/// mincore(2) of the syscalls probe visits all pages of each block that holds one: 320 million.
#[test(flavor = "multi_thread")]
async fn scan_of_many_blocks_is_logged() {
    const BLOCKS: u64 = 80_000;
    const BLOCK_BYTES: u64 = 16 << 20;
    require(root());
    let service = Service::start(&["--probe", "syscalls"]).unwrap();
    create_file(&service.client().await.unwrap(), "ram", BLOCKS * BLOCK_BYTES).await.unwrap();
    let (file, _) = service.fdpass().unwrap().open(&named("ram"), true).unwrap();
    for block in 0..BLOCKS {
        write_at(file.as_fd(), block * BLOCK_BYTES, b"x").unwrap();
    }
    let mut command = fdmap_as(&service, 0).unwrap();
    let mut scan = command.args(["pages", "ram"]).stdout(Stdio::null()).spawn().unwrap();
    assert_fields(&logged(&service, SLOW, "Scan"), &["phase=page-states", "after=", "others="]);
    assert_eq!(line_of(&service, ENDED, "Scan"), None);
    assert!(scan.wait().unwrap().success());
    assert_fields(&logged(&service, ENDED, "Scan"), &["phase=page-states", "after="]);
}

/// Seal waits for a helper, which waits for a process that holds the lock of the inode: for half a second each. So further calls wait for
/// the only thread of their user.
#[test(flavor = "multi_thread")]
async fn calls_that_wait_for_a_thread_of_their_user_are_logged() {
    const USER: u32 = 65534;
    require(root());
    let group = USER.to_string();
    let service = Service::start(&["--group", &group, "--max-threads-per-user", "1"]).unwrap();
    let fdmap = |arguments: &[&str]| {
        let mut command = fdmap_as(&service, USER).unwrap();
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    // As many as the user has helpers for.
    let names = ["first", "second", "third", "fourth"];
    let locked = names.map(|name| {
        assert!(fdmap(&["create", name, "--size", "64K"]).status().unwrap().success());
        let (file, _) = service.fdpass().unwrap().open(&named(&format!("{USER}/{name}")), true).unwrap();
        let mut holder = require(LockHolder::prepare_as(&path_of(&file), USER));
        holder.write(0, 1).unwrap();
        holder.hold_inode().unwrap();
        holder
    });
    // The second call on a file fails at once when it has the thread.
    let calls = [names, names].concat();
    let calls: Vec<_> = calls.iter().map(|name| fdmap(&["seal", name, "grow"]).spawn().unwrap()).collect();
    for mut call in calls {
        assert!(!call.wait().unwrap().success(), "the inode is locked");
    }
    let line = logged_with(&service, &["a call waited for its turn", &format!("user={USER} ")]);
    assert_fields(&line, &["after="]);
    assert!(!line.contains("file="), "it waits for a thread: {line}");
    for mut holder in locked {
        holder.release().unwrap();
    }
}

/// The threads of the service's holder that make calls on address spaces. Its first thread makes none.
pub fn calling_threads(service: &Service) -> Vec<String> {
    let is_holder =
        |pid: &u32| read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "fdmapd-holder");
    let holder = children_of(service.pid()).unwrap().into_iter().find(is_holder).expect("a holder");
    let threads = std::fs::read_dir(format!("/proc/{holder}/task")).unwrap();
    let threads = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
    threads.filter(|thread| *thread != holder.to_string()).collect()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

/// A processor that a thread of this process uses all the time, until this is dropped. A thread of SCHED_IDLE that may use
/// only this one gets well below 1 % of it.
struct BusyProcessor {
    number: usize,
    ended: Arc<AtomicBool>,
}

impl BusyProcessor {
    fn start() -> Self {
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let number = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap()).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ended);
        std::thread::spawn(move || {
            let mut only = CpuSet::new();
            only.set(number).unwrap();
            sched_setaffinity(Pid::from_raw(0), &only).unwrap();
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Self { number, ended }
    }

    /// A thread gets little of this processor, and nothing else.
    fn starve(&self, thread: &str) {
        run("taskset", &["--cpu-list", "--pid", &self.number.to_string(), thread]);
        run("chrt", &["--idle", "--pid", "0", thread]);
    }
}

impl Drop for BusyProcessor {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// A thread of the holder that waits for a processor is waited for, unlike one that sleeps. It write-protects all pages of the mapping,
/// also those without data, and holds the mmap_lock of the process meanwhile.
#[test(flavor = "multi_thread")]
async fn track_request_that_takes_seconds_is_logged_with_its_process() {
    /// Some 50 ms of processor time.
    const BYTES: u64 = 16 << 30;
    require(root());
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "small", PAGE).await.unwrap();
    create_file(&client, "ram", BYTES).await.unwrap();
    let mut agent = TestAgent::start(None).unwrap();
    let pid = format!("pid={} ", agent.pid());
    // Starts the holder.
    agent.map(&service, "small", true).unwrap();
    let (busy, threads) = (BusyProcessor::start(), calling_threads(&service));
    threads.iter().for_each(|thread| busy.starve(thread));
    let line = std::thread::scope(|scope| {
        let tracked = scope.spawn(|| agent.map(&service, "ram", true).unwrap());
        let line = logged(&service, SLOW, "Track");
        assert!(line_of(&service, ENDED, "Track").is_none() && !tracked.is_finished());
        threads.iter().for_each(|thread| run("chrt", &["--other", "--pid", "0", thread]));
        drop(busy);
        tracked.join().unwrap();
        line
    });
    assert_fields(&line, &["phase=registration", &pid, "after="]);
    assert_fields(&logged(&service, ENDED, "Track"), &["after="]);
}
