//! Writes of programs under the shim are told, whatever becomes of their descriptors and mappings.

use fdmap_client::proto::tracking::CoveragePolicy;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use crate::bed::{Consumer, mapped, stranger};

const PAGES: u64 = 512;
const BYTES: u64 = PAGES * 4096;
/// Of kernels before 6.10, which seal no mappings.
const ENOSYS: &str = "38";

/// Writes these pages.
fn write(
    stranger: &mut fdmap_tests::line_process::LineProcess,
    slot: &str,
    pages: impl IntoIterator<Item = u64>,
) {
    for page in pages {
        stranger.call(&format!("write {slot} {page}")).unwrap();
    }
}

async fn names(service: &Service) -> Vec<String> {
    let files = service.client().await.unwrap().list().await.unwrap();
    files.into_iter().map(|file| file.name).collect()
}

#[test]
async fn writes_are_told_exactly_until_the_mapping_is_gone() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let (_, slot) = mapped(&mut stranger, "ram", PAGES);
    write(&mut stranger, &slot, 0..64);
    let mut consumer = Consumer::begin(&service, "ram").await;
    consumer.settle().await;
    write(&mut stranger, &slot, [3, 5, 400]);
    assert_eq!(consumer.step().await, (vec![(3, true), (5, true), (400, true)], true));
    assert_eq!(consumer.step().await, (vec![], true));

    write(&mut stranger, &slot, [7]);
    stranger.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
    let (told, _) = consumer.step().await;
    assert!(told.contains(&(7, true)), "what was written before is taken before it is gone: {told:?}");
    assert!(told.iter().all(|(page, exact)| !exact || *page == 7), "{told:?}");
}

#[test]
async fn parts_that_are_unmapped_covered_or_moved_lose_no_write() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let (fd, slot) = mapped(&mut stranger, "ram", PAGES);
    write(&mut stranger, &slot, 0..64);
    let mut consumer = Consumer::begin(&service, "ram").await;

    write(&mut stranger, &slot, [500, 10]);
    stranger.call(&format!("unmap {slot} {} {}", 490 * 4096, 22 * 4096)).unwrap();
    let told = consumer.pages().await;
    assert!(told.contains(&500) && told.contains(&10), "{told:?}");

    write(&mut stranger, &slot, [300, 11]);
    stranger.call(&format!("cover {slot} {} {}", 290 * 4096, 20 * 4096)).unwrap();
    write(&mut stranger, &slot, [12, 489]);
    let told = consumer.pages().await;
    assert!([300, 11, 12, 489].iter().all(|page| told.contains(page)), "{told:?}");
    stranger.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();

    let slot = stranger.call(&format!("map {fd} 0 {}", BYTES / 2)).unwrap();
    consumer.pages().await;
    write(&mut stranger, &slot, [20]);
    // It grows and moves.
    stranger.call(&format!("move {slot} {BYTES}")).unwrap();
    write(&mut stranger, &slot, [21, 511]);
    let told = consumer.pages().await;
    assert!([20, 21, 511].iter().all(|page| told.contains(page)), "{told:?}");
    consumer.settle().await;
    write(&mut stranger, &slot, [22, 510]);
    assert_eq!(consumer.step().await, (vec![(22, true), (510, true)], true), "tracked where it is now");
    stranger.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
}

#[test]
async fn writes_after_an_unmapping_that_failed_are_told() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let fd = stranger.call(&format!("memfd ram {BYTES}")).unwrap();
    let slot = stranger.call(&format!("reserve {fd} {BYTES}")).unwrap();
    stranger.call(&format!("protect {slot}")).unwrap();
    let mut consumer = Consumer::begin(&service, "ram").await;
    consumer.settle().await;
    write(&mut stranger, &slot, [3]);
    assert!(stranger.call(&format!("unmap {slot} 1 {BYTES}")).is_err(), "it begins within a page");
    write(&mut stranger, &slot, [4]);
    assert_eq!(consumer.step().await, (vec![(3, true), (4, true)], true), "nothing was let go of");

    let sealed = stranger.call(&format!("mseal {slot}")).unwrap();
    if sealed == ENOSYS {
        return;
    }
    assert_eq!(sealed, "0");
    write(&mut stranger, &slot, [5]);
    assert!(stranger.call(&format!("unmap {slot} 0 {BYTES}")).is_err(), "it is sealed");
    write(&mut stranger, &slot, [6]);
    let told = consumer.pages().await;
    assert!(told.contains(&5) && told.contains(&6), "{told:?}");
    write(&mut stranger, &slot, [7]);
    assert_eq!(consumer.step().await, (vec![(7, true)], true), "tracked anew");
}

#[test]
async fn descriptors_may_be_passed_around_and_children_made() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let fd = stranger.call(&format!("memfd ram {BYTES}")).unwrap();
    let second = stranger.call(&format!("dup {fd} -1")).unwrap();
    let third = stranger.call(&format!("dup {second} 77")).unwrap();
    assert_eq!(third, "77");
    stranger.call(&format!("close {fd}")).unwrap();
    let one = stranger.call(&format!("map {second} 0 {BYTES}")).unwrap();
    stranger.call(&format!("close {second}")).unwrap();
    let other = stranger.call(&format!("map {third} 4096 4096")).unwrap();
    let raw = stranger.call(&format!("raw raw {BYTES}")).unwrap();
    stranger.call(&format!("map {raw} 0 {BYTES}")).unwrap();
    let mut all = names(&service).await;
    all.sort();
    assert_eq!(all, ["ram", "raw"], "each file once");

    let mut consumer = Consumer::begin(&service, "ram").await;
    consumer.settle().await;
    write(&mut stranger, &one, [9]);
    write(&mut stranger, &other, [0]);
    assert_eq!(consumer.step().await, (vec![(1, true), (9, true)], true));

    assert_eq!(stranger.call(&format!("fork {one} 33")).unwrap(), "7");
    assert!(consumer.pages().await.contains(&33), "a child's write");
    assert_eq!(stranger.call("vfork").unwrap(), "7");
    assert_eq!(stranger.call(&format!("child {BYTES}")).unwrap(), "7");
    assert!(names(&service).await.contains(&"child".to_owned()), "a child's own memfd");
    consumer.pages().await;
    write(&mut stranger, &one, [40]);
    assert!(consumer.pages().await.contains(&40));
}

#[test]
async fn scans_by_the_program_take_no_marks_of_the_service() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let (fd, slot) = mapped(&mut stranger, "ram", PAGES);
    let mut consumer = Consumer::begin(&service, "ram").await;
    consumer.settle().await;
    write(&mut stranger, &slot, [0, 1, 2]);
    let mut scan = |flags, mask| stranger.call(&format!("scan {slot} {flags} {mask}")).unwrap();
    let (written, present) = (2, 8);
    assert_eq!(scan(1, written), "0 0 0", "PM_SCAN_WP_MATCHING passes it over");
    assert_eq!(scan(3, written), "errno 1", "PM_SCAN_CHECK_WPASYNC: EPERM, as where nothing is registered");
    assert_eq!(scan(0, written), "0 0 0", "whose marks are not the program's to see");
    assert_eq!(scan(0, present), "1 3 c", "three pages, of a file and present");
    assert_eq!(consumer.step().await, (vec![(0, true), (1, true), (2, true)], true));

    // What a program may do with a memfd it may do still.
    stranger.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
    stranger.call(&format!("seal {fd}")).unwrap();
}

#[test]
async fn own_userfaultfd_wins_and_coverage_says_so() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let (_, slot) = mapped(&mut stranger, "ram", PAGES);
    let mut consumer = Consumer::begin(&service, "ram").await;
    write(&mut stranger, &slot, [1]);
    assert_eq!(stranger.call(&format!("uffd {slot}")).unwrap(), "0", "it is registered");
    write(&mut stranger, &slot, [2]);
    let (told, exact) = consumer.step().await;
    assert!(!exact, "nobody observes it any more");
    let pages: Vec<_> = told.iter().map(|(page, _)| *page).collect();
    assert!(pages.contains(&1) && pages.contains(&2), "{told:?}");
}

#[test]
async fn file_that_was_deleted_is_given_again_when_it_is_mapped() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &["--strict"]);
    let (fd, _) = mapped(&mut stranger, "ram", PAGES);
    service.client().await.unwrap().delete(&named("ram")).await.unwrap();
    assert!(names(&service).await.is_empty());
    let slot = stranger.call(&format!("map {fd} 0 {BYTES}")).unwrap();
    let mut consumer = Consumer::begin(&service, "ram").await;
    write(&mut stranger, &slot, [9]);
    let told = consumer.step().await.0;
    assert!(told.contains(&(9, true)), "{told:?}");
}

#[test]
async fn what_is_taken_made_and_left_alone_is_as_was_asked() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let options =
        ["--take", "ram*", "--make", "made", "--min-size", "64K", "--policy", "ignore", "--no-track"];
    let mut stranger = stranger(&service, &program, &options);
    mapped(&mut stranger, "ram0", 16);
    mapped(&mut stranger, "ram1", 15);
    mapped(&mut stranger, "disk", 16);
    assert_eq!(names(&service).await, ["ram0"]);
    let coverage = service.client().await.unwrap().coverage(&named("ram0")).await.unwrap();
    assert_eq!((coverage.policy, coverage.mappings.len()), (CoveragePolicy::Ignore, 0));

    let made = stranger.call("memfd made 8192").unwrap();
    assert_eq!(
        stranger.call(&format!("flags {made}")).unwrap(),
        "1 0",
        "close-on-exec, and seals can be added"
    );
    let second = stranger.call("raw made 8192").unwrap();
    assert_eq!(stranger.call(&format!("flags {second}")).unwrap(), "0 1", "not so");
    let all = names(&service).await;
    assert_eq!(all.iter().filter(|name| name.starts_with("made")).count(), 2, "{all:?}");
}
