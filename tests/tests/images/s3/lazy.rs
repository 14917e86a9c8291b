//! Lazy restores from a server that does not answer for a while.

use std::io::{BufRead as _, BufReader, Read as _};
use std::time::{Duration, Instant};

use fdmap_tests::test;

use super::super::Bed;
use super::super::lazy::{Chain, PAGES, read};
use super::proxy::{Faults, Proxy};
use super::server::Server;

/// A process that removes or moves memory, or forks, sleeps until the event is read.
#[test]
fn guest_changes_its_memory_while_the_server_hangs() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    // The stream takes seconds.
    proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
    let handler = chain.handler_of("s3://images/vm/3", &[]);
    let mut guest = chain.guest(&["fork", "remap"]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    proxy.hang();
    let began = Instant::now();
    let (first, count) = (PAGES - 9000, 2000);
    guest.call(&format!("remove {} 1000", PAGES / 2 + 100)).unwrap();
    assert!(guest.call("fork 1").unwrap().starts_with(&chain.text(1)));
    guest.call(&format!("move {first} {count} 0")).unwrap();
    assert_eq!(guest.call("moved 1500").unwrap(), "sigbus");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    proxy.resume();
    proxy.set(Faults::NONE);
    for page in (first + count..PAGES).rev().step_by(11) {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
    let report = handler.report();
    assert_eq!(report["lazy"]["end"], "complete", "{report}");
    assert!(report["lazy"]["counts"]["removed_pages"].as_u64().unwrap() > 2000, "{report}");
    for page in 0..PAGES / 2 {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
}

/// Requests fail for longer than the client of the object store repeats them.
#[test]
fn guest_waits_while_the_server_answers_errors() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
    let mut handler = chain.handler_of("s3://images/vm/3", &[]);
    let mut messages = BufReader::new(handler.0.stderr.take().unwrap()).lines();
    let mut guest = chain.guest(&[]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    proxy.set(Faults { server_errors: 100, ..Faults::NONE });
    proxy.break_all();
    guest.send(&format!("read {}", PAGES - 1)).unwrap();
    let began = Instant::now();
    let message = messages.find(|line| line.as_ref().unwrap().contains("trying again")).unwrap().unwrap();
    println!("{:?}: {message}", began.elapsed());
    proxy.set(Faults::NONE);
    assert!(guest.receive().unwrap().starts_with(&format!("ok {}", chain.text(PAGES - 1))));
    let mut output = String::new();
    handler.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["lazy"]["end"], "complete", "{report}");
    assert_eq!(report["lazy"]["counts"]["damaged_pages"], 0, "{report}");
    assert!(report["lazy"]["counts"]["repeated_reads"].as_u64().unwrap() > 0, "{report}");
    chain.assert_memory(&mut guest, |_| None);
}

#[test]
fn cancelled_restore_ends_though_the_server_hangs() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
    let handler = chain.handler_of("s3://images/vm/3", &[]);
    let mut guest = chain.guest(&["drop"]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    proxy.hang();
    // It waits for content.
    guest.send(&format!("read {}", PAGES - 200)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    handler.signal(nix::sys::signal::Signal::SIGTERM);
    let (_, messages) = handler.exits(7);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(messages.contains("cancelled") && !messages.contains("panicked"), "{messages}");
    assert_eq!(guest.receive().unwrap(), "ok sigbus");
}

#[test]
fn restore_ends_with_an_execve_of_its_guest_though_the_server_hangs() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
    for descriptor in ["keep", "drop"] {
        let handler = chain.handler_of("s3://images/vm/3", &[]);
        let mut guest = chain.guest(&[descriptor]);
        assert_eq!(read(&mut guest, 1).0, chain.text(1));
        proxy.hang();
        guest.call(&format!("exec {}", PAGES - 300)).unwrap();
        let began = Instant::now();
        assert_eq!(handler.report()["lazy"]["end"], "process-ended");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // cat(1) runs in its place.
        assert_eq!(guest.call("ok 17").unwrap(), "17");
        proxy.resume();
    }
}

/// All other pages have what they need, so the end of the registration depends on this one.
#[test]
fn last_page_without_content_is_never_zero_where_it_is_moved() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    let (last, target) = (PAGES - 9100, 5);
    let mut refused = 0;
    for _ in 0..8 {
        proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
        let handler = chain.handler_of("s3://images/vm/3", &[]);
        let mut guest = chain.guest(&["remap"]);
        assert_eq!(read(&mut guest, 1).0, chain.text(1));
        proxy.hang();
        guest.call(&format!("remove 0 {last}")).unwrap();
        guest.call(&format!("remove {} {}", last + 1, PAGES - last - 1)).unwrap();
        guest.call(&format!("cover {target} {last} 1")).unwrap();
        match read(&mut guest, target).0 {
            bytes if bytes == "sigbus" => refused += 1,
            bytes => assert_eq!(bytes, chain.text(last)),
        }
        assert_eq!(handler.report()["lazy"]["end"], "complete");
        proxy.resume();
    }
    assert!(refused > 4, "{refused}");
}

/// A page without data gets zeroes, unless memory was moved there since its page fault.
#[test]
fn memory_that_is_moved_over_a_page_fault_is_never_zero() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let chain = Chain::at(Bed::with_s3(proxy.address), "s3://images/vm/");
    proxy.set(Faults { delay: Duration::from_millis(5), ..Faults::NONE });
    let handler = chain.handler_of("s3://images/vm/3", &[]);
    let mut guest = chain.guest(&["remap"]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    proxy.hang();
    let (holes, source) = (924, PAGES - 9100);
    for part in 0..8 {
        guest.call(&format!("cover {} {} 100", part * 1024 + holes, source + part * 1024)).unwrap();
    }
    let mut refused = 0;
    for (part, page) in (0..8).flat_map(|part| (0..100).map(move |page| (part, page))) {
        match read(&mut guest, part * 1024 + holes + page).0 {
            bytes if bytes == "sigbus" => refused += 1,
            bytes => assert_eq!(bytes, chain.text(source + part * 1024 + page), "page {page} of part {part}"),
        }
    }
    assert!(refused > 400, "{refused}");
    proxy.resume();
    proxy.set(Faults::NONE);
    assert_eq!(handler.report()["lazy"]["end"], "complete");
}
