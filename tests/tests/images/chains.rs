//! Incremental images, and dumps with a pause.

use fdmap_client::image::ImageChain;
use fdmap_client::proto::Backing;
use fdmap_sys::mapping::SharedMapping;
use fdmap_tests::cgroup::freezer;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::test;
use fdmap_tests::test_agent::Run;
use serde_json::json;

use super::{Bed, PAGE, content_now, random, write_at};

#[test]
fn incremental_image_stores_what_changed() {
    let bed = Bed::new();
    let fd = bed.create("ram", 1000 * PAGE);
    write_at(&fd, 0, &random(1, 500 * 4096));
    write_at(&fd, 600, &[0; 10 * 4096]);
    bed.json(&["dump", "ram", "1"]);
    let first = content_now(&fd);

    write_at(&fd, 100, &random(2, 3 * 4096));
    write_at(&fd, 700, &random(3, 4096));
    fdmap_sys::memfd::punch_hole(std::os::fd::AsFd::as_fd(&fd), 200 * PAGE, 50 * PAGE).unwrap();
    write_at(&fd, 300, &[0; 4096]);
    let report = bed.json(&["dump", "ram", "2", "--parent", "1", "--compress", "zstd"]);
    let counts = &report["files"][0]["counts"];
    assert_eq!((&counts["stored_pages"], &counts["zero_pages"]), (&json!(4), &json!(1)));
    assert_eq!(counts["parent_pages"], 500 - 3 - 50 - 1);
    let second = content_now(&fd);

    bed.json(&["resize", "ram", &(400 * PAGE).to_string()]);
    bed.json(&["resize", "ram", &(800 * PAGE).to_string()]);
    write_at(&fd, 450, &random(4, 4096));
    bed.json(&["dump", "ram", "3", "--parent", "2"]);
    for (name, content) in [("1", &first), ("2", &second), ("3", &content_now(&fd))] {
        bed.assert_image(name, content);
    }
    // An unchanged file costs nothing.
    let report = bed.json(&["dump", "ram", "4", "--parent", "3"]);
    assert_eq!(report["files"][0]["counts"]["stored_pages"], 0);
    bed.assert_image("4", &content_now(&fd));
    assert_eq!(ImageChain::open(&bed.image("4")).unwrap().len(), 4);
}

/// Bytes that were written through a mapping past the end of the file become content when it grows.
#[test]
fn bytes_past_the_end_are_content_after_growth() {
    let bed = Bed::new();
    let fd = bed.create("ram", 4100);
    let mapping = SharedMapping::shared(&fd, 0, 8192, true).unwrap();
    let before = ["1", "2", "3"];
    for (name, size) in before.into_iter().zip([5000, 8192, 12288]) {
        bed.json(&["resize", "ram", "4100"]);
        assert!(mapping.write_at(4500, b"A"));
        bed.json(&["dump", "ram", name]);
        bed.json(&["resize", "ram", &size.to_string()]);
        let grown = format!("{name}-grown");
        bed.json(&["dump", "ram", &grown, "--parent", name]);
        let content = content_now(&fd);
        assert_eq!((content.len() as u64, content[4500]), (size, b'A'));
        bed.assert_image(&grown, &content);
    }
}

/// CRIU's reader fails where a parent does not have a page that its child refers to, and needs the same number along a chain.
#[test]
fn chain_is_laid_out_as_the_reader_of_criu_needs_it() {
    let bed = Bed::new();
    let fd = bed.create("ram", 100 * PAGE);
    write_at(&fd, 0, &random(1, 10 * 4096));
    bed.json(&["dump", "ram", "1"]);
    write_at(&fd, 5, &random(2, 2 * 4096));
    bed.json(&["dump", "ram", "2", "--parent", "1"]);
    assert_eq!(std::fs::read_link(bed.folder.join("2/parent")).unwrap(), std::path::Path::new("../1"));
    let shmid = super::shmid(&fd);
    let entries = |image: &str| {
        super::crit(&bed.folder.join(format!("{image}/pagemap-shmem-{shmid}.img")))["entries"].clone()
    };
    assert_eq!(entries("1"), json!([{"pages_id": 1}, {"vaddr": 0, "nr_pages": 10, "flags": 4}]));
    let expected = json!([
        {"pages_id": 1},
        {"vaddr": 0, "nr_pages": 5, "flags": 1},
        {"vaddr": 5 * PAGE, "nr_pages": 2, "flags": 4},
        {"vaddr": 7 * PAGE, "nr_pages": 3, "flags": 1},
    ]);
    assert_eq!(entries("2"), expected);
    assert_eq!(std::fs::metadata(bed.folder.join("2/pages-1.img")).unwrap().len(), 2 * PAGE);
}

/// Writers run all the time, but while they are paused. The command that pauses them copies the file.
#[test(flavor = "multi_thread")]
async fn each_image_of_a_chain_has_the_content_at_its_pause() {
    const PAGES: u64 = 2048;
    let bed = Bed::new();
    let log = Log::create(2, 1 << 16).unwrap();
    let scenario = Scenario::new(&bed.service, "ram", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.write_all(0, 1, 0..PAGES / 2, 0).unwrap();
    writer.start_run(Run::new("store write", 6000, 7, 0..PAGES, 0)).unwrap();
    let pid = writer.pid();
    let fdmap = fdmap_tests::service::program("fdmap").unwrap();
    let mut parent: Option<String> = None;
    for number in 1..=5 {
        let image = number.to_string();
        let copy = format!(
            "kill -STOP {pid} && until grep -q '^State:.T' /proc/{pid}/status; do :; done && \
             '{}' --runtime-dir '{}' open ram -- sh -c 'cat <&3' > copy-{number}",
            fdmap.display(),
            bed.service.folder().display(),
        );
        let resume = format!("kill -CONT {pid}");
        let mut arguments = vec!["dump", "ram", &image, "--pause", &copy, "--resume", &resume];
        if let Some(parent) = &parent {
            arguments.extend(["--parent", parent]);
        }
        let report = bed.json(&arguments);
        assert_eq!(report["consistency"], "point-in-time");
        assert_eq!(report["before_pause"][0]["consistency"], "per-page");
        println!(
            "{number}: paused for {} us, {}",
            report["paused_ns"].as_u64().unwrap() / 1000,
            report["files"][0]["counts"]
        );
        parent = Some(image);
    }
    writer.reply().unwrap();
    for number in 1..=5 {
        let copy = std::fs::read(bed.folder.join(format!("copy-{number}"))).unwrap();
        bed.assert_image(&number.to_string(), &copy);
    }
    writer.finish().unwrap();
}

#[test(flavor = "multi_thread")]
async fn frozen_cgroup_runs_again_after_the_dump() {
    let bed = Bed::new();
    let log = Log::create(1, 1 << 16).unwrap();
    let scenario = Scenario::new(&bed.service, "ram", 256, Backing::Shmem, log).await.unwrap();
    let (cgroup, _guard) = fdmap_tests::harness::require(freezer());
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    std::fs::write(cgroup.join("cgroup.procs"), writer.pid().to_string()).unwrap();
    writer.start_run(Run::new("store", 2000, 7, 0..256, 0)).unwrap();
    let path = cgroup.to_str().unwrap();
    let report = bed.json(&["dump", "ram", "image", "--freeze-cgroup", path]);
    assert_eq!(report["consistency"], "point-in-time");
    assert!(report["paused_ns"].as_u64().unwrap() > 0);
    // A frozen process does not answer.
    writer.reply().unwrap();
    let missing = bed.fails(7, &["dump", "ram", "other", "--freeze-cgroup", "/nonexistent"]);
    assert!(missing.contains("freezing cgroup /nonexistent"), "{missing}");
    assert!(!bed.folder.join("other").exists(), "nothing is left");
    writer.finish().unwrap();

    // Who froze it may thaw it at any time.
    std::fs::write(cgroup.join("freezer.state"), "FROZEN").unwrap();
    let frozen = bed.fails(7, &["dump", "ram", "other", "--freeze-cgroup", path]);
    assert!(frozen.contains("it is frozen already"), "{frozen}");
    let state = || std::fs::read_to_string(cgroup.join("freezer.state")).unwrap();
    assert_ne!(state().trim(), "THAWED", "it stays as it was");
    bed.json(&["dump", "ram", "other", "--pause", "true"]);
    assert_ne!(state().trim(), "THAWED");
}
