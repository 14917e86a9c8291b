//! Marks of pages that are swapped out.

use std::os::fd::AsFd as _;

use fdmap_sys::fd;
use fdmap_sys::mincore::ResidencyWindow;
use fdmap_sys::uffd::UffdFeatures;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::puppet::Puppet;
use fdmap_tests::swap::Swap;
use fdmap_tests::test;

const PAGES: usize = 512;

fn resident(puppet: &Puppet) -> usize {
    let file = fd::reopen_for_probe(puppet.file.as_fd()).unwrap();
    let window = ResidencyWindow::open(file.as_fd(), 0, PAGES * 4096, 4096).unwrap();
    let mut bytes = [0; PAGES];
    window.read(0, &mut bytes).unwrap();
    bytes.iter().filter(|byte| **byte & 1 != 0).count()
}

/// Pages out until nothing is in memory, or little is: a page may be held by others for a moment.
fn page_out(puppet: &mut Puppet) {
    for _ in 0..100 {
        puppet.call("pageout").unwrap();
        if resident(puppet) < PAGES / 50 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{} pages stay in memory", resident(puppet));
}

#[test]
fn marks_survive_the_way_out_and_in() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::at_least(64 << 20));
    let cgroup = require(Cgroup::with_limit(64 << 20));
    let mut puppet = Puppet::start(PAGES as u64, Some(&cgroup)).unwrap();
    let tracker = puppet.track(UffdFeatures::empty()).unwrap();
    for page in 0..PAGES as u64 {
        puppet.write(page).unwrap();
    }
    tracker.arm().unwrap();
    puppet.write(3).unwrap();
    puppet.write(400).unwrap();
    page_out(&mut puppet);
    assert_eq!(tracker.look().unwrap(), [3, 400], "on the way out");
    for page in 0..PAGES as u64 {
        puppet.call(&format!("read {page}")).unwrap();
    }
    assert_eq!(resident(&puppet), PAGES);
    assert_eq!(tracker.harvest().unwrap(), [3, 400], "and in");

    page_out(&mut puppet);
    assert_eq!(tracker.harvest().unwrap(), [0_u64; 0]);
    puppet.write(9).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [9], "a swapped page is written");
    page_out(&mut puppet);
    assert_eq!(tracker.harvest().unwrap(), [0_u64; 0]);
}
