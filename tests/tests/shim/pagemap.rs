//! Programs that read pagemaps get the page states of the files.

use std::path::Path;
use std::process::Command;

use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::Service;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;

use crate::fixture::{compile_plain_program, map_memfd, start_program, stdout_of, with_shim, without_shim};

const PAGES: u64 = 1 << 13;
/// Pages of the test that reads entries one by one.
const SINGLE_READ_PAGES: u64 = 1 << 10;

/// The same command in a cgroup.
fn in_cgroup(cgroup: &Cgroup, command: &Command) -> Command {
    let mut sh = Command::new("sh");
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", cgroup.path().display());
    sh.arg("-c").arg(join).arg("sh").arg(command.get_program()).args(command.get_args());
    sh
}

/// Parses the counts of present, swapped and empty entries.
fn counts(line: &str) -> [u64; 3] {
    let words: Vec<_> = line.split_whitespace().collect();
    let ["present", present, "swap", swap, "none", none] = words[..] else { panic!("{line:?}") };
    [present, swap, none].map(|count| count.parse().unwrap())
}

#[test]
fn pagemap_readers_count_swapped_pages() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    // Without BPF the states come from the syscalls probe.
    for probe in ["xarray", "syscalls"] {
        let service = Service::start(&["--probe", probe]).unwrap();
        let program = Compiled::new("counts").unwrap();
        let (program, pages) = (program.path().to_str().unwrap(), PAGES.to_string());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/counts.py");
        let mut methods: Vec<Vec<_>> = ["pread", "read", "fopen", "freopen", "scan", "each"]
            .map(|method| vec![program, &pages, method])
            .into();
        methods.push(vec!["python3", script.to_str().unwrap(), &pages]);
        for method in methods {
            let cgroup = Cgroup::with_limit(PAGES * 4096 / 2).unwrap();
            let [.., none] = counts(&stdout_of(in_cgroup(&cgroup, &without_shim(&method))));
            assert!(
                none > PAGES / 4 + PAGES / 8,
                "{method:?}: {none} of {PAGES} are empty in the kernel's pagemap"
            );

            let [present, swap, none] =
                counts(&stdout_of(in_cgroup(&cgroup, &with_shim(service.folder(), &[], &method))));
            assert_eq!(none, PAGES / 4, "{method:?}: exactly the pages that were never written");
            assert_eq!(present + swap, PAGES / 4 * 3, "{method:?}");
            assert!(swap > PAGES / 8, "{method:?}: {swap}");
        }
    }
}

#[test]
fn hole_written_and_swapped_out_between_reads_is_reported_as_swapped() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    let service = Service::start(&[]).unwrap();
    let program = Compiled::new("counts").unwrap();
    let method = [program.path().to_str().unwrap(), &SINGLE_READ_PAGES.to_string(), "late"];
    let [.., lost] = counts(&stdout_of(without_shim(&method)));
    assert!(lost > SINGLE_READ_PAGES / 2, "{lost} are empty in the kernel's pagemap");
    let [_, _, none] = counts(&stdout_of(with_shim(service.folder(), &[], &method)));
    assert_eq!(none, SINGLE_READ_PAGES / 4);
}

#[test]
fn write_protected_holes_stay_holes_and_pages_of_other_mappings_are_present() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &[]);
    let (fd, slot) = map_memfd(&mut program, "ram", 512);
    let second = program.call(&format!("map {fd} 8192 {}", 4096 * 16)).unwrap();
    program.call(&format!("write {slot} 3")).unwrap();
    let mut entry = |slot: &str, page| {
        let answer = program.call(&format!("entry {slot} {page}")).unwrap();
        u64::from_str_radix(&answer, 16).unwrap()
    };
    assert_eq!(entry(&slot, 2) & !(1 << 55), 0, "a hole, and no trace of tracking");
    let (first, other) = (entry(&slot, 3), entry(&second, 1));
    assert_eq!(first >> 57, 0b101_0000, "present, of a file, not write-protected");
    assert_eq!(other >> 57, 0b101_0000, "present although this mapping never accessed it");
    assert_eq!(entry(&second, 2) & !(1 << 55), 0);
}
