//! Wrong URLs and credentials, servers that cannot be reached, and damaged objects.

use fdmap_tests::test;

use super::super::{Bed, PAGE, content_now, random, write_at};
use super::server::{ACCESS_KEY, SECRET_KEY, Server};

impl Bed {
    fn set(&mut self, name: &'static str, value: &str) {
        self.variables.retain(|(other, _)| *other != name);
        self.variables.push((name, value.to_owned()));
    }

    fn unset(&mut self, name: &str) {
        self.variables.retain(|(other, _)| *other != name);
    }

    /// Runs a dump and a restore that fail. Returns their errors, which have no secret and no long answers of the server.
    #[track_caller]
    fn both_fail(&self, image: &str) -> [String; 2] {
        let texts = [self.fails(7, &["dump", "ram", image]), self.fails(7, &["restore", image])];
        for text in &texts {
            println!("{text}");
            assert!(!text.contains(SECRET_KEY) && !text.contains("<?xml") && text.len() < 500, "{text}");
            assert!(text.contains(image), "{text}");
        }
        texts
    }
}

#[test]
fn wrong_buckets_and_credentials_are_named() {
    let server = Server::start();
    let mut bed = Bed::with_s3(server.address);
    bed.create("ram", 10 * PAGE);
    for text in bed.both_fail("s3://absent/vm") {
        assert!(text.contains("listing s3://absent/vm: NoSuchBucket"), "{text}");
    }
    bed.set("AWS_SECRET_ACCESS_KEY", "wrong");
    for text in bed.both_fail("s3://images/vm") {
        assert!(text.contains("listing s3://images/vm: SignatureDoesNotMatch"), "{text}");
    }
    bed.set("AWS_SECRET_ACCESS_KEY", SECRET_KEY);
    bed.set("AWS_ACCESS_KEY_ID", "unknown");
    for text in bed.both_fail("s3://images/vm") {
        assert!(
            text.contains("listing s3://images/vm: InvalidAccessKeyId") || text.contains("NotSignedUp"),
            "{text}"
        );
    }
    bed.set("AWS_ACCESS_KEY_ID", ACCESS_KEY);
    bed.unset("AWS_ALLOW_HTTP");
    for text in bed.both_fail("s3://images") {
        assert!(text.contains("opening s3://images: the endpoint has no TLS: set AWS_ALLOW_HTTP"), "{text}");
    }
    bed.set("AWS_ALLOW_HTTP", "true");
    bed.unset("AWS_SECRET_ACCESS_KEY");
    for text in bed.both_fail("s3://images") {
        assert!(text.contains("opening s3://images"), "{text}");
    }
    let text = bed.fails(2, &["dump", "ram", "gs://images/vm"]);
    assert!(text.contains("expected a path, file:///PATH or s3://BUCKET/PREFIX"), "{text}");
    server.assert_empty();
}

/// Without credentials, those of an instance role are asked for, at an address where no server is.
#[test]
fn missing_credentials_are_named() {
    let server = Server::start();
    let mut bed = Bed::with_s3(server.address);
    bed.create("ram", PAGE);
    bed.unset("AWS_ACCESS_KEY_ID");
    bed.unset("AWS_SECRET_ACCESS_KEY");
    bed.set("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1");
    let begun = std::time::Instant::now();
    let text = bed.fails(7, &["dump", "ram", "s3://images/vm"]);
    println!("{:?}: {text}", begun.elapsed());
    assert!(text.contains("listing s3://images/vm: no credentials: set AWS_ACCESS_KEY_ID"), "{text}");
}

#[test]
fn targets_and_parents_that_do_not_fit_are_refused() {
    let server = Server::start();
    let bed = Bed::with_s3(server.address);
    let fd = bed.create("ram", 10 * PAGE);
    write_at(&fd, 0, &random(1, 4096));
    bed.json(&["dump", "ram", "s3://images/1"]);
    let keys = server.keys();
    let text = bed.fails(7, &["dump", "ram", "s3://images/1"]);
    assert!(text.contains("s3://images/1 is not empty: it has"), "{text}");
    let text = bed.fails(7, &["dump", "ram", "s3://images"]);
    assert!(text.contains("s3://images is not empty: it has 1"), "{text}");
    let text = bed.fails(7, &["dump", "ram", "2", "--parent", "s3://images/1"]);
    assert!(text.contains("linking s3://images/1: the parent is not in a directory"), "{text}");
    assert!(!bed.folder.join("2").exists());
    bed.json(&["dump", "ram", "1"]);
    let text = bed.fails(7, &["dump", "ram", "s3://images/2", "--parent", "1"]);
    assert!(text.contains("the parent is not in the bucket s3://images"), "{text}");
    let text = bed.fails(7, &["dump", "ram", "s3://images/2", "--parent", "s3://images/absent"]);
    assert!(text.contains("s3://images/absent has no complete image"), "{text}");
    assert_eq!(server.keys(), keys, "nothing is left");
}

#[test]
fn damaged_objects_are_refused_by_name() {
    let server = Server::start();
    let bed = Bed::with_s3(server.address);
    let fd = bed.create("ram", 300 * PAGE);
    write_at(&fd, 0, &random(1, 280 * 4096));
    bed.json(&["dump", "ram", "s3://images/1"]);
    write_at(&fd, 100, &random(2, 20 * 4096));
    bed.json(&["dump", "ram", "s3://images/2", "--parent", "s3://images/1"]);
    let content = content_now(&fd);
    bed.json(&["delete", "ram"]);
    for key in server.keys() {
        let path = server.object(&key);
        let good = std::fs::read(&path).unwrap();
        let mut changed = good.clone();
        changed[good.len() / 2] ^= 1;
        // The server reports the ETag of the object that was uploaded.
        for (damage, bytes) in [
            ("changed", Some(changed)),
            ("truncated", Some(good[..good.len() - 1].to_vec())),
            ("missing", None),
        ] {
            match bytes {
                Some(bytes) => std::fs::write(&path, bytes).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            let output = bed.run(&["restore", "s3://images/2", "--name", "copy"]);
            let text = String::from_utf8_lossy(&output.stderr);
            // Without its line feed, a link is the same. Without fdmap.json, the image is one of CRIU.
            if [("2/parent", "truncated"), ("2/fdmap.json", "missing")].contains(&(&*key, damage)) {
                assert!(output.status.success(), "{text}");
                bed.json(&["delete", "copy"]);
            } else {
                assert_eq!(output.status.code(), Some(7), "{key} {damage}: {text}");
                assert!(text.contains("s3://images/"), "{key} {damage}: {text}");
                assert_eq!(bed.json(&["ls"]), serde_json::json!([]), "{key} {damage}");
            }
            std::fs::write(&path, &good).unwrap();
        }
    }
    bed.assert_restores("s3://images/2", &content);
}
