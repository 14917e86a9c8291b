//! Migrations while writers run.

use std::process::Child;

use fdmap_client::proto::Backing;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::test;
use fdmap_tests::test_agent::Run;

use super::{Bed, PAGE, content_of, random, write_at};

/// Writers run all the time, but while they are paused. The command that pauses them copies the file.
#[test(flavor = "multi_thread")]
async fn destination_equals_the_source_at_its_pause() {
    const PAGES: u64 = 4096;
    for (methods, written) in [("store", PAGES / 100), ("store write", PAGES / 10), ("store", PAGES / 2)] {
        let bed = Bed::new();
        let log = Log::create(2, 1 << 22).unwrap();
        let scenario = Scenario::new(&bed.source, "ram", PAGES, Backing::Shmem, log).await.unwrap();
        let mut writer = scenario.writer(None).unwrap();
        scenario.map(&mut writer, true).unwrap();
        writer.write_all(0, 1, 0..PAGES, 0).unwrap();
        writer.start_run(Run::new(methods, 4000, 7, 0..written, 0)).unwrap();
        let pid = writer.pid();
        let pause = format!(
            "kill -STOP {pid} && until grep -q '^State:.T' /proc/{pid}/status; do :; done && \
             '{}' --runtime-dir '{}' open ram -- sh -c 'cat <&3' > copy",
            fdmap_tests::service::program("fdmap").unwrap().display(),
            bed.source.folder().display(),
        );
        let receiving = bed.receive(&["--keep"]);
        let (report, _) = bed.migrated(receiving.port, receiving, &["--pause", &pause, "--rounds", "4"]);
        println!("{written} pages: {report}");
        let rounds = report["rounds"].as_array().unwrap();
        assert!(rounds.len() > 2 && rounds[0]["pages"] == PAGES, "{report}");
        assert!(rounds[1]["pages"].as_u64().unwrap() > written / 2, "the writer writes: {report}");
        let copy = std::fs::read(bed.folder.join("copy")).unwrap();
        assert!(bed.content(&bed.destination, "ram") == copy, "{methods}, {written} pages");
        // After success the writers stay paused.
        let state = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(state.contains("State:\tT"), "{state}");
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGCONT,
        )
        .unwrap();
        writer.reply().unwrap();
        writer.finish().unwrap();
    }
}

/// The file changes in all ways between two rounds: the command that pauses the writers does that.
#[test]
fn holes_zeroes_and_sizes_of_the_last_round_are_those_of_the_source() {
    let bed = Bed::new();
    let fd = bed.create("ram", 1000 * PAGE);
    write_at(&fd, 0, &random(1, 900 * 4096));
    let fdmap = format!(
        "'{}' --runtime-dir '{}'",
        fdmap_tests::service::program("fdmap").unwrap().display(),
        bed.source.folder().display(),
    );
    let zeroes = "dd if=/dev/zero bs=4096 conv=notrunc status=none";
    let pause = format!(
        "{fdmap} open --write ram -- sh -c '{zeroes} seek=10 count=7 of=/proc/self/fd/3 && \
         fallocate -p -o {} -l {} /proc/self/fd/3' && \
         {fdmap} resize ram {} && {fdmap} resize ram {}",
        100 * PAGE,
        50 * PAGE,
        400 * PAGE + 5,
        1200 * PAGE + 9,
    );
    let receiving = bed.receive(&["--keep"]);
    let (report, _) = bed.migrated(receiving.port, receiving, &["--pause", &pause]);
    assert_eq!(report["rounds"][0]["pages"], 900);
    let theirs = bed.json(&bed.destination, &["ls"])[0].clone();
    assert_eq!(theirs["size_bytes"], 1200 * PAGE + 9);
    assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
    assert_eq!(theirs["allocated_bytes"], (401 - 57) * PAGE, "pages of zeroes became holes");
}

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that does not pause the writers. A migration succeeds all the same if they make no write between two checkpoints, as when other
/// programs have the processors.
#[test]
fn writes_after_the_pause_end_the_migration() {
    let bed = Bed::new();
    let fd = bed.create("ram", 256 * PAGE);
    write_at(&fd, 0, &random(1, 256 * 4096));
    let write = "i=0; while :; do i=$((i+1)); echo $i 1<>/proc/self/fd/3; done";
    let writing = || bed.fdmap(&bed.source, &["open", "--write", "ram", "--", "sh", "-c", write]).spawn();
    let writers = [(); 4].map(|()| Killed(writing().unwrap()));
    let mut attempts = 0;
    let output = loop {
        let receiving = bed.receive(&["--keep"]);
        let mut migrate = bed.migrate(receiving.port, &["--pause", "true", "--resume", "touch resumed"]);
        let output = migrate.output().unwrap();
        let (status, _, error) = receiving.ended();
        attempts += 1;
        if output.status.code() != Some(0) || attempts == 30 {
            assert!(status == Some(7) && error.contains("the source aborted the migration"), "{error}");
            break output;
        }
        bed.json(&bed.source, &["fence", "ram", "--remove"]);
        bed.json(&bed.destination, &["delete", "ram"]);
    };
    drop(writers);
    let error = super::error_of(&output, 7);
    assert!(error.contains("were written, or pinned for DMA, after the writers were paused"), "{error}");
    assert!(bed.folder.join("resumed").exists());
    bed.assert_not_migrated();
}
