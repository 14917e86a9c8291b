//! A server whose connections break at random bytes, and which answers with errors.

use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_tests::test;

use super::super::{Bed, PAGE, content_now, random, write_at};
use super::proxy::{Faults, Proxy};
use super::server::Server;

/// Each seed has other faults.
const SEEDS: u64 = 6;

#[test]
fn dumps_and_restores_succeed_though_connections_break() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 1);
    let bed = Bed::with_s3(proxy.address);
    let fd = bed.create("ram", 8000 * PAGE);
    // An object of three parts.
    write_at(&fd, 0, &random(1, 5000 * 4096));
    for seed in 1..=SEEDS {
        proxy.set(Faults { server_errors: 10, breaks: 25, max_bytes: 12 << 20, ..Faults::NONE });
        let before = proxy.faulty();
        let (first, second) = (format!("s3://images/{seed}/1"), format!("s3://images/{seed}/2"));
        bed.json(&["dump", "ram", &first]);
        write_at(&fd, seed * 10, &random(seed, 20 * 4096));
        bed.json(&["dump", "ram", &second, "--parent", &first]);
        bed.assert_restores(&second, &content_now(&fd));
        println!("seed {seed}: {} faulty connections", proxy.faulty() - before);
        let left = server.keys().into_iter().filter(|key| key.contains("partial")).collect::<Vec<_>>();
        assert!(left.is_empty(), "{left:?}");
    }
    assert!(proxy.faulty() > 3 * SEEDS, "{} connections broke", proxy.faulty());
}

/// The permission to write ends while the parts of an object are sent.
#[test]
fn dump_that_fails_leaves_no_objects_and_no_upload() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 2);
    let bed = Bed::with_s3(proxy.address);
    let fd = bed.create("ram", 8000 * PAGE);
    write_at(&fd, 0, &random(1, 8000 * 4096));
    proxy.set(Faults { delay: Duration::from_millis(10), ..Faults::NONE });
    let mut command = bed.command(&["dump", "ram", "s3://images/vm", "--pause", "true", "--rounds", "1"]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while proxy.forwarded() < 10 << 20 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{} bytes", proxy.forwarded());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!server.uploads().is_empty(), "the upload has begun");
    proxy.set(Faults { refuses_puts: true, ..Faults::NONE });
    proxy.break_all();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{text}");
    assert!(text.contains("writing s3://images/vm/pre-1/pages-1.img: AccessDenied"), "{text}");
    server.assert_empty();
}

#[test]
fn server_that_only_answers_errors_ends_the_retries() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, 3);
    let bed = Bed::with_s3(proxy.address);
    bed.create("ram", PAGE);
    proxy.set(Faults { server_errors: 100, ..Faults::NONE });
    let begun = Instant::now();
    let text = bed.fails(7, &["dump", "ram", "s3://images/vm"]);
    println!("{:?}: {text}", begun.elapsed());
    assert!(text.contains("listing s3://images/vm: 50"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
    server.assert_empty();
}
