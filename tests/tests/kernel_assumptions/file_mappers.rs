//! The walk over the VMAs of a file sees what `/proc/PID/maps` lists, and more: other namespaces, overlay file systems, and
//! processes whose first thread has ended. Its result is right while other processes map and unmap the file.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use fdmap_server::probe::{FileVma, MapperWalk, Probe as _, XarrayProbe};
use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root, temp_dir};
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::mapper::{MapperKind, MapperProgram, path_of};
use fdmap_tests::test;
use fdmap_tests::tracked::{HUGE, PAGE, PageKind, TrackedMemfd, range_of};
use fdmap_tests::{HarnessError, HarnessResult};
use nix::sys::mman::{MapFlags, ProtFlags};

const PAGES: u64 = 16;

fn probe() -> HarnessResult<&'static XarrayProbe> {
    static PROBE: OnceLock<Result<XarrayProbe, String>> = OnceLock::new();
    root()?;
    let loaded = PROBE.get_or_init(|| XarrayProbe::load().map_err(|error| error.to_string()));
    loaded.as_ref().map_err(|error| HarnessError::Missing(format!("the xarray probe: {error}")))
}

/// One walk; `None` if the mappers are unknown.
fn try_walk(file: BorrowedFd<'_>) -> Option<Vec<FileVma>> {
    match require(probe()).mappers(file).unwrap() {
        MapperWalk::Found(mut vmas) => {
            vmas.sort_unstable_by_key(|vma| vma.range.start);
            Some(vmas)
        }
        MapperWalk::Unknown => None,
        MapperWalk::Unavailable(reason) => panic!("{reason}"),
    }
}

fn walk(file: &OwnedFd) -> Vec<FileVma> {
    try_walk(file.as_fd()).expect("an accepted walk")
}

fn new_file(pages: u64) -> OwnedFd {
    let file = memfd::create("mapped", None).unwrap();
    memfd::resize(file.as_fd(), pages * PAGE).unwrap();
    file
}

/// Addresses, first page, and whether the mapping can be written: the VMAs of a file in this process, as maps lists them.
fn listed(file: &OwnedFd) -> Vec<(AddressRange, u64, bool)> {
    let stat = fd::stat(file).unwrap();
    let pid = std::process::id();
    let mut vmas = Maps::open(pid).unwrap().all().unwrap();
    vmas.retain(|vma| (vma.device, vma.inode) == (stat.st_dev, stat.st_ino));
    let writable = |vma| may_write(pid, vma).unwrap();
    vmas.iter().map(|vma| (vma.range, vma.offset / PAGE, vma.shared && writable(vma))).collect()
}

/// The VMAs that a walk found, in the form of [`listed`].
fn walked(file: &OwnedFd) -> Vec<(AddressRange, u64, bool)> {
    walk(file).iter().map(|vma| (vma.range, vma.first_page.0, vma.writable)).collect()
}

#[test]
fn walk_finds_what_maps_lists_of_each_kind() {
    require(probe());
    let file = new_file(PAGES);
    assert!(walk(&file).is_empty());
    let bytes = (4 * PAGE) as usize;
    let read_only = fd::reopen(file.as_fd(), false).unwrap();
    let shared = SharedMapping::shared(&file, 0, bytes, true).unwrap();
    let may_be_written = SharedMapping::shared(&file, 2 * PAGE, bytes, false).unwrap();
    let never_written = SharedMapping::shared(&read_only, 4 * PAGE, bytes, false).unwrap();
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let private = RawMapping::map(Some((file.as_fd(), 0)), bytes, access, MapFlags::MAP_PRIVATE).unwrap();
    let found = walked(&file);
    assert_eq!(found, listed(&file));
    let mut kinds: Vec<_> = found.iter().map(|(_, first, writable)| (*first, *writable)).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [(0, false), (0, true), (2, true), (4, false)]);
    // A VMA that is split is found in parts.
    let page = PAGE as usize;
    BorrowedMapping::of(&shared).protect(page, page, ProtFlags::PROT_NONE).unwrap();
    assert_eq!(walked(&file), listed(&file));
    assert_eq!(walk(&file).iter().filter(|vma| range_of(&shared).covers(vma.range)).count(), 3);
    drop((private, may_be_written, never_written));
    assert_eq!(walked(&file), listed(&file));
    drop(shared);
    assert!(walk(&file).is_empty());
}

#[test]
fn walk_finds_hugetlb_mappings_by_base_pages() {
    let host = HostLock::acquire().unwrap();
    require(probe());
    let _pages = require(hugetlb_2m(&host, 2));
    let file = memfd::create("huge", Some(HUGE)).unwrap();
    memfd::resize(file.as_fd(), 2 * HUGE).unwrap();
    let _whole = SharedMapping::shared(&file, 0, 2 * HUGE as usize, true).unwrap();
    let _second = SharedMapping::shared(&file, HUGE, HUGE as usize, true).unwrap();
    assert_eq!(walked(&file), listed(&file));
    let mut first: Vec<_> = walk(&file).iter().map(|vma| vma.first_page.0).collect();
    first.sort_unstable();
    assert_eq!(first, [0, HUGE / PAGE]);
}

#[test]
fn walk_of_more_mappings_than_one_run_handles_is_complete() {
    require(probe());
    let file = new_file(PAGES);
    // Two mappings that are adjacent in memory and in the file would be one VMA.
    let map = |nth: u64| SharedMapping::shared(&file, nth * 7 % PAGES * PAGE, PAGE as usize, true).unwrap();
    let mappings: Vec<_> = (0..5000).map(map).collect();
    let found = walked(&file);
    let pages: u64 = found.iter().map(|(range, ..)| range.len() / PAGE).sum();
    assert_eq!(pages, 5000);
    assert!(found.len() > 4096, "{} VMAs: at least three runs", found.len());
    assert_eq!(found, listed_quickly(&file));
    drop(mappings);
}

/// As [`listed`], if all mappings can be written. smaps takes long for thousands of mappings.
fn listed_quickly(file: &OwnedFd) -> Vec<(AddressRange, u64, bool)> {
    let stat = fd::stat(file).unwrap();
    let vmas = Maps::open(std::process::id()).unwrap().shared_of(stat.st_dev, stat.st_ino).unwrap();
    vmas.iter().map(|vma| (vma.range, vma.offset / PAGE, true)).collect()
}

#[test]
fn accepted_walk_has_every_lasting_mapping_while_others_come_and_go() {
    require(probe());
    let program = MapperProgram::compile().unwrap();
    let file = new_file(PAGES);
    let map = |nth: u64| SharedMapping::shared(&file, nth * 7 % PAGES * PAGE, PAGE as usize, true).unwrap();
    let lasting: Vec<_> = (0..100).map(map).collect();
    let expected: Vec<_> = walk(&file).iter().map(|vma| (vma.range, vma.first_page)).collect();
    let pid = std::process::id();
    let _others = program.map(&path_of(&file), MapperKind::Churn(2)).unwrap();
    let (mut accepted, mut others) = (0, 0);
    for _ in 0..20_000 {
        let Some(vmas) = try_walk(file.as_fd()) else { continue };
        accepted += 1;
        others += vmas.iter().filter(|vma| vma.pid != Some(pid)).count();
        let own = vmas.iter().filter(|vma| vma.pid == Some(pid));
        let own: Vec<_> = own.map(|vma| (vma.range, vma.first_page)).collect();
        assert_eq!(own, expected);
    }
    eprintln!("{accepted} of 20000 walks were accepted, with {others} mappings that come and go");
    assert!(accepted > 10_000 && others > 0);
    drop(lasting);
}

#[test]
fn walk_finds_processes_of_other_namespaces_and_without_their_first_thread() {
    require(probe());
    let program = MapperProgram::compile().unwrap();
    for how in [MapperKind::Plain, MapperKind::Namespaces, MapperKind::LeaderEnded] {
        let file = new_file(PAGES);
        let mapper = program.map(&path_of(&file), how).unwrap();
        let [found] = walk(&file)[..] else { panic!("{how:?}: {:?}", walk(&file)) };
        assert!(found.writable);
        assert_eq!((found.first_page.0, found.range.len()), (0, 2 * PAGE), "{how:?}");
        assert_eq!(found.pid, Some(mapper.pid), "{how:?}");
    }
}

#[test]
fn walk_finds_mappings_through_an_overlay_file_system() {
    require(probe());
    let program = MapperProgram::compile().unwrap();
    let (folder, _guard) = temp_dir("fdmap-overlay-").unwrap();
    let (mapper, path) = program.map_through_overlay(&folder).unwrap();
    let file: OwnedFd = open(&path);
    let [found] = walk(&file)[..] else { panic!("{:?}", walk(&file)) };
    assert_eq!((found.pid, found.writable, found.range.len()), (Some(mapper.pid), true, 2 * PAGE));
    let stat = fd::stat(&file).unwrap();
    let listed = Maps::open(mapper.pid).unwrap().shared_of(stat.st_dev, stat.st_ino).unwrap();
    assert!(listed.is_empty(), "maps shows the inode of the overlay: {listed:?}");
}

fn open(path: &Path) -> OwnedFd {
    std::fs::File::options().read(true).write(true).open(path).unwrap().into()
}

#[test]
fn tracked_mapping_has_the_address_space_of_its_pagemap_and_its_userfaultfd() {
    let probe = require(probe());
    let tracked =
        TrackedMemfd::with(PageKind::Shmem, PAGES, Userfaultfd::create().unwrap(), UffdFeatures::empty())
            .unwrap();
    let _untracked = SharedMapping::shared(&tracked.file, PAGE, PAGE as usize, true).unwrap();
    let object = |fd: BorrowedFd<'_>| probe.private_data(fd).unwrap().expect("a kernel object");
    let own = object(tracked.tracker.pagemap.as_fd());
    assert_eq!(object(Pagemap::open(None).unwrap().as_fd()), own);
    let userfaultfd = object(tracked.tracker.uffd.as_fd());
    assert_eq!(object(tracked.tracker.uffd.try_clone().unwrap().as_fd()), userfaultfd);
    assert_ne!(object(Userfaultfd::create().unwrap().as_fd()), userfaultfd);
    let found = walk(&tracked.file);
    assert!(found.len() == 2 && found.iter().all(|vma| vma.mm == own));
    for vma in found {
        let is_tracked = vma.range == tracked.tracker.range;
        assert_eq!(vma.userfaultfd, is_tracked.then_some(userfaultfd));
    }
}
