//! Dumps of files that are mostly in swap.

use fdmap_client::image::{DumpedFile, ImageChain};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::swap::Swap;
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;

use super::{Bed, PAGE};

const PAGES: u64 = 16 << 10;

/// Resident and swapped pages of a file.
fn residency(bed: &Bed) -> (u64, u64) {
    let stat = bed.json(&["stat", "ram"]);
    let count = |state: &str| stat["pages"][state].as_u64().unwrap();
    (count("resident_pages"), count("swapped_pages"))
}

/// Asserts that the side file lists about this number of pages that were in memory, which a lazy restore copies first.
fn assert_resident_pages(bed: &Bed, pages: u64) {
    let chain = ImageChain::open(&bed.image("image")).unwrap();
    let listed = &chain.side_file().unwrap().files[0].resident;
    assert!((1..=DumpedFile::MAX_RESIDENT_RANGES).contains(&listed.len()), "{}", listed.len());
    let sum: u64 = listed.iter().map(|[_, count]| count).sum();
    println!("{sum} resident pages in {} ranges", listed.len());
    // Ranges that are rounded have others, too.
    assert!(sum + PAGES / 100 >= pages && sum < PAGES, "{sum} {pages}");
}

#[test]
fn dump_of_a_swapped_file_keeps_its_residency() {
    let bed = Bed::new();
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::at_least(2 * PAGES * PAGE));
    drop(bed.create("ram", PAGES * PAGE));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&bed.service, "ram").unwrap();
    let pattern = Pattern { seed: 5, percent: 100 };
    agent.fill(pattern, 0, PAGES).unwrap();
    let before = residency(&bed);
    assert!(before.1 > PAGES / 2, "{before:?}");
    let report = bed.json(&["dump", "ram", "image"]);
    let after = residency(&bed);
    println!("resident and swapped pages: {before:?}, {after:?}; {}", report["files"][0]["counts"]);
    assert!(before.0.abs_diff(after.0) <= PAGES / 100, "{before:?}, {after:?}");
    assert!(before.1.abs_diff(after.1) <= PAGES / 100, "{before:?}, {after:?}");
    let mut content = vec![0; usize::try_from(PAGES * PAGE).unwrap()];
    for (page, bytes) in (0..).zip(content.chunks_mut(4096)) {
        bytes[..16].copy_from_slice(&pattern.content(page));
    }
    bed.assert_image("image", &content);
    assert_resident_pages(&bed, before.0);
    // The agent reads all of it at once.
    cgroup.limit(4 * PAGES * PAGE).unwrap();
    assert_eq!(agent.wrong_pages(pattern, 0, PAGES).unwrap(), 0);
    agent.finish().unwrap();
}

/// It maps the file to swap pages out again, which is neither a write nor a writer that is not observed.
#[test]
fn dump_of_a_swapped_file_leaves_its_coverage_exact() {
    let bed = Bed::new();
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::at_least(2 * PAGES * PAGE));
    drop(bed.create("ram", PAGES * PAGE));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let write = format!(
        "echo $$ >'{}/cgroup.procs' && head -c {} /dev/urandom >&3",
        cgroup.path().display(),
        PAGES * PAGE
    );
    let status = bed.command(&["open", "ram", "--write", "--", "sh", "-c", &write]).status().unwrap();
    assert!(status.success());
    let report = bed.json(&["dump", "ram", "1"]);
    let counts = &report["files"][0]["counts"];
    assert!(counts["swapped_in_pages"].as_u64().unwrap() > PAGES / 2, "{counts}");
    assert_eq!(counts["evicted_pages"], counts["swapped_in_pages"]);
    let report = bed.json(&["dump", "ram", "2", "--parent", "1"]);
    let file = &report["files"][0];
    assert_eq!((&file["exact"], &file["counts"]["stored_pages"]), (&true.into(), &0.into()), "{file}");
}
