//! Follows the forks of real processes.

use std::fs;
use std::os::fd::AsFd as _;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use fdmap_sys::pidfd;
use fdmap_sys::testing::calls;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::super::holder::{FindCounter, Holders, Worker};
use super::link::{Link, Program};
use super::wire::{Message, Received, Sent};
use super::*;

mod quota;
mod tracked;

use tracked::Tracked;

/// The companion process of the other tests, not a test.
#[test]
fn companion() {
    if companion::is_started_as_one() {
        assert_eq!(companion::main(), std::process::ExitCode::SUCCESS);
    }
}

fn program() -> Program {
    let arguments = ["--exact", "tracking::observe::forks::needs_root::companion", "--test-threads=1"];
    Program { user: 0, arguments: arguments.map(Into::into).into() }
}

/// Serializes tests that count descriptors of this process.
fn serialized() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn until(event: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(20), "not within 20 s: {event}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn userfaultfds_of(pid: u32) -> usize {
    let folder = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = folder.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.as_os_str() == "anon_inode:[userfaultfd]").count()
}

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

/// States of the threads, from `/proc/PID/task/TID/stat`.
fn states_of(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stat")).ok());
    stats.filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next()).collect()
}

/// Stops a process, and returns when it has stopped. Until then it may still read an event.
fn stop(pid: u32) {
    signal(pid, Signal::SIGSTOP);
    until("it stops", || states_of(pid).chars().all(|state| state == 'T'));
}

/// The userfaultfd, which a thread of this process closes.
fn held(userfaultfd: Userfaultfd) -> HeldSpace {
    HeldSpace::new(userfaultfd, Holders::new(Worker::Thread, FindCounter(Arc::new(|| None))).of_user(0))
}

/// A sink, and the events that it receives.
fn sink() -> (ForkSink, Receiver<ForkEvent>) {
    let (sender, events) = channel();
    // A test may drop the receiver early.
    (Arc::new(move |event| drop(sender.send(event))), events)
}

fn next(events: &Receiver<ForkEvent>) -> ForkEvent {
    events.recv_timeout(Duration::from_secs(20)).expect("an event")
}

/// A followed process.
struct ForkBench {
    events: Receiver<ForkEvent>,
    subscription: ForkSubscription,
    uffd: HeldSpace,
    tracked: Tracked,
    forks: Arc<Forks>,
}

impl ForkBench {
    fn new() -> Self {
        Self::with(program())
    }

    fn with(program: Program) -> Self {
        let (tracked, uffd) = Tracked::start();
        let forks = Forks::start_as(program).unwrap();
        let (sink, events) = sink();
        let subscription = forks.follow(&uffd, sink).unwrap();
        Self { events, subscription, uffd, tracked, forks }
    }

    fn companion(&self) -> u32 {
        self.forks.companion().unwrap()
    }

    /// Receives this number of children.
    fn children(&self, count: usize) -> Vec<(HeldSpace, ForkSubscription)> {
        let child = |_| match next(&self.events) {
            ForkEvent::Child { parent, uffd, subscription } if parent == self.subscription.id() => {
                (uffd, subscription)
            }
            other => panic!("{other:?}"),
        };
        (0..count).map(child).collect()
    }
}

#[test]
fn forks_return_at_once_and_leave_nothing_behind() {
    let _serialized = serialized();
    let before = userfaultfds_of(std::process::id());
    let bench = ForkBench::new();
    bench.tracked.fork(100);
    let children = bench.children(100);
    let companion = bench.companion();
    assert_eq!(userfaultfds_of(companion), 101);
    // Other tests of this process have some too.
    assert!(userfaultfds_of(std::process::id()) >= 101);
    drop(children);
    until("the companion closes the children", || userfaultfds_of(companion) == 1);
    assert_eq!(bench.forks.shared.lock().outbox, []);
    until("the companion confirms", || bench.forks.shared.lock().followed.len() == 1);

    let ForkBench { events, subscription, uffd, tracked, forks } = bench;
    drop((subscription, uffd));
    until("the companion closes the last userfaultfd", || userfaultfds_of(companion) == 0);
    until("the sink is dropped", || matches!(events.try_recv(), Err(TryRecvError::Disconnected)));
    until("this process closes them", || userfaultfds_of(std::process::id()) <= before);
    // Forks are neither reported nor blocked any more.
    tracked.fork(10);

    signal(companion, Signal::SIGTERM);
    drop(forks);
    assert!(pidfd::open(companion).is_err(), "neither a process nor a zombie");
}

#[test]
fn cleared_o_nonblock_of_one_process_delays_the_forks_of_none() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    let (other, other_uffd) = Tracked::start();
    let (sink, events) = sink();
    let _other = bench.forks.follow(&other_uffd, sink).unwrap();
    // The flag belongs to the open file description, which the followed process has in common with the companion.
    bench.uffd.with(|own| fcntl(own, FcntlArg::F_SETFL(OFlag::empty())).unwrap()).unwrap();
    bench.tracked.fork(1);
    other.fork(3);
    let forked = (0..3).all(|_| matches!(next(&events), ForkEvent::Child { .. }));
    assert!(forked);
    assert_eq!(bench.children(1).len(), 1);
}

#[test]
fn forks_return_while_the_service_is_stuck() {
    let _serialized = serialized();
    let (tracked, uffd) = Tracked::start();
    let forks = Forks::start_as(program()).unwrap();
    let stuck = Arc::new(Mutex::new(()));
    let (sender, events) = channel();
    let its = Arc::clone(&stuck);
    let sink: ForkSink = Arc::new(move |event| {
        drop(its.lock().unwrap());
        drop(sender.send(event));
    });
    let subscription = forks.follow(&uffd, sink).unwrap();
    let guard = stuck.lock().unwrap();
    tracked.fork(500);
    assert!(events.try_recv().is_err());
    drop(guard);
    for _ in 0..500 {
        let event = next(&events);
        assert!(
            matches!(&event, ForkEvent::Child { parent, .. } if *parent == subscription.id()),
            "{event:?}"
        );
    }
}

#[test]
fn excess_children_are_reported_as_lost() {
    let _serialized = serialized();
    let (tracked, uffd) = Tracked::start();
    let link = Link::start(&program()).unwrap();
    let parent = FollowId::draw();
    let followed = uffd.with(|own| wire::send(link.as_fd(), Message::Follow(parent), Some(own.as_fd())));
    assert_eq!(followed, Some(Sent::Yes));
    const FORKS: u32 = 2000;
    tracked.fork(FORKS);
    let (mut children, mut lost) = (vec![], 0);
    while lost == 0 {
        match wire::receive(link.as_fd()) {
            Received::Message(Message::Forked { parent: reported, child }, Some(_)) => {
                assert_eq!(reported, parent);
                children.push(child);
            }
            Received::Message(Message::Lost(reported), None) => {
                assert_eq!(reported, parent);
                lost += 1;
            }
            Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
            other => panic!("{other:?}"),
        }
    }
    assert!((900..FORKS.try_into().unwrap()).contains(&children.len()), "{}", children.len());
    assert!(matches!(wire::receive(link.as_fd()), Received::Nothing), "one Lost event is reported");
    assert_eq!(userfaultfds_of(link.pid), 1 + children.len());
    // Later forks are reported as before.
    tracked.fork(1);
    until("a child is reported", || {
        matches!(wire::receive(link.as_fd()), Received::Message(Message::Forked { .. }, Some(_)))
    });
}

#[test]
fn grandchildren_are_reported_with_their_parent() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    bench.tracked.fork_grandchildren(20);
    let (_uffd, child) = bench.children(1).remove(0);
    for _ in 0..20 {
        let event = next(&bench.events);
        assert!(matches!(&event, ForkEvent::Child { parent, .. } if *parent == child.id()), "{event:?}");
    }
}

#[test]
fn killed_companion_is_replaced() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    bench.tracked.fork(1);
    let child = bench.children(1).remove(0);
    let first = bench.companion();
    signal(first, Signal::SIGKILL);
    bench.tracked.fork(1);
    let mut lost = vec![];
    let reported = loop {
        match next(&bench.events) {
            ForkEvent::Lost { parent } => lost.push(parent),
            ForkEvent::Child { parent, uffd, subscription } => {
                assert_eq!(parent, bench.subscription.id());
                break (uffd, subscription);
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(
        lost.contains(&bench.subscription.id()) && lost.contains(&child.1.id()) && lost.len() == 2,
        "{lost:?}"
    );
    let second = bench.companion();
    assert!(second != first && pidfd::open(first).is_err());
    assert_eq!(userfaultfds_of(second), 3);
    drop((child, reported));
    until("the companion closes the children", || userfaultfds_of(second) == 1);
    assert!(bench.events.try_recv().is_err());
}

#[test]
fn pending_fork_is_read_by_the_next_companion() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    stop(bench.companion());
    bench.tracked.begin_to_fork();
    let begin = Instant::now();
    signal(bench.companion(), Signal::SIGKILL);
    bench.tracked.took();
    assert!(begin.elapsed() < RETRY_TIMEOUT, "{:?}", begin.elapsed());
    assert_child_and_lost(&bench.events);
}

/// The fork of a process whose companion is replaced is reported, and as one of which others may be lost.
fn assert_child_and_lost(events: &Receiver<ForkEvent>) {
    let (mut children, mut lost) = (0, 0);
    while children + lost < 2 {
        match next(events) {
            ForkEvent::Child { .. } => children += 1,
            ForkEvent::Lost { .. } => lost += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((children, lost), (1, 1));
}

#[test]
fn companion_that_does_not_answer_is_replaced() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    let stopped = bench.companion();
    // A companion that answers stays.
    std::thread::sleep(2 * RETRY_TIMEOUT);
    assert_eq!(bench.companion(), stopped);
    stop(stopped);
    bench.tracked.begin_to_fork();
    let begin = Instant::now();
    bench.tracked.took();
    assert!(begin.elapsed() < 5 * RETRY_TIMEOUT, "{:?}", begin.elapsed());
    assert_ne!(bench.companion(), stopped);
    assert_child_and_lost(&bench.events);
}

#[test]
fn pending_fork_is_reported_after_the_subscription_is_dropped() {
    let _serialized = serialized();
    let ForkBench { events, subscription, uffd, tracked, forks } = ForkBench::new();
    let (companion, id) = (forks.companion().unwrap(), subscription.id());
    stop(companion);
    tracked.begin_to_fork();
    drop((subscription, uffd));
    signal(companion, Signal::SIGCONT);
    tracked.took();
    let event = next(&events);
    assert!(matches!(&event, ForkEvent::Child { parent, .. } if *parent == id), "{event:?}");
}

#[test]
fn forks_return_when_no_companion_lasts() {
    let _serialized = serialized();
    // A test binary without a matching test ends at once.
    let arguments = ["--exact", "none of that name"].map(Into::into).into();
    let bench = ForkBench::with(Program { user: 0, arguments });
    let begin = Instant::now();
    bench.tracked.begin_to_fork();
    let broken = loop {
        match next(&bench.events) {
            ForkEvent::Lost { parent } => assert_eq!(parent, bench.subscription.id()),
            ForkEvent::Broken { id } => break id,
            other => panic!("{other:?}"),
        }
    };
    let ForkBench { events: _events, subscription, uffd, tracked, forks } = bench;
    assert_eq!(broken, subscription.id());
    assert_eq!(forks.companion(), None);
    drop(uffd);
    tracked.took();
    assert!(begin.elapsed() < 2 * RETRY_TIMEOUT, "{:?}", begin.elapsed());
    // The next follow() starts a companion again.
    let (other, uffd) = Tracked::start();
    let (sink, events) = sink();
    let again = forks.follow(&uffd, sink).unwrap();
    while !matches!(next(&events), ForkEvent::Broken { id } if id == again.id()) {}
    drop(uffd);
    other.fork(1);
}

#[test]
fn forks_return_when_the_companion_has_no_descriptors_left() {
    let _serialized = serialized();
    let bench = ForkBench::new();
    bench.tracked.fork(1);
    let child = bench.children(1).remove(0);
    let open = fs::read_dir(format!("/proc/{}/fd", bench.companion())).unwrap().count();
    calls::limit_descriptors(bench.companion(), u64::try_from(open + 10).unwrap()).unwrap();
    bench.tracked.fork(50);
    let mut children = vec![];
    loop {
        match next(&bench.events) {
            ForkEvent::Child { uffd, subscription, .. } => children.push((uffd, subscription)),
            ForkEvent::Lost { parent } => break assert_eq!(parent, bench.subscription.id()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(children.len(), 10);
    // The companion cannot follow another userfaultfd without a free descriptor.
    let (_other, uffd) = Tracked::start();
    let (sink, events) = sink();
    let subscription = bench.forks.follow(&uffd, sink).unwrap();
    let event = next(&events);
    assert!(matches!(event, ForkEvent::Broken { id } if id == subscription.id()), "{event:?}");
    drop((children, child));
    until("the companion closes the children", || userfaultfds_of(bench.companion()) == 1);
    let _again = bench.forks.follow(&uffd, Arc::new(drop)).unwrap();
    until("the companion follows again", || userfaultfds_of(bench.companion()) == 2);
}

#[test]
fn userfaultfd_without_features_is_not_followed() {
    let _serialized = serialized();
    let (_tracked, uffd, _) = Tracked::start_without_features();
    let uffd = held(uffd);
    let forks = Forks::start_as(program()).unwrap();
    let (sink, events) = sink();
    let subscription = forks.follow(&uffd, sink).unwrap();
    let event = next(&events);
    assert!(matches!(event, ForkEvent::Broken { id } if id == subscription.id()), "{event:?}");
}

#[test]
fn sink_may_drop_everything() {
    let _serialized = serialized();
    let (tracked, uffd) = Tracked::start();
    let forks = Forks::start_as(program()).unwrap();
    let companion = forks.companion().unwrap();
    let all = Arc::new(Mutex::new(None));
    let its = Arc::clone(&all);
    let sink: ForkSink = Arc::new(move |_| drop(its.lock().unwrap().take()));
    let subscription = forks.follow(&uffd, sink).unwrap();
    *all.lock().unwrap() = Some((subscription, uffd, forks));
    tracked.fork(1);
    until("the companion ends", || pidfd::open(companion).is_err());
    tracked.fork(1);
}
