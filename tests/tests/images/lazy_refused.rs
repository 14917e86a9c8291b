//! Hand-offs of a userfaultfd that are refused: accesses to the memory raise SIGBUS, and never find zero in place of content.

use std::io::Write as _;
use std::os::fd::AsFd as _;
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

/// UFFDIO_REGISTER fails with EBUSY.
#[test]
fn memory_that_is_registered_with_another_userfaultfd_is_refused_and_raises_sigbus() {
    let chain = Chain::new();
    for descriptor in ["keep", "drop"] {
        let handler = chain.handler(&[]);
        let mut guest = chain.guest(&["busy", descriptor]);
        let (_, messages) = handler.exits(7);
        assert!(messages.contains("is registered with another userfaultfd"), "{messages}");
        for page in [0, 5, 1000, PAGES / 2 - 1, PAGES / 2, PAGES - 1] {
            assert_eq!(read(&mut guest, page).0, "sigbus", "{descriptor}: page {page}");
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

/// Huge pages that exist or have markers, and base pages that are stated, are in the way of no others.
#[test]
fn hugetlb_memory_that_was_written_or_protected_before_a_refused_handoff_raises_sigbus() {
    let chain = Chain::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let pages = u32::try_from(PAGES / 512).unwrap();
    let _pages = fdmap_tests::harness::require(fdmap_tests::hugepages::hugetlb_2m(&host, pages.into()));
    for option in ["written", "marked"] {
        let handler = chain.handler(&[]);
        let mut guest = chain.guest(&["huge", "smaller", "drop", option]);
        handler.exits(7);
        let first = if option == "written" { "11000000" } else { "sigbus" };
        assert_eq!(read(&mut guest, 0).0, first, "{option}");
        for page in (512..PAGES).step_by(512).chain([PAGES - 1]) {
            assert_eq!(read(&mut guest, page).0, "sigbus", "{option}: page {page}");
        }
    }
}

/// A connection to the socket of the handler, once that exists.
fn connected(chain: &Chain) -> UnixStream {
    let began = Instant::now();
    loop {
        match UnixStream::connect(chain.bed.folder.join("uffd.sock")) {
            Ok(stream) => return stream,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn stray_connections_are_refused_and_the_guest_is_served() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let silent: Vec<_> = (0..4).map(|_| connected(&chain)).collect();
    let memfd = fdmap_sys::memfd::create("other", None).unwrap();
    let mapping = br#"[{"base_host_virt_addr":4096,"size":4096,"offset":0}]"#;
    for (bytes, descriptors) in
        [(&b""[..], 0), (b"{}", 0), (b"[{\"base_host", 0), (mapping, 0), (mapping, 1), (mapping, 2)]
    {
        let stream = connected(&chain);
        let passed = vec![memfd.as_fd(); descriptors];
        if !bytes.is_empty() {
            fdmap_sys::scm::send(stream.as_fd(), bytes, &passed).unwrap();
        }
        drop(stream);
    }
    for _ in 0..100 {
        drop(connected(&chain));
    }
    // More than wait at the same time.
    let others: Vec<_> = (0..40).map(|_| connected(&chain)).collect();
    let mut guest = chain.guest(&[]);
    assert_eq!(read(&mut guest, PAGES - 200).0, chain.text(PAGES - 200));
    let (_, messages) = handler.exits(0);
    drop((silent, others));
    for reason in [
        "the connection ended before the message was complete",
        "invalid list of mappings",
        "no userfaultfd",
        "its descriptor is not a userfaultfd",
        "more than one descriptor",
    ] {
        assert!(messages.contains(&format!("refused: {reason}")), "{reason}: {messages}");
    }
    let lines = messages.matches("refused:").count();
    assert!((6..20).contains(&lines), "{lines} lines: {messages}");
    chain.assert_memory(&mut guest, |_| None);
}

#[test]
fn handler_that_waits_for_a_message_ends_by_a_signal() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut stream = connected(&chain);
    stream.write_all(b"[").unwrap();
    let began = Instant::now();
    handler.signal(Signal::SIGTERM);
    let (_, messages) = handler.exits(7);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(messages.contains("cancelled"), "{messages}");
}

/// A process that connects and sends a byte now and then.
#[test]
fn connection_without_a_complete_message_is_refused_after_a_timeout() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut stream = connected(&chain);
    stream.write_all(b"[").unwrap();
    let began = Instant::now();
    while stream.write_all(b" ").is_ok() {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(began.elapsed() > Duration::from_secs(9), "{:?}", began.elapsed());
    let mut guest = chain.guest(&[]);
    assert_eq!(read(&mut guest, PAGES - 200).0, chain.text(PAGES - 200));
    let (_, messages) = handler.exits(0);
    assert!(messages.contains("refused: no complete message within 10s"), "{messages}");
}
