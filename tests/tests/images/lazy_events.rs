//! Processes that have write-protected pages before these are filled, or that execute a program meanwhile.

use fdmap_tests::line_process::LineProcess;
use fdmap_tests::test;
use nix::sys::signal::Signal;

use super::lazy::{Chain, Handler, PAGES, read};

/// A page that the image does not have: the last 100 of each 1024 are holes.
const HOLE: u64 = PAGES - 1024 - 50;

/// Asserts that each page has its content or raises SIGBUS. Returns how many do the latter.
#[track_caller]
fn refused_pages(chain: &Chain, guest: &mut LineProcess, pages: impl Iterator<Item = u64>) -> usize {
    pages
        .filter(|page| match read(guest, *page).0 {
            bytes if bytes == "sigbus" => true,
            bytes => {
                assert_eq!(bytes, chain.text(*page), "page {page}");
                false
            }
        })
        .count()
}

/// A handler and a guest whose hand-off is over.
fn served(chain: &Chain, options: &[&str]) -> (Handler, LineProcess) {
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(options);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    (handler, guest)
}

/// As after vfork(2) and execve(2) of the process that connected.
#[test]
fn address_space_is_served_after_the_process_that_connected_has_executed_a_program() {
    let chain = Chain::new();
    for descriptor in ["keep", "drop"] {
        let (handler, mut guest) = served(&chain, &["thread", "execute", descriptor]);
        for page in (0..PAGES).rev().step_by(7) {
            assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
        }
        assert_eq!(handler.report()["lazy"]["end"], "complete");
        chain.assert_memory(&mut guest, |_| None);
    }
}

/// Absent pages have markers then, which the kernel does not replace by the zero page or by poison.
#[test]
fn absent_pages_that_are_protected_have_their_content() {
    let chain = Chain::new();
    let (handler, mut guest) = served(&chain, &["marked"]);
    for page in (0..PAGES).rev().step_by(101).chain([HOLE]) {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    chain.assert_memory(&mut guest, |_| None);
}

#[test]
fn absent_pages_that_are_protected_raise_sigbus_after_a_cancelled_handler() {
    let chain = Chain::new();
    for descriptor in ["keep", "drop"] {
        let (handler, mut guest) = served(&chain, &["marked", descriptor]);
        handler.signal(Signal::SIGTERM);
        handler.exits(7);
        let refused = refused_pages(&chain, &mut guest, (0..PAGES).rev());
        assert!(refused > 100, "{descriptor}: {refused}");
    }
}

#[test]
fn absent_huge_pages_that_are_protected_raise_sigbus_after_a_cancelled_handler() {
    let chain = Chain::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let pages = u32::try_from(PAGES / 512).unwrap();
    let _pages = fdmap_tests::harness::require(fdmap_tests::hugepages::hugetlb_2m(&host, pages.into()));
    let (handler, mut guest) = served(&chain, &["marked", "huge"]);
    handler.signal(Signal::SIGTERM);
    handler.exits(7);
    assert!(refused_pages(&chain, &mut guest, (0..PAGES).rev().step_by(64)) > 8);
}

/// The handler serves page faults as long as the guest runs, since content is damaged.
#[test]
fn protected_pages_of_a_damaged_image_are_zero_or_raise_sigbus() {
    let chain = Chain::new();
    let path = chain.bed.folder.join("1/pages-1.img");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9 * 924 * 4096] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let handler = chain.handler_of("1", &[]);
    let mut guest = chain.guest(&["marked"]);
    for _ in 0..2 {
        assert_eq!(read(&mut guest, HOLE).0, "00000000");
        assert_eq!(read(&mut guest, 9 * 1024).0, "sigbus");
        assert_eq!(read(&mut guest, 4).0, chain.text(4));
    }
    guest.call(&format!("write {} 5", HOLE + 1)).unwrap();
    assert_eq!(read(&mut guest, HOLE + 1).0, "05000000");
    guest.kill().unwrap();
    handler.exits(7);
}
