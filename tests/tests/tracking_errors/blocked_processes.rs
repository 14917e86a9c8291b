//! Tracked processes that hold the lock of their own address space (mmap_lock), and holders that are stopped or killed.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{Checkpoint, Effect, GapKind};
use fdmap_sys::memfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::mapper::LockHolder;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use nix::libc::SYS_ioctl;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{changed, create, service};
use crate::slow_operations::calling_threads;

/// How long one process may delay the calls of others.
const BOUND: Duration = Duration::from_secs(1);
/// How long a change of the inode that no harvest explains makes generations conservative, and some more.
const UNEXPLAINED: Duration = Duration::from_secs(20);
/// The user of the attacker.
const ATTACKER: u32 = 65534;

/// A file "held", mapped by a process of another user that is tracked and can hold its lock.
async fn held(service: &Service, client: &Client) -> (LockHolder, OwnedFd) {
    adopted(service, client, "held", ATTACKER).await
}

/// A file of root, mapped by a process of `user` that root tracks, and that can hold its lock.
async fn adopted(service: &Service, client: &Client, name: &str, user: u32) -> (LockHolder, OwnedFd) {
    require(root());
    let file = memfd::create(name, None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let mut holder = require(LockHolder::prepare_as(Path::new(&path), user));
    let pid = holder.pid.to_string();
    let adopted = fdmap_as(service, 0).unwrap().args(["adopt", "--pid", &pid, "--track"]).output().unwrap();
    assert!(adopted.status.success(), "{adopted:?}");
    holder.write(0, 1).unwrap();
    holder.write(1, 1).unwrap();
    let before = checkpoint(client, name).await;
    assert_eq!(before.coverage.tracked_mappings, 1);
    (holder, file)
}

/// A checkpoint that answers in time.
async fn checkpoint(client: &Client, name: &str) -> Checkpoint {
    let began = Instant::now();
    let made = client.checkpoint(&named(name), true, None).await.unwrap();
    assert!(began.elapsed() < BOUND, "the checkpoint of {name} took {:?}", began.elapsed());
    made
}

/// Waits until the call that was late has returned, and its result is sent: on a host under load, that is later than the release of the
/// lock.
fn await_late_call(service: &Service) {
    let is_in_call = |thread: &String| {
        let call = read(format!("/proc/{thread}/syscall")).unwrap();
        call.starts_with("running") || call.starts_with(&format!("{SYS_ioctl} "))
    };
    let began = Instant::now();
    while calling_threads(service).iter().any(is_in_call) {
        assert!(began.elapsed() < UNEXPLAINED, "a call of the holder does not return");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn blocked(made: &Checkpoint) -> Option<u32> {
    let gap = made.coverage.gaps.iter().find(|gap| gap.kind == GapKind::BlockedMapping)?;
    assert_eq!(gap.effect, Effect::Conservative);
    gap.pid
}

/// The processes of the service with this name.
fn helpers(service: u32, name: &str) -> Vec<u32> {
    let is_named = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    children_of(service).unwrap().into_iter().filter(is_named).collect()
}

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).unwrap();
}

#[test(flavor = "multi_thread")]
async fn process_that_holds_its_mmap_lock_delays_nobody_else() {
    let (mut service, client) = service().await;
    let (mut holder, _file) = held(&service, &client).await;
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    checkpoint(&client, "ram").await;
    holder.hold().unwrap();

    let began = Instant::now();
    let first = checkpoint(&client, "held").await;
    assert_eq!((blocked(&first), first.conservative_pages), (Some(holder.pid), 2));
    for _ in 0..10 {
        let next = checkpoint(&client, "held").await;
        assert_eq!((blocked(&next), next.conservative_pages), (Some(holder.pid), 2));
    }
    assert!(began.elapsed() < 2 * BOUND, "the wait is not repeated: {:?}", began.elapsed());
    let coverage = client.coverage(&named("held")).await.unwrap();
    assert!(!coverage.coverage.exact);

    // Another file and user: checkpoints are exact, a process forks, and a mapping is tracked.
    let exact = checkpoint(&client, "ram").await;
    assert!(exact.coverage.exact, "{:?}", exact.coverage);
    let began = Instant::now();
    let status = std::process::Command::new("true").stdin(Stdio::null()).status().unwrap();
    assert!(status.success() && began.elapsed() < BOUND, "a fork took {:?}", began.elapsed());
    let began = Instant::now();
    service.fdpass().unwrap().map(&named("ram"), true).unwrap().track().unwrap();
    assert!(began.elapsed() < BOUND, "Track took {:?}", began.elapsed());

    service.signal(Signal::SIGTERM);
    assert!(service.ended(Duration::from_secs(5)), "the service ends while the process holds its lock");
    service.restart().unwrap();
    assert!(holder.holds(), "the lock is still held");
    let client = service.client().await.unwrap();
    create(&client, "next").await;
    checkpoint(&client, "next").await;
}

#[test(flavor = "multi_thread")]
async fn writes_while_a_process_is_blocked_are_in_a_later_generation() {
    let (service, client) = service().await;
    let (mut holder, _file) = held(&service, &client).await;
    // Tracking has begun: without further writes, nothing is reported.
    checkpoint(&client, "held").await;
    let idle = checkpoint(&client, "held").await;
    assert_eq!(idle.observed_pages + idle.conservative_pages, 0);

    holder.write(0, 2).unwrap();
    holder.hold().unwrap();
    let late = checkpoint(&client, "held").await;
    assert_eq!(blocked(&late), Some(holder.pid));
    // The page is not protected again before the lock is free: no page fault shows this write.
    holder.write(0, 3).unwrap();
    holder.release().unwrap();
    await_late_call(&service);
    let after = checkpoint(&client, "held").await;
    assert_eq!(blocked(&after), None, "{:?}", after.coverage);
    assert!(changed(&client, "held", late.generation).await.contains(&0));
    // Page 1 is reported since the change of the inode is not explained before the pages of its cause are known.
    assert_eq!((after.observed_pages, after.conservative_pages), (1, 1), "{:?}", after.coverage);
    // Tracking continues.
    let began = Instant::now();
    let after = loop {
        let after = checkpoint(&client, "held").await;
        if after.coverage.exact {
            break after;
        }
        assert!(began.elapsed() < UNEXPLAINED, "{:?}", after.coverage);
    };
    holder.write(1, 4).unwrap();
    let last = checkpoint(&client, "held").await;
    assert_eq!(changed(&client, "held", after.generation).await, [1]);
    assert!(last.coverage.exact, "{:?}", last.coverage);
    // No call is late any more: the process can be tracked again.
    let pid = holder.pid.to_string();
    for arguments in [["detach", "--pid", &pid].as_slice(), &["adopt", "--pid", &pid, "--track"]] {
        let done = fdmap_as(&service, 0).unwrap().args(arguments).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
    let again = checkpoint(&client, "held").await;
    assert_eq!(again.coverage.tracked_mappings, 1);
    holder.write(0, 5).unwrap();
    checkpoint(&client, "held").await;
    assert!(changed(&client, "held", again.generation).await.contains(&0));
}

/// Each process has the helpers of its own user, not those of root, who tracks all of them.
#[test(flavor = "multi_thread")]
async fn processes_that_root_tracks_block_none_of_another_user() {
    /// Calls that wait at the same time, beyond which no further one is made.
    const BLOCKED: usize = 17;
    const VICTIM: u32 = 1234;
    let (service, client) = service().await;
    let (mut victim, _file) = adopted(&service, &client, "victim", VICTIM).await;
    let mut attackers = Vec::new();
    for number in 0..BLOCKED {
        attackers.push(adopted(&service, &client, &format!("held-{number}"), ATTACKER).await);
    }
    for (number, (attacker, _file)) in attackers.iter_mut().enumerate() {
        attacker.hold().unwrap();
        let made = checkpoint(&client, &format!("held-{number}")).await;
        assert_eq!(blocked(&made), Some(attacker.pid));
    }
    let since = checkpoint(&client, "victim").await;
    assert_eq!((blocked(&since), since.coverage.tracked_mappings), (None, 1), "{:?}", since.coverage);
    victim.write(1, 2).unwrap();
    let made = checkpoint(&client, "victim").await;
    assert_eq!(blocked(&made), None, "{:?}", made.coverage);
    assert!(changed(&client, "victim", since.generation).await.contains(&1));
    let mut own = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    let began = Instant::now();
    own.track().unwrap();
    assert!(began.elapsed() < BOUND, "Track by root took {:?}", began.elapsed());
    drop(adopted(&service, &client, "later", VICTIM).await);
    let users: std::collections::BTreeSet<_> = helpers(service.pid(), "fdmapd-holder")
        .into_iter()
        .map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap())
        .map(|line| line.split('\0').nth(2).unwrap().parse::<u32>().unwrap())
        .collect();
    assert_eq!(users, [0, VICTIM, ATTACKER].into());
}

/// When a file ends, the last close of each userfaultfd of its processes is the holder's.
#[test(flavor = "multi_thread")]
async fn closes_that_never_return_take_four_threads_of_a_holder() {
    const PROCESSES: usize = 10;
    const MAX_CLOSERS: usize = 4;
    let (service, client) = service().await;
    let mut blocking = Vec::new();
    for number in 0..PROCESSES {
        blocking.push(adopted(&service, &client, &format!("held-{number}"), ATTACKER).await);
    }
    let [holder] = helpers(service.pid(), "fdmapd-holder")[..] else { panic!("one holder") };
    let closers = || {
        let tasks = std::fs::read_dir(format!("/proc/{holder}/task")).into_iter().flatten().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name == "closer\n").count()
    };
    for (number, (process, _file)) in blocking.iter_mut().enumerate() {
        process.hold().unwrap();
        client.delete(&named(&format!("held-{number}"))).await.unwrap();
    }
    let began = Instant::now();
    while closers() < MAX_CLOSERS {
        assert!(began.elapsed() < 5 * BOUND, "{} threads close userfaultfds", closers());
        std::thread::sleep(Duration::from_millis(10));
    }
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(closers(), MAX_CLOSERS);
        checkpoint(&client, "ram").await;
    }
    for (process, _file) in &mut blocking {
        process.release().unwrap();
    }
    let began = Instant::now();
    while helpers(service.pid(), "fdmapd-holder").contains(&holder) {
        assert!(began.elapsed() < 10 * BOUND, "the holder ends when all userfaultfds are closed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A walk over the VMAs of the file shows that the mapping is unchanged.
#[test(flavor = "multi_thread")]
async fn idle_checkpoint_asks_no_process() {
    let (service, client) = service().await;
    let ram = named("ram");
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    assert!(mapped.write_at(0, &[1]));
    let unforced = || client.checkpoint(&ram, false, None);
    let began = Instant::now();
    while !unforced().await.unwrap().unchanged {
        assert!(began.elapsed() < UNEXPLAINED, "the file is not idle");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let [stopped] = helpers(service.pid(), "fdmapd-holder")[..] else { panic!("one holder") };
    signal(stopped, Signal::SIGSTOP);
    let idle = unforced().await.unwrap();
    assert!(idle.unchanged && idle.coverage.exact, "{:?}", idle.coverage);
    assert_eq!(helpers(service.pid(), "fdmapd-holder"), [stopped], "nothing was asked of it");
    // A write is harvested, which replaces the holder.
    assert!(mapped.write_at(4096, &[1]));
    checkpoint(&client, "ram").await;
    assert!(reports(&client, idle.generation, 1).await);
}

#[test(flavor = "multi_thread")]
async fn blocked_process_is_detached_at_once() {
    let (service, client) = service().await;
    let (mut holder, _file) = held(&service, &client).await;
    holder.hold().unwrap();
    let began = Instant::now();
    let detached = service.fdpass().unwrap().detach(Some(holder.pid), &named("held"), &[]).unwrap();
    assert!(began.elapsed() < BOUND, "Detach took {:?}", began.elapsed());
    assert_eq!(detached, 1);
    let made = checkpoint(&client, "held").await;
    assert_eq!(made.coverage.tracked_mappings, 0);
    let untracked =
        |kind| made.coverage.gaps.iter().any(|gap| gap.kind == kind && gap.pid == Some(holder.pid));
    assert!(untracked(GapKind::UntrackedMapping), "{:?}", made.coverage);
}

#[test(flavor = "multi_thread")]
async fn killed_or_stopped_holder_is_replaced_and_loses_no_write() {
    let (service, client) = service().await;
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    let mut before = checkpoint(&client, "ram").await.generation;
    for (sent, page) in [(Signal::SIGKILL, 3), (Signal::SIGSTOP, 5), (Signal::SIGKILL, 7)] {
        let [running] = helpers(service.pid(), "fdmapd-holder")[..] else { panic!("one holder") };
        assert!(mapped.write_at(page * 4096, &[1]));
        signal(running, sent);
        let began = Instant::now();
        let made = client.checkpoint(&named("ram"), true, None).await.unwrap();
        assert!(began.elapsed() < 2 * BOUND, "{sent}: {:?}", began.elapsed());
        assert!(reports(&client, before, page).await, "{sent}: {made:?}");
        before = made.generation;
        // The next harvest is by another holder, and exact.
        assert!(mapped.write_at((page + 1) * 4096, &[1]));
        let began = Instant::now();
        let made = loop {
            let made = checkpoint(&client, "ram").await;
            assert!(reports(&client, before, page + 1).await, "{sent}: {made:?}");
            if made.coverage.exact {
                break made;
            }
            assert!(began.elapsed() < UNEXPLAINED, "{sent}: {:?}", made.coverage);
        };
        before = made.generation;
        let began = Instant::now();
        while helpers(service.pid(), "fdmapd-holder").contains(&running) {
            assert!(began.elapsed() < BOUND, "{sent}: the holder is killed and reaped");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(incidents::count(&service, "holder-replaced"), 3);
    // Others may be omitted: the log has one line per second.
    let text = "a holder of userfaultfds ended: another one replaces it";
    incidents::assert_reported(&service, "holder-replaced", text);
}

async fn reports(client: &Client, since: Generation, page: u64) -> bool {
    changed(client, "ram", since).await.contains(&page)
}

#[test(flavor = "multi_thread")]
async fn holder_and_companion_end_with_the_last_mapping() {
    let (service, client) = service().await;
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    checkpoint(&client, "ram").await;
    assert_eq!(helpers(service.pid(), "fdmapd-holder").len(), 1);
    drop(mapped);
    checkpoint(&client, "ram").await;
    let began = Instant::now();
    while !helpers(service.pid(), "fdmapd-holder").is_empty()
        || !helpers(service.pid(), "fdmapd-forks").is_empty()
    {
        assert!(began.elapsed() < Duration::from_secs(10), "they end with their last address space");
        checkpoint(&client, "ram").await;
        std::thread::sleep(Duration::from_millis(20));
    }
}
