//! Migrations that are refused, or cannot be completed.

use std::process::Command;

use fdmap_tests::certificates::{Certificates, dns};
use fdmap_tests::service::{Service, fdmap_as};
use fdmap_tests::test;

use super::{Bed, PAGE, error_of, random, write_at};

#[test]
fn certificates_of_others_are_refused_on_both_sides() {
    let bed = Bed::new();
    bed.create("ram", 16 * PAGE);
    let others = Certificates::new("others");
    others.sign("source", dns("source.test"), 2);
    let receiving = bed.receive(&["--keep"]);
    let path = |certificates: &Certificates, file: &str| certificates.path(file).to_str().unwrap().to_owned();
    let ours = &bed.certificates;
    for (ca, of, name) in
        [(ours, &others, "fdmapd.test"), (&others, ours, "fdmapd.test"), (ours, ours, "a.test")]
    {
        let to = format!("localhost:{}", receiving.port);
        let (ca, cert, key) = (path(ca, "ca"), path(of, "source"), path(of, "source.key"));
        let mut command = bed.fdmap(&bed.source, &["migrate", "ram", "--to", &to, "--paused"]);
        command.args(["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key, "--tls-server-name", name]);
        let error = error_of(&command.output().unwrap(), 5);
        assert!(error.contains(&to), "{error}");
        bed.assert_not_migrated();
    }
    // The right one still may.
    bed.migrated(receiving.port, receiving, &["--paused"]);
}

#[test]
fn second_source_is_refused_while_one_is_served() {
    let bed = Bed::new();
    let fd = bed.create("ram", 16 * PAGE);
    write_at(&fd, 0, &random(1, 16 * 4096));
    let receiving = bed.receive(&["--keep"]);
    let other = bed.migrate(receiving.port, &["--paused"]);
    let quoted: Vec<_> = std::iter::once(other.get_program())
        .chain(other.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let pause = format!("! {} 2> refused", quoted.join(" "));
    bed.migrated(receiving.port, receiving, &["--pause", &pause]);
    let refused = std::fs::read_to_string(bed.folder.join("refused")).unwrap();
    assert!(refused.contains("another migration is in progress"), "{refused}");
}

#[test]
fn file_that_the_destination_cannot_have_is_refused() {
    let bed = Bed::new();
    bed.create("ram", 16 * PAGE);
    bed.json(&bed.destination, &["create", "ram", "--size", "4096"]);
    let receiving = bed.receive(&["--keep"]);
    let error = error_of(&bed.migrate(receiving.port, &["--paused"]).output().unwrap(), 6);
    assert!(error.contains("refused the file") && error.contains("already has a file named"), "{error}");
    let (status, _, error) = receiving.ended();
    assert!(status == Some(7) && error.contains("already has a file named"), "{error}");
    bed.json(&bed.destination, &["delete", "ram"]);
    bed.assert_not_migrated();
}

#[test]
fn larger_file_than_the_destination_admits_is_refused() {
    let mut bed = Bed::new();
    bed.destination = Service::start(&["--max-file-bytes", "1048576"]).unwrap();
    let fd = bed.create("ram", 16 * PAGE);
    write_at(&fd, 0, &random(1, 16 * 4096));
    // It grows after the first round.
    let pause = format!(
        "'{}' --runtime-dir '{}' resize ram 2M",
        fdmap_tests::service::program("fdmap").unwrap().display(),
        bed.source.folder().display(),
    );
    let receiving = bed.receive(&["--keep"]);
    let error = error_of(&bed.migrate(receiving.port, &["--pause", &pause]).output().unwrap(), 6);
    assert!(error.contains("refused the file") && error.contains("limit"), "{error}");
    receiving.ended();
    bed.assert_not_migrated();
}

/// The destination sets them by the first message.
#[test]
fn rights_and_seals_that_change_meanwhile_end_the_migration() {
    for (change, what) in [("access ram --other inspect", "owner or rights"), ("seal ram shrink", "seals")] {
        let bed = Bed::new();
        let fd = bed.create("ram", 16 * PAGE);
        write_at(&fd, 0, &random(1, 16 * 4096));
        let pause = format!(
            "'{}' --runtime-dir '{}' {change}",
            fdmap_tests::service::program("fdmap").unwrap().display(),
            bed.source.folder().display(),
        );
        let receiving = bed.receive(&["--keep"]);
        let options = ["--pause", &pause, "--resume", "touch resumed"];
        let error = error_of(&bed.migrate(receiving.port, &options).output().unwrap(), 6);
        assert!(error.contains(&format!("the {what} of ram changed meanwhile")), "{error}");
        receiving.ended();
        assert!(bed.folder.join("resumed").exists());
        bed.assert_not_migrated();
    }
}

/// The source reads the refusal before it connects again, which would take its time.
#[test]
fn refusal_is_read_after_the_connection_has_ended() {
    let bed = Bed::new();
    let fd = bed.create("ram", 16 * PAGE);
    write_at(&fd, 0, &random(1, 16 * 4096));
    let receiving = bed.receive(&["--keep"]);
    let pause = format!("kill -INT {} && sleep 0.5", receiving.child.id());
    let options = ["--pause", &pause, "--reconnect-within", "60s"];
    let error = error_of(&bed.migrate(receiving.port, &options).output().unwrap(), 6);
    assert!(error.contains("refused the file: the destination ended the migration"), "{error}");
    receiving.ended();
    bed.assert_not_migrated();
}

#[test]
fn user_without_the_right_cannot_fence_a_file() {
    let mut bed = Bed::new();
    bed.source = Service::start(&["--group", "65534"]).unwrap();
    bed.create("ram", 16 * PAGE);
    bed.json(&bed.source, &["access", "ram", "--other", "inspect,read,write,checkpoint"]);
    let fence = |service: &Service| {
        let mut command: Command = fdmap_as(service, 65_534).unwrap();
        command.args(["fence", "root/ram", "--reason", "mine"]).output().unwrap()
    };
    assert!(error_of(&fence(&bed.source), 4).contains("lacks the migrate right"));
    bed.assert_not_migrated();
}

#[test]
fn missing_options_are_named() {
    let bed = Bed::new();
    bed.create("ram", 16 * PAGE);
    let without = bed.fdmap(&bed.source, &["migrate", "ram", "--to", "localhost:1", "--paused"]);
    let mut without = without;
    assert!(error_of(&without.output().unwrap(), 2).contains("needs --tls-ca"));
    let mut unpaused = bed.fdmap(&bed.source, &["migrate", "ram", "--to", "localhost:1"]);
    assert!(error_of(&unpaused.output().unwrap(), 2).contains("--paused"));
    let mut nowhere = bed.fdmap(&bed.source, &["migrate", "ram", "--to", "localhost", "--paused"]);
    assert!(error_of(&nowhere.output().unwrap(), 2).contains("is not HOST:PORT"));
}
