//! Changes of two threads that overlap: no page is zero in place of its content. Their events come in the order of the changes here, since
//! another one cannot be forced; all orders are tested without a kernel, beside `changes`.

use fdmap_tests::line_process::LineProcess;
use fdmap_tests::test;
use nix::sys::signal::Signal;

use super::lazy::{Chain, Handler, PAGES, read};

/// Pages that change.
const COUNT: u64 = 2000;
/// The first one; near the end, which the stream reaches last.
const FIRST: u64 = PAGES - 9000;

/// Pages of the image before [`FIRST`] that have the same number of holes at other places.
const OVER: u64 = FIRST - 2500;

/// A guest, two of whose threads have changed its memory while the handler was stopped: both wait until their events are read.
fn changed(chain: &Chain, options: &[&str], kind: &str) -> (Handler, LineProcess) {
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(options);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    handler.signal(Signal::SIGSTOP);
    guest.call(&format!("overlap {kind} {FIRST} {OVER} {COUNT}")).unwrap();
    handler.signal(Signal::SIGCONT);
    guest.call("changed").unwrap();
    (handler, guest)
}

/// Asserts that pages have their content or raise SIGBUS, and that some do the latter. `command` reads a page; `first` is the page of the
/// image that the first one has.
#[track_caller]
fn assert_refused(chain: &Chain, guest: &mut LineProcess, command: &str, first: u64) {
    let mut refused = 0;
    for page in (0..COUNT).rev() {
        let answer = guest.call(&format!("{command} {page}")).unwrap();
        match answer.split(' ').next().unwrap() {
            "sigbus" => refused += 1,
            bytes => assert_eq!(bytes, chain.text(first + page), "{command} {page}"),
        }
    }
    assert!(refused > 100, "{command}: {refused}");
}

#[test]
fn memory_that_is_moved_over_memory_that_moves_raises_sigbus() {
    let chain = Chain::new();
    let (handler, mut guest) = changed(&chain, &["remap"], "moves");
    assert_refused(&chain, &mut guest, "moved", FIRST);
    for page in 0..COUNT {
        let bytes = read(&mut guest, FIRST + page).0;
        assert!(bytes == "sigbus" || bytes == chain.text(OVER + page), "page {page}: {bytes}");
    }
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    for page in (FIRST + COUNT..PAGES).chain(0..OVER).step_by(7) {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
}

#[test]
fn child_finds_no_zero_where_memory_is_moved_or_unmapped_after_the_fork() {
    let chain = Chain::new();
    for (kind, options) in [
        ("fork_move", &["fork", "remap"][..]),
        ("fork_unmap", &["fork", "unmap"]),
        ("fork_unmap", &["fork", "unmap", "drop"]),
    ] {
        let (handler, mut guest) = changed(&chain, options, kind);
        assert_refused(&chain, &mut guest, "child", FIRST);
        assert_eq!(handler.report()["lazy"]["end"], "complete");
    }
}

#[test]
fn child_finds_no_zero_where_memory_was_moved_before_the_fork() {
    let chain = Chain::new();
    for options in [&["fork", "remap"][..], &["fork", "remap", "drop"], &["fork", "remap", "unmap"]] {
        let (handler, mut guest) = changed(&chain, options, "move_fork");
        assert_refused(&chain, &mut guest, "child", FIRST);
        assert_refused(&chain, &mut guest, "moved", FIRST);
        assert_eq!(handler.report()["lazy"]["end"], "complete");
    }
}

/// Holes that are moved stay zero.
#[test]
fn memory_that_is_moved_in_a_loop_is_zero_where_it_has_holes() {
    let chain = Chain::new();
    for option in ["keep", "unmap"] {
        let handler = chain.handler(&[]);
        let mut guest = chain.guest(&["remap", option]);
        assert_eq!(read(&mut guest, 1).0, chain.text(1));
        let mut zero = 0;
        for at in 0..20 {
            let first = FIRST + at * 400;
            guest.call(&format!("again {first} 300 50")).unwrap();
            for page in 0..300 {
                let answer = guest.call(&format!("moved {page}")).unwrap();
                let expected = chain.text(first + page);
                match answer.split(' ').next().unwrap() {
                    "sigbus" => assert_ne!(expected, "00000000", "page {}", first + page),
                    bytes => {
                        assert_eq!(bytes, expected, "page {}", first + page);
                        zero += u32::from(bytes == "00000000");
                    }
                }
            }
        }
        assert!(zero > 100, "{zero}");
        assert_eq!(handler.report()["lazy"]["end"], "complete");
    }
}
