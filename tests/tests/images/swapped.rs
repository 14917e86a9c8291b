//! Dumps of files that are mostly in swap.

use fdmap_client::image::{DumpedFile, ImageChain};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, vmstat};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::{HarnessError, test};

use super::slots::{PAGES, content_with_zeros, count, lock, residency, swapped_file};
use super::{Bed, PAGE};

const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

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

/// What zswap took is not on the device. The dump maps the file to swap pages out again, which is neither a write nor a writer that is not
/// observed.
#[test]
fn dump_with_zswap_reads_through_the_file_and_leaves_coverage_exact() {
    let _host = lock();
    let bed = Bed::new();
    let before = std::fs::read_to_string(ZSWAP).map_err(|_| HarnessError::Missing("zswap".to_owned()));
    let value = require(before).trim().to_owned();
    let _zswap = CleanupGuard::new(Cleanup::Restore { path: ZSWAP.into(), value }).unwrap();
    std::fs::write(ZSWAP, "Y").unwrap();
    let _swap = require(Swap::make(2 * PAGES * PAGE, SwapKind::Any));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(6);
    let compressed = vmstat("zswpout").unwrap();
    swapped_file(&bed, "ram", &cgroup, &content);
    println!("{} pages to zswap", vmstat("zswpout").unwrap() - compressed);
    let report = bed.json(&["dump", "ram", "1"]);
    println!("{}", report["files"][0]["counts"]);
    assert_eq!(count(&report, "slot_pages") + count(&report, "zero_slot_pages"), 0);
    assert!(report["slots_refused"].as_str().unwrap().contains("zswap"), "{report}");
    assert!(count(&report, "swapped_in_pages") > PAGES / 2);
    assert_eq!(count(&report, "evicted_pages"), count(&report, "swapped_in_pages"));
    bed.assert_image("1", &content);
    // Each dump maps the file, too. A signal that other programs of the host cause may make a generation conservative.
    let is_exact = |number: u64| {
        let (image, parent) = (number.to_string(), (number - 1).to_string());
        let report = bed.json(&["dump", "ram", &image, "--parent", &parent]);
        bed.assert_image(&image, &content);
        let file = &report["files"][0];
        println!("{file} {}", String::from_utf8(bed.run(&["dirty", "ram", "--since", "1"]).stdout).unwrap());
        (&file["exact"], &file["counts"]["stored_pages"]) == (&true.into(), &0.into())
    };
    assert!((2..5).any(is_exact));
}
