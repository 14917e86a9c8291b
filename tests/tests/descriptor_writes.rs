//! Single writes through descriptors between two checkpoints. The next generation reports the pages that were written
//! or freed, even if their data is freed before the generation is closed.

use fdmap_client::proto::Backing;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::service::Service;
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 10;

/// A file of which half is written, with a writer and a consumer.
async fn half_written<'a>(service: &'a Service, name: &str) -> (Scenario<'a>, TestAgent) {
    let log = Log::create(1, 1 << 16).unwrap();
    let mut scenario = Scenario::new(service, name, PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.write_all(0, 1, 0..PAGES / 2, 0).unwrap();
    scenario.consumer(1, true).await.unwrap();
    // These checkpoints close all generations with earlier writes.
    scenario.first().step(true).await.unwrap();
    scenario.first().step(true).await.unwrap();
    (scenario, writer)
}

/// Asserts that the next generation contains the page.
async fn assert_next(scenario: &mut Scenario<'_>, page: u64, what: &str) {
    let reported = scenario.first().step(false).await.unwrap();
    assert!(reported.changed.contains(page), "{what}: page {page} is missing in {:?}", reported.changed);
}

async fn assert_sound(scenario: Scenario<'_>, what: &str) {
    for outcome in scenario.finish().await.unwrap() {
        assert_eq!(outcome.verdict.lost, 0, "{what}: {}", outcome.verdict);
        assert_eq!(outcome.stale.unwrap_or_default().count(), 0, "{what}: the mirror differs");
    }
}

const METHODS: [Method; 8] = [
    Method::Pwrite,
    Method::Write,
    Method::Writev,
    Method::Splice,
    Method::Copy,
    Method::Sendfile,
    Method::UringWrite,
    Method::AioWrite,
];

#[test(flavor = "multi_thread")]
async fn descriptor_write_is_reported_in_the_next_generation() {
    let service = Service::start(&[]).unwrap();
    for method in METHODS {
        let what = method.to_string();
        let (mut scenario, mut writer) = half_written(&service, &what).await;
        for page in [7, PAGES - 9] {
            for round in 0..4 {
                writer.write_once(method, round, page..page + 1).unwrap();
                assert_next(&mut scenario, page, &format!("{method}, round {round}")).await;
            }
        }
        assert_sound(scenario, &what).await;
    }
}

#[test(flavor = "multi_thread")]
async fn punched_page_is_reported() {
    let service = Service::start(&[]).unwrap();
    for method in [Method::Punch, Method::Remove] {
        let what = method.to_string();
        let (mut scenario, mut writer) = half_written(&service, &what).await;
        for page in [3, 200, PAGES / 2 - 1] {
            writer.free(method, page..page + 1).unwrap();
            assert_next(&mut scenario, page, &what).await;
        }
        assert_sound(scenario, &what).await;
    }
}

#[test(flavor = "multi_thread")]
async fn written_then_punched_page_is_reported() {
    let service = Service::start(&[]).unwrap();
    for hole in [Method::Punch, Method::Remove] {
        for method in [Method::Pwrite, Method::Store] {
            let what = format!("{method}-{hole}");
            let (mut scenario, mut writer) = half_written(&service, &what).await;
            // A page that is a hole before the write is a hole again after the punch. A reader may have seen its data
            // in between.
            for page in [PAGES - 5, PAGES - 5, 9, 9] {
                writer.write_once(method, 1, page..page + 1).unwrap();
                writer.free(hole, page..page + 1).unwrap();
                assert_next(&mut scenario, page, &what).await;
            }
            assert_sound(scenario, &what).await;
        }
    }
}
