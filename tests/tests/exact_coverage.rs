//! With exact coverage, exactly the written pages are reported; consumers are independent.

use std::collections::BTreeSet;
use std::time::Duration;

use fdmap_client::grpc::{ChangesEncoding, ChangesOptions};
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{Backing, GapKind};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::no_lost_writes::history::Checkpoint;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::WriterCommand;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 14;

/// A writer-sealed file with one process that maps and tracks it, and a consumer.
async fn writer_sealed<'a>(
    service: &'a Service,
    name: &str,
    cgroup: Option<&Cgroup>,
) -> (Scenario<'a>, TestAgent) {
    let log = Log::create(1, 1 << 20).unwrap();
    let mut scenario = Scenario::new(service, name, PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(cgroup).unwrap();
    scenario.map(&mut writer, true).unwrap();
    let (_, coverage) = service.client().await.unwrap().seal_writers(&named(name)).await.unwrap();
    assert!(coverage.exact, "{coverage:?}");
    scenario.consumer(1, false).await.unwrap();
    (scenario, writer)
}

fn fill(writer: &mut TestAgent, pattern: Pattern) {
    writer.write_pattern(0, pattern, 0..PAGES, 0).unwrap();
}

/// The pages of a pattern.
fn pages_of(pattern: Pattern) -> PageSet {
    let mut set = PageSet::of(PAGES);
    set.extend(pattern.pages(PAGES));
    set
}

/// The kernel referenced a page at the moment of a checkpoint, which therefore reported the page as conservative.
struct StrayReference(String);

/// The pages of a batch of an LRU list: `PAGEVEC_SIZE` of linux/pagevec.h.
const MAX_STRAY_PAGES: u64 = 31;

/// Asserts that exactly these pages are reported, all of them as observed, with the exception of a few stray references.
fn check_reported(reported: &Checkpoint, written: &PageSet, when: &str) -> Result<(), StrayReference> {
    // A page that was referenced at the last checkpoint is a gap.
    let referenced = reported.gaps == BTreeSet::from([GapKind::Pinned]);
    assert!(reported.coverage_exact || referenced, "{when}: {:?}", reported.gaps);
    let (missing, more) = (written.without(&reported.changed), reported.changed.without(written));
    let more = more.without(&reported.conservative);
    assert!(missing.count() == 0 && more.count() == 0, "{when}: missing {missing:?}, not written {more:?}");
    match reported.conservative.count() {
        0 => Ok(()),
        _ if reported.coverage_exact => panic!("{when}: {:?} without a gap", reported.conservative),
        1..=MAX_STRAY_PAGES => Err(StrayReference(format!("{when}: {:?}", reported.conservative))),
        pages => panic!("{when}: {pages} pages are conservative"),
    }
}

/// Runs a test until no page is conservative. Kernel threads (DAMON, compaction) and LRU batches reference single pages for
/// some microseconds.
async fn without_stray_references(test: impl AsyncFn() -> Result<(), StrayReference>) {
    const MAX_ATTEMPTS: u32 = 3;
    for attempt in 1..=MAX_ATTEMPTS {
        match test().await {
            Ok(()) => return,
            Err(StrayReference(pages)) => eprintln!("attempt {attempt}: conservative {pages}"),
        }
    }
    panic!("pages were conservative in each of {MAX_ATTEMPTS} attempts");
}

#[test(flavor = "multi_thread")]
async fn exactly_the_written_pages_are_reported() {
    without_stray_references(write_and_read).await;
}

async fn write_and_read() -> Result<(), StrayReference> {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = writer_sealed(&service, "exactly", None).await;
    for (seed, percent) in [(1, 100), (2, 10), (3, 0), (4, 1), (5, 50), (6, 100)] {
        let pattern = Pattern { seed, percent };
        fill(&mut writer, pattern);
        let reported = scenario.first().step(seed % 2 == 0).await.unwrap().clone();
        check_reported(&reported, &pages_of(pattern), &format!("{percent} %"))?;
        // The next generation does not repeat them.
        let again = scenario.first().step(true).await.unwrap().clone();
        check_reported(&again, &PageSet::of(PAGES), &format!("after {percent} %"))?;
        // A read is not reported.
        writer.read_mapping(0, PAGES).unwrap();
        check_reported(
            &scenario.first().step(true).await.unwrap().clone(),
            &PageSet::of(PAGES),
            "after reading",
        )?;
    }
    // One page in a thousand, each written separately.
    let mut few = PageSet::of(PAGES);
    for page in (0..PAGES).step_by(1009) {
        writer.write_all(0, 1, page..page + 1, 0).unwrap();
        few.insert(page);
    }
    check_reported(&scenario.first().step(false).await.unwrap().clone(), &few, "a few")?;
    Ok(())
}

#[test(flavor = "multi_thread")]
async fn swap_neither_loses_nor_adds_written_pages() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(1 << 29, SwapKind::Any));
    without_stray_references(write_under_swap).await;
}

async fn write_under_swap() -> Result<(), StrayReference> {
    let cgroup = Cgroup::with_limit(16 << 20).unwrap();
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = writer_sealed(&service, "swapped", Some(&cgroup)).await;
    let all = Pattern { seed: 1, percent: 100 };
    let some = Pattern { seed: 2, percent: 10 };
    // 64 MiB in a cgroup of 16 MiB: most pages are written and swapped out before the checkpoint.
    fill(&mut writer, all);
    check_reported(&scenario.first().step(false).await.unwrap().clone(), &pages_of(all), "swapped out")?;
    writer.read_mapping(0, PAGES).unwrap();
    check_reported(
        &scenario.first().step(true).await.unwrap().clone(),
        &PageSet::of(PAGES),
        "swapped in and out",
    )?;
    fill(&mut writer, some);
    writer.writer(WriterCommand::PageOut(0)).unwrap();
    writer.read_mapping(0, PAGES).unwrap();
    check_reported(
        &scenario.first().step(false).await.unwrap().clone(),
        &pages_of(some),
        "written, swapped out and in",
    )?;
    Ok(())
}

#[test(flavor = "multi_thread")]
async fn consumers_are_independent() {
    without_stray_references(consume_twice).await;
}

async fn consume_twice() -> Result<(), StrayReference> {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = writer_sealed(&service, "two", None).await;
    let client = service.client().await.unwrap();
    let begin = scenario.first().since();
    let mut both = PageSet::of(PAGES);
    for seed in 1..6 {
        let pattern = Pattern { seed, percent: 5 };
        fill(&mut writer, pattern);
        both.extend(pattern.pages(PAGES));
        check_reported(
            &scenario.first().step(false).await.unwrap().clone(),
            &pages_of(pattern),
            "one at a time",
        )?;
    }
    // A consumer that took none of the five checkpoints reads the changes of all of them.
    client.checkpoint(&named("two"), false, None).await.unwrap();
    let reported = scenario.first().changes(begin, ChangesEncoding::Runs).await.unwrap();
    assert_eq!(reported.changed, both);
    let ever = scenario.first().changes(Generation::NONE, ChangesEncoding::Bitmaps).await.unwrap();
    assert_eq!(both.without(&ever.changed).count(), 0);
    Ok(())
}

#[test(flavor = "multi_thread")]
async fn failed_consumer_reads_the_same_changes_again() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = writer_sealed(&service, "again", None).await;
    let since = scenario.first().since();
    let pattern = Pattern { seed: 3, percent: 40 };
    fill(&mut writer, pattern);
    let client = service.client().await.unwrap();
    let closed = client.checkpoint(&named("again"), false, Some(77)).await.unwrap();
    // The consumer does not know whether the checkpoint was made, and retries.
    let repeated = client.checkpoint(&named("again"), false, Some(77)).await.unwrap();
    assert_eq!((repeated.generation, repeated.unchanged), (closed.generation, closed.unchanged));
    for encoding in [ChangesEncoding::Runs, ChangesEncoding::Bitmaps] {
        // The consumer begins to read, and disconnects.
        let options = ChangesOptions { since, encoding, ..ChangesOptions::default() };
        let mut changes = client.changes(&named("again"), options).await.unwrap();
        changes.next().await.unwrap();
        drop(changes);
        // Meanwhile other clients write and make checkpoints.
        let more = Pattern { seed: 4, percent: 3 };
        fill(&mut writer, more);
        client.checkpoint(&named("again"), true, None).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let reported = scenario.first().changes(since, encoding).await.unwrap();
        assert_eq!(pages_of(pattern).without(&reported.changed).count(), 0);
        let mut all = pages_of(pattern);
        all.extend(more.pages(PAGES));
        assert_eq!(reported.changed, all);
    }
}
