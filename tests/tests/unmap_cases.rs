//! The kernel frees the written bits of a mapping together with its page tables. However a tracked mapping ends
//! between two checkpoints, the next generation contains the pages that were written through it before, and those
//! written later through what remains of it.

use std::time::{Duration, Instant};

use fdmap_client::proto::Backing;
use fdmap_tests::harness::require;
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::Service;
use fdmap_tests::test;
use fdmap_tests::test_agent::command::{Command, WriterCommand};
use fdmap_tests::test_agent::{MappingEnd, PROGRAM, Run, TestAgent};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 12;

/// A file with a writer whose mapping 0 is tracked, and a consumer.
async fn start_scenario<'a>(service: &'a Service, name: &str, backing: Backing) -> (Scenario<'a>, TestAgent) {
    let log = Log::create(1, 1 << 18).unwrap();
    let mut scenario = Scenario::new(service, name, PAGES, backing, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    scenario.consumer(1, true).await.unwrap();
    (scenario, writer)
}

/// Writes some of the pages from `first` up to `end` through a mapping. Returns the written pages.
fn fill(writer: &mut TestAgent, mapping: usize, seed: u64, first: u64, end: u64) -> PageSet {
    let pattern = Pattern { seed, percent: 20 };
    writer.write_pattern(mapping, pattern, first..end, 0).unwrap();
    let mut set = PageSet::of(PAGES);
    set.extend((first..end).filter(|page| pattern.has(*page)));
    set
}

/// Asserts that the next generation contains these pages.
async fn assert_next(scenario: &mut Scenario<'_>, written: &PageSet, what: &str) {
    let reported = scenario.first().step(false).await.unwrap();
    let missing = written.without(&reported.changed);
    assert_eq!(missing.count(), 0, "{what}: {missing:?} of {written:?} missing in {:?}", reported.changed);
    eprintln!(
        "{what}: {} reported, {} of them conservative",
        reported.changed.count(),
        reported.conservative.count()
    );
}

/// Asserts that every write of the scenario is reported in its generation.
async fn assert_sound(scenario: Scenario<'_>, what: &str) {
    for outcome in scenario.finish().await.unwrap() {
        let verdict = &outcome.verdict;
        assert_eq!((verdict.lost, verdict.unchecked, verdict.wrong), (0, 0, 0), "{what}: {verdict}");
        assert_eq!(outcome.stale.unwrap_or_default().count(), 0, "{what}: the mirror differs");
    }
}

/// How a mapping ends, and which pages can be written afterwards through mappings 0 and 1.
const ENDS: [(MappingEnd, Option<u64>, Option<u64>); 10] = [
    (MappingEnd::Unmap, None, None),
    (MappingEnd::UnmapPart, None, None),
    (MappingEnd::CoverAnonymous, None, None),
    (MappingEnd::CoverSameFile, Some(PAGES), None),
    (MappingEnd::CoverPart, None, None),
    (MappingEnd::Move, Some(PAGES), None),
    (MappingEnd::MovePart, Some(PAGES / 2), None),
    (MappingEnd::Shrink, Some(PAGES / 2), None),
    (MappingEnd::Duplicate, Some(PAGES), Some(PAGES)),
    (MappingEnd::LeaveBehind, Some(PAGES), Some(PAGES)),
];

async fn end_in_each_way(service: &Service, backing: Backing) {
    for (end, first, second) in ENDS {
        let how = &format!("{end:?}");
        // hugetlbfs supports neither duplicates nor MREMAP_DONTUNMAP.
        if matches!(backing, Backing::Hugetlb(_))
            && matches!(end, MappingEnd::Duplicate | MappingEnd::LeaveBehind)
        {
            continue;
        }
        let (mut scenario, mut writer) = start_scenario(service, how, backing).await;
        let written = fill(&mut writer, 0, 1, 0, PAGES);
        writer.end_mapping(0, end).unwrap();
        assert_next(&mut scenario, &written, how).await;
        // What remains of the mapping can be written at any time, and again after each checkpoint.
        for round in 2..5 {
            let mut written = PageSet::of(PAGES);
            for (mapping, end) in [(0, first), (1, second)] {
                if let Some(end) = end {
                    written.extend(fill(&mut writer, mapping, round * 2 + mapping as u64, 0, end).iter());
                }
            }
            assert_next(&mut scenario, &written, &format!("{how}, round {round}")).await;
        }
        drop(writer);
        scenario.first().step(true).await.unwrap();
        assert_sound(scenario, how).await;
    }
}

#[test(flavor = "multi_thread")]
async fn unmapped_shmem_pages_are_reported() {
    let service = Service::start(&[]).unwrap();
    end_in_each_way(&service, Backing::Shmem).await;
}

#[test(flavor = "multi_thread")]
async fn unmapped_hugetlb_pages_are_reported() {
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 16));
    let service = Service::start(&[]).unwrap();
    end_in_each_way(&service, Backing::Hugetlb(2 << 20)).await;
}

/// Waits until the process has ended or executes another program.
fn wait_until_ended(writer: &TestAgent) {
    let begun = Instant::now();
    let exe = format!("/proc/{}/exe", writer.pid());
    while std::fs::read_link(&exe).is_ok_and(|path| path.ends_with(PROGRAM)) {
        assert!(begun.elapsed() < Duration::from_secs(10), "the process does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test(flavor = "multi_thread")]
async fn pages_of_ended_process_are_reported() {
    let service = Service::start(&[]).unwrap();
    for how in ["drop", "exit", "kill", "exec", "return"] {
        let (mut scenario, mut writer) = start_scenario(&service, how, Backing::Shmem).await;
        let mut written = fill(&mut writer, 0, 1, 0, PAGES);
        match how {
            "drop" => drop(writer.writer(WriterCommand::Unmap(0)).unwrap()),
            "exit" => {
                writer.send(&Command::Exit).unwrap();
                wait_until_ended(&writer);
            }
            "exec" => {
                writer.call(&Command::Exec).unwrap();
                wait_until_ended(&writer);
            }
            "kill" => writer.kill().unwrap(),
            _ => writer.finish().unwrap(),
        }
        assert_next(&mut scenario, &written, how).await;
        // Another process continues to use the file.
        let mut next = scenario.writer(None).unwrap();
        scenario.map(&mut next, true).unwrap();
        written = fill(&mut next, 0, 2, 0, PAGES);
        next.kill().unwrap();
        assert_next(&mut scenario, &written, &format!("after {how}")).await;
        scenario.first().step(true).await.unwrap();
        assert_sound(scenario, how).await;
    }
}

#[test(flavor = "multi_thread")]
async fn pages_of_forked_children_are_reported() {
    let service = Service::start(&[]).unwrap();
    for round in 0..10 {
        let name = format!("family-{round}");
        let (mut scenario, mut writer) = start_scenario(&service, &name, Backing::Shmem).await;
        writer.run(Run::new("fork", 20, round, 0..PAGES, 0)).unwrap();
        let mut written = PageSet::of(PAGES);
        written.extend(scenario.log().writes(0).iter().map(|write| u64::from(write.page)));
        writer.kill().unwrap();
        assert_next(&mut scenario, &written, &name).await;
        scenario.first().step(true).await.unwrap();
        assert_sound(scenario, &name).await;
    }
}

#[test(flavor = "multi_thread")]
async fn pages_of_thousands_of_children_are_reported() {
    let service = Service::start(&[]).unwrap();
    let log = Log::create(2, 1 << 21).unwrap();
    let mut scenario = Scenario::new(&service, "thousands", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    // No checkpoint runs meanwhile: there are more children than the service remembers individually.
    writer.start_run(Run::new("fork fork", 8000, 1, 0..PAGES, 0)).unwrap();
    let writers = scenario.watch(vec![writer], Duration::from_secs(60)).await.unwrap();
    eprintln!("{} writes by children", scenario.log().count());
    scenario.consumer(1, true).await.unwrap();
    // Forks still work afterwards.
    let [mut writer] = <[TestAgent; 1]>::try_from(writers).unwrap();
    writer.start_run(Run::new("fork", 500, 2, 0..PAGES, 0)).unwrap();
    drop(scenario.watch(vec![writer], Duration::from_secs(60)).await.unwrap());
    let first = scenario.finish().await.unwrap();
    assert_eq!((first[0].verdict.lost, first[0].verdict.unchecked), (0, 0), "{}", first[0].verdict);
}

#[test(flavor = "multi_thread")]
async fn short_lived_untracked_mapping_is_reported() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "passing", Backing::Shmem).await;
    for seed in 1..8 {
        let mut written = fill(&mut writer, 0, seed, 0, PAGES);
        // The pages exist already, so that the mapping itself is the only sign of the writes.
        let pattern = Pattern { seed: seed + 100, percent: 20 };
        let pages = (0..PAGES).into();
        writer.writer(WriterCommand::FillUntracked { pattern, pages, lane: 0 }).unwrap();
        written.extend(pattern.pages(PAGES));
        assert_next(&mut scenario, &written, &format!("passing, round {seed}")).await;
    }
    scenario.first().step(true).await.unwrap();
    assert_sound(scenario, "passing").await;
}

#[test(flavor = "multi_thread")]
async fn lasting_untracked_mapping_is_reported() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "untracked", Backing::Shmem).await;
    scenario.map(&mut writer, false).unwrap();
    for seed in 1..8 {
        // Every other round writes the pages of the previous round again: no fault occurs.
        let written = fill(&mut writer, 1, seed / 2, 0, PAGES);
        assert_next(&mut scenario, &written, &format!("untracked, round {seed}")).await;
    }
    let written = fill(&mut writer, 1, 9, 0, PAGES);
    writer.writer(WriterCommand::Unmap(1)).unwrap();
    assert_next(&mut scenario, &written, "untracked, then unmapped").await;
    scenario.first().step(true).await.unwrap();
    assert_sound(scenario, "untracked").await;
}
