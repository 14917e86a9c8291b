//! What the tests have in common.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::{ChangesEncoding, ChangesOptions};
use fdmap_client::proto::units::Generation;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, named, program};

/// A command under the shim, with more options of `fdmap exec`.
pub fn under(folder: &Path, options: &[&str], command: &[&str]) -> Command {
    let mut fdmap = Command::new(program("fdmap").unwrap());
    fdmap.arg("--runtime-dir").arg(folder).arg("exec").args(options).arg("--").args(command);
    fdmap
}

/// A command without the shim.
pub fn stock(command: &[&str]) -> Command {
    let mut stock = Command::new(command[0]);
    stock.args(&command[1..]);
    stock
}

/// What a command prints, if it ends well.
#[track_caller]
pub fn printed(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}: {}", output.status, said(&output));
    assert_eq!(said(&output), "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What was said on standard error.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The program of the tests, to be told what to do.
pub fn stranger(service: &Service, compiled: &Compiled, options: &[&str]) -> LineProcess {
    let path = compiled.path().to_str().unwrap();
    LineProcess::start(under(service.folder(), options, &[path]), None).unwrap()
}

/// Has it map a new memfd; gives the descriptor and the mapping.
pub fn mapped(stranger: &mut LineProcess, name: &str, pages: u64) -> (String, String) {
    let fd = stranger.call(&format!("memfd {name} {}", pages * 4096)).unwrap();
    let slot = stranger.call(&format!("map {fd} 0 {}", pages * 4096)).unwrap();
    (fd, slot)
}

/// What was written to a file since the last time that it was asked.
pub struct Consumer {
    client: Client,
    name: String,
    last: Generation,
}

/// What a checkpoint told: pages, with whether they are exact.
pub type Told = Vec<(u64, bool)>;

impl Consumer {
    /// From now on.
    pub async fn begin(service: &Service, name: &str) -> Self {
        Self::with(service.client().await.unwrap(), name).await
    }

    /// From now on, by a client.
    pub async fn with(client: Client, name: &str) -> Self {
        let last = client.checkpoint(&named(name), true, None).await.unwrap().generation;
        Self { client, name: name.to_owned(), last }
    }

    /// Takes a checkpoint; gives the pages that were written since the last one, and whether all writers were observed.
    pub async fn step(&mut self) -> (Told, bool) {
        let file = named(&self.name);
        let made = self.client.checkpoint(&file, true, None).await.unwrap();
        let options =
            ChangesOptions { since: self.last, encoding: ChangesEncoding::Runs, ..ChangesOptions::default() };
        let changes = self.client.changes(&file, options).await.unwrap().runs().await.unwrap();
        let mut told = Told::new();
        for pages in changes {
            let range = pages.run.range;
            told.extend((range.start().0..range.end().0).map(|page| (page, !pages.run.conservative)));
        }
        self.last = made.generation;
        (told, made.coverage.exact)
    }

    /// Takes checkpoints until all writers are observed: some 10 s after a file was adopted, whose inode changed then without
    /// anybody's being seen to write.
    pub async fn settle(&mut self) {
        let began = Instant::now();
        while !self.step().await.1 {
            assert!(began.elapsed() < Duration::from_secs(30), "coverage does not get exact");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Takes a checkpoint and gives the pages alone.
    pub async fn pages(&mut self) -> Vec<u64> {
        self.step().await.0.into_iter().map(|(page, _)| page).collect()
    }
}

/// Waits until it is so.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
