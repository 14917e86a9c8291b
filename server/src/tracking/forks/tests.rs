use std::fs;
use std::os::fd::AsFd as _;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use fdmap_sys::pidfd;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::link::{Link, Program};
use super::wire::{Message, Received, Sent};
use super::*;

mod tracked;

use tracked::Tracked;

/// No test by itself: the companion of the others.
#[test]
fn companion() {
    if companion::is_started_as_one() {
        assert_eq!(companion::main(), std::process::ExitCode::SUCCESS);
    }
}

fn program() -> Program {
    Program(["--exact", "dirty::forks::tests::companion", "--test-threads=1"].map(Into::into).into())
}

/// One at a time: they count descriptors of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
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

/// What its threads are at, by their letters in `/proc/PID/stat`.
fn states_of(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stat")).ok());
    stats.filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next()).collect()
}

/// Returns when it has stopped: until then it may still read an event.
fn stop(pid: u32) {
    signal(pid, Signal::SIGSTOP);
    until("it stops", || states_of(pid).chars().all(|state| state == 'T'));
}

/// A sink, and where it puts the news.
fn sink() -> (Sink, Receiver<ForkNews>) {
    let (news, told) = channel();
    // Whoever does not listen any more does not want them.
    (Arc::new(move |one| drop(news.send(one))), told)
}

fn next(told: &Receiver<ForkNews>) -> ForkNews {
    told.recv_timeout(Duration::from_secs(20)).expect("news")
}

/// A tracked process that is followed.
struct Bed {
    told: Receiver<ForkNews>,
    following: Following,
    uffd: Userfaultfd,
    tracked: Tracked,
    forks: Arc<Forks>,
}

impl Bed {
    fn new() -> Option<Self> {
        Self::with(program())
    }

    fn with(program: Program) -> Option<Self> {
        let (tracked, uffd) = Tracked::start()?;
        let forks = Forks::start_as(program).unwrap();
        let (sink, told) = sink();
        let following = forks.follow(&uffd, sink).unwrap();
        Some(Self { told, following, uffd, tracked, forks })
    }

    fn companion(&self) -> u32 {
        self.forks.companion().unwrap()
    }

    /// So many children of the one that is followed.
    fn children(&self, count: usize) -> Vec<(Userfaultfd, Following)> {
        let child = |_| match next(&self.told) {
            ForkNews::Child { parent, uffd, following } if parent == self.following.id() => (uffd, following),
            other => panic!("{other:?}"),
        };
        (0..count).map(child).collect()
    }
}

#[test]
fn forks_return_at_once_and_leave_nothing_behind() {
    let _alone = alone();
    let before = userfaultfds_of(std::process::id());
    let Some(bed) = Bed::new() else { return };
    bed.tracked.fork(100);
    let children = bed.children(100);
    let companion = bed.companion();
    assert_eq!(userfaultfds_of(companion), 101);
    assert_eq!(userfaultfds_of(std::process::id()) - before, 2 * 101);
    drop(children);
    until("children are let go", || userfaultfds_of(companion) == 1);
    assert_eq!(bed.forks.shared.lock().outbox, []);
    until("that is confirmed", || bed.forks.shared.lock().followed.len() == 1);

    let Bed { told, following, uffd, tracked, forks } = bed;
    drop((following, uffd));
    until("the last one is let go", || userfaultfds_of(companion) == 0);
    until("its sink is let go", || matches!(told.try_recv(), Err(TryRecvError::Disconnected)));
    assert_eq!(userfaultfds_of(std::process::id()), before);
    // Nobody is told, and nobody waits.
    tracked.fork(10);

    signal(companion, Signal::SIGTERM);
    drop(forks);
    assert!(pidfd::open(companion).is_err(), "neither a process nor a zombie");
}

#[test]
fn forks_return_while_the_service_is_stuck() {
    let _alone = alone();
    let Some((tracked, uffd)) = Tracked::start() else { return };
    let forks = Forks::start_as(program()).unwrap();
    let stuck = Arc::new(Mutex::new(()));
    let (news, told) = channel();
    let its = Arc::clone(&stuck);
    let sink: Sink = Arc::new(move |one| {
        drop(its.lock().unwrap());
        drop(news.send(one));
    });
    let following = forks.follow(&uffd, sink).unwrap();
    let held = stuck.lock().unwrap();
    tracked.fork(500);
    assert!(told.try_recv().is_err());
    drop(held);
    for _ in 0..500 {
        let news = next(&told);
        assert!(matches!(&news, ForkNews::Child { parent, .. } if *parent == following.id()), "{news:?}");
    }
}

#[test]
fn children_are_passed_on_later_or_told_as_lost_when_there_are_too_many() {
    let _alone = alone();
    let Some((tracked, uffd)) = Tracked::start() else { return };
    let link = Link::start(&program()).unwrap();
    let parent = FollowId::draw();
    assert_eq!(wire::send(link.as_fd(), Message::Follow(parent), Some(uffd.as_fd())), Sent::Yes);
    const FORKS: u32 = 2000;
    tracked.fork(FORKS);
    let (mut children, mut lost) = (vec![], 0);
    while lost == 0 {
        match wire::receive(link.as_fd()) {
            Received::Message(Message::Forked { parent: told, child }, Some(_)) => {
                assert_eq!(told, parent);
                children.push(child);
            }
            Received::Message(Message::Lost(told), None) => {
                assert_eq!(told, parent);
                lost += 1;
            }
            Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
            other => panic!("{other:?}"),
        }
    }
    assert!((900..FORKS.try_into().unwrap()).contains(&children.len()), "{}", children.len());
    assert!(matches!(wire::receive(link.as_fd()), Received::Nothing), "the loss is told once");
    assert_eq!(userfaultfds_of(link.pid), 1 + children.len());
    // And it goes on as before.
    tracked.fork(1);
    until("a child is told", || {
        matches!(wire::receive(link.as_fd()), Received::Message(Message::Forked { .. }, Some(_)))
    });
}

#[test]
fn grandchildren_are_told_by_their_parents() {
    let _alone = alone();
    let Some(bed) = Bed::new() else { return };
    bed.tracked.fork_grandchildren(20);
    let (_uffd, child) = bed.children(1).remove(0);
    for _ in 0..20 {
        let news = next(&bed.told);
        assert!(matches!(&news, ForkNews::Child { parent, .. } if *parent == child.id()), "{news:?}");
    }
}

#[test]
fn another_companion_takes_the_place_of_one_that_was_killed() {
    let _alone = alone();
    let Some(bed) = Bed::new() else { return };
    bed.tracked.fork(1);
    let child = bed.children(1).remove(0);
    let first = bed.companion();
    signal(first, Signal::SIGKILL);
    bed.tracked.fork(1);
    let mut lost = vec![];
    let told = loop {
        match next(&bed.told) {
            ForkNews::Lost { parent } => lost.push(parent),
            ForkNews::Child { parent, uffd, following } => {
                assert_eq!(parent, bed.following.id());
                break (uffd, following);
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(
        lost.contains(&bed.following.id()) && lost.contains(&child.1.id()) && lost.len() == 2,
        "{lost:?}"
    );
    let second = bed.companion();
    assert!(second != first && pidfd::open(first).is_err());
    assert_eq!(userfaultfds_of(second), 3);
    drop((child, told));
    until("children are let go", || userfaultfds_of(second) == 1);
    assert!(bed.told.try_recv().is_err());
}

#[test]
fn fork_that_no_companion_has_read_is_read_by_the_next_one() {
    let _alone = alone();
    let Some(bed) = Bed::new() else { return };
    stop(bed.companion());
    bed.tracked.begin_to_fork();
    let begin = Instant::now();
    signal(bed.companion(), Signal::SIGKILL);
    bed.tracked.took();
    assert!(begin.elapsed() < RETRY, "{:?}", begin.elapsed());
    let (mut children, mut lost) = (0, 0);
    while children + lost < 2 {
        match next(&bed.told) {
            ForkNews::Child { .. } => children += 1,
            ForkNews::Lost { .. } => lost += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((children, lost), (1, 1));
}

#[test]
fn forks_from_before_it_was_let_go_are_told_after_it() {
    let _alone = alone();
    let Some(Bed { told, following, uffd, tracked, forks }) = Bed::new() else { return };
    let (companion, id) = (forks.companion().unwrap(), following.id());
    stop(companion);
    tracked.begin_to_fork();
    drop((following, uffd));
    signal(companion, Signal::SIGCONT);
    tracked.took();
    let news = next(&told);
    assert!(matches!(&news, ForkNews::Child { parent, .. } if *parent == id), "{news:?}");
}

#[test]
fn forks_return_when_no_companion_lasts() {
    let _alone = alone();
    // It runs no test and ends.
    let Some(bed) = Bed::with(Program(["--exact", "none of that name"].map(Into::into).into())) else {
        return;
    };
    let begin = Instant::now();
    bed.tracked.begin_to_fork();
    let broken = loop {
        match next(&bed.told) {
            ForkNews::Lost { parent } => assert_eq!(parent, bed.following.id()),
            ForkNews::Broken { id } => break id,
            other => panic!("{other:?}"),
        }
    };
    let Bed { told: _told, following, uffd, tracked, forks } = bed;
    assert_eq!(broken, following.id());
    assert_eq!(forks.companion(), None);
    drop(uffd);
    tracked.took();
    assert!(begin.elapsed() < 2 * RETRY, "{:?}", begin.elapsed());
    // It is tried again when it is needed again.
    let (other, uffd) = Tracked::start().unwrap();
    let (sink, told) = sink();
    let again = forks.follow(&uffd, sink).unwrap();
    while !matches!(next(&told), ForkNews::Broken { id } if id == again.id()) {}
    drop(uffd);
    other.fork(1);
}

#[test]
fn forks_return_when_the_companion_has_no_descriptors_left() {
    let _alone = alone();
    let Some(bed) = Bed::new() else { return };
    bed.tracked.fork(1);
    let child = bed.children(1).remove(0);
    let open = fs::read_dir(format!("/proc/{}/fd", bed.companion())).unwrap().count();
    let most = u64::try_from(open + 10).unwrap();
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    let pid = i32::try_from(bed.companion()).unwrap();
    // SAFETY: limit is a valid struct rlimit, and no old one is asked for.
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    bed.tracked.fork(50);
    let mut children = vec![];
    loop {
        match next(&bed.told) {
            ForkNews::Child { uffd, following, .. } => children.push((uffd, following)),
            ForkNews::Lost { parent } => break assert_eq!(parent, bed.following.id()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(children.len(), 10);
    // A userfaultfd for which it has no room it does not follow.
    let (_other, uffd) = Tracked::start().unwrap();
    let (sink, told) = sink();
    let following = bed.forks.follow(&uffd, sink).unwrap();
    let news = next(&told);
    assert!(matches!(news, ForkNews::Broken { id } if id == following.id()), "{news:?}");
    drop((children, child));
    until("children are let go", || userfaultfds_of(bed.companion()) == 1);
    let _again = bed.forks.follow(&uffd, Arc::new(drop)).unwrap();
    until("there is room again", || userfaultfds_of(bed.companion()) == 2);
}

#[test]
fn userfaultfd_without_features_is_not_followed() {
    let _alone = alone();
    let (_tracked, uffd, _) = Tracked::untold();
    let forks = Forks::start_as(program()).unwrap();
    let (sink, told) = sink();
    let following = forks.follow(&uffd, sink).unwrap();
    let news = next(&told);
    assert!(matches!(news, ForkNews::Broken { id } if id == following.id()), "{news:?}");
}

#[test]
fn sink_may_let_go_of_everything() {
    let _alone = alone();
    let Some((tracked, uffd)) = Tracked::start() else { return };
    let forks = Forks::start_as(program()).unwrap();
    let companion = forks.companion().unwrap();
    let all = Arc::new(Mutex::new(None));
    let its = Arc::clone(&all);
    let sink: Sink = Arc::new(move |_| drop(its.lock().unwrap().take()));
    let following = forks.follow(&uffd, sink).unwrap();
    *all.lock().unwrap() = Some((following, uffd, forks));
    tracked.fork(1);
    until("the companion ends", || pidfd::open(companion).is_err());
    tracked.fork(1);
}
