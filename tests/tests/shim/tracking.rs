//! Writes of programs under the shim are reported, no matter what happens to their descriptors and mappings.

use fdmap_client::proto::tracking::CoveragePolicy;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use crate::fixture::{ChangeReader, compile_plain_program, map_memfd, start_program};

const PAGES: u64 = 512;
const BYTES: u64 = PAGES * 4096;
/// Kernels before 6.10 lack mseal.
const ENOSYS: &str = "38";

fn write(
    program: &mut fdmap_tests::line_process::LineProcess,
    slot: &str,
    pages: impl IntoIterator<Item = u64>,
) {
    for page in pages {
        program.call(&format!("write {slot} {page}")).unwrap();
    }
}

async fn names(service: &Service) -> Vec<String> {
    let files = service.client().await.unwrap().list().await.unwrap();
    files.into_iter().map(|file| file.name).collect()
}

#[test]
async fn writes_are_reported_exactly_until_the_mapping_is_unmapped() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let (_, slot) = map_memfd(&mut program, "ram", PAGES);
    write(&mut program, &slot, 0..64);
    let mut reader = ChangeReader::start(&service, "ram").await;
    reader.wait_until_exact().await;
    write(&mut program, &slot, [3, 5, 400]);
    assert_eq!(reader.read().await, (vec![(3, true), (5, true), (400, true)], true));
    assert_eq!(reader.read().await, (vec![], true));

    write(&mut program, &slot, [7]);
    program.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
    let (written, _) = reader.read().await;
    assert!(written.contains(&(7, true)), "writes before munmap are harvested: {written:?}");
    assert!(written.iter().all(|(page, exact)| !exact || *page == 7), "{written:?}");
}

#[test]
async fn partial_munmap_map_fixed_and_mremap_lose_no_write() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let (fd, slot) = map_memfd(&mut program, "ram", PAGES);
    write(&mut program, &slot, 0..64);
    let mut reader = ChangeReader::start(&service, "ram").await;

    write(&mut program, &slot, [500, 10]);
    program.call(&format!("unmap {slot} {} {}", 490 * 4096, 22 * 4096)).unwrap();
    let written = reader.read_pages().await;
    assert!(written.contains(&500) && written.contains(&10), "{written:?}");

    write(&mut program, &slot, [300, 11]);
    program.call(&format!("cover {slot} {} {}", 290 * 4096, 20 * 4096)).unwrap();
    write(&mut program, &slot, [12, 489]);
    let written = reader.read_pages().await;
    assert!([300, 11, 12, 489].iter().all(|page| written.contains(page)), "{written:?}");
    program.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();

    let slot = program.call(&format!("map {fd} 0 {}", BYTES / 2)).unwrap();
    reader.read_pages().await;
    write(&mut program, &slot, [20]);
    // The mapping grows and moves.
    program.call(&format!("move {slot} {BYTES}")).unwrap();
    write(&mut program, &slot, [21, 511]);
    let written = reader.read_pages().await;
    assert!([20, 21, 511].iter().all(|page| written.contains(page)), "{written:?}");
    reader.wait_until_exact().await;
    write(&mut program, &slot, [22, 510]);
    assert_eq!(reader.read().await, (vec![(22, true), (510, true)], true), "tracked at its new address");
    program.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
}

#[test]
async fn writes_after_a_failed_munmap_are_reported() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let fd = program.call(&format!("memfd ram {BYTES}")).unwrap();
    let slot = program.call(&format!("reserve {fd} {BYTES}")).unwrap();
    program.call(&format!("protect {slot}")).unwrap();
    let mut reader = ChangeReader::start(&service, "ram").await;
    reader.wait_until_exact().await;
    write(&mut program, &slot, [3]);
    assert!(program.call(&format!("unmap {slot} 1 {BYTES}")).is_err(), "the address is not page-aligned");
    write(&mut program, &slot, [4]);
    assert_eq!(reader.read().await, (vec![(3, true), (4, true)], true), "tracking has not stopped");

    let sealed = program.call(&format!("mseal {slot}")).unwrap();
    if sealed == ENOSYS {
        return;
    }
    assert_eq!(sealed, "0");
    write(&mut program, &slot, [5]);
    assert!(program.call(&format!("unmap {slot} 0 {BYTES}")).is_err(), "the mapping is sealed");
    write(&mut program, &slot, [6]);
    let written = reader.read_pages().await;
    assert!(written.contains(&5) && written.contains(&6), "{written:?}");
    write(&mut program, &slot, [7]);
    assert_eq!(reader.read().await, (vec![(7, true)], true), "tracked again");
}

#[test]
async fn duplicated_descriptors_and_children_are_tracked() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let fd = program.call(&format!("memfd ram {BYTES}")).unwrap();
    let second = program.call(&format!("dup {fd} -1")).unwrap();
    let third = program.call(&format!("dup {second} 77")).unwrap();
    assert_eq!(third, "77");
    program.call(&format!("close {fd}")).unwrap();
    let one = program.call(&format!("map {second} 0 {BYTES}")).unwrap();
    program.call(&format!("close {second}")).unwrap();
    let other = program.call(&format!("map {third} 4096 4096")).unwrap();
    let raw = program.call(&format!("raw raw {BYTES}")).unwrap();
    program.call(&format!("map {raw} 0 {BYTES}")).unwrap();
    let mut all = names(&service).await;
    all.sort();
    assert_eq!(all, ["ram", "raw"], "each file is adopted once");

    let mut reader = ChangeReader::start(&service, "ram").await;
    reader.wait_until_exact().await;
    write(&mut program, &one, [9]);
    write(&mut program, &other, [0]);
    assert_eq!(reader.read().await, (vec![(1, true), (9, true)], true));

    assert_eq!(program.call(&format!("fork {one} 33")).unwrap(), "7");
    assert!(reader.read_pages().await.contains(&33), "a child's write");
    assert_eq!(program.call("vfork").unwrap(), "7");
    assert_eq!(program.call(&format!("child {BYTES}")).unwrap(), "7");
    assert!(names(&service).await.contains(&"child".to_owned()), "a child's own memfd");
    reader.read_pages().await;
    write(&mut program, &one, [40]);
    assert!(reader.read_pages().await.contains(&40));
}

#[test]
async fn scan_by_the_program_keeps_the_written_bits_of_the_service() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let (fd, slot) = map_memfd(&mut program, "ram", PAGES);
    let mut reader = ChangeReader::start(&service, "ram").await;
    reader.wait_until_exact().await;
    write(&mut program, &slot, [0, 1, 2]);
    let mut scan = |flags, mask| program.call(&format!("scan {slot} {flags} {mask}")).unwrap();
    let (written, present) = (2, 8);
    assert_eq!(scan(1, written), "0 0 0", "PM_SCAN_WP_MATCHING skips it");
    assert_eq!(scan(3, written), "errno 1", "PM_SCAN_CHECK_WPASYNC: EPERM, as for an unregistered range");
    assert_eq!(scan(0, written), "0 0 0", "the written bits of the service are hidden");
    assert_eq!(scan(0, present), "1 3 c", "three present file pages");
    // The service cannot see that the scans took no bits.
    assert_eq!(reader.read().await, (vec![(0, true), (1, true), (2, true)], false));

    // The program can still seal its memfd.
    program.call(&format!("unmap {slot} 0 {BYTES}")).unwrap();
    program.call(&format!("seal {fd}")).unwrap();
}

#[test]
async fn own_userfaultfd_takes_precedence_and_coverage_is_inexact() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let (_, slot) = map_memfd(&mut program, "ram", PAGES);
    let mut reader = ChangeReader::start(&service, "ram").await;
    write(&mut program, &slot, [1]);
    assert_eq!(program.call(&format!("uffd {slot}")).unwrap(), "0", "UFFDIO_REGISTER succeeds");
    write(&mut program, &slot, [2]);
    let (written, exact) = reader.read().await;
    assert!(!exact, "the mapping is not observed any more");
    let pages: Vec<_> = written.iter().map(|(page, _)| *page).collect();
    assert!(pages.contains(&1) && pages.contains(&2), "{written:?}");
}

#[test]
async fn deleted_file_is_adopted_again_when_it_is_mapped() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &["--strict"]);
    let (fd, _) = map_memfd(&mut program, "ram", PAGES);
    service.client().await.unwrap().delete(&named("ram")).await.unwrap();
    assert!(names(&service).await.is_empty());
    let slot = program.call(&format!("map {fd} 0 {BYTES}")).unwrap();
    let mut reader = ChangeReader::start(&service, "ram").await;
    write(&mut program, &slot, [9]);
    let written = reader.read().await.0;
    assert!(written.contains(&(9, true)), "{written:?}");
}

#[test]
async fn options_select_the_files_to_adopt_and_to_create() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let options =
        ["--take", "ram*", "--make", "made", "--min-size", "64K", "--policy", "ignore", "--no-track"];
    let mut program = start_program(&service, &compiled, &options);
    map_memfd(&mut program, "ram0", 16);
    map_memfd(&mut program, "ram1", 15);
    map_memfd(&mut program, "disk", 16);
    assert_eq!(names(&service).await, ["ram0"]);
    let coverage = service.client().await.unwrap().coverage(&named("ram0")).await.unwrap();
    assert_eq!((coverage.policy, coverage.mappings.len()), (CoveragePolicy::Ignore, 0));

    let created = program.call("memfd made 8192").unwrap();
    assert_eq!(program.call(&format!("flags {created}")).unwrap(), "1 0", "close-on-exec and sealable");
    let second = program.call("raw made 8192").unwrap();
    assert_eq!(
        program.call(&format!("flags {second}")).unwrap(),
        "0 1",
        "neither close-on-exec nor sealable"
    );
    let all = names(&service).await;
    assert_eq!(all.iter().filter(|name| name.starts_with("made")).count(), 2, "{all:?}");
}
