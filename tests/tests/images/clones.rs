//! Processes that map one restored file privately share the pages that they do not write to: `examples/python/clone.py`.

use std::collections::BTreeMap;
use std::path::Path;

use fdmap_tests::harness::require;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::{HarnessError, test};

use super::{Bed, PAGE, content_now, random, write_at};

/// A clone that has written to its first `pages` pages.
fn clone(bed: &Bed, pages: u64) -> LineProcess {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python/clone.py");
    let program = program.to_str().unwrap();
    let command = bed.command(&["open", "template", "--", "python3", program, &pages.to_string()]);
    let mut clone = LineProcess::start(command, None).unwrap();
    assert_eq!(clone.receive().unwrap(), "ready");
    clone
}

/// The sizes that a clone prints, in KiB, and the first byte of its memory.
fn sizes(clone: &mut LineProcess) -> BTreeMap<String, u64> {
    clone.send("sizes").unwrap();
    let line = clone.receive().unwrap();
    let pairs = line.split_whitespace().map(|word| word.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

#[test]
fn clones_share_the_pages_that_they_do_not_write_to() {
    const PAGES: u64 = 2048;
    // Two that share all pages, so that none is mapped once.
    const WRITTEN: [u64; 4] = [0, 0, 100, 200];
    let python = std::process::Command::new("python3").arg("--version").output();
    require(python.map_err(|error| HarnessError::Missing(format!("python3: {error}"))));
    let bed = Bed::new();
    let fd = bed.create("ram", PAGES * PAGE);
    let content = random(1, (PAGES * PAGE).try_into().unwrap());
    write_at(&fd, 0, &content);
    bed.json(&["dump", "ram", "image"]);
    bed.json(&["delete", "ram"]);
    drop(fd);
    bed.json(&["restore", "image", "--name", "template"]);
    bed.json(&["seal", "template", "write", "shrink", "grow"]);
    let mut clones = WRITTEN.map(|pages| clone(&bed, pages));
    let found = clones.each_mut().map(sizes);
    for (written, sizes) in WRITTEN.iter().zip(&found) {
        println!("{sizes:?}");
        let own = written * 4;
        let all = PAGES * 4;
        assert_eq!(sizes["Rss"], all, "{sizes:?}");
        assert_eq!(sizes["Private_Dirty"] + sizes["Private_Clean"], own, "{sizes:?}");
        assert_eq!(sizes["Shared_Clean"] + sizes["Shared_Dirty"], all - own, "{sizes:?}");
        // A page that two clones have not copied counts half for each.
        assert!(sizes["Pss"] <= own + (all - own) / 2, "{sizes:?}");
        let first = u64::from(content[0]) + u64::from(*written > 0);
        assert_eq!(sizes["first"], first % 256);
    }
    let all: u64 = found.iter().map(|sizes| sizes["Pss"]).sum();
    let copied = 4 * WRITTEN.iter().sum::<u64>();
    assert!(all <= 4 * PAGES + copied, "{all} KiB for {} clones", WRITTEN.len());
    let fd = bed.service.fdpass().unwrap().open(&fdmap_tests::service::named("template"), false).unwrap().0;
    assert!(content_now(&fd) == content, "the template is unchanged");
}
