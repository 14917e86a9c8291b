//! `fdmap migrate` and `fdmap receive` between two services: the destination equals the source at its pause, whatever breaks.

mod broken;
mod control;
mod faults;
mod lost_answers;
mod messages;
mod namespaces;
mod pinned;
mod proxy;
mod refused;
mod writers;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use fdmap_tests::certificates::{Certificates, dns};
use fdmap_tests::cleanup::CleanupGuard;
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::test;
use serde_json::{Value, json};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

/// Two services, and certificates for the connection between them.
struct Bed {
    source: Service,
    destination: Service,
    certificates: Certificates,
    folder: PathBuf,
    _guard: CleanupGuard,
}

/// A running `fdmap receive`. Killed on drop.
struct Receiving {
    child: Child,
    stdout: BufReader<ChildStdout>,
    port: u16,
}

impl Bed {
    fn new() -> Self {
        require(root());
        let (folder, guard) = temp_dir("fdmap-migration").unwrap();
        let certificates = Certificates::new("ours");
        certificates.sign("source", dns("source.test"), 2);
        let (source, destination) = (Service::start(&[]).unwrap(), Service::start(&[]).unwrap());
        Self { source, destination, certificates, folder, _guard: guard }
    }

    fn fdmap(&self, service: &Service, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(service.folder()).args(arguments).current_dir(&self.folder);
        command
    }

    #[track_caller]
    fn json(&self, service: &Service, arguments: &[&str]) -> Value {
        let output = self.fdmap(service, &[arguments, &["--json"]].concat()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Options for a certificate.
    fn tls(&self, name: &str) -> Vec<String> {
        let path = |file: &str| self.certificates.path(file).to_str().unwrap().to_owned();
        let options = [("--tls-ca", "ca"), ("--tls-cert", name), ("--tls-key", &format!("{name}.key"))];
        options.iter().flat_map(|(option, file)| [(*option).to_owned(), path(file)]).collect()
    }

    fn create(&self, name: &str, bytes: u64) -> OwnedFd {
        self.json(&self.source, &["create", name, "--size", &bytes.to_string()]);
        self.source.fdpass().unwrap().open(&named(name), true).unwrap().0
    }

    fn receive(&self, options: &[&str]) -> Receiving {
        Receiving::start(self.receive_at("127.0.0.1:0", options))
    }

    /// `fdmap receive` at an address.
    fn receive_at(&self, address: &str, options: &[&str]) -> Command {
        let mut command = self.fdmap(&self.destination, &["receive", "--json", "--listen", address]);
        command.args(self.tls("service")).args(options);
        command
    }

    /// `fdmap migrate ram` to a port.
    fn migrate(&self, port: u16, options: &[&str]) -> Command {
        self.migrate_to(&format!("localhost:{port}"), options)
    }

    fn migrate_to(&self, to: &str, options: &[&str]) -> Command {
        let mut command = self.fdmap(&self.source, &["migrate", "ram", "--json", "--to", to]);
        command.args(self.tls("source")).args(["--tls-server-name", "fdmapd.test"]).args(options);
        command
    }

    /// Migrates, and returns what both programs print.
    #[track_caller]
    fn migrated(&self, port: u16, receiving: Receiving, options: &[&str]) -> (Value, Value) {
        let output = self.migrate(port, options).output().unwrap();
        let (status, received, errors) = receiving.ended();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "source: {stderr}\ndestination: {errors}");
        assert_eq!(status, Some(0), "{errors}");
        let report = serde_json::from_slice(&output.stdout).unwrap();
        (report, serde_json::from_str(&received).unwrap())
    }

    /// The content of a file of a service.
    fn content(&self, service: &Service, name: &str) -> Vec<u8> {
        content_of(&service.fdpass().unwrap().open(&named(name), false).unwrap().0)
    }

    /// Asserts that the source is as before: not fenced, and checkpoints are possible; and that the destination has no file.
    #[track_caller]
    fn assert_not_migrated(&self) {
        let stat = self.json(&self.source, &["ls"]);
        assert!(stat[0]["fence"].is_null(), "{stat}");
        self.json(&self.source, &["checkpoint", "ram"]);
        assert_eq!(self.json(&self.destination, &["ls"]), json!([]));
    }
}

impl Receiving {
    /// Starts the program, and waits until it listens.
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let listening: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let address = listening["listening"].as_str().unwrap();
        let port = address.rsplit_once(':').unwrap().1.parse().unwrap();
        Self { child, stdout, port }
    }

    /// Waits for its end. Returns the exit code and what it printed.
    fn ended(mut self) -> (Option<i32>, String, String) {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.stdout.read_to_string(&mut stdout).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (self.child.wait().unwrap().code(), stdout, stderr)
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn content_of(fd: &OwnedFd) -> Vec<u8> {
    let size = usize::try_from(fdmap_sys::fd::stat(fd).unwrap().st_size).unwrap();
    let mut content = vec![0; size];
    let mut filled = 0;
    while filled < size {
        filled += fdmap_sys::fd::read_at(fd.as_fd(), filled as u64, &mut content[filled..]).unwrap();
    }
    content
}

/// Bytes that differ from page to page and from seed to seed.
fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut word = seed;
    let words = std::iter::repeat_with(|| {
        word = fdmap_tests::pattern::mix(word);
        word.to_le_bytes()
    });
    words.flatten().take(bytes).collect()
}

fn write_at(fd: &OwnedFd, page: u64, bytes: &[u8]) {
    fdmap_sys::fd::write_at(fd.as_fd(), page * PAGE, bytes).unwrap();
}

#[track_caller]
fn error_of(output: &Output, code: i32) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    stderr
}

/// What a migrated file has: pages of all kinds, a partial last page, seals, owner and rights.
#[test]
fn destination_has_content_size_seals_owner_and_rights() {
    let bed = Bed::new();
    let fd = bed.create("ram", 3000 * PAGE + 100);
    write_at(&fd, 3, &random(1, 600 * 4096));
    write_at(&fd, 700, &[0; 5 * 4096]);
    write_at(&fd, 2000, &random(2, 300 * 4096));
    write_at(&fd, 3000, &random(3, 100));
    bed.json(&bed.source, &["access", "ram", "--uid", "1234", "--mode", "0740"]);
    for compression in ["none", "zstd", "lz4"] {
        if compression == "lz4" {
            bed.json(&bed.source, &["seal", "1234/ram", "shrink", "grow"]);
        }
        let receiving = bed.receive(&["--keep"]);
        let port = receiving.port;
        let to = format!("localhost:{port}");
        let mut command = bed.fdmap(&bed.source, &["migrate", "1234/ram", "--json", "--to", &to, "--paused"]);
        command.args(bed.tls("source")).args(["--tls-server-name", "fdmapd.test", "--compress", compression]);
        let output = command.output().unwrap();
        let (status, _, errors) = receiving.ended();
        assert!(output.status.success() && status == Some(0), "{}{errors}", error_of(&output, 0));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["rounds"][0]["pages"], 906, "{report}");
        assert_eq!((&report["exact"], &report["reconnections"]), (&json!(true), &json!(0)), "{report}");

        let ours = bed.json(&bed.source, &["ls"])[0].clone();
        let theirs = bed.json(&bed.destination, &["ls"])[0].clone();
        for field in ["name", "size_bytes", "backing", "seals", "access"] {
            assert_eq!(ours[field], theirs[field], "{field}");
        }
        assert_eq!(theirs["seals"].as_array().unwrap().len(), if compression == "lz4" { 2 } else { 0 });
        let reason = ours["fence"].as_str().unwrap();
        assert!(reason.starts_with(&format!("migrated to localhost:{port}, migration ")), "{reason}");
        assert!(bed.content(&bed.destination, "1234/ram") == content_of(&fd));
        // Pages of zeroes stay holes.
        assert_eq!(theirs["allocated_bytes"], 901 * PAGE);

        let refused = bed.fdmap(&bed.source, &["checkpoint", "1234/ram"]).output().unwrap();
        assert!(error_of(&refused, 6).contains("fenced: migrated to localhost"));
        let refused =
            bed.fdmap(&bed.source, &["open", "--write", "1234/ram", "--", "true"]).output().unwrap();
        assert!(error_of(&refused, 6).contains("fenced: migrated to localhost"));
        bed.json(&bed.source, &["fence", "1234/ram", "--remove"]);
        bed.json(&bed.source, &["checkpoint", "1234/ram"]);
        bed.json(&bed.destination, &["delete", "1234/ram"]);
    }
}

#[test]
fn fence_outlives_the_process_of_the_service() {
    require(root());
    let service = Service::start_with_fd_store(&[]).unwrap();
    let fdmap = |arguments: &[&str]| {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(service.folder()).args(arguments).output().unwrap()
    };
    error_of(&fdmap(&["create", "ram", "--size", "1M"]), 0);
    error_of(&fdmap(&["fence", "ram", "--reason", "migrated to b.test"]), 0);
    assert!(error_of(&fdmap(&["fence", "ram", "--reason", "a\nb"]), 6).contains("invalid reason of a fence"));
    service.kill().unwrap();
    service.restart().unwrap();
    assert!(error_of(&fdmap(&["checkpoint", "ram"]), 6).contains("fenced: migrated to b.test"));
    // Who sets a fence relies on it.
    error_of(&fdmap(&["fence", "ram", "--reason", "migrated to b.test"]), 0);
    let other = error_of(&fdmap(&["fence", "ram", "--reason", "migrated to c.test"]), 6);
    assert!(other.contains("is fenced: migrated to b.test"), "{other}");
    error_of(&fdmap(&["fence", "ram", "--remove"]), 0);
    error_of(&fdmap(&["checkpoint", "ram"]), 0);
}

#[test]
fn hugetlb_file_is_migrated() {
    let bed = Bed::new();
    let host = require(fdmap_tests::host::HostLock::acquire());
    let _pages = require(fdmap_tests::hugepages::hugetlb_2m(&host, 8));
    bed.json(&bed.source, &["create", "ram", "--size", "8M", "--huge", "2M"]);
    let fd = bed.source.fdpass().unwrap().open(&named("ram"), true).unwrap().0;
    let mapping = fdmap_sys::mapping::SharedMapping::shared(&fd, 0, 8 << 20, true).unwrap();
    let content = random(5, 3 << 20);
    assert!(mapping.write_at(1 << 20, &content));
    let receiving = bed.receive(&["--keep"]);
    bed.migrated(receiving.port, receiving, &["--paused"]);
    assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
    let theirs = bed.json(&bed.destination, &["ls"])[0].clone();
    assert_eq!(theirs["allocated_bytes"], 4 << 20, "a huge page without data stays a hole");
}
