//! Images in a bucket of an S3 server.

mod faults;
mod interrupted;
mod lazy;
mod proxy;
mod refused;
mod server;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use fdmap_tests::service::named;
use fdmap_tests::test;

use super::{Bed, PAGE, content_now, random, write_at};
use server::Server;

impl Bed {
    /// A bed whose `fdmap` uses the S3 server at an address.
    fn with_s3(address: SocketAddr) -> Self {
        let mut bed = Self::new();
        bed.variables = vec![
            ("AWS_ENDPOINT", format!("http://{address}")),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", server::ACCESS_KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", server::SECRET_KEY.to_owned()),
        ];
        bed
    }

    /// Asserts that an image restores to this content.
    #[track_caller]
    fn assert_restores(&self, image: &str, content: &[u8]) {
        self.json(&["restore", image, "--name", "copy"]);
        let copy: OwnedFd = self.service.fdpass().unwrap().open(&named("copy"), true).unwrap().0;
        assert!(content_now(&copy) == content, "{image}");
        self.json(&["delete", "copy"]);
    }
}

#[test]
fn chain_in_a_bucket_is_restored_there_and_from_a_copy() {
    let server = Server::start();
    let bed = Bed::with_s3(server.address);
    let fd = bed.create("ram", 1000 * PAGE + 5);
    write_at(&fd, 0, &random(1, 600 * 4096));
    let report = bed.json(&["dump", "ram", "s3://images/vm/1"]);
    assert_eq!(report["image"], "s3://images/vm/1");
    let first = content_now(&fd);
    write_at(&fd, 100, &random(2, 30 * 4096));
    write_at(&fd, 1000, &random(3, 5));
    bed.json(&["dump", "ram", "s3://images/vm/2/", "--parent", "s3://images/vm/1", "--compress", "zstd"]);
    let second = content_now(&fd);
    write_at(&fd, 700, &random(4, 4096));
    let pause = ["--pause", "true", "--rounds", "2"];
    bed.json(&[&["dump", "ram", "s3://images/vm/3", "--parent", "s3://images/vm/2"], &pause[..]].concat());
    let third = content_now(&fd);

    let keys = server.keys();
    let in_third = |name: &str| keys.contains(&format!("vm/3/{name}"));
    assert!(in_third("pre-1/inventory.img") && in_third("pre-2/inventory.img"), "{keys:?}");
    assert!(keys.iter().all(|key| !key.contains("partial")), "{keys:?}");
    assert!(server.uploads().is_empty());
    for (key, link) in
        [("vm/2", "../1\n"), ("vm/3", "pre-2\n"), ("vm/3/pre-2", "../pre-1\n"), ("vm/3/pre-1", "../../2\n")]
    {
        assert_eq!(std::fs::read_to_string(server.object(&format!("{key}/parent"))).unwrap(), link);
    }
    for (number, content) in [("1", &first), ("2", &second), ("3", &third)] {
        bed.assert_restores(&format!("s3://images/vm/{number}"), content);
    }
    // A copy in a directory has a file in place of the symbolic link.
    let copy = bed.folder.join("copy");
    server.download(&copy);
    for (number, content) in [("1", &first), ("2", &second), ("3", &third)] {
        bed.assert_restores(&format!("copy/vm/{number}"), content);
        bed.assert_restores(&format!("file://{}/vm/{number}", copy.display()), content);
    }
}

/// The peak of the resident memory of `fdmap`, bytes.
fn peak_of(bed: &Bed, arguments: &[&str]) -> u64 {
    let mut child = bed.command(arguments).stdout(std::process::Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = kib.map_or(peak, |kib| kib << 10);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success(), "{arguments:?}");
    peak
}

#[test]
fn large_object_is_sent_in_parts_with_little_memory() {
    const BYTES: u64 = 200 << 20;
    let server = Server::start();
    let bed = Bed::with_s3(server.address);
    let fd = bed.create("ram", BYTES);
    for part in 0..25 {
        write_at(&fd, part * 2048, &random(part + 1, 8 << 20));
    }
    let directory = peak_of(&bed, &["dump", "ram", "directory", "--jobs", "2"]);
    let bucket = peak_of(&bed, &["dump", "ram", "s3://images/vm", "--jobs", "2"]);
    println!("peak of a dump: {} MiB to a directory, {} MiB to a bucket", directory >> 20, bucket >> 20);
    assert_eq!(server.parts("vm/pages-1.img"), 25);
    // Three parts of 8 MiB, and the HTTP client.
    assert!(bucket < directory + (48 << 20), "{bucket} {directory}");
    let restored = peak_of(&bed, &["restore", "s3://images/vm", "--name", "peak"]);
    println!("peak of a restore: {} MiB from a bucket", restored >> 20);
    // 8 threads with 8 chunks of 1 MiB each.
    assert!(restored < 112 << 20, "{restored}");
    bed.assert_restores("s3://images/vm", &content_now(&fd));
}
