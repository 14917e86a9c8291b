//! The memory of a guest of an unpatched QEMU: writes of the guest, of QEMU and of a device in another process are reported.
//! QEMU is started by `fdmap exec`, or adopted while it runs.

mod fixture;

use std::time::{Duration, Instant};

use fdmap_client::proto::GapKind;
use fdmap_tests::guest::daemon::Daemon;
use fdmap_tests::guest::{Guest, Options, PageSelection};
use fdmap_tests::harness::require;
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::history::Checkpoint;
use fdmap_tests::test;

use crate::fixture::{Attachment, DISK, Fixture, both, set_of};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// Sets of pages that a guest writes.
const SETS: u64 = 20;

/// Writes that began before adoption may be in progress for up to 10 s after it. This is longer.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns true if all writers are observed. Pages of reads in flight are reported once more, with a gap.
fn observed(seen: &Checkpoint) -> bool {
    seen.gaps.iter().all(|gap| *gap == GapKind::Pinned)
}

/// Waits until writes that began before adoption no longer count as in progress.
async fn settle(consumer: &mut Consumer) {
    let begun = Instant::now();
    while !observed(consumer.step(true).await.unwrap()) {
        assert!(begun.elapsed() < SETTLE_TIMEOUT, "some writers are still unobserved");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("all writers are observed after {:?}", begun.elapsed());
}

/// The guest writes sets of its pages and reads a disk into others. Asserts that all of these pages are reported.
/// With `exact`, all writers must be observed, no other guest page may be reported as exact, and few may be reported
/// at all.
async fn sets_are_reported(fixture: &Fixture, guest: &mut Guest, consumer: &mut Consumer, exact: bool) {
    let own = set_of(&guest.layout().pages);
    let (mut all_written, mut all_reported, mut again, mut most_swapped) = (0, 0, 0, 0);
    for seed in 1..=SETS {
        consumer.step(false).await.unwrap();
        let set = PageSelection { seed, per_mille: [1, 10, 50, 200][seed as usize % 4] };
        let written = set_of(&guest.write(set).unwrap());
        let (first, place) = (seed * 31 % (DISK - 64), seed as usize * 17 % 900);
        let read = set_of(&guest.read(&fixture.disk, first, 64, place).unwrap());
        most_swapped = most_swapped.max(fixture.swapped().await);
        let seen = consumer.step(seed % 2 == 0).await.unwrap();
        for (what, pages) in [("written", &written), ("read from the disk", &read)] {
            let lost = pages.without(&seen.changed);
            assert_eq!(lost.count(), 0, "set {seed}: {what} and not reported: {lost:?}");
        }
        all_written += written.count() + read.count();
        all_reported += seen.changed.count();
        if exact {
            assert!(observed(seen), "set {seed}: {:?}", seen.gaps);
            let more = both(&own, &seen.changed).without(&written);
            again += more.count();
            let more = more.without(&seen.conservative);
            assert_eq!(more.count(), 0, "set {seed}: exact and not written: {more:?}");
        }
    }
    println!(
        "{all_written} pages of {SETS} sets and reads; {all_reported} pages reported, {again} of them unnecessarily; \
         {most_swapped} swapped out at most"
    );
    assert!(most_swapped > 1000, "the guest is not swapped");
    assert!(!exact || again * 10 < all_written, "{again} pages were reported unnecessarily");
}

/// A paused guest has no changes once the requests in flight have ended. A resumed guest has changes again.
async fn paused_guest_writes_nothing(guest: &mut Guest, consumer: &mut Consumer) {
    guest.pause().unwrap();
    // Pages that were pinned for a read are reported once more, and for a second or so pages with another kernel
    // reference, for example an LRU batch.
    let begun = Instant::now();
    while consumer.step(true).await.unwrap().changed.count() > 0 {
        assert!(begun.elapsed() < SETTLE_TIMEOUT, "a paused guest still writes");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("paused: no changes after {:?}", begun.elapsed());
    for _ in 0..3 {
        let seen = consumer.step(true).await.unwrap();
        assert_eq!(seen.changed.count(), 0, "a paused guest wrote {:?}", seen.changed);
        assert!(observed(seen), "{:?}", seen.gaps);
    }
    guest.resume().unwrap();
    let written = set_of(&guest.write(PageSelection { seed: 99, per_mille: 5 }).unwrap());
    let seen = consumer.step(false).await.unwrap();
    assert_eq!(written.without(&seen.changed).count(), 0, "writes of the resumed guest are reported");
}

async fn guest_writes_are_reported(attachment: Attachment) {
    let fixture = Fixture::make().await;
    let options = Options {
        wrapper: attachment.wrapper(&fixture.service),
        memory: attachment.memory(&fixture).await,
        cgroup: Some(&fixture.cgroup),
        disk: Some(&fixture.disk),
        vhost_user: None,
    };
    let mut guest = require(Guest::start(&options));
    guest.start_reads(&fixture.disk).unwrap();
    attachment.adopt(&fixture, guest.pid());
    if attachment == Attachment::Given {
        fixture.seal_writers().await;
    }
    let mut consumer = fixture.consumer().await;
    settle(&mut consumer).await;
    sets_are_reported(&fixture, &mut guest, &mut consumer, true).await;
    paused_guest_writes_nothing(&mut guest, &mut consumer).await;
    guest.stop_reads().unwrap();
}

#[test(flavor = "multi_thread")]
async fn guest_writes_are_reported_under_the_shim() {
    guest_writes_are_reported(Attachment::Exec).await;
}

#[test(flavor = "multi_thread")]
async fn guest_writes_are_reported_after_adoption() {
    guest_writes_are_reported(Attachment::Adopt).await;
}

#[test(flavor = "multi_thread")]
async fn guest_writes_are_reported_in_a_writer_sealed_file() {
    guest_writes_are_reported(Attachment::Given).await;
}

/// Another process maps the same memory and reads the disk, which is `/dev/vda` in the guest.
async fn vhost_user_writes_are_reported(attachment: Attachment) {
    let fixture = Fixture::make().await;
    let wrapper = attachment.wrapper(&fixture.service);
    let daemon = require(Daemon::start(&wrapper, &fixture.disk));
    let cgroup = Some(&fixture.cgroup);
    let options = Options { wrapper, cgroup, vhost_user: Some(daemon.socket()), ..Options::default() };
    let mut guest = require(Guest::start(&options));
    guest.start_reads(&fixture.disk).unwrap();
    attachment.adopt(&fixture, guest.pid());
    let mut consumer = fixture.consumer().await;
    if attachment == Attachment::Adopt {
        // The daemon is not observed: the gap names it, and all pages that it may have written are reported.
        let read = set_of(&guest.read(&fixture.disk, 7, 64, 3).unwrap());
        let seen = consumer.step(false).await.unwrap();
        assert_eq!(read.without(&seen.changed).count(), 0);
        assert!(seen.gaps.contains(&GapKind::UntrackedMapping), "{:?}", seen.gaps);
        assert!(fixture.names(daemon.pid()).await, "the gap names the daemon");
    }
    attachment.adopt(&fixture, daemon.pid());
    settle(&mut consumer).await;
    sets_are_reported(&fixture, &mut guest, &mut consumer, true).await;
    // This daemon aborts a request that is in flight when its guest is paused.
    guest.stop_reads().unwrap();
    paused_guest_writes_nothing(&mut guest, &mut consumer).await;
}

#[test(flavor = "multi_thread")]
async fn vhost_user_writes_are_reported_under_the_shim() {
    vhost_user_writes_are_reported(Attachment::Exec).await;
}

#[test(flavor = "multi_thread")]
async fn vhost_user_writes_are_reported_after_adoption() {
    vhost_user_writes_are_reported(Attachment::Adopt).await;
}

#[test(flavor = "multi_thread")]
async fn unobserved_guest_is_named_and_reported_conservatively() {
    let fixture = Fixture::make().await;
    let options = Options { cgroup: Some(&fixture.cgroup), disk: Some(&fixture.disk), ..Options::default() };
    let mut guest = require(Guest::start(&options));
    let memory = guest.memory_for_writing().unwrap();
    fixture.service.fdpass().unwrap().adopt(std::os::fd::AsFd::as_fd(&memory), "", None).unwrap();
    drop(memory);
    guest.start_reads(&fixture.disk).unwrap();
    let mut consumer = fixture.consumer().await;
    sets_are_reported(&fixture, &mut guest, &mut consumer, false).await;
    let seen = consumer.step(false).await.unwrap();
    assert!(!seen.coverage_exact && seen.gaps.contains(&GapKind::UntrackedMapping), "{:?}", seen.gaps);
    assert!(fixture.names(guest.pid()).await, "the gap names QEMU");
    guest.stop_reads().unwrap();
}
