//! The memory of a guest of an unpatched QEMU: what the guest, its QEMU and a device in another process write there is told.
//! QEMU gets to the service in both ways: it is started by `fdmap exec`, or adopted while it runs.

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

/// How long after a file was taken over writes may be reckoned with that had begun before, and somewhat more.
const SETTLED: Duration = Duration::from_secs(30);

/// All writers are observed. Pages that a read is under way into are told once more, and said to be.
fn observed(seen: &Checkpoint) -> bool {
    seen.gaps.iter().all(|gap| *gap == GapKind::Pinned)
}

/// Waits until what was written before anybody looked is reckoned with no longer.
async fn settle(consumer: &mut Consumer) {
    let begun = Instant::now();
    while !observed(consumer.step(true).await.unwrap()) {
        assert!(begun.elapsed() < SETTLED, "it is not observed yet");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("all of it is observed after {:?}", begun.elapsed());
}

/// The guest writes sets of its pages and reads a disk into others: all of them are told. Where all writers are observed
/// exactly, none of its other pages is told as exact, and few are at all.
async fn sets_are_told(fixture: &Fixture, guest: &mut Guest, consumer: &mut Consumer, exact: bool) {
    let own = set_of(&guest.layout().pages);
    let (mut all_written, mut all_told, mut again, mut most_swapped) = (0, 0, 0, 0);
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
            assert_eq!(lost.count(), 0, "set {seed}: {what} and not told: {lost:?}");
        }
        all_written += written.count() + read.count();
        all_told += seen.changed.count();
        if exact {
            assert!(observed(seen), "set {seed}: {:?}", seen.gaps);
            let more = both(&own, &seen.changed).without(&written);
            again += more.count();
            let more = more.without(&seen.conservative);
            assert_eq!(more.count(), 0, "set {seed}: told as exact and not written: {more:?}");
        }
    }
    println!(
        "{all_written} pages of {SETS} sets and reads; {all_told} pages told, {again} of its own without need; \
         {most_swapped} swapped out at most"
    );
    assert!(most_swapped > 1000, "the guest is not swapped");
    assert!(!exact || again * 10 < all_written, "{again} pages were told without need");
}

/// Of a guest that is paused nothing is told, once what was under way is. Then it goes on, and is told of again.
async fn paused_guest_writes_nothing(guest: &mut Guest, consumer: &mut Consumer) {
    guest.pause().unwrap();
    // Told once more: what was pinned for a read that has come to its end, and for a second or so what somebody else in the
    // kernel holds, an LRU batch for one.
    let begun = Instant::now();
    while consumer.step(true).await.unwrap().changed.count() > 0 {
        assert!(begun.elapsed() < SETTLED, "a paused guest goes on writing");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("paused: nothing is told after {:?}", begun.elapsed());
    for _ in 0..3 {
        let seen = consumer.step(true).await.unwrap();
        assert_eq!(seen.changed.count(), 0, "a paused guest wrote {:?}", seen.changed);
        assert!(observed(seen), "{:?}", seen.gaps);
    }
    guest.resume().unwrap();
    let written = set_of(&guest.write(PageSelection { seed: 99, per_mille: 5 }).unwrap());
    let seen = consumer.step(false).await.unwrap();
    assert_eq!(written.without(&seen.changed).count(), 0, "it goes on");
}

async fn what_a_guest_writes_is_told(way: Attachment) {
    let fixture = Fixture::make().await;
    let options = Options {
        wrapper: way.wrapper(&fixture.service),
        memory: way.memory(&fixture).await,
        cgroup: Some(&fixture.cgroup),
        disk: Some(&fixture.disk),
        vhost_user: None,
    };
    let mut guest = require(Guest::start(&options));
    guest.be_busy(&fixture.disk).unwrap();
    way.take(&fixture, guest.pid());
    if way == Attachment::Given {
        fixture.close().await;
    }
    let mut consumer = fixture.consumer().await;
    settle(&mut consumer).await;
    sets_are_told(&fixture, &mut guest, &mut consumer, true).await;
    paused_guest_writes_nothing(&mut guest, &mut consumer).await;
    guest.be_calm().unwrap();
}

#[test(flavor = "multi_thread")]
async fn what_a_guest_writes_is_told_if_it_was_started_under_the_shim() {
    what_a_guest_writes_is_told(Attachment::Exec).await;
}

#[test(flavor = "multi_thread")]
async fn what_a_guest_writes_is_told_if_it_was_adopted() {
    what_a_guest_writes_is_told(Attachment::Adopt).await;
}

#[test(flavor = "multi_thread")]
async fn what_a_guest_writes_is_told_if_its_memory_is_a_closed_file_of_the_service() {
    what_a_guest_writes_is_told(Attachment::Given).await;
}

/// The disk is read by another process, which maps the same memory: `/dev/vda` is its.
async fn what_a_device_in_another_process_writes_is_told(way: Attachment) {
    let fixture = Fixture::make().await;
    let wrapper = way.wrapper(&fixture.service);
    let daemon = require(Daemon::start(&wrapper, &fixture.disk));
    let cgroup = Some(&fixture.cgroup);
    let options = Options { wrapper, cgroup, vhost_user: Some(daemon.socket()), ..Options::default() };
    let mut guest = require(Guest::start(&options));
    guest.be_busy(&fixture.disk).unwrap();
    way.take(&fixture, guest.pid());
    let mut consumer = fixture.consumer().await;
    if way == Attachment::Adopt {
        // Nobody observes the daemon: it is named, and all that it may have written is told.
        let read = set_of(&guest.read(&fixture.disk, 7, 64, 3).unwrap());
        let seen = consumer.step(false).await.unwrap();
        assert_eq!(read.without(&seen.changed).count(), 0);
        assert!(seen.gaps.contains(&GapKind::UntrackedMapping), "{:?}", seen.gaps);
        assert!(fixture.names(daemon.pid()).await, "the gap names the daemon");
    }
    way.take(&fixture, daemon.pid());
    settle(&mut consumer).await;
    sets_are_told(&fixture, &mut guest, &mut consumer, true).await;
    // This daemon gives a request up that is under way when its guest is paused.
    guest.be_calm().unwrap();
    paused_guest_writes_nothing(&mut guest, &mut consumer).await;
}

#[test(flavor = "multi_thread")]
async fn what_a_device_in_another_process_writes_is_told_if_both_were_started_under_the_shim() {
    what_a_device_in_another_process_writes_is_told(Attachment::Exec).await;
}

#[test(flavor = "multi_thread")]
async fn what_a_device_in_another_process_writes_is_told_if_both_were_adopted() {
    what_a_device_in_another_process_writes_is_told(Attachment::Adopt).await;
}

#[test(flavor = "multi_thread")]
async fn guest_that_nobody_observes_is_named_and_all_of_it_is_told() {
    let fixture = Fixture::make().await;
    let options = Options { cgroup: Some(&fixture.cgroup), disk: Some(&fixture.disk), ..Options::default() };
    let mut guest = require(Guest::start(&options));
    let memory = guest.memory_for_writing().unwrap();
    fixture.service.fdpass().unwrap().adopt(std::os::fd::AsFd::as_fd(&memory), "", None).unwrap();
    drop(memory);
    guest.be_busy(&fixture.disk).unwrap();
    let mut consumer = fixture.consumer().await;
    sets_are_told(&fixture, &mut guest, &mut consumer, false).await;
    let seen = consumer.step(false).await.unwrap();
    assert!(!seen.coverage_exact && seen.gaps.contains(&GapKind::UntrackedMapping), "{:?}", seen.gaps);
    assert!(fixture.names(guest.pid()).await, "the gap names QEMU");
    guest.be_calm().unwrap();
}
