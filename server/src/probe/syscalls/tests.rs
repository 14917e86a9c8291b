use std::os::fd::{AsFd, OwnedFd};

use fdmap_proto::units::PageSize;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};

use super::*;

const PAGE: u64 = 4096;

/// A memfd with data in the given pages.
fn file(pages: u64, data: &[u64]) -> OwnedFd {
    let memfd = memfd::create("syscalls-probe", None).unwrap();
    memfd::resize(memfd.as_fd(), pages * PAGE).unwrap();
    let mapping = SharedMapping::shared(&memfd, 0, (pages * PAGE) as usize, true).unwrap();
    data.iter().for_each(|page| assert!(mapping.write_at((page * PAGE) as usize, b"x")));
    fd::reopen_for_probe(memfd.as_fd()).unwrap()
}

fn target(file: &OwnedFd, file_pages: u64) -> ScanTarget<'_> {
    ScanTarget { fd: file.as_fd(), page_size: PageSize::new(PAGE).unwrap(), file_pages, hugetlb_order: None }
}

fn data_pages(out: &ScanOutput) -> Vec<u64> {
    let pages = |(index, block): &(BlockIndex, Block)| {
        let (first, block) = (index.first_page().0, block.clone());
        (0..BLOCK_PAGES).filter(move |page| block.state(*page).is_data()).map(move |page| first + page)
    };
    out.blocks.iter().flat_map(pages).collect()
}

#[test]
fn both_methods_find_the_same_data() {
    let data: Vec<u64> = (0..20_000).filter(|page| page % 7 == 0 || (4096..8192).contains(page)).collect();
    let file = file(20_000, &data);
    let target = target(&file, 20_000);
    let range = BlockRange::around(PageRange::first(20_000));
    let (mut extent, mut page) = (ScanOutput::default(), ScanOutput::default());
    by_extent(&target, range, &|| false, &mut extent).unwrap();
    by_page(&target, range, &|| false, &mut page).unwrap();
    assert_eq!(data_pages(&extent), data);
    assert_eq!(extent.blocks, page.blocks);
}

#[test]
fn small_range_is_scanned_without_the_rest_of_the_file() {
    let file = file(100_000, &[3, 5000, 5001, 99_999]);
    let mut out = ScanOutput::default();
    let range = BlockRange::around(PageRange::at(PageIndex(5000), 1));
    SyscallsProbe.scan(&target(&file, 100_000), range, ScanOptions::default(), &|| false, &mut out).unwrap();
    assert_eq!(data_pages(&out), [5000, 5001]);
    assert!(out.uncertainty.is_empty());
}

#[test]
fn partial_last_page_is_a_page() {
    let file = file(3, &[2]);
    // 10 bytes of the third page remain.
    memfd::resize(fd::reopen(file.as_fd(), true).unwrap().as_fd(), 2 * PAGE + 10).unwrap();
    let mut out = ScanOutput::default();
    SyscallsProbe
        .scan(
            &target(&file, 3),
            BlockRange::around(PageRange::first(3)),
            ScanOptions::default(),
            &|| false,
            &mut out,
        )
        .unwrap();
    assert_eq!(data_pages(&out), [2]);
}

#[test]
fn cancelled_scan_ends() {
    let file = file(10, &[1]);
    let range = BlockRange::around(PageRange::first(10));
    let result = SyscallsProbe.scan(
        &target(&file, 10),
        range,
        ScanOptions::default(),
        &|| true,
        &mut ScanOutput::default(),
    );
    assert!(matches!(result, Err(ScanError::Cancelled)));
}

#[test]
fn hugetlb_file_is_opaque_not_a_hole() {
    let file = file(1024, &[]);
    let target = ScanTarget { hugetlb_order: Some(9), ..target(&file, 1024) };
    let mut out = ScanOutput::default();
    SyscallsProbe
        .scan(
            &target,
            BlockRange::around(PageRange::first(1024)),
            ScanOptions::default(),
            &|| false,
            &mut out,
        )
        .unwrap();
    assert!(out.opaque && out.blocks.is_empty());
}
