//! Pages that are pinned for DMA during the pause: freezing a cgroup does not end DMA.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use fdmap_sys::memfd;
use fdmap_sys::testing::kernel_access::RegisteredBuffer;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_tests::cgroup::freezer;
use fdmap_tests::harness::require;
use fdmap_tests::test;

use super::{Bed, PAGE, content_of, error_of, random, write_at};

const PINNED_PAGE: usize = 5;

/// A file of random pages, of which one is pinned.
fn pinned(bed: &Bed) -> (OwnedFd, RegisteredBuffer) {
    let fd = bed.create("ram", 64 * PAGE);
    write_at(&fd, 0, &random(1, 64 * 4096));
    let mapping = RawMapping::shared(fd.as_fd(), 0, 64 * 4096).unwrap();
    let buffer = RegisteredBuffer::new(&mapping, PINNED_PAGE * 4096, 4096).unwrap();
    (fd, buffer)
}

fn is_frozen(cgroup: &Path) -> bool {
    let read = |file: &str| std::fs::read_to_string(cgroup.join(file)).unwrap_or_default();
    read("freezer.state").trim() == "FROZEN" || read("cgroup.events").contains("frozen 1")
}

/// The kernel writes to the page after the last round has read it, and then releases it.
#[test]
fn page_that_dma_writes_during_the_pause_is_sent_again() {
    let bed = Bed::new();
    let (cgroup, _guard) = require(freezer());
    let (fd, mut buffer) = pinned(&bed);
    let written = random(2, 4096);
    let source = memfd::create("written", None).unwrap();
    fdmap_sys::fd::write_at(source.as_fd(), 0, &written).unwrap();
    let observed = cgroup.clone();
    let dma = std::thread::spawn(move || {
        while !is_frozen(&observed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(buffer.fill(source.as_fd()), Ok(4096));
    });
    let receiving = bed.receive(&["--keep"]);
    let port = receiving.port;
    let (report, _) = bed.migrated(port, receiving, &["--freeze-cgroup", cgroup.to_str().unwrap()]);
    dma.join().unwrap();
    let content = bed.content(&bed.destination, "ram");
    assert!(content[PINNED_PAGE * 4096..][..4096] == written, "{report}");
    assert!(content == content_of(&fd));
    assert!(report["downtime_ns"].as_u64().unwrap() > 300_000_000, "it waits for the release: {report}");
    // After success the writers stay paused.
    assert!(is_frozen(&cgroup));
    let state = if cgroup.join("freezer.state").exists() {
        ("freezer.state", "THAWED")
    } else {
        ("cgroup.freeze", "0")
    };
    std::fs::write(cgroup.join(state.0), state.1).unwrap();
}

/// A page that stays pinned may be written at any time. A command that pauses writers ends DMA, too.
#[test]
fn page_that_stays_pinned_is_refused_unless_dma_has_ended() {
    let bed = Bed::new();
    let (cgroup, _guard) = require(freezer());
    let (fd, _buffer) = pinned(&bed);
    let receiving = bed.receive(&["--keep"]);
    let mut migrate = bed.migrate(receiving.port, &["--freeze-cgroup", cgroup.to_str().unwrap()]);
    let error = error_of(&migrate.output().unwrap(), 7);
    assert!(error.contains("pinned for DMA, after the writers were paused"), "{error}");
    let (status, _, error) = receiving.ended();
    assert!(status == Some(7) && error.contains("the source aborted the migration"), "{error}");
    assert!(!is_frozen(&cgroup));
    bed.assert_not_migrated();

    let receiving = bed.receive(&["--keep"]);
    let (report, _) = bed.migrated(receiving.port, receiving, &["--pause", "true"]);
    assert_eq!(report["exact"], false, "a pinned page can be written unobserved");
    assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
}
