//! Processes that change their mappings while these are filled: no page is zero in place of its content.

use std::time::Duration;

use fdmap_tests::line_process::LineProcess;
use fdmap_tests::test;
use nix::sys::signal::Signal;

use super::lazy::{Chain, PAGES, read};

/// First bytes of a page that has no content.
const ZERO: &str = "00000000";

/// A guest whose hand-off is over: its mappings are checked then.
fn served(chain: &Chain, options: &[&str]) -> LineProcess {
    let mut guest = chain.guest(options);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    guest
}

/// Asserts that pages have their content or raise SIGBUS. Returns how many do the latter.
#[track_caller]
fn refused_pages(chain: &Chain, guest: &mut LineProcess, pages: impl Iterator<Item = u64>) -> u64 {
    let mut refused = 0;
    for page in pages {
        match read(guest, page).0 {
            bytes if bytes == "sigbus" => refused += 1,
            bytes => assert_eq!(bytes, chain.text(page), "page {page}"),
        }
    }
    refused
}

/// A run of pages that is not one mapping cannot be poisoned by one call.
#[test]
fn missing_pages_of_split_mappings_raise_sigbus_after_a_cancelled_handler() {
    let chain = Chain::new();
    for option in ["keep", "drop"] {
        let handler = chain.handler(&[]);
        let mut guest = served(&chain, &[option]);
        for page in [PAGES - 3, PAGES - 5000, PAGES - 9000, PAGES / 2 + 10] {
            guest.call(&format!("protect {page} 1")).unwrap();
        }
        handler.signal(Signal::SIGTERM);
        handler.exits(7);
        let refused = refused_pages(&chain, &mut guest, (0..PAGES).rev());
        assert!(refused > 100, "{option}: {refused}");
    }
}

#[test]
fn missing_pages_beside_replaced_memory_raise_sigbus_after_a_cancelled_handler() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = served(&chain, &["keep"]);
    let replaced = PAGES - 6000;
    guest.call(&format!("replace {replaced}")).unwrap();
    handler.signal(Signal::SIGTERM);
    handler.exits(7);
    let refused = refused_pages(&chain, &mut guest, (0..PAGES).rev().filter(|page| *page != replaced));
    assert!(refused > 100, "{refused}");
    // Nothing is registered any more: a page without content does not wait.
    guest.call(&format!("remove {} 1", PAGES / 2 + 1)).unwrap();
    assert_eq!(read(&mut guest, PAGES / 2 + 1).0, ZERO);
}

#[test]
fn guest_that_replaces_a_page_finds_the_content_of_all_others() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = served(&chain, &[]);
    let replaced = PAGES - 200;
    guest.call(&format!("replace {replaced}")).unwrap();
    for page in (0..PAGES).rev().filter(|page| *page != replaced).step_by(5) {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
    let report = handler.report();
    assert_eq!(report["lazy"]["end"], "complete");
    assert_eq!(report["lazy"]["counts"]["removed_pages"], 1, "{report}");
    // A hole that was not accessed before.
    let hole = (6044..6144).find(|page| !(PAGES - 1 - page).is_multiple_of(5)).unwrap();
    assert_eq!(read(&mut guest, hole).0, ZERO);
    assert_eq!(read(&mut guest, replaced).0, "7f454c46", "the memory of the guest");
}

/// Without UFFD_FEATURE_EVENT_UNMAP, the kernel reports ENOENT for the pages, and nothing else.
#[test]
fn pages_that_are_unmapped_without_an_event_count_as_removed() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = served(&chain, &[]);
    let first = PAGES - 6000;
    guest.call(&format!("unmap {first} 2000")).unwrap();
    guest.call(&format!("protect {} 7", PAGES - 700)).unwrap();
    let report = handler.report();
    assert_eq!(report["lazy"]["end"], "complete");
    assert!(report["lazy"]["counts"]["removed_pages"].as_u64().unwrap() > 500, "{report}");
    let others = (0..first).chain(first + 2000..PAGES);
    assert_eq!(refused_pages(&chain, &mut guest, others), 0);
}

#[test]
fn moved_pages_raise_sigbus_where_they_lack_content() {
    let chain = Chain::new();
    for (stays, descriptor) in [(0, "keep"), (0, "drop"), (1, "keep"), (1, "drop")] {
        let handler = chain.handler(&[]);
        let mut guest = served(&chain, &["remap", descriptor]);
        let (first, count) = (PAGES - 9000, 8000);
        guest.call(&format!("move {first} {count} {stays}")).unwrap();
        let mut refused = 0;
        for page in (0..count).rev() {
            let answer = guest.call(&format!("moved {page}")).unwrap();
            match answer.split(' ').next().unwrap() {
                "sigbus" => refused += 1,
                bytes => assert_eq!(bytes, chain.text(first + page), "page {page}, {stays} {descriptor}"),
            }
        }
        assert!(refused > 100, "{stays} {descriptor}: {refused}");
        assert_eq!(handler.report()["lazy"]["end"], "complete");
        let others = (0..first).chain(first + count..PAGES);
        assert_eq!(refused_pages(&chain, &mut guest, others), 0);
        if stays == 1 {
            for page in (first..first + count).step_by(97) {
                assert_eq!(read(&mut guest, page).0, ZERO, "page {page}");
            }
        }
    }
}

#[test]
fn missing_pages_raise_sigbus_in_a_child_of_a_child() {
    let chain = Chain::new();
    let mut refused = 0;
    for _ in 0..4 {
        let handler = chain.handler(&[]);
        let mut guest = served(&chain, &["fork"]);
        for page in (PAGES - 270..PAGES - 55).step_by(43).chain([PAGES / 2 + 3]) {
            let answer = guest.call(&format!("grandchild {page}")).unwrap();
            match answer.split(' ').next().unwrap() {
                "sigbus" => refused += 1,
                bytes => assert_eq!(bytes, chain.text(page), "page {page}"),
            }
        }
        assert_eq!(handler.report()["lazy"]["end"], "complete");
        chain.assert_memory(&mut guest, |_| None);
    }
    assert!(refused > 4, "{refused}");
}

/// As after vfork(2), or if a launcher exits.
#[test]
fn address_space_is_served_after_the_process_that_connected_has_ended() {
    let chain = Chain::new();
    for descriptor in ["keep", "drop"] {
        let handler = chain.handler(&[]);
        let mut guest = served(&chain, &["thread", descriptor]);
        for page in (0..PAGES).rev().step_by(7) {
            assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
        }
        assert_eq!(handler.report()["lazy"]["end"], "complete");
    }
}

#[test]
fn writes_to_write_protected_pages_go_on() {
    let chain = Chain::new();
    let handler = chain.handler_of("1", &[]);
    let mut guest = served(&chain, &["wp"]);
    for page in [1, 2, 3100, PAGES - 700] {
        let before = read(&mut guest, page).0;
        assert_ne!(before, ZERO);
        guest.call(&format!("wp {page}")).unwrap();
        assert_eq!(read(&mut guest, page).0, before, "page {page}");
        guest.call(&format!("write {page} 171")).unwrap();
        assert_eq!(read(&mut guest, page).0, format!("ab{}", &before[2..]), "page {page}");
    }
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    // Nothing is registered any more.
    guest.call(&format!("remove {} 1", PAGES / 2 + 1)).unwrap();
    assert_eq!(read(&mut guest, PAGES / 2 + 1).0, ZERO);
}

/// Moved twice, the second time beside pages that were filled, and then given back to the kernel.
#[test]
fn pages_that_are_moved_twice_have_their_content_or_raise_sigbus() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = served(&chain, &["remap"]);
    let mut refused = 0;
    for first in [PAGES - 9000, PAGES - 4000] {
        guest.call(&format!("move {first} 3000 0")).unwrap();
        for page in (0..3000).rev() {
            let answer = guest.call(&format!("moved {page}")).unwrap();
            match answer.split(' ').next().unwrap() {
                "sigbus" => refused += 1,
                bytes => assert_eq!(bytes, chain.text(first + page), "page {}", first + page),
            }
        }
    }
    assert!(refused > 100, "{refused}");
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    let others = (0..PAGES - 9000).chain(PAGES - 6000..PAGES - 4000).chain(PAGES - 1000..PAGES);
    assert_eq!(refused_pages(&chain, &mut guest, others), 0);
}

#[test]
fn guest_with_a_blocking_descriptor_is_served_without_a_busy_loop() {
    let chain = Chain::new();
    let path = chain.bed.folder.join("1/pages-1.img");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9 * 924 * 4096] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let handler = chain.handler_of("1", &[]);
    let mut guest = served(&chain, &["blocking"]);
    // It waits for page faults, since content is damaged.
    while read(&mut guest, 9 * 1024).0 != "sigbus" {}
    std::thread::sleep(Duration::from_secs(2));
    let ticks = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", handler.0.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(1));
    assert!(ticks() - before < 30, "the handler uses {} ms in a second", (ticks() - before) * 10);
    assert_eq!(read(&mut guest, 4).0, chain.text(4));
    guest.kill().unwrap();
    handler.exits(7);
}
