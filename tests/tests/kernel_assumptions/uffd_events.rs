//! userfaultfd events: forks, remaps and unmaps, and the processes that they block.

use std::time::Duration;

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::{UffdEvent, UffdFeatures};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, children_of, read, root};
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::test;
use fdmap_tests::test_agent::command::MemfdCommand;
use fdmap_tests::test_agent::number;
use fdmap_tests::tracked::{PAGE, WpTracker};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::errno;

fn tracked_agent(more: UffdFeatures) -> (MemfdAgent, WpTracker) {
    let mut agent = MemfdAgent::start(16, None).unwrap();
    let tracker = agent.track(more).unwrap();
    tracker.arm().unwrap();
    (agent, tracker)
}

/// A field of /proc/PID/stat. Field 0 is the state of the process.
fn stat(pid: u32, field: usize) -> String {
    let stat = read(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(field).unwrap().to_owned()
}

fn state(pid: u32) -> String {
    stat(pid, 0)
}

fn minor_faults(pid: u32) -> u64 {
    stat(pid, 7).parse().unwrap()
}

#[test]
fn fork_brings_the_childs_userfaultfd() {
    require(root());
    let (mut agent, parent) = tracked_agent(UffdFeatures::EVENT_FORK);
    agent.write(1).unwrap();
    agent.send(MemfdCommand::Fork).unwrap();
    let UffdEvent::Fork(uffd) = parent.event().unwrap() else { panic!("expected a fork event") };
    let pid = number(agent.agent.reply().unwrap()).unwrap() as u32;
    let child =
        WpTracker { uffd, pagemap: Pagemap::open(Some(pid)).unwrap(), range: parent.range, unit: PAGE };
    assert_eq!(children_of(agent.agent.pid()).unwrap(), [pid]);
    assert_eq!(child.harvest().unwrap(), [1], "the child inherits the written bits of its parent");
    agent.call(MemfdCommand::ChildWrite(2)).unwrap();
    assert_eq!(child.harvest().unwrap(), [2]);
    assert_eq!(parent.harvest().unwrap(), [1], "each address space reports only its own writes");
    child.arm().unwrap();
    agent.write(5).unwrap();
    assert_eq!(child.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(parent.harvest().unwrap(), [5]);
}

#[test]
fn child_is_not_tracked_without_the_event() {
    let (mut agent, parent) = tracked_agent(UffdFeatures::empty());
    let pid = agent.call_for_number(MemfdCommand::Fork).unwrap() as u32;
    agent.call(MemfdCommand::ChildWrite(2)).unwrap();
    assert_eq!(parent.harvest().unwrap(), [0_u64; 0], "the parent's scan does not report the child's write");
    let uffd = parent.uffd.try_clone().unwrap();
    let child =
        WpTracker { uffd, pagemap: Pagemap::open(Some(pid)).unwrap(), range: parent.range, unit: PAGE };
    assert_eq!(errno(child.harvest()), Errno::EPERM);
}

#[test]
fn event_blocks_its_process_until_read() {
    let (mut agent, tracker) = tracked_agent(UffdFeatures::EVENT_UNMAP);
    let pid = agent.agent.pid();
    let maps = Maps::open(pid).unwrap();
    agent.send(MemfdCommand::Unmap).unwrap();
    while state(pid) != "D" {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The mapping is unmapped before the event is read.
    let next = maps.vma_at_or_after(tracker.range.start, true).unwrap();
    assert!(next.is_none_or(|vma| vma.range.start >= tracker.range.end));
    assert_eq!(tracker.harvest(), Ok(vec![]));
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(state(pid), "D", "SIGSTOP does not end the wait");
    assert!(matches!(tracker.event().unwrap(), UffdEvent::Unmap(range) if range == tracker.range));
    while state(pid) != "T" {
        std::thread::sleep(Duration::from_millis(1));
    }
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGCONT).unwrap();
    agent.agent.reply().unwrap();
}

/// Forks a child while the last userfaultfd of the parent is closed. The child writes to its first page.
fn orphan(mut agent: MemfdAgent) -> (MemfdAgent, u32) {
    let pid = agent.agent.pid();
    agent.write(0).unwrap();
    let tracker = agent.track(UffdFeatures::EVENT_FORK).unwrap();
    agent.call(MemfdCommand::CloseUserfaultfd).unwrap();
    tracker.arm().unwrap();
    agent.send(MemfdCommand::Fork).unwrap();
    while state(pid) != "D" {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(tracker);
    let child = number(agent.agent.reply().unwrap()).unwrap() as u32;
    agent.send(MemfdCommand::ChildWrite(0)).unwrap();
    (agent, child)
}

#[test]
fn unread_fork_event_leaves_a_child_that_can_write() {
    require(root());
    let (mut agent, _) = orphan(MemfdAgent::start(16, None).unwrap());
    agent.agent.reply().unwrap();
}

#[test]
fn unread_fork_event_leaves_a_child_that_faults_on_hugetlb_forever() {
    let host = HostLock::acquire().unwrap();
    require(root());
    let _pages = require(hugetlb_2m(&host, 1));
    let (mut agent, child) = orphan(MemfdAgent::start_huge(1).unwrap());
    let faults = || minor_faults(child);
    let before = faults();
    std::thread::sleep(Duration::from_millis(500));
    assert!(faults() > before + 1000, "{before} faults before, {} after", faults());
    kill(Pid::from_raw(child.cast_signed()), Signal::SIGKILL).unwrap();
    agent.agent.reply().unwrap_err();
}

#[test]
fn userfaultfd_reports_whether_its_address_space_exists() {
    let mut agent = MemfdAgent::start(16, None).unwrap();
    let tracker = agent.track(UffdFeatures::empty()).unwrap();
    tracker.arm().unwrap();
    agent.write(3).unwrap();
    assert_eq!(tracker.uffd.address_space_exists(), Some(true));
    assert_eq!(tracker.harvest().unwrap(), [3], "the query clears no written bit");
    drop(agent);
    while tracker.uffd.address_space_exists() != Some(false) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn mremap_duplicate_event_has_length_0_and_keeps_the_old_mapping() {
    let (mut agent, tracker) = tracked_agent(UffdFeatures::EVENT_REMAP);
    agent.send(MemfdCommand::Duplicate).unwrap();
    let UffdEvent::Remap { from, to, len } = tracker.event().unwrap() else {
        panic!("expected a remap event")
    };
    assert_eq!((from, len), (tracker.range.start, 0));
    assert_eq!(number(agent.agent.reply().unwrap()).unwrap(), to);
    agent.write(4).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [4]);
    let WpTracker { uffd, pagemap, range, unit } = tracker;
    let copy = WpTracker { uffd, pagemap, range: AddressRange::at(to, range.len()).unwrap(), unit };
    // The new mapping is registered like the old one, and none of its pages is protected yet.
    assert_eq!(copy.peek().unwrap().len(), 16);
    copy.arm().unwrap();
    assert_eq!(copy.harvest().unwrap(), [0_u64; 0]);
}

#[test]
fn unprivileged_process_is_tracked() {
    require(root());
    let mut agent = MemfdAgent::start(16, None).unwrap();
    agent.call(MemfdCommand::BecomeUnprivileged).unwrap();
    assert!(agent.call(MemfdCommand::OpenPagemap).is_err(), "setuid made the process undumpable");
    let tracker = agent.track(UffdFeatures::EVENT_UNMAP).unwrap();
    tracker.arm().unwrap();
    agent.write(7).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [7]);
}
