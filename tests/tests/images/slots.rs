//! Dumps that read swapped pages from their swap slots.

use std::process::Command;

use fdmap_client::ClientError;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::{PageIndex, PageState, SlotContent};
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::testing::credentials::become_user;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root, settle_lru_lists, vmstat};
use fdmap_tests::service::{Service, fdmap_as, named, program};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use serde_json::Value;

use super::{Bed, PAGE, content_now, random, write_at};

pub(super) const PAGES: u64 = 16 << 10;
const BYTES: usize = 4096 * 16384;
/// An unprivileged user.
const USER: u32 = 65534;

/// Taken before the service starts, so that these tests run one after the other.
pub(super) fn lock() -> HostLock {
    require(root());
    HostLock::acquire().unwrap()
}

/// Random pages; each seventh one is zero, in an order that differs from seed to seed.
pub(super) fn content_with_zeros(seed: u64) -> Vec<u8> {
    let mut content = random(seed, BYTES);
    let zeros = content.chunks_mut(4096).skip(usize::try_from(seed).unwrap()).step_by(7);
    zeros.for_each(|page| page.fill(0));
    content
}

/// Resident and swapped pages of a file.
pub(super) fn residency(bed: &Bed) -> (u64, u64) {
    let stat = bed.json(&["stat", "ram"]);
    let count = |state: &str| stat["pages"][state].as_u64().unwrap();
    (count("resident_pages"), count("swapped_pages"))
}

/// Creates a file, and writes it in a cgroup that swaps most of it out: first without zero pages, so that slots which later belong to zero
/// pages have bytes of others on the device.
pub(super) fn swapped_file(bed: &Bed, name: &str, cgroup: &Cgroup, content: &[u8]) {
    bed.json(&["create", name, "--size", &(PAGES * PAGE).to_string()]);
    for bytes in [&random(99, BYTES), content] {
        std::fs::write(bed.folder.join("content"), bytes).unwrap();
        let write = format!(
            "echo $$ >'{}/cgroup.procs' && dd if=content iflag=direct bs=1M >&3",
            cgroup.path().display()
        );
        let written = bed.command(&["open", name, "--write", "--", "sh", "-c", &write]).output().unwrap();
        assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    }
}

pub(super) fn count(report: &Value, name: &str) -> u64 {
    report["files"][0]["counts"][name].as_u64().unwrap()
}

/// Dumps a file that is mostly swapped to new areas, and asserts that nothing is swapped in.
fn dump_from_slots(kinds: &[SwapKind], service: Command) {
    let _host = lock();
    let bed = Bed { service: Service::start_command(service).unwrap(), ..Bed::new() };
    // The last area has the highest priority, and is filled first.
    let bytes = |number: usize| if number == 0 { PAGES * PAGE * 5 / 4 } else { PAGES * PAGE / 4 };
    let _swap: Vec<_> =
        (0..).zip(kinds).map(|(number, kind)| require(Swap::make(bytes(number), *kind))).collect();
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(3);
    swapped_file(&bed, "ram", &cgroup, &content);
    let before = residency(&bed);
    assert!(before.1 > PAGES / 2, "{before:?}");
    let areas = bed.json(&["stat", "ram"])["pages"]["swap_types"].as_object().unwrap().len();
    assert_eq!(areas, kinds.len(), "pages are in all areas");
    // Pages that a slow device is still writing, or has written just now. They are read from memory.
    let cached = &bed.json(&["stat", "ram", "--swap-cached"])["pages"]["swap_cached_pages"];
    let cached = cached.as_u64().unwrap();
    let swapped_in = vmstat("pswpin").unwrap();
    let report = bed.json(&["dump", "ram", "image", "--jobs", "2"]);
    let swapped_in = vmstat("pswpin").unwrap() - swapped_in;
    let after = residency(&bed);
    let counts = &report["files"][0]["counts"];
    println!("{before:?} -> {after:?}, {cached} swap-cached, {swapped_in} swapped in: {counts}");
    bed.assert_image("image", &content);
    assert_eq!(report["slots_refused"], Value::Null);
    let tolerance = PAGES / 100;
    assert!(swapped_in < tolerance, "{swapped_in} pages were swapped in");
    assert!(count(&report, "swapped_in_pages") < tolerance + cached, "{counts}");
    assert!(before.0.abs_diff(after.0) < tolerance && before.1.abs_diff(after.1) < tolerance);
    let read = count(&report, "slot_pages") + count(&report, "zero_slot_pages");
    assert!(read.abs_diff(before.1) < tolerance + cached, "{read} of {}", before.1);
    assert!(count(&report, "zero_slot_pages") > before.1 / 20, "zero pages have marked slots");
    let shown = String::from_utf8(bed.run(&["dump", "ram", "table"]).stdout).unwrap();
    assert!(shown.contains("slots") && shown.contains("swapped in"), "{shown}");
    assert!(!shown.contains("not read from their swap slots"), "{shown}");
}

/// The service has no CAP_SYSLOG, as with its unit file, so that it cannot look up addresses in the kernel by name.
#[test]
fn pages_on_zram_are_read_from_their_slots() {
    let mut service = Command::new("setpriv");
    service.args(["--bounding-set=-syslog", "--inh-caps=-syslog"]).arg(program("fdmapd").unwrap());
    dump_from_slots(&[SwapKind::Any], service);
}

#[test]
fn pages_in_a_swap_file_are_read_from_the_block_device_of_its_file_system() {
    dump_from_slots(&[SwapKind::Ext4(4096)], Command::new(program("fdmapd").unwrap()));
}

/// The kernel skips parts of its extents that are no whole pages: a slot is no page of the file.
#[test]
fn pages_in_a_swap_file_with_small_blocks_are_read_through_the_file() {
    let _host = lock();
    let bed = Bed::new();
    let _swap = require(Swap::make(PAGES * PAGE * 5 / 4, SwapKind::Ext4(1024)));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(2);
    swapped_file(&bed, "ram", &cgroup, &content);
    let report = bed.json(&["dump", "ram", "image"]);
    assert_eq!(count(&report, "slot_pages"), 0);
    assert!(count(&report, "zero_slot_pages") > 0 && count(&report, "swapped_in_pages") > PAGES / 2);
    let refused = report["slots_refused"].as_str().unwrap();
    assert!(refused.starts_with("swap area /") && refused.contains("whole pages"), "{refused}");
    bed.assert_image("image", &content);
}

#[test]
fn pages_in_several_areas_are_read_from_their_slots() {
    let service = Command::new(program("fdmapd").unwrap());
    dump_from_slots(&[SwapKind::Ext4(4096), SwapKind::Loop, SwapKind::Any], service);
}

/// A slot has all of the last page, and so what a mapping wrote past the end of the file.
#[test]
fn bytes_past_the_end_of_the_file_are_not_in_the_image() {
    let _host = lock();
    let bed = Bed::new();
    let _swap = require(Swap::make(16 << 20, SwapKind::Any));
    let fd = bed.create("ram", 3 * PAGE + 100);
    write_at(&fd, 0, &random(1, 3 * 4096 + 100));
    let mapping = SharedMapping::shared(&fd, 0, 4 * 4096, true).unwrap();
    assert!(mapping.write_at(3 * 4096 + 100, &[0xff; 3996]));
    for _ in 0..20 {
        // MADV_PAGEOUT takes pages from page tables only.
        mapping.advise(Advice::PopulateRead).unwrap();
        settle_lru_lists().unwrap();
        mapping.advise(Advice::PageOut).unwrap();
        if residency(&bed).1 == 4 {
            break;
        }
    }
    assert_eq!(residency(&bed), (0, 4), "all pages are swapped out");
    let report = bed.json(&["dump", "ram", "image"]);
    println!("{}", report["files"][0]["counts"]);
    assert!(count(&report, "slot_pages") > 0, "{report}");
    bed.assert_image("image", &content_now(&fd));
}

/// Against the content of the pages.
#[test]
async fn service_reports_which_slots_are_zero() {
    let _host = lock();
    let bed = Bed::new();
    let _swap = require(Swap::make(2 * PAGES * PAGE, SwapKind::Any));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(5);
    swapped_file(&bed, "ram", &cgroup, &content);
    let client = bed.service.client().await.unwrap();
    let (name, mut known, mut swapped) = (named("ram"), 0_u64, 0_u64);
    for first in (0..PAGES).step_by(4096) {
        let pages: Vec<_> = (first..first + 4096).map(PageIndex).collect();
        let found = client.slot_content(&name, &pages).await.unwrap();
        assert_eq!((found.slots.len(), found.areas.len()), (4096, 1));
        let states = client.lookup(&name, &pages, Default::default(), std::time::Duration::ZERO, false);
        let states = states.await.unwrap().pages;
        for ((page, (slot, content_of_slot)), state) in (first..).zip(found.slots).zip(states) {
            assert_eq!(slot.is_some(), state.state == PageState::Swapped, "page {page}");
            swapped += u64::from(slot.is_some());
            let at = usize::try_from(page).unwrap() * 4096;
            let is_zero = content[at..at + 4096].iter().all(|byte| *byte == 0);
            match content_of_slot {
                SlotContent::Unknown => continue,
                SlotContent::Zero => assert!(is_zero && slot.is_some(), "page {page}"),
                SlotContent::Device => assert!(!is_zero && slot.is_some(), "page {page}"),
            }
            known += 1;
        }
    }
    println!("content known of {known} of {swapped} swapped pages");
    assert!(swapped > PAGES / 2 && known > swapped / 100 * 99, "{known} of {swapped}");
}

/// A bed whose service a user may connect to, and whose folder is the user's.
fn bed_for(user: u32) -> Bed {
    let bed = Bed { service: Service::start(&["--group", &user.to_string()]).unwrap(), ..Bed::new() };
    std::os::unix::fs::chown(&bed.folder, Some(user), Some(user)).unwrap();
    bed
}

/// A right to inspect a file does not permit to see which of its pages are zero.
#[test]
async fn slot_content_is_limited_and_needs_the_right_to_read() {
    let _host = lock();
    let bed = bed_for(USER);
    bed.json(&["create", "ram", "--size", "64K", "--other", "inspect"]);
    let ask = async |service: &Service, pages: &[u64]| {
        let pages: Vec<_> = pages.iter().copied().map(PageIndex).collect();
        let client = service.client().await.unwrap();
        client.slot_content(&named("0/ram"), &pages).await
    };
    assert_eq!(ask(&bed.service, &[0, 15]).await.unwrap().slots, [(None, SlotContent::Unknown); 2]);
    let code = |refused: Result<_, ClientError>| match refused {
        Err(ClientError::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(ask(&bed.service, &[16]).await), RefusalCode::OutOfRange);
    assert_eq!(code(ask(&bed.service, &[]).await), RefusalCode::InvalidArgument);
    assert_eq!(code(ask(&bed.service, &[0; 4097]).await), RefusalCode::InvalidArgument);
    let by_user = || {
        become_user(USER, USER).unwrap();
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let client = bed.service.client().await.unwrap();
            assert_eq!(client.get(&named("0/ram")).await.unwrap().size_bytes, 64 << 10);
            code(ask(&bed.service, &[0]).await)
        })
    };
    let refused = std::thread::scope(|scope| scope.spawn(by_user).join().unwrap());
    assert_eq!(refused, RefusalCode::PermissionDenied);
}

/// Only the administrator may open swap areas.
#[test]
fn ordinary_user_reads_through_the_file() {
    let _host = lock();
    let bed = bed_for(USER);
    let _swap = require(Swap::make(2 * PAGES * PAGE, SwapKind::Any));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(4);
    let name = format!("{USER}/ram");
    swapped_file(&bed, &name, &cgroup, &content);
    let mut command = fdmap_as(&bed.service, USER).unwrap();
    command.args(["dump", "ram", "image", "--json"]).current_dir(&bed.folder);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{}", report["files"][0]["counts"]);
    assert_eq!(count(&report, "slot_pages"), 0);
    assert!(count(&report, "swapped_in_pages") > PAGES / 2);
    let refused = report["slots_refused"].as_str().unwrap();
    assert!(refused.starts_with("open of /dev/") && refused.contains("EACCES"), "{refused}");
    bed.assert_image("image", &content);
}

/// As lxcfs does in containers: such files raise no event and have other counters.
#[test]
fn pages_are_read_through_the_file_if_files_of_proc_are_replaced() {
    let _host = lock();
    let bed = Bed::new();
    let _swap = require(Swap::make(PAGES * PAGE * 5 / 4, SwapKind::Any));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 4).unwrap();
    let content = content_with_zeros(4);
    swapped_file(&bed, "ram", &cgroup, &content);
    for name in ["swaps", "vmstat", "meminfo"] {
        let path = format!("/proc/{name}");
        std::fs::write(bed.folder.join(name), std::fs::read(&path).unwrap()).unwrap();
        let image = format!("image-{name}");
        let dump = bed.command(&["dump", "ram", &image, "--json"]);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("mount --bind {name} {path} && exec \"$@\""), "sh"]);
        command.arg(dump.get_program()).args(dump.get_args()).current_dir(&bed.folder);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let refused = report["slots_refused"].as_str().unwrap();
        assert!(refused.contains(&format!("{path} is the file of the kernel")), "{refused}");
        assert_eq!((count(&report, "slot_pages"), count(&report, "zero_slot_pages")), (0, 0));
        bed.assert_image(&image, &content);
    }
}
