//! Dumps that are interrupted, killed or concurrent.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::super::{Bed, PAGE, content_now, random, write_at};
use super::proxy::{Faults, Proxy};
use super::server::Server;

/// A dump of an object of several parts, whose first part has arrived in part.
struct Uploading {
    server: Server,
    proxy: Proxy,
    bed: Bed,
    child: Child,
}

impl Uploading {
    fn start() -> Self {
        let server = Server::start();
        let proxy = Proxy::start(server.address, 1);
        let bed = Bed::with_s3(proxy.address);
        let fd = bed.create("ram", 8000 * PAGE);
        write_at(&fd, 0, &random(1, 8000 * 4096));
        proxy.set(Faults { delay: Duration::from_millis(10), ..Faults::NONE });
        let mut command = bed.command(&["dump", "ram", "s3://images/vm"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while proxy.forwarded() < 6 << 20 {
            assert!(begun.elapsed() < Duration::from_secs(30), "{} bytes", proxy.forwarded());
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { server, proxy, bed, child }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }
}

#[test]
fn interrupted_dump_leaves_no_objects_and_no_upload() {
    let dump = Uploading::start();
    assert!(!dump.server.uploads().is_empty(), "the upload has begun");
    let begun = Instant::now();
    dump.signal(Signal::SIGINT);
    let output = dump.child.wait_with_output().unwrap();
    println!("ended {:?} after ^C", begun.elapsed());
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "fdmap: cancelled\n");
    dump.server.assert_empty();
}

/// The server does not answer any more.
#[test]
fn interrupted_dump_ends_though_the_server_hangs() {
    let dump = Uploading::start();
    dump.proxy.hang();
    let begun = Instant::now();
    dump.signal(Signal::SIGTERM);
    let output = dump.child.wait_with_output().unwrap();
    println!("ended {:?} after SIGTERM", begun.elapsed());
    assert_eq!(output.status.code(), Some(7));
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
}

#[test]
fn killed_dump_leaves_no_image_and_its_prefix_reserved() {
    let mut dump = Uploading::start();
    dump.signal(Signal::SIGKILL);
    dump.child.wait().unwrap();
    dump.proxy.set(Faults::NONE);
    assert_eq!(dump.server.keys(), ["vm/fdmap.partial"]);
    let bed = &dump.bed;
    let text = bed.fails(7, &["dump", "ram", "s3://images/vm"]);
    assert!(text.contains("s3://images/vm is not empty: it has fdmap.partial"), "{text}");
    let text = bed.fails(7, &["restore", "s3://images/vm"]);
    assert!(text.contains("s3://images/vm has no complete image: inventory.img is missing"), "{text}");
    std::fs::remove_file(dump.server.object("vm/fdmap.partial")).unwrap();
    bed.json(&["dump", "ram", "s3://images/vm"]);
}

#[test]
fn one_of_concurrent_dumps_to_a_prefix_succeeds() {
    let server = Server::start();
    let bed = Bed::with_s3(server.address);
    let fd = bed.create("ram", 100 * PAGE);
    write_at(&fd, 0, &random(1, 100 * 4096));
    for round in 1..=4 {
        let image = format!("s3://images/{round}");
        let dump = || {
            let mut command = bed.command(&["dump", "ram", &image]);
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let outputs = [dump(), dump(), dump()].map(|child| child.wait_with_output().unwrap());
        let succeeded = outputs.iter().filter(|output| output.status.success()).count();
        assert_eq!(succeeded, 1, "{outputs:?}");
        for output in outputs.iter().filter(|output| !output.status.success()) {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(text.contains("fdmap.partial") || text.contains("is not empty"), "{text}");
        }
        bed.assert_restores(&image, &content_now(&fd));
    }
}
