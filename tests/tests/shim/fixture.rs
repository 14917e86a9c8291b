//! Shared parts of the shim tests: programs with and without the shim, and a reader of changes.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::{ChangesEncoding, ChangesOptions};
use fdmap_client::proto::units::Generation;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, named, program};

/// A command under the shim, with additional options of `fdmap exec`.
pub fn with_shim(runtime_dir: &Path, options: &[&str], command: &[&str]) -> Command {
    let mut fdmap = Command::new(program("fdmap").unwrap());
    fdmap.arg("--runtime-dir").arg(runtime_dir).arg("exec").args(options).arg("--").args(command);
    fdmap
}

/// A command without the shim.
pub fn without_shim(command: &[&str]) -> Command {
    let mut plain = Command::new(command[0]);
    plain.args(&command[1..]);
    plain
}

/// Runs a command that must succeed and print nothing on standard error, and returns its standard output.
#[track_caller]
pub fn stdout_of(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}: {}", output.status, stderr_of(&output));
    assert_eq!(stderr_of(&output), "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

pub fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Compiles the C program that runs the commands of a test and does not link against fdmap.
pub fn compile_plain_program() -> Compiled {
    Compiled::new("plain_program").unwrap()
}

/// Starts the plain program under the shim.
pub fn start_program(service: &Service, compiled: &Compiled, options: &[&str]) -> LineProcess {
    let path = compiled.path().to_str().unwrap();
    LineProcess::start(with_shim(service.folder(), options, &[path]), None).unwrap()
}

/// Makes the program create and map a memfd. Returns the descriptor and the mapping.
pub fn map_memfd(program: &mut LineProcess, name: &str, pages: u64) -> (String, String) {
    let fd = program.call(&format!("memfd {name} {}", pages * 4096)).unwrap();
    let slot = program.call(&format!("map {fd} 0 {}", pages * 4096)).unwrap();
    (fd, slot)
}

/// Reads the pages of a file written since the last read, checkpoint by checkpoint.
pub struct ChangeReader {
    client: Client,
    name: String,
    last: Generation,
}

/// Pages reported as written, each with whether the write was observed (not conservative).
pub type WrittenPages = Vec<(u64, bool)>;

impl ChangeReader {
    /// Starts at the current generation.
    pub async fn start(service: &Service, name: &str) -> Self {
        Self::start_with(service.client().await.unwrap(), name).await
    }

    pub async fn start_with(client: Client, name: &str) -> Self {
        let last = client.checkpoint(&named(name), true, None).await.unwrap().generation;
        Self { client, name: name.to_owned(), last }
    }

    /// Makes a checkpoint. Returns the pages written since the last one and whether coverage is exact.
    pub async fn read(&mut self) -> (WrittenPages, bool) {
        let file = named(&self.name);
        let made = self.client.checkpoint(&file, true, None).await.unwrap();
        let options =
            ChangesOptions { since: self.last, encoding: ChangesEncoding::Runs, ..ChangesOptions::default() };
        let changes = self.client.changes(&file, options).await.unwrap().runs().await.unwrap();
        let mut written = WrittenPages::new();
        for pages in changes {
            let range = pages.run.range;
            written.extend((range.start().0..range.end().0).map(|page| (page, !pages.run.conservative)));
        }
        self.last = made.generation;
        (written, made.coverage.exact)
    }

    /// Makes checkpoints until coverage is exact: some 10 s after adoption, which changes the inode without an observed writer.
    pub async fn wait_until_exact(&mut self) {
        let start = Instant::now();
        while !self.read().await.1 {
            assert!(start.elapsed() < Duration::from_secs(30), "coverage does not become exact");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Makes a checkpoint and returns only the page numbers.
    pub async fn read_pages(&mut self) -> Vec<u64> {
        self.read().await.0.into_iter().map(|(page, _)| page).collect()
    }
}

/// Waits until `condition` holds; panics with `what` after 30 s.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
