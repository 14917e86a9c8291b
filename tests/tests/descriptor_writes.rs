//! Single writes that no page table sees, one between two checkpoints: what was written or taken away is told in the next
//! generation, also where nothing is left of it when that is closed.

use fdmap_client::proto::Backing;
use fdmap_tests::actor::Actor;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::service::Service;
use fdmap_tests::test;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 10;

/// A file half of which was written, with a writer and a consumer.
async fn half_written<'a>(service: &'a Service, name: &str) -> (Scenario<'a>, Actor) {
    let log = Log::create(1, 1 << 16).unwrap();
    let mut scenario = Scenario::new(service, name, PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.call(&format!("fill 0 1 100 0 {} 0", PAGES / 2)).unwrap();
    scenario.consumer(1, true).await.unwrap();
    // Whatever was still open is closed.
    scenario.first().step(true).await.unwrap();
    scenario.first().step(true).await.unwrap();
    (scenario, writer)
}

/// The next generation has the page.
async fn assert_next(scenario: &mut Scenario<'_>, page: u64, what: &str) {
    let told = scenario.first().step(false).await.unwrap();
    assert!(told.changed.contains(page), "{what}: page {page} is not told, but {:?}", told.changed);
}

async fn assert_sound(scenario: Scenario<'_>, what: &str) {
    for outcome in scenario.finish().await.unwrap() {
        assert_eq!(outcome.verdict.lost, 0, "{what}: {}", outcome.verdict);
        assert_eq!(outcome.stale.unwrap_or_default().count(), 0, "{what}: the mirror differs");
    }
}

const METHODS: [&str; 8] =
    ["pwrite", "write", "writev", "splice", "copy", "sendfile", "uring-write", "aio-write"];

#[test(flavor = "multi_thread")]
async fn single_write_to_data_or_to_a_hole_is_told() {
    let service = Service::start(&[]).unwrap();
    for way in METHODS {
        let (mut scenario, mut writer) = half_written(&service, way).await;
        for page in [7, PAGES - 9] {
            for round in 0..4 {
                writer.call(&format!("once {way} {round} {page} {} 0", page + 1)).unwrap();
                assert_next(&mut scenario, page, &format!("{way}, round {round}")).await;
            }
        }
        assert_sound(scenario, way).await;
    }
}

#[test(flavor = "multi_thread")]
async fn page_that_was_taken_away_is_told() {
    let service = Service::start(&[]).unwrap();
    for way in ["punch", "remove"] {
        let (mut scenario, mut writer) = half_written(&service, way).await;
        for page in [3, 200, PAGES / 2 - 1] {
            writer.call(&format!("hole {way} {page} {} 0", page + 1)).unwrap();
            assert_next(&mut scenario, page, way).await;
        }
        assert_sound(scenario, way).await;
    }
}

#[test(flavor = "multi_thread")]
async fn page_that_was_written_and_taken_away_is_told() {
    let service = Service::start(&[]).unwrap();
    for hole in ["punch", "remove"] {
        for way in ["pwrite", "store"] {
            let what = format!("{way}-{hole}");
            let (mut scenario, mut writer) = half_written(&service, &what).await;
            // A page that was a hole before is one afterwards; but somebody may have looked in between.
            for page in [PAGES - 5, PAGES - 5, 9, 9] {
                writer.call(&format!("once {way} 1 {page} {} 0", page + 1)).unwrap();
                writer.call(&format!("hole {hole} {page} {} 0", page + 1)).unwrap();
                assert_next(&mut scenario, page, &what).await;
            }
            assert_sound(scenario, &what).await;
        }
    }
}
