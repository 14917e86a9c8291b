//! Programs that read pagemaps are told what the files say.

use std::path::Path;
use std::process::Command;

use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::Service;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;

use crate::bed::{mapped, printed, stock, stranger, under};

const PAGES: u64 = 1 << 13;
/// Of which each is looked at by itself.
const FEW: u64 = 1 << 10;

/// The same command, in a cgroup.
fn within(cgroup: &Cgroup, command: &Command) -> Command {
    let mut sh = Command::new("sh");
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", cgroup.path().display());
    sh.arg("-c").arg(join).arg("sh").arg(command.get_program()).args(command.get_args());
    sh
}

/// Present, swapped, none.
fn counts(line: &str) -> [u64; 3] {
    let words: Vec<_> = line.split_whitespace().collect();
    let ["present", present, "swap", swap, "none", none] = words[..] else { panic!("{line:?}") };
    [present, swap, none].map(|count| count.parse().unwrap())
}

#[test]
fn pages_that_are_swapped_out_are_counted_by_those_who_read_pagemap() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    // Without BPF what is swapped is told as well.
    for probe in ["xarray", "syscalls"] {
        let service = Service::start(&["--probe", probe]).unwrap();
        let program = Compiled::new("counts").unwrap();
        let (program, pages) = (program.path().to_str().unwrap(), PAGES.to_string());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/counts.py");
        let mut ways: Vec<Vec<_>> = ["pread", "read", "fopen", "freopen", "scan", "each"]
            .map(|way| vec![program, &pages, way])
            .into();
        ways.push(vec!["python3", script.to_str().unwrap(), &pages]);
        for way in ways {
            let cgroup = Cgroup::with_limit(PAGES * 4096 / 2).unwrap();
            let [.., none] = counts(&printed(within(&cgroup, &stock(&way))));
            assert!(none > PAGES / 4 + PAGES / 8, "{way:?}: {none} of {PAGES} are lost by pagemap itself");

            let [present, swap, none] =
                counts(&printed(within(&cgroup, &under(service.folder(), &[], &way))));
            assert_eq!(none, PAGES / 4, "{way:?}: those that were not written, and no others");
            assert_eq!(present + swap, PAGES / 4 * 3, "{way:?}");
            assert!(swap > PAGES / 8, "{way:?}: {swap}");
        }
    }
}

#[test]
fn hole_that_was_written_and_paged_out_since_the_last_read_is_none() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("counts").unwrap();
    let way = [program.path().to_str().unwrap(), &FEW.to_string(), "late"];
    let [.., lost] = counts(&printed(stock(&way)));
    assert!(lost > FEW / 2, "{lost} are lost by pagemap itself");
    let [_, _, none] = counts(&printed(under(service.folder(), &[], &way)));
    assert_eq!(none, FEW / 4);
}

#[test]
fn holes_that_are_armed_are_holes_and_pages_of_other_mappings_are_there() {
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &program, &[]);
    let (fd, slot) = mapped(&mut stranger, "ram", 512);
    let second = stranger.call(&format!("map {fd} 8192 {}", 4096 * 16)).unwrap();
    stranger.call(&format!("write {slot} 3")).unwrap();
    let mut entry = |slot: &str, page| {
        let said = stranger.call(&format!("entry {slot} {page}")).unwrap();
        u64::from_str_radix(&said, 16).unwrap()
    };
    assert_eq!(entry(&slot, 2) & !(1 << 55), 0, "a hole, and nothing of the tracking");
    let (first, other) = (entry(&slot, 3), entry(&second, 1));
    assert_eq!(first >> 57, 0b101_0000, "present, of a file, not write-protected");
    assert_eq!(other >> 57, 0b101_0000, "present though this mapping never touched it");
    assert_eq!(entry(&second, 2) & !(1 << 55), 0);
}
