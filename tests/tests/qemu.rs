//! The memory of a guest of an unpatched QEMU: what the guest, its QEMU and a device in another process write there is told.

use std::path::Path;

use fdmap_client::grpc::SummaryOptions;
use fdmap_client::proto::GapKind;
use fdmap_client::proto::convert::FileName;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::guest::daemon::Daemon;
use fdmap_tests::guest::disk::Disk;
use fdmap_tests::guest::{Guest, MEMORY_PAGES, Options, Set, Wrapper};
use fdmap_tests::host::{Alone, need, output};
use fdmap_tests::lost::consumer::Consumer;
use fdmap_tests::lost::pages::PageSet;
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::swap::{Kind, Swap};

/// Sets of pages that a guest writes.
const SETS: u64 = 20;
/// Less than the guest has, and QEMU itself needs some.
const LIMIT: u64 = 160 << 20;
/// Pages of a disk.
const DISK: u64 = 4096;

/// The name that QEMU gives to its memory.
const MEMORY: &str = "memory-backend-memfd";

/// What all tests here need. Dropped in this order.
struct Bed {
    service: Service,
    cgroup: Cgroup,
    disk: Disk,
    _swap: Swap,
    _alone: Alone,
}

impl Bed {
    fn make() -> Option<Self> {
        let alone = Alone::wait().unwrap();
        let swap = need(Swap::make(1 << 29, Kind::Any))?;
        let cgroup = Cgroup::with_limit(LIMIT).unwrap();
        let disk = Disk::make(Path::new(env!("CARGO_TARGET_TMPDIR")), 1, DISK).unwrap();
        Some(Self { service: Service::start(&[]).unwrap(), cgroup, disk, _swap: swap, _alone: alone })
    }
}

async fn consumer(service: &Service) -> Consumer {
    let mut consumer = Consumer::new(service.client().await.unwrap(), named(MEMORY), MEMORY_PAGES, 1);
    consumer.step(true).await.unwrap();
    consumer
}

fn set_of(pages: &[u64]) -> PageSet {
    let mut set = PageSet::of(MEMORY_PAGES);
    set.extend(pages.iter().copied());
    set
}

async fn swapped(service: &Service) -> u64 {
    let client = service.client().await.unwrap();
    client.summary(&named(MEMORY), &SummaryOptions::default()).await.unwrap().swapped
}

/// The guest writes sets of its pages and reads the disk into others: all of them are told. Where all writers are observed
/// exactly, none of its other pages is.
async fn sets_are_told(bed: &Bed, guest: &mut Guest, consumer: &mut Consumer, exact: bool) {
    let own = set_of(&guest.layout().pages);
    let (mut told, mut most_swapped) = (0, 0);
    for seed in 1..=SETS {
        consumer.step(false).await.unwrap();
        let set = Set { seed, per_mille: [1, 10, 50, 200][seed as usize % 4] };
        let written = set_of(&guest.write(set).unwrap());
        let (first, place) = (seed * 31 % (DISK - 64), seed * 17 % 900);
        let read = set_of(&guest.read(&bed.disk, first, 64, place as usize).unwrap());
        most_swapped = most_swapped.max(swapped(&bed.service).await);
        let seen = consumer.step(seed % 2 == 0).await.unwrap();
        let lost = written.without(&seen.changed);
        assert_eq!(lost.count(), 0, "set {seed}: written and not told: {lost:?}");
        let lost = read.without(&seen.changed);
        assert_eq!(lost.count(), 0, "set {seed}: read from the disk and not told: {lost:?}");
        told += seen.changed.count();
        if exact {
            assert!(seen.coverage_exact, "set {seed}: {:?}", seen.gaps);
            let more = own.without(&written).without(&own.without(&seen.changed));
            assert_eq!(more.count(), 0, "set {seed}: told and not written: {more:?}");
        }
    }
    println!("{SETS} sets: {told} pages told in all; {most_swapped} pages of the guest were swapped out at most");
    assert!(most_swapped > 1000, "the guest is not swapped");
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_that_nobody_tracks_is_told_of_and_named() {
    let Some(bed) = Bed::make() else { return };
    let options = Options { cgroup: Some(&bed.cgroup), disk: Some(&bed.disk), ..Options::default() };
    let Some(mut guest) = need(Guest::start(&options)) else { return };
    let begun = std::time::Instant::now();
    let memory = guest.memory_for_writing().unwrap();
    bed.service.handover().unwrap().adopt(std::os::fd::AsFd::as_fd(&memory), "", None).unwrap();
    drop(memory);
    let mut consumer = consumer(&bed.service).await;
    guest.be_busy(&bed.disk).unwrap();
    sets_are_told(&bed, &mut guest, &mut consumer, false).await;
    let seen = consumer.step(false).await.unwrap();
    assert!(!seen.coverage_exact && seen.gaps.contains(&GapKind::UntrackedMapping), "{:?}", seen.gaps);
    guest.be_calm().unwrap();
    println!("took {:?}", begun.elapsed());
}
