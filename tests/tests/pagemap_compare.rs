//! `fdmap compare` on a process whose memory is half swapped out.

use std::process::{Command, Output};

use fdmap_client::grpc::CreateFile;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::{Service, program};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use serde_json::Value;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const PAGES: u64 = 1 << 15;

fn compare(service: &Service, pid: u32, more: &[&str]) -> Output {
    let pid = pid.to_string();
    let mut command = Command::new(program("fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).args(["compare", "--pid", &pid]).args(more);
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

#[test]
async fn compare_counts_pages_that_pagemap_misreports() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let _swap = require(Swap::make(512 << 20, SwapKind::Any));
    let client = service.client().await.unwrap();
    for name in ["ram", "other"] {
        let (name, size_bytes) = (name.to_owned(), PAGES * PAGE);
        client.create(CreateFile { name, size_bytes, ..CreateFile::default() }).await.unwrap();
    }
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 2).unwrap();
    let mut writer = TestAgent::start(Some(&cgroup)).unwrap();
    writer.open(&service, "ram").unwrap();
    let pattern = Pattern { seed: 8, percent: 90 };
    writer.fill(pattern, 0, PAGES).unwrap();
    // Another process maps the same file and does not touch it.
    let mut onlooker = TestAgent::start(None).unwrap();
    onlooker.open(&service, "ram").unwrap();

    let output = compare(&service, writer.pid(), &["--json", "--first", "3"]);
    assert_eq!(output.status.code(), Some(0));
    let got = json(&output);
    let cell = |entry: &str, state: &str| got["matrix"][entry][state].as_u64().unwrap();
    let total: u64 = ["none", "present", "swap"]
        .iter()
        .flat_map(|entry| {
            ["hole", "resident", "swap_cached", "swapped", "unknown"].map(|state| cell(entry, state))
        })
        .sum();
    let moving = got["mappings"][0]["moving_pages"].as_u64().unwrap();
    assert_eq!(total + moving, PAGES, "each page is in one cell");
    assert_eq!(cell("none", "hole"), PAGES - pattern.count(PAGES));
    assert!(cell("none", "swapped") > PAGES / 4, "pagemap does not report swapped pages: {got}");
    assert!(cell("present", "resident") > PAGES / 5);
    assert_eq!(cell("swap", "hole") + cell("present", "hole"), 0);
    assert!(got["misreported_pages"].as_u64().unwrap() >= cell("none", "swapped"));
    let patch = &got["patch_2021"];
    let sum: u64 = ["equal", "differ", "undecided"].iter().map(|key| patch[key].as_u64().unwrap()).sum();
    assert_eq!(sum, total);
    assert!(
        patch["differ"].as_u64().unwrap() + patch["undecided"].as_u64().unwrap() >= cell("none", "swapped")
    );
    let first = got["mappings"][0]["first_misreported"].as_array().unwrap();
    assert_eq!(first.len(), 3);
    assert!(first.iter().all(|page| page["kind"] == "none" && page["slot"]["offset"].is_u64()), "{first:?}");

    let blind = json(&compare(&service, onlooker.pid(), &["--json"]));
    let none = &blind["matrix"]["none"];
    let data = none["resident"].as_u64().unwrap()
        + none["swapped"].as_u64().unwrap()
        + none["swap_cached"].as_u64().unwrap();
    assert_eq!(data, pattern.count(PAGES), "the pagemap of an untouched mapping is empty");

    let other = json(&compare(&service, writer.pid(), &["--json", "other"]));
    assert_eq!(other["mappings"].as_array().unwrap().len(), 0, "only mappings of that file");
    assert_eq!(compare(&service, writer.pid(), &["--exit-code"]).status.code(), Some(1));
    let words = String::from_utf8(compare(&service, writer.pid(), &["ram"]).stdout).unwrap();
    assert!(words.contains("pagemap entry") && words.contains("pagemap misreports"), "{words}");
}

#[test]
async fn compare_with_ended_process_fails() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let output = compare(&service, 4_000_000, &[]);
    assert_eq!(output.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&output.stderr).contains("4000000"));
}
