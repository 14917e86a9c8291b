//! Hand-offs of a userfaultfd that are refused: accesses to the memory raise SIGBUS, and never find zero in place of content.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fdmap_tests::test;
use nix::sys::signal::Signal;

use super::lazy::{Chain, PAGES, read};

#[test]
fn memory_of_a_refused_handoff_raises_sigbus() {
    let chain = Chain::new();
    for (option, reason) in [
        ("outside", "extend past the end of the file"),
        ("larger", "has pages of 4096 bytes, and the message has 2097152"),
        ("half", "is not registered for missing pages"),
        ("other", "bytes of 0x"),
    ] {
        for descriptor in ["keep", "drop"] {
            let handler = chain.handler(&[]);
            let mut guest = chain.guest(&[option, descriptor]);
            let (_, messages) = handler.exits(7);
            assert!(messages.contains(reason), "{option}: {messages}");
            for page in [0, 1, 1000, PAGES / 2 - 1, PAGES / 2, PAGES - 1] {
                // Memory that is not registered was zero before.
                let expected = if option == "half" && page >= PAGES / 2 { "00000000" } else { "sigbus" };
                assert_eq!(read(&mut guest, page).0, expected, "{option} {descriptor}: page {page}");
            }
        }
    }
}

#[test]
fn hugetlb_memory_of_a_refused_handoff_raises_sigbus() {
    let chain = Chain::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let pages = u32::try_from(PAGES / 512).unwrap();
    let _pages = fdmap_tests::harness::require(fdmap_tests::hugepages::hugetlb_2m(&host, pages.into()));
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&["huge", "smaller", "drop"]);
    let (_, messages) = handler.exits(7);
    assert!(messages.contains("has pages of 2097152 bytes, and the message has 4096"), "{messages}");
    for page in [0, 511, 512, PAGES - 1] {
        assert_eq!(read(&mut guest, page).0, "sigbus", "page {page}");
    }
}

/// A process that connects and sends a byte now and then.
#[test]
fn handler_that_waits_for_a_message_ends_by_a_signal_and_by_a_timeout() {
    let chain = Chain::new();
    for (is_cancelled, reason) in [(true, "cancelled"), (false, "no complete message within 10s")] {
        let mut handler = chain.handler(&[]);
        let began = Instant::now();
        let mut stream = loop {
            match UnixStream::connect(chain.bed.folder.join("uffd.sock")) {
                Ok(stream) => break stream,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{error}"),
            }
        };
        stream.write_all(b"[").unwrap();
        let began = Instant::now();
        if is_cancelled {
            handler.signal(Signal::SIGTERM);
        }
        while handler.0.try_wait().unwrap().is_none() {
            // It may have ended just now.
            let _ = stream.write_all(b" ");
            std::thread::sleep(Duration::from_millis(300));
        }
        let limit = if is_cancelled { 5 } else { 20 };
        assert!(began.elapsed() < Duration::from_secs(limit), "{:?}", began.elapsed());
        let (_, messages) = handler.exits(7);
        assert!(messages.contains(reason), "{messages}");
    }
}
