use std::os::fd::{AsFd, OwnedFd};

use fdmap_proto::units::{PageIndex, PageSize};
use fdmap_sys::cachestat::CacheCounts;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};
use nix::fcntl::{FallocateFlags, fallocate};
use proptest::prelude::*;

use super::seek::{by_extent, by_page};
use super::*;
use crate::pages::{BLOCK_LEAVES, Block};

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

fn scan(file: &OwnedFd, file_pages: u64, pages: PageRange) -> ScanOutput {
    let mut out = ScanOutput::default();
    let range = BlockRange::around(pages);
    SyscallsProbe
        .scan(&target(file, file_pages), range, ScanOptions::default(), &|| false, &mut out)
        .unwrap();
    out
}

#[test]
fn all_methods_find_the_same_data() {
    let data: Vec<u64> = (0..20_000).filter(|page| page % 7 == 0 || (4096..8192).contains(page)).collect();
    let file = file(20_000, &data);
    let target = target(&file, 20_000);
    let range = BlockRange::around(PageRange::first(20_000));
    let (mut extent, mut page, mut counts) =
        (ScanOutput::default(), ScanOutput::default(), ScanOutput::default());
    by_extent(&target, range, &|| false, &mut extent).unwrap();
    by_page(&target, range, &|| false, &mut page).unwrap();
    assert_eq!(data_pages(&extent), data);
    assert_eq!(extent.blocks, page.blocks);
    if counts::are_available(file.as_fd()) {
        counts::scan(&target, range, &|| false, &mut counts).unwrap();
        assert_eq!(counts.blocks, page.blocks);
    }
}

/// SEEK_DATA and mincore skip them until they are written; cachestat counts them.
#[test]
fn allocated_pages_are_resident_to_counts_and_holes_to_seeks() {
    let file = file(9000, &[1, 5000]);
    let writable = fd::reopen(file.as_fd(), true).unwrap();
    fallocate(&writable, FallocateFlags::empty(), 0, (4096 * PAGE).cast_signed()).unwrap();
    let (target, range) = (target(&file, 9000), BlockRange::around(PageRange::first(9000)));
    let (mut sought, mut counted) = (ScanOutput::default(), ScanOutput::default());
    seek::scan(&target, range, &|| false, &mut sought).unwrap();
    assert_eq!(data_pages(&sought), [1, 5000]);
    if counts::are_available(file.as_fd()) {
        counts::scan(&target, range, &|| false, &mut counted).unwrap();
        assert_eq!(data_pages(&counted), (0..4096).chain([5000]).collect::<Vec<_>>());
    }
}

/// As large as a file may be by default.
#[test]
fn sparse_file_of_16_tib_is_scanned() {
    let pages = (16 << 40) / PAGE;
    let file = memfd::create("syscalls-probe", None).unwrap();
    memfd::resize(file.as_fd(), pages * PAGE).unwrap();
    let writable = fd::reopen(file.as_fd(), true).unwrap();
    let data = [0, 70_000 * BLOCK_PAGES + 5, 70_001 * BLOCK_PAGES, pages - 1];
    for page in data {
        fd::write_at(writable.as_fd(), page * PAGE, b"x").unwrap();
    }
    let file = fd::reopen_for_probe(file.as_fd()).unwrap();
    assert_eq!(data_pages(&scan(&file, pages, PageRange::first(pages))), data);
}

#[test]
fn small_range_is_sought_page_by_page() {
    let file = file(100_000, &[3, 5000, 5001, 99_999]);
    let mut out = ScanOutput::default();
    let range = BlockRange::around(PageRange::at(PageIndex(5000), 1));
    seek::scan(&target(&file, 100_000), range, &|| false, &mut out).unwrap();
    assert_eq!(data_pages(&out), [5000, 5001]);
    assert!(out.uncertainty.is_empty());
}

/// State of a page that mincore does not find in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Hole,
    Cached,
    Swapped,
}

/// Runs of pages in one state, as many pages as a block.
fn block_of<T: Clone + std::fmt::Debug + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Vec<T>> {
    let pages = BLOCK_PAGES as usize;
    let runs = prop::collection::vec((value, 1..=700_usize), 1..80);
    runs.prop_map(move |runs| {
        let values = runs.into_iter().flat_map(|(value, len)| std::iter::repeat_n(value, len));
        let values: Vec<_> = values.take(pages).collect();
        values.iter().cycle().take(pages).cloned().collect()
    })
}

fn missing_states() -> impl Strategy<Value = Missing> {
    prop_oneof![Just(Missing::Hole), Just(Missing::Cached), Just(Missing::Swapped)]
}

proptest! {
    /// Pages change their states between the counts.
    #[test]
    fn page_that_is_not_in_memory_gets_a_state_that_it_had(
        missing in block_of(any::<bool>()),
        states in block_of(missing_states()),
        changes in prop::collection::vec((0..BLOCK_PAGES as usize, 1..200_usize, missing_states()), 0..40),
    ) {
        let mut plane = [0; BLOCK_LEAVES];
        (0..BLOCK_PAGES).filter(|page| missing[*page as usize]).for_each(|page| set(&mut plane, page, page + 1));
        let mut now = states.clone();
        let mut had: Vec<Vec<Missing>> = states.iter().map(|state| vec![*state]).collect();
        let mut changes = changes.into_iter();
        let count = |start: u64, end: u64| {
            let of = |state| now[start as usize..end as usize].iter().filter(|page| **page == state).count() as u64;
            let counts = CacheCounts { cached: of(Missing::Cached), evicted: of(Missing::Swapped) };
            if let Some((first, len, state)) = changes.next() {
                for page in first..(first + len).min(now.len()) {
                    now[page] = state;
                    had[page].push(state);
                }
            }
            Ok(counts)
        };
        let found = counts::find(&plane, count).unwrap();
        for page in 0..BLOCK_PAGES {
            let is_set = |plane: &Plane| plane[to_usize(page / 64)] >> (page % 64) & 1 == 1;
            let state = match (is_set(&found.swapped), is_set(&found.cached)) {
                (false, false) => Missing::Hole,
                (false, true) => Missing::Cached,
                (true, false) => Missing::Swapped,
                (true, true) => panic!("page {page} is in both sets"),
            };
            let allowed = if missing[page as usize] { &had[page as usize][..] } else { &[Missing::Hole] };
            prop_assert!(allowed.contains(&state), "page {} is {:?}, had {:?}", page, state, allowed);
        }
    }
}

#[test]
fn runs_of_bits_are_found() {
    for expected in [&[][..], &[(0, 4096)], &[(0, 1), (63, 65), (100, 4000), (4095, 4096)], &[(64, 128)]] {
        let mut plane = [0; 64];
        expected.iter().for_each(|(start, end)| set(&mut plane, *start, *end));
        assert_eq!(counts::runs(&plane), expected);
    }
}

#[test]
fn small_range_is_scanned_without_the_rest_of_the_file() {
    let file = file(100_000, &[3, 5000, 5001, 99_999]);
    let out = scan(&file, 100_000, PageRange::at(PageIndex(5000), 1));
    assert_eq!(data_pages(&out), [5000, 5001]);
    assert!(out.uncertainty.is_empty());
}

#[test]
fn partial_last_page_is_a_page() {
    let file = file(3, &[2]);
    // 10 bytes of the third page remain.
    memfd::resize(fd::reopen(file.as_fd(), true).unwrap().as_fd(), 2 * PAGE + 10).unwrap();
    let out = scan(&file, 3, PageRange::first(3));
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
