//! A service for tests.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fdmap_client::proto::convert::FileName;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::fd_store_parent::FdStoreParent;
use crate::host::read;
use crate::{HarnessError, HarnessResult};

/// A running `fdmapd` in a folder of its own, killed on drop.
#[derive(Debug)]
pub struct Service {
    running: Mutex<Running>,
    folder: PathBuf,
    /// Who keeps its descriptors, and its arguments.
    kept: Option<(FdStoreParent, Vec<String>)>,
    /// Dropped last: its folder.
    _guard: CleanupGuard,
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Dropped after the child was waited for.
    _process: CleanupGuard,
}

/// How long the service may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

impl Service {
    /// Starts one with more arguments.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not come up.
    pub fn start(arguments: &[&str]) -> HarnessResult<Self> {
        let mut command = Command::new(program("fdmapd")?);
        command.args(arguments);
        Self::start_command(command)
    }

    /// Starts one by a command of the caller's: a wrapper, another user. `--runtime-dir` is added to it.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not come up.
    pub fn start_command(command: Command) -> HarnessResult<Self> {
        let (folder, guard) = own_folder()?;
        let running = Mutex::new(Running::start(command, &folder)?);
        Ok(Self { running, folder, kept: None, _guard: guard })
    }

    /// Starts one whose descriptors are kept, so that it can be killed and go on.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not come up.
    pub fn start_with_fd_store(arguments: &[&str]) -> HarnessResult<Self> {
        let (folder, guard) = own_folder()?;
        let arguments: Vec<_> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let keeper = FdStoreParent::start(&folder)?;
        let command = keeper.command(&program("fdmapd")?, &arguments)?;
        let running = Mutex::new(Running::start(command, &folder)?);
        Ok(Self { running, folder, kept: Some((keeper, arguments)), _guard: guard })
    }

    /// Who keeps its descriptors.
    ///
    /// # Panics
    /// If it was not started as one whose descriptors are kept.
    #[must_use]
    pub fn fd_store(&self) -> &FdStoreParent {
        &self.kept.as_ref().expect("a service whose descriptors are kept").0
    }

    /// Kills it as a crash would, and waits until it is gone.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn kill(&self) -> HarnessResult<()> {
        let mut running = self.running();
        let failed = |error: std::io::Error| HarnessError::Agent(format!("killing the service: {error}"));
        running.child.kill().and_then(|()| running.child.wait()).map_err(failed)?;
        self.kept.as_ref().map_or(Ok(()), |(keeper, _)| keeper.settle())
    }

    /// Starts another process of it, once it was killed, with the descriptors that were kept.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not come up.
    ///
    /// # Panics
    /// If it was not started as one whose descriptors are kept.
    pub fn restart(&self) -> HarnessResult<()> {
        let (keeper, arguments) = self.kept.as_ref().expect("a service whose descriptors are kept");
        let command = keeper.command(&program("fdmapd")?, arguments)?;
        *self.running() = Running::start(command, &self.folder)?;
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its sockets.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::in_runtime_dir(&self.folder)
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.running().child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        read(self.folder.join("log")).unwrap_or_default()
    }

    /// A client of it.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub async fn client(&self) -> HarnessResult<Client> {
        Ok(Client::connect(&self.endpoint(), Timeouts::default()).await?)
    }

    /// A fdpass session with it.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub fn fdpass(&self) -> HarnessResult<FdpassClient> {
        Ok(FdpassClient::connect(&self.endpoint(), Timeouts::default())?)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.pid()) {
            // It may have ended.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Stops it, and waits until all of it stands still.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        if let Ok(pid) = i32::try_from(self.pid()) {
            // Returns when the last thread has stopped. The exit status of an ended service stays.
            let _ = waitid(
                Id::Pid(Pid::from_raw(pid)),
                WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT,
            );
        }
    }

    /// Waits until it ends, at most so long. `false` if it does not.
    pub fn ended(&mut self, within: Duration) -> bool {
        let started = Instant::now();
        while started.elapsed() < within {
            if matches!(self.running().child.try_wait(), Ok(Some(_))) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // One that was stopped takes no other signal.
        self.signal(Signal::SIGCONT);
        self.signal(Signal::SIGTERM);
        if !self.ended(Duration::from_secs(5)) {
            let mut running = self.running();
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
        if crate::harness::is_failing() {
            eprintln!("the log of the service:\n{}", self.log());
        }
    }
}

impl Running {
    /// Runs a command with the folder as an argument, and waits until it serves.
    fn start(mut command: Command, folder: &Path) -> HarnessResult<Self> {
        let path = folder.join("log");
        let log = File::options().create(true).append(true).open(&path);
        let log = log.map_err(|error| HarnessError::File { what: "making", path, error })?;
        command.arg("--runtime-dir").arg(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // ^C is for the process that started it.
        command.process_group(0);
        let shown = format!("{command:?}");
        let child = command
            .spawn()
            .map_err(|error| HarnessError::Program { program: shown.clone(), said: error.to_string() })?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let mut running = Self { child, _process: process };
        let started = Instant::now();
        while FdpassClient::connect(&Endpoint::in_runtime_dir(folder), Timeouts::default()).is_err() {
            let ended = running.child.try_wait().ok().flatten();
            if ended.is_some() || started.elapsed() > START_TIMEOUT {
                let said = read(folder.join("log")).unwrap_or_default();
                return Err(HarnessError::Program { program: shown, said });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(running)
    }
}

/// A new folder for a service.
fn own_folder() -> HarnessResult<(PathBuf, CleanupGuard)> {
    let (folder, guard) = crate::host::temp_dir("fdmap-service-")?;
    // Other users come here too: sockets have modes of their own.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    let opened = std::fs::set_permissions(&folder, open);
    opened.map_err(|error| HarnessError::File {
        what: "setting the mode of",
        path: folder.clone(),
        error,
    })?;
    Ok((folder, guard))
}

/// The path of a program of this project, built as this one was.
///
/// # Errors
/// [`HarnessError::Program`] if it cannot be built.
pub fn program(name: &str) -> HarnessResult<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = BUILT.get_or_init(|| build().map_err(|error| fdmap_proto::error_chain(&error)));
    match folder {
        Ok(folder) => Ok(folder.join(name)),
        Err(said) => Err(HarnessError::Program { program: "cargo build".to_owned(), said: said.clone() }),
    }
}

/// Builds the programs into the directory of this one, unless the caller has (`FDMAP_PROGRAMS_ARE_BUILT`).
fn build() -> HarnessResult<PathBuf> {
    let failed = |error| HarnessError::File { what: "finding", path: PathBuf::from("/proc/self/exe"), error };
    let own = std::env::current_exe().map_err(failed)?;
    // Tests are in target/PROFILE/deps, programs one above.
    let mut folder = own.parent().unwrap_or(Path::new("/")).to_owned();
    if folder.ends_with("deps") {
        folder.pop();
    }
    if std::env::var_os("FDMAP_PROGRAMS_ARE_BUILT").is_none() {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let release = folder.ends_with("release");
        // All targets of the whole workspace, as for tests: fewer would have other features, and all be built again.
        let mut arguments = vec!["build", "--quiet", "--workspace", "--all-targets"];
        if release {
            arguments.push("--release");
        }
        crate::host::output(&cargo, &arguments)?;
    }
    Ok(folder)
}

/// A file by its name.
#[must_use]
pub fn named(name: &str) -> FileName {
    FileName::Name(name.to_owned())
}

/// `fdmap` as another user, of the group of the same number, against a service.
///
/// # Errors
/// [`HarnessError`]
pub fn fdmap_as(service: &Service, user: u32) -> HarnessResult<Command> {
    // Where it was built, others may not come.
    let copy = copied(service.folder(), "fdmap")?;
    let mut command = Command::new(&copy);
    command.arg("--runtime-dir").arg(service.folder()).uid(user).gid(user);
    Ok(command)
}

/// A program of this project, copied to a folder where other users may come.
///
/// # Errors
/// [`HarnessError`]
pub fn copied(folder: &Path, name: &str) -> HarnessResult<PathBuf> {
    let copy = folder.join(name);
    if !copy.exists() {
        std::fs::copy(program(name)?, &copy).map_err(|error| HarnessError::File {
            what: "copying a program to",
            path: copy.clone(),
            error,
        })?;
    }
    Ok(copy)
}
