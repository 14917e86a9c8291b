//! Written bits of swapped pages.

use std::os::fd::AsFd as _;

use fdmap_sys::fd;
use fdmap_sys::mincore::ResidencyWindow;
use fdmap_sys::uffd::UffdFeatures;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::swap::Swap;
use fdmap_tests::test;
use fdmap_tests::test_agent::command::MemfdCommand;

const PAGES: usize = 512;

fn resident(agent: &MemfdAgent) -> usize {
    let file = fd::reopen_for_probe(agent.file.as_fd()).unwrap();
    let window = ResidencyWindow::open(file.as_fd(), 0, PAGES * 4096, 4096).unwrap();
    let mut bytes = [0; PAGES];
    window.read(0, &mut bytes).unwrap();
    bytes.iter().filter(|byte| **byte & 1 != 0).count()
}

/// Pages out until almost no page is resident. The kernel may reference a few pages for a moment.
fn page_out(agent: &mut MemfdAgent) {
    for _ in 0..100 {
        agent.call(MemfdCommand::PageOut).unwrap();
        if resident(agent) < PAGES / 50 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{} pages are still resident", resident(agent));
}

#[test]
fn written_bits_survive_swap_out_and_in() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::at_least(64 << 20));
    let cgroup = require(Cgroup::with_limit(64 << 20));
    let mut agent = MemfdAgent::start(PAGES as u64, Some(&cgroup)).unwrap();
    let tracker = agent.track(UffdFeatures::empty()).unwrap();
    for page in 0..PAGES as u64 {
        agent.write(page).unwrap();
    }
    tracker.arm().unwrap();
    agent.write(3).unwrap();
    agent.write(400).unwrap();
    page_out(&mut agent);
    assert_eq!(tracker.peek().unwrap(), [3, 400], "after swap-out");
    for page in 0..PAGES as u64 {
        agent.call(MemfdCommand::Read(page)).unwrap();
    }
    assert_eq!(resident(&agent), PAGES);
    assert_eq!(tracker.harvest().unwrap(), [3, 400], "after swap-in");

    page_out(&mut agent);
    assert_eq!(tracker.harvest().unwrap(), [0_u64; 0]);
    agent.write(9).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [9], "a write to a swapped page is reported");
    page_out(&mut agent);
    assert_eq!(tracker.harvest().unwrap(), [0_u64; 0]);
}
