//! The demo leaves nothing behind, however it ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::service::program;
use fdmap_tests::swap::areas;
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// Resources of this host that a demo could leave behind.
#[derive(Debug, PartialEq, Eq)]
struct Leftovers {
    swaps: Vec<PathBuf>,
    devices: Vec<PathBuf>,
    cgroups: Vec<PathBuf>,
    files: Vec<PathBuf>,
    processes: Vec<PathBuf>,
}

impl Leftovers {
    /// The resources of other programs, before a demo starts.
    fn of_host() -> Self {
        Self {
            swaps: areas().unwrap().into_iter().map(|area| area.path).collect(),
            devices: listed("/sys/block", "zram"),
            cgroups: [listed("/sys/fs/cgroup/memory", "fdmap"), listed("/sys/fs/cgroup", "fdmap")].concat(),
            files: Vec::new(),
            processes: Vec::new(),
        }
    }
}

fn listed(folder: impl Into<PathBuf>, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.into()).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

/// A demo whose files and processes are identified by an environment variable.
struct Demo {
    child: Child,
    mark: String,
    folder: tempfile::TempDir,
}

impl Demo {
    fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("fdmap-demo-").tempdir().unwrap();
        let mark = format!("FDMAP_DEMO_MARK={}", folder.path().display());
        let child = Command::new(program("fdmap-demo").unwrap())
            .args(arguments)
            .env("TMPDIR", folder.path())
            .env("FDMAP_PROGRAMS_ARE_BUILT", "1")
            .env("FDMAP_DEMO_MARK", folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, mark, folder }
    }

    /// Reads the output of the demo up to a line that contains `word`.
    fn read_up_to(&mut self, word: &str) {
        let lines = BufReader::new(self.child.stdout.as_mut().unwrap()).lines();
        assert!(
            lines.map_while(Result::ok).any(|line| line.contains(word)),
            "the demo never prints {word:?}"
        );
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn leftovers(&self) -> Leftovers {
        let mut left = Leftovers::of_host();
        left.files = listed(self.folder.path(), "");
        let processes = listed("/proc", "").into_iter().filter(|path| {
            let environment = std::fs::read(path.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == self.mark.as_bytes())
        });
        left.processes = processes.collect();
        left
    }
}

#[test]
fn finished_demo_is_correct_and_leaves_nothing() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let before = Leftovers::of_host();
    let mut demo = Demo::start(&["--mib", "64"]);
    let (mut printed, mut errors) = (String::new(), String::new());
    demo.child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    demo.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(demo.child.wait().unwrap().success(), "{printed}\n{errors}");
    for words in [
        "pagemap reports none for",
        "the client wrote 12288 pages; fdmap misreports 0",
        "$ fdmap compare",
        "ns/page",
    ] {
        assert!(printed.contains(words), "{words} is missing in\n{printed}");
    }
    assert_eq!(demo.leftovers(), before);
}

#[test]
fn interrupted_demo_leaves_nothing() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    for (word, signal) in [
        ("client ", Signal::SIGINT),
        ("What fdmap reports", Signal::SIGTERM),
        ("ends the demo", Signal::SIGINT),
    ] {
        let before = Leftovers::of_host();
        let mut demo = Demo::start(&["--mib", "64", "--stay"]);
        demo.read_up_to(word);
        assert!(demo.leftovers() != before, "there is something to clean up");
        demo.signal(signal);
        let status = demo.child.wait().unwrap();
        assert_eq!(status.code(), Some(128 + signal as i32), "after {word:?}");
        assert_eq!(demo.leftovers(), before, "after {word:?}");
    }
}

#[test]
fn killed_demo_leaves_nothing() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let before = Leftovers::of_host();
    let mut demo = Demo::start(&["--mib", "64", "--stay"]);
    demo.read_up_to("ends the demo");
    demo.signal(Signal::SIGKILL);
    demo.child.wait().unwrap();
    // The cleanup helper may still be running.
    let begun = Instant::now();
    while demo.leftovers() != before {
        assert!(begun.elapsed() < Duration::from_secs(20), "left: {:?}", demo.leftovers());
        std::thread::sleep(Duration::from_millis(50));
    }
}
