//! Dumps of swapped files whose pages are written, punched away, swapped in and out meanwhile.

use std::collections::HashMap;
use std::process::Stdio;
use std::time::Duration;

use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::FileCommand;
use serde_json::Value;

use super::{Bed, PAGE, content_of};

const PAGES: u64 = 8 << 10;
/// Pages that a step writes or punches.
const STEP: u64 = 32;

/// What a page may contain: it is written with each seed in turn.
#[derive(Clone, Copy, Default)]
struct Versions {
    /// The last seed before the dump.
    before: u64,
    /// The last seed.
    last: u64,
    /// It was punched away since the dump began, so that it was zero for a moment.
    was_punched: bool,
}

/// The seeds of a file's pages, and the agent that writes them.
struct Writer {
    agent: TestAgent,
    seed: u64,
    pages: Vec<Versions>,
}

impl Writer {
    fn write(&mut self, first: u64, pages: u64) {
        self.seed += 1;
        let end = (first + pages).min(PAGES);
        self.agent.fill(Pattern { seed: self.seed, percent: 100 }, first, end).unwrap();
        let written = usize::try_from(first).unwrap()..usize::try_from(end).unwrap();
        self.pages[written].iter_mut().for_each(|page| page.last = self.seed);
    }

    /// Writes some pages, or punches them away before it writes them again. Then all of them are swapped out, to other slots.
    fn step(&mut self, number: u64) {
        let first = mix(number) % (PAGES - STEP);
        if number.is_multiple_of(3) {
            self.agent.file(FileCommand::Punch((first..first + STEP).into())).unwrap();
            let punched = usize::try_from(first).unwrap();
            let punched = punched..punched + usize::try_from(STEP).unwrap();
            self.pages[punched].iter_mut().for_each(|page| page.was_punched = true);
        }
        self.write(first, STEP);
        self.agent.file(FileCommand::PageOut).unwrap();
    }

    /// The dump begins now.
    fn begin(&mut self) {
        for page in &mut self.pages {
            *page = Versions { before: page.last, last: page.last, was_punched: false };
        }
    }

    /// Asserts that each page is one of its versions since the dump began.
    #[track_caller]
    fn check(&self, content: &[u8]) {
        let seeds: HashMap<_, _> = (1..=self.seed)
            .map(|seed| (Pattern { seed, percent: 100 }.content(0)[..8].to_vec(), seed))
            .collect();
        for (page, (bytes, versions)) in (0_u64..).zip(content.chunks(4096).zip(&self.pages)) {
            // Also if it was read between the two words of a write.
            let was_zero = [&bytes[..8], &bytes[8..16]].iter().any(|word| **word == [0; 8]);
            if was_zero && versions.was_punched && bytes[16..].iter().all(|byte| *byte == 0) {
                continue;
            }
            let seed =
                seeds.get(&bytes[..8]).unwrap_or_else(|| panic!("page {page} has {:x?}", &bytes[..16]));
            let is_its = bytes[8..16] == page.to_le_bytes() && bytes[16..].iter().all(|byte| *byte == 0);
            assert!(is_its, "page {page} has content of another page: {:x?}", &bytes[..16]);
            let expected = versions.before..=versions.last;
            assert!(expected.contains(seed), "page {page} has seed {seed} of {expected:?}");
        }
    }
}

/// Pauses between steps differ from dump to dump: with short ones, the file is always swapped in and out; with long ones, many windows see
/// nothing of it.
#[test]
fn image_has_a_version_of_each_page_that_is_written_meanwhile() {
    let bed = Bed::new();
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(PAGES * PAGE * 2, SwapKind::Any));
    drop(bed.create("ram", PAGES * PAGE));
    let cgroup = Cgroup::with_limit(PAGES * PAGE * 3 / 8).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&bed.service, "ram").unwrap();
    let pages = vec![Versions::default(); usize::try_from(PAGES).unwrap()];
    let mut writer = Writer { agent, seed: 0, pages };
    writer.write(0, PAGES);
    // The agent itself swaps out from now on: at its limit it might be killed, since the dump has pages locked.
    cgroup.limit(4 * PAGES * PAGE).unwrap();
    let (mut from_slots, mut through_the_file, mut number) = (0, 0, 0);
    let mut parent: Option<String> = None;
    for pause in [0, 5, 20, 2, 50] {
        let image = format!("image-{pause}");
        writer.begin();
        let mut arguments = vec!["dump", "ram", &image, "--json"];
        if let Some(parent) = &parent {
            arguments.extend(["--parent", parent]);
        }
        let mut dump = bed.command(&arguments);
        let mut dump = dump.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while dump.try_wait().unwrap().is_none() {
            number += 1;
            writer.step(number);
            std::thread::sleep(Duration::from_millis(pause));
        }
        let output = dump.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let counts = &report["files"][0]["counts"];
        println!("{pause} ms, {number} steps: {counts}");
        writer.check(&content_of(&bed.image(&image), 0));
        from_slots += counts["slot_pages"].as_u64().unwrap();
        through_the_file += counts["swapped_in_pages"].as_u64().unwrap();
        // Two whole images and their descendants.
        parent = (pause != 20).then_some(image);
    }
    assert!(from_slots > 0, "no page was read from its slot, and {through_the_file} through the file");
    writer.begin();
    bed.json(&["dump", "ram", "last"]);
    writer.check(&content_of(&bed.image("last"), 0));
    writer.agent.finish().unwrap();
}
