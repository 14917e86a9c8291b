//! A client of another user than an attacker's, which must notice nothing of the attack.

use std::io::BufRead as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fdmap_client::grpc::ScanRequest;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::error_chain;
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{PageIndex, PageState};
use fdmap_client::{Client, Endpoint, FdpassClient, MappedFile, Timeouts};
use nix::sys::prctl;
use nix::unistd::{Gid, Uid};

use crate::line_process::LineProcess;
use crate::reported::{Reported, create_file};
use crate::service::{Service, named};
use crate::{HarnessError, HarnessResult};

/// The user of the victim.
pub const USER: u32 = 1234;
/// A group whose members may connect, of the victim and of attackers.
pub const GROUP: u32 = 65_534;
/// The promise: no process of one user delays a call of another user by more.
pub const MAX_DELAY: Duration = Duration::from_secs(1);

const ARGUMENT: &str = "victim";
const PAGE: u64 = 4096;
const PAGES: u64 = 64;
/// Runs this process as the victim, if its arguments request that. The `main` of a test program that starts one calls this first.
#[must_use]
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ARGUMENT, runtime_dir] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] else {
        return None;
    };
    let endpoint = Endpoint::in_runtime_dir(runtime_dir);
    // Two threads: a connection answers the pings of the service between two calls.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let served = runtime.expect("a runtime").block_on(serve(&endpoint));
    if let Err(error) = &served {
        println!("{}", error_chain(error));
    }
    Some(if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Makes this process one of the user, as a login does.
///
/// # Errors
/// [`HarnessError::Syscall`] without root.
pub fn become_user(user: u32) -> HarnessResult<()> {
    let failed = |errno| {
        HarnessError::Syscall(fdmap_sys::SyscallError { call: format!("becoming user {user}"), errno })
    };
    nix::unistd::setgroups(&[]).map_err(failed)?;
    nix::unistd::setgid(Gid::from_raw(GROUP)).map_err(failed)?;
    nix::unistd::setuid(Uid::from_raw(user)).map_err(failed)?;
    // A change of the user clears it.
    prctl::set_dumpable(true).map_err(failed)
}

/// Reads lines with the number of a round, and answers each with `ok` and the slowest call, or with what went wrong.
async fn serve(endpoint: &Endpoint) -> HarnessResult<()> {
    become_user(USER)?;
    let name = format!("victim-{}", std::process::id());
    let mut tracked = TrackedFile::create(endpoint, &name).await?;
    println!("ok {name}");
    for line in std::io::stdin().lock().lines() {
        let round = line.ok().and_then(|line| line.parse().ok()).expect("the number of a round");
        let mut calls = Calls::default();
        match calls.make(endpoint, &mut tracked, round).await {
            Ok(()) => println!("ok {} took {:?}", calls.slowest.0, calls.slowest.1),
            Err(error) => println!("{}: {}", calls.last, error_chain(&error)),
        }
    }
    Ok(())
}

/// A file with a tracked mapping.
struct TrackedFile {
    client: Client,
    name: FileName,
    mapping: MappedFile,
    /// The last closed generation.
    since: Generation,
}

impl TrackedFile {
    async fn create(endpoint: &Endpoint, name: &str) -> HarnessResult<Self> {
        let client = Client::connect(endpoint, Timeouts::default()).await?;
        create_file(&client, name, PAGES * PAGE).await?;
        let name = named(name);
        let mut mapping = FdpassClient::connect(endpoint, Timeouts::default())?.map(&name, true)?;
        mapping.track()?;
        let since = client.checkpoint(&name, true, None).await?.generation;
        Ok(Self { client, name, mapping, since })
    }
}

/// The calls of one round.
#[derive(Default)]
struct Calls {
    last: &'static str,
    slowest: (&'static str, Duration),
}

impl Calls {
    async fn of<T, E: Into<HarnessError>>(
        &mut self,
        name: &'static str,
        call: impl Future<Output = Result<T, E>>,
    ) -> HarnessResult<T> {
        self.last = name;
        let began = Instant::now();
        let result = call.await;
        let elapsed = began.elapsed();
        if elapsed > self.slowest.1 {
            self.slowest = (name, elapsed);
        }
        let result = result.map_err(Into::into)?;
        if elapsed <= MAX_DELAY { Ok(result) } else { Err(HarnessError::Agent(format!("took {elapsed:?}"))) }
    }

    async fn make(&mut self, endpoint: &Endpoint, old: &mut TrackedFile, round: u64) -> HarnessResult<()> {
        let client = self.of("Connect", Client::connect(endpoint, Timeouts::default())).await?;
        let name = format!("round-{round}");
        let file = named(&name);
        self.of("Create", create_file(&client, &name, PAGE)).await?;
        self.of("Resize", client.resize(&file, PAGES * PAGE)).await?;
        let mut session =
            self.of("Hello", async { FdpassClient::connect(endpoint, Timeouts::default()) }).await?;
        let mut mapping = self.of("Open", async { session.map(&file, true) }).await?;
        self.of("Track", async { mapping.track() }).await?;
        let since = self.of("Checkpoint", client.checkpoint(&file, true, None)).await?.generation;
        let mut new = TrackedFile { client: client.clone(), name: file.clone(), mapping, since };
        for tracked in [old, &mut new] {
            self.check_writes(tracked, round % PAGES).await?;
        }
        drop(new);
        let (memfd, _) = self.of("MemfdCreate", async { session.memfd_create("memfd", "memfd", 0) }).await?;
        drop(memfd);
        self.of("Delete", client.delete(&named("memfd"))).await?;
        self.of("Delete", client.delete(&file)).await
    }

    /// Writes a page, forks, and looks for the page in the answers of the service.
    async fn check_writes(&mut self, file: &mut TrackedFile, page: u64) -> HarnessResult<()> {
        let missing = |what: &str| HarnessError::Agent(format!("the write to page {page} {what}"));
        if !file.mapping.write_at(page * PAGE, b"written") {
            return Err(missing("failed"));
        }
        self.of("fork", async { fork_once() }).await?;
        let made = self.of("Checkpoint", file.client.checkpoint(&file.name, true, None)).await?;
        let reported = self.of("Changes", Reported::since(&file.client, &file.name, file.since)).await?;
        if !reported.pages.contains(&page) {
            return Err(missing(&format!("is missing in {reported:?}")));
        }
        file.since = made.generation;
        let scan = async { file.client.scan(&file.name, &ScanRequest::default()).await?.runs().await };
        let runs = self.of("Scan", scan).await?;
        let found = runs.iter().find(|run| run.range.contains(PageIndex(page)));
        match found.map(|run| run.state) {
            Some(PageState::Hole) | None => Err(missing(&format!("is not in {runs:?}"))),
            Some(_) => Ok(()),
        }
    }
}

/// Starts a program by fork(2): posix_spawn(3), which the standard library uses otherwise, copies no address space.
fn fork_once() -> HarnessResult<()> {
    let mut program = Command::new("true");
    let status = program.stdin(Stdio::null()).uid(USER).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(HarnessError::Agent(format!("{other:?}"))),
    }
}

/// The process of the victim, ended on drop.
#[derive(Debug)]
pub struct Victim {
    process: LineProcess,
    file: String,
    rounds: u64,
}

impl Victim {
    /// Starts the victim, with a tracked file.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(service: &Service) -> HarnessResult<Self> {
        Self::start_by(Command::new("/proc/self/exe"), service.folder())
    }

    /// Starts the victim by a command that runs this program with further arguments.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_by(mut command: Command, runtime_dir: &Path) -> HarnessResult<Self> {
        command.arg(ARGUMENT).arg(runtime_dir);
        let mut process = LineProcess::start(command, None)?;
        let line = process.receive()?;
        let file = line.strip_prefix("ok ").map(str::to_owned);
        Ok(Self { process, file: file.ok_or(HarnessError::Agent(line))?, rounds: 0 })
    }

    /// The name of the file that is tracked all the time.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Makes a round of calls: new connections, files, a tracked mapping, fork(2), checkpoints, scans.
    ///
    /// # Panics
    /// If one fails or takes more than [`MAX_DELAY`], or if a write is not reported.
    #[track_caller]
    pub fn assert_served(&mut self, moment: &str) {
        self.rounds += 1;
        match self.process.call(&self.rounds.to_string()) {
            Ok(slowest) => eprintln!("{moment}: {slowest}"),
            Err(error) => panic!("{moment}: {}", error_chain(&error)),
        }
    }
}
