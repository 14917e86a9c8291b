//! The process of an attack, which this test program runs as.

use std::io::BufRead as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::ScanRequest;
use fdmap_client::proto::convert::AttributeSet;
use fdmap_client::proto::{ClientMapping, PageIndex};
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::HarnessResult;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::raw::RawSession;
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, named};
use fdmap_tests::victim::become_user;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::{invalid_requests, stopped_holders, unclosed_userfaultfds};

const ARGUMENT: &str = "attacker";
const PAGE: u64 = 4096;
const PAGES: u64 = 64;
/// Mappings whose userfaultfds are made blocking.
const BLOCKING: u64 = 8;
/// Pages of one Lookup: the default of `--max-lookup-pages`.
const SCATTERED_PAGES: u64 = 4096;
/// Pages of one block of page states.
const BLOCK_PAGES: u64 = 4096;
/// Pause between two forks, or checks.
const PAUSE: Duration = Duration::from_millis(20);
/// Files, and connections, of attacks on many files.
const FILES: u64 = 64;
/// Calls at a time for each of the files.
const CALLS_PER_FILE: u64 = 16;
/// Calls of a connection at a time, fewer than the service receives.
const CALLS_PER_CONNECTION: u64 = 32;
/// A file of root that the attacker may inspect.
pub const READABLE: &str = "0/readable";

/// Runs this process as the attacker, if its arguments request that.
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ARGUMENT, runtime_dir, user] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] else {
        return None;
    };
    become_user(user.parse().unwrap()).unwrap();
    let endpoint = Endpoint::in_runtime_dir(runtime_dir);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.unwrap().block_on(serve(&endpoint, user));
    Some(ExitCode::SUCCESS)
}

/// Begins the attacks that it reads from standard input, and goes on with them until it is killed.
async fn serve(endpoint: &Endpoint, user: &str) {
    let mut kept = Kept::default();
    println!("ok");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let (attack, count) = line.split_once(' ').unwrap();
        let count = count.parse().unwrap();
        let successes = match attack {
            "blocking-userfaultfds" => kept.make_userfaultfds_blocking(endpoint, user).await.unwrap(),
            "tracks" => kept.track(endpoint, user, count).await.unwrap(),
            "sessions" => kept.open_sessions(endpoint, count),
            "refused-connections" => connect_and_close(endpoint, count),
            "events" => kept.write_by_many_threads(endpoint, count).await.unwrap(),
            "checkpoints" => start_checkpoints(endpoint).await.unwrap(),
            "coverage" => kept.read(endpoint, count, ReadKind::Coverage).await.unwrap(),
            "attributes" => kept.read(endpoint, count, ReadKind::Attributes).await.unwrap(),
            "cached-states" => kept.read(endpoint, count, ReadKind::CachedStates).await.unwrap(),
            "held-checkpoints" => checkpoint_at_once(endpoint, count).await.unwrap(),
            "files" => kept.create_files(endpoint, count).unwrap(),
            "memory" => kept.fill_file(endpoint, count).unwrap(),
            "refused-userfaultfds" => stopped_holders::pass_refused_userfaultfds(endpoint, count).unwrap(),
            "invalid-userfaultfds" => unclosed_userfaultfds::pass_with_invalid_requests(endpoint, count),
            "invalid-requests" => invalid_requests::start(endpoint).await.unwrap(),
            other => panic!("{other}"),
        };
        println!("ok {successes}");
    }
}

/// What stays open until the process ends.
#[derive(Default)]
struct Kept {
    sessions: Vec<RawSession>,
    grpc: Vec<std::os::unix::net::UnixStream>,
    clients: Vec<FdpassClient>,
    mappings: Vec<SharedMapping>,
    userfaultfds: Vec<Userfaultfd>,
    files: Vec<OwnedFd>,
    /// Answers to calls about a file.
    answers: Option<Arc<AtomicU64>>,
}

/// Calls about the file [`READABLE`].
#[derive(Clone, Copy)]
enum ReadKind {
    Coverage,
    /// The attributes of as many scattered pages as one scan reads for several calls.
    Attributes,
    /// The states of as many scattered pages, of any age.
    CachedStates,
}

impl ReadKind {
    /// True if it is answered.
    async fn call(self, client: &Client) -> bool {
        let file = named(READABLE);
        // Each in a block of its own, apart from the others.
        let pages: Vec<_> = (0..SCATTERED_PAGES).map(|nth| PageIndex(nth * 2 * BLOCK_PAGES)).collect();
        let none = AttributeSet::NONE;
        let order = AttributeSet { order: true, ..none };
        match self {
            Self::Coverage => client.coverage(&file).await.is_ok(),
            Self::Attributes => client.lookup(&file, &pages, order, Duration::ZERO, false).await.is_ok(),
            Self::CachedStates => {
                let age = Duration::from_secs(3600);
                client.lookup(&file, &pages, none, age, false).await.is_ok()
            }
        }
    }
}

impl Kept {
    /// Sends this number of Track requests, each for a mapping of its own. Returns the number of those that the service accepts.
    async fn track(&mut self, endpoint: &Endpoint, user: &str, count: u64) -> HarnessResult<u64> {
        let name = format!("tracked-by-{user}");
        let client = Client::connect(endpoint, Timeouts::default()).await?;
        create_file(&client, &name, PAGES * PAGE).await?;
        let name = named(&name);
        let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
        let (fd, _) = session.open(&name, true)?;
        let mut accepted = 0;
        for number in 0..count {
            let page = number % PAGES;
            let mapping = SharedMapping::shared(&fd, page * PAGE, PAGE as usize, true)?;
            let uffd = Userfaultfd::create_user_mode_only()?;
            let range = ClientMapping {
                address: mapping.as_ptr().addr() as u64,
                length_bytes: PAGE,
                first_page: PageIndex(page),
            };
            if session.track(&name, uffd.as_fd(), None, None, &[range]).is_ok() {
                accepted += 1;
                self.mappings.push(mapping);
                self.userfaultfds.push(uffd);
            }
        }
        self.clients.push(session);
        Ok(accepted)
    }

    /// Clears O_NONBLOCK of userfaultfds that the service has as well, and forks from then on.
    async fn make_userfaultfds_blocking(&mut self, endpoint: &Endpoint, user: &str) -> HarnessResult<u64> {
        let accepted = self.track(endpoint, user, BLOCKING).await?;
        for uffd in &self.userfaultfds {
            fcntl(uffd.as_fd(), FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        }
        std::thread::spawn(|| {
            loop {
                // The user requests fork(2), since posix_spawn(3) copies no address space.
                let user = nix::unistd::getuid().as_raw();
                let _ = Command::new("true").stdin(Stdio::null()).uid(user).status();
                std::thread::sleep(PAUSE);
            }
        });
        Ok(accepted)
    }

    /// Writes to many files by this number of threads, one after the other, so that each write raises an event of its own.
    async fn write_by_many_threads(&mut self, endpoint: &Endpoint, threads: u64) -> HarnessResult<u64> {
        let client = Client::connect(endpoint, Timeouts::default()).await?;
        let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
        let mut files = Vec::new();
        for number in 0..FILES {
            let name = format!("events-{number}");
            create_file(&client, &name, PAGE).await?;
            files.push(session.open(&named(&name), true)?.0);
        }
        let write_to_all =
            || files.iter().filter(|file| nix::unistd::write(file, b"x").is_ok()).count() as u64;
        self.clients.push(session);
        Ok((0..threads).map(|_| std::thread::scope(|scope| scope.spawn(write_to_all).join().unwrap())).sum())
    }

    /// Keeps this number of calls about a file waiting. Returns the number of answers until now.
    async fn read(&mut self, endpoint: &Endpoint, calls: u64, read: ReadKind) -> HarnessResult<u64> {
        let answered = match self.answers.take() {
            Some(started) => started,
            None => start_reads(endpoint, calls, read).await?,
        };
        let count = answered.load(Ordering::Relaxed);
        self.answers = Some(answered);
        Ok(count)
    }

    /// Creates this number of ephemeral files, with data. Returns the number of those that the service accepts.
    fn create_files(&mut self, endpoint: &Endpoint, count: u64) -> HarnessResult<u64> {
        let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
        let before = self.files.len();
        for number in 0..count {
            let name = format!("file-{}", before as u64 + number);
            // The service refuses those beyond the limit.
            let Ok((file, _)) = session.memfd_create(&name, &name, 0) else { continue };
            fdmap_sys::fd::write_at(file.as_fd(), 0, &[1; PAGE as usize])?;
            self.files.push(file);
        }
        Ok((self.files.len() - before) as u64)
    }

    /// Creates a file and fills it. Returns its size in MiB, or 0 if the service refuses it.
    fn fill_file(&mut self, endpoint: &Endpoint, mib: u64) -> HarnessResult<u64> {
        let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
        // The service may still have the file of an ended attacker.
        let name = format!("filled-{}", std::process::id());
        let (file, _) = match session.memfd_create(&name, &name, 0) {
            Err(error) if error.refusal() == Some(RefusalCode::ResourceExhausted) => return Ok(0),
            created => created?,
        };
        for block in 0..mib {
            fdmap_sys::fd::write_at(file.as_fd(), block << 20, &[1; 1 << 20])?;
        }
        self.files.push(file);
        Ok(mib)
    }

    /// Opens this number of connections to each socket. Returns the number of fdpass sessions that the service accepts.
    fn open_sessions(&mut self, endpoint: &Endpoint, count: u64) -> u64 {
        for _ in 0..count {
            self.sessions.extend(RawSession::greeted(endpoint));
            self.grpc.extend(std::os::unix::net::UnixStream::connect(&endpoint.socket));
        }
        self.sessions.len() as u64
    }
}

/// Makes this number of connections to each socket, and closes each at once. Returns the number of those that were made.
fn connect_and_close(endpoint: &Endpoint, count: u64) -> u64 {
    let made = (0..count).map(|_| {
        let fdpass = RawSession::connect(endpoint).is_ok();
        let grpc = std::os::unix::net::UnixStream::connect(&endpoint.socket).is_ok();
        u64::from(fdpass) + u64::from(grpc)
    });
    made.sum()
}

/// Keeps calls about the file [`READABLE`] waiting, each of which is made again until it fails. Counts the answered ones.
async fn start_reads(endpoint: &Endpoint, calls: u64, read: ReadKind) -> HarnessResult<Arc<AtomicU64>> {
    let answered = Arc::new(AtomicU64::new(0));
    for _ in 0..calls / CALLS_PER_CONNECTION {
        let client = Client::connect(endpoint, Timeouts::default()).await?;
        for _ in 0..CALLS_PER_CONNECTION {
            let (client, answered) = (client.clone(), Arc::clone(&answered));
            tokio::spawn(async move {
                while read.call(&client).await {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    Ok(answered)
}

/// Keeps calls about the generations and pages of many files in progress.
async fn start_checkpoints(endpoint: &Endpoint) -> HarnessResult<u64> {
    let answered = Arc::new(AtomicU64::new(0));
    for number in 0..FILES {
        let client = Client::connect(endpoint, Timeouts::default()).await?;
        let name = format!("checkpoints-{number}");
        create_file(&client, &name, 1 << 30).await?;
        for call in 0..CALLS_PER_FILE {
            let (client, name, answered) = (client.clone(), named(&name), Arc::clone(&answered));
            tokio::spawn(async move {
                loop {
                    if call % 2 == 0 {
                        // The service may refuse it.
                        let made = client.checkpoint(&name, true, None).await;
                        answered.fetch_add(u64::from(made.is_ok()), Ordering::Relaxed);
                    } else if let Ok(scan) = client.scan(&name, &ScanRequest::default()).await {
                        let _ = scan.runs().await;
                    }
                }
            });
        }
    }
    while answered.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(PAUSE).await;
    }
    Ok(answered.load(Ordering::Relaxed))
}

/// Checkpoints the files `held-0` and so on, all at once. Returns the number of checkpoints that were made.
async fn checkpoint_at_once(endpoint: &Endpoint, files: u64) -> HarnessResult<u64> {
    let client = Client::connect(endpoint, Timeouts::default()).await?;
    let calls: Vec<_> = (0..files)
        .map(|number| {
            let (client, name) = (client.clone(), named(&format!("held-{number}")));
            tokio::spawn(async move { client.checkpoint(&name, true, None).await.is_ok() })
        })
        .collect();
    let mut made = 0;
    for call in calls {
        made += u64::from(call.await.unwrap());
    }
    Ok(made)
}

/// The process of an attack, killed on drop.
#[derive(Debug)]
pub struct Attacker(LineProcess);

impl Attacker {
    pub fn start(service: &Service, user: u32) -> HarnessResult<Self> {
        Self::start_in(service, user, None)
    }

    /// The same in a cgroup.
    pub fn start_in(service: &Service, user: u32, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ARGUMENT).arg(service.folder()).arg(user.to_string());
        let mut process = LineProcess::start(command, cgroup)?;
        process.receive()?;
        Ok(Self(process))
    }

    /// Begins an attack without waiting for the answer.
    pub fn begin(&mut self, attack: &str, count: u64) -> HarnessResult<()> {
        self.0.send(&format!("{attack} {count}"))
    }

    /// Waits for the number of attempts that the service accepted.
    pub fn accepted(&mut self) -> HarnessResult<u64> {
        let line = self.0.receive()?;
        let accepted = line.strip_prefix("ok ").and_then(|count| count.parse().ok());
        accepted.ok_or(fdmap_tests::HarnessError::Agent(line))
    }

    /// Makes an attack. Returns the number of attempts that the service accepted.
    pub fn attack(&mut self, attack: &str, count: u64) -> HarnessResult<u64> {
        self.begin(attack, count)?;
        self.accepted()
    }

    pub fn kill(self) -> HarnessResult<()> {
        self.0.kill()
    }
}
