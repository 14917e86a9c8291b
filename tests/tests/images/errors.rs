//! Refused and interrupted dumps leave nothing, and the writers run.

use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Bed, PAGE, random, write_at};

#[test]
fn unsuitable_targets_and_parents_are_refused() {
    let bed = Bed::new();
    let fd = bed.create("ram", 10 * PAGE);
    write_at(&fd, 0, &random(1, 4096));
    drop(bed.create("other", 10 * PAGE));
    bed.json(&["dump", "ram", "1"]);
    bed.json(&["dump", "other", "o"]);

    let text = bed.fails(7, &["dump", "ram", "1"]);
    assert!(text.contains("is not empty: it has"), "{text}");
    let text = bed.fails(7, &["dump", "ram", "2", "--parent", "o"]);
    assert!(text.contains("o cannot be the parent: it has no image of ram"), "{text}");
    let text = bed.fails(7, &["dump", "ram", "2", "--parent", "missing"]);
    assert!(text.contains("opening missing"), "{text}");
    let text = bed.fails(2, &["dump", "ram", "ram", "2"]);
    assert!(text.contains("ram is listed twice"), "{text}");
    assert_eq!(bed.run(&["dump", "nothing", "2"]).status.code(), Some(3));
    std::fs::remove_file(bed.folder.join("1/fdmap.json")).unwrap();
    let text = bed.fails(7, &["dump", "ram", "2", "--parent", "1"]);
    assert!(text.contains("it has no fdmap.json"), "{text}");
    std::fs::remove_file(bed.folder.join("1/inventory.img")).unwrap();
    let text = bed.fails(7, &["dump", "ram", "2", "--parent", "1"]);
    assert!(text.contains("has no complete image"), "{text}");
    bed.fails(7, &["dump", "ram", "new/images/2", "--parent", "1"]);
    assert!(["2", "new"].iter().all(|left| !bed.folder.join(left).exists()), "nothing is left");
}

#[test]
fn directories_above_an_image_are_created() {
    let bed = Bed::new();
    write_at(&bed.create("ram", 10 * PAGE), 0, &random(1, 4096));
    bed.json(&["dump", "ram", "new/images/1"]);
    bed.json(&["restore", "new/images/1", "--name", "copy"]);
    assert_eq!(bed.json(&["stat", "copy"])["pages"]["file_pages"], 10);
}

/// With the policy `ignore`, changes may lack pages.
#[test]
fn parent_is_refused_if_writes_may_be_missing() {
    let bed = Bed::new();
    let fd = bed.create("ram", 10 * PAGE);
    write_at(&fd, 0, &random(1, 4096));
    bed.json(&["coverage-policy", "ram", "ignore"]);
    bed.json(&["dump", "ram", "1"]);
    // Its writes are not observed.
    let mapped = bed.service.fdpass().unwrap().map(&fdmap_tests::service::named("ram"), true).unwrap();
    assert!(mapped.write_at(0, b"unobserved"));
    let text = bed.fails(2, &["dump", "ram", "2", "--parent", "1"]);
    assert!(text.contains("writes may be missing") && text.contains("dump without a parent"), "{text}");
    bed.json(&["dump", "ram", "2"]);
    bed.assert_image("2", &super::content_now(&fd));
}

#[test]
fn interrupted_dump_leaves_nothing_and_resumes_the_writers() {
    let bed = Bed::new();
    let fd = bed.create("ram", 100 * PAGE);
    write_at(&fd, 0, &random(1, 4096));
    let pause = "touch paused; sleep 2";
    let mut command = bed.command(&["dump", "ram", "image", "--pause", pause, "--resume", "touch resumed"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !bed.folder.join("paused").exists() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the writers are not paused");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cancelled"), "{output:?}");
    assert!(bed.folder.join("resumed").exists());
    assert!(!bed.folder.join("image").exists(), "nothing is left");

    // A command that fails is named, and the writers are resumed, too.
    std::fs::remove_file(bed.folder.join("resumed")).unwrap();
    let text = bed.fails(7, &["dump", "ram", "image", "--pause", "exit 3", "--resume", "touch resumed"]);
    assert!(text.contains(r#"running "exit 3": exit status: 3"#), "{text}");
    assert!(bed.folder.join("resumed").exists() && !bed.folder.join("image").exists());
}
