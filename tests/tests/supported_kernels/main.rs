//! The service runs on the oldest supported kernels: guests boot Debian's Linux 6.1 and 6.12 with cgroup v2 and swap, and run
//! tests of this program there, with the built `fdmapd`, `fdmap` and test agent. Linux 6.1 cannot track writes (6.7), so only
//! page states and refusals are tested there.
//!
//! The tests of other files run as they are; `inside` and `refused` have the tests that are for guests only.

// The `main` of these files is unused here.
#[allow(dead_code)]
#[path = "../descriptor_writes.rs"]
mod descriptor_writes;
mod inside;
#[allow(dead_code)]
#[path = "../no_lost_writes.rs"]
mod no_lost_writes;
#[allow(dead_code)]
#[path = "../page_states.rs"]
mod page_states;
#[allow(dead_code)]
#[path = "../pagemap_compare.rs"]
mod pagemap_compare;
mod refused;

use std::path::PathBuf;
use std::time::Instant;

use fdmap_tests::guest::system::System;
use fdmap_tests::harness::require;
use fdmap_tests::host::output;
use fdmap_tests::service::program;
use fdmap_tests::test;

/// In a guest: the names of the tests to run, separated by commas.
const GUEST_TESTS: &str = "FDMAP_GUEST_TESTS";

fn main() -> std::process::ExitCode {
    if let Some(code) = refused::main() {
        return code;
    }
    match std::env::var(GUEST_TESTS) {
        Ok(names) => fdmap_tests::harness::main_of(|name| names.split(',').any(|wanted| wanted == name)),
        // The other tests are for guests.
        Err(_) => fdmap_tests::harness::main_of(|name| !name.contains("::")),
    }
}

/// Tests of page states and of connections, which every supported kernel passes.
const STATES: [&str; 6] = [
    "inside::descriptors_on_the_grpc_socket_are_not_received",
    "inside::doctor_reports_what_the_kernel_lacks",
    "page_states::small_files_match_the_oracle",
    "pagemap_compare::compare_counts_pages_that_pagemap_misreports",
    "refused::descriptors_of_refused_fdpass_connections_block_the_refuser_only",
    "refused::descriptors_of_refused_grpc_connections_block_the_refuser_only",
];

/// Tests for kernels that cannot track writes.
const UNTRACKED: [&str; 3] = [
    "inside::hugetlb_file_indexed_by_huge_pages_is_unknown",
    "inside::tracking_is_refused_before_anything_is_stopped",
    "inside::untracked_stores_are_conservative",
];

/// Tests of write tracking.
const TRACKED: [&str; 3] = [
    "descriptor_writes::descriptor_write_is_reported_in_the_next_generation",
    "no_lost_writes::stores_of_forked_children_are_not_lost",
    "inside::stores_under_swap_are_not_lost",
];

fn tests_pass_on(kernel: &str, tests: &[&str]) {
    let own = std::env::current_exe().unwrap();
    let mut programs = vec![own.clone()];
    for name in ["fdmapd", "fdmap", "fdmap-test-agent", "fdmap-cleanup"] {
        programs.push(program(name).unwrap());
    }
    for name in ["mkswap", "swapon", "swapoff"] {
        let path = output("sh", &["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {name}")]);
        programs.push(PathBuf::from(require(path).trim()));
    }
    let environment = [
        format!("{GUEST_TESTS}={}", tests.join(",")),
        format!("FDMAP_GUEST_KERNEL={kernel}"),
        "FDMAP_PROGRAMS_ARE_BUILT=1".to_owned(),
        "FDMAP_REQUIRE_ALL=1".to_owned(),
        "PATH=/usr/bin:/usr/sbin:/bin:/sbin".to_owned(),
    ];
    let options = ["--test-threads", "1", "--color", "never"].map(str::to_owned);
    let command: Vec<_> = [own.display().to_string()].into_iter().chain(options).collect();
    let system = System { kernel, programs: &programs, environment: &environment, command: &command };
    let begun = Instant::now();
    let (status, text) = require(system.run());
    println!("Linux {kernel}, {:?}:\n{text}", begun.elapsed());
    assert_eq!(status, 0, "a test failed on Linux {kernel}");
    let all = format!("test result: ok. {} passed", tests.len());
    assert!(text.contains(&all), "Linux {kernel} did not run all of {tests:?}");
}

#[test]
fn service_works_on_linux_6_1() {
    tests_pass_on("6.1", &[&STATES[..], &UNTRACKED].concat());
}

#[test]
fn service_works_on_linux_6_12() {
    tests_pass_on("6.12", &[&STATES[..], &TRACKED].concat());
}
