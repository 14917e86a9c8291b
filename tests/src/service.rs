//! A service for tests.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_client::proto::convert::FileName;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

pub use crate::built_programs::program;

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::fd_store_parent::FdStoreParent;
use crate::host::{SERVICE_START_TIMEOUT, read};
use crate::{HarnessError, HarnessResult};

/// A running `fdmapd` with its own runtime directory, killed on drop.
#[derive(Debug)]
pub struct Service {
    running: Mutex<Running>,
    folder: PathBuf,
    next: Next,
    /// The runtime directory, dropped last.
    _guard: CleanupGuard,
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Dropped after the child was waited for.
    _process: CleanupGuard,
}

/// How the next process is started.
#[derive(Debug)]
enum Next {
    /// As the last one.
    Command(Mutex<Command>),
    /// With the stored descriptors. A command would keep them open.
    Stored(Stored),
}

/// The FD store, and how the next process starts with it.
#[derive(Debug)]
struct Stored {
    fd_store: FdStoreParent,
    program: PathBuf,
    arguments: Vec<String>,
}

/// Lines of the log that a failed test prints. More of them would hide why it failed.
const MAX_SHOWN_LINES: usize = 40;

impl Service {
    /// Starts a service with additional arguments.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not start.
    pub fn start(arguments: &[&str]) -> HarnessResult<Self> {
        let mut command = Command::new(program("fdmapd")?);
        command.args(arguments);
        Self::start_command(command)
    }

    /// Starts a service by the given command as a user, who owns its directory. Adds `--runtime-dir`.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not start.
    pub fn start_as(user: u32, mut command: Command) -> HarnessResult<Self> {
        let (folder, guard) = own_folder()?;
        let owned = std::os::unix::fs::chown(&folder, Some(user), Some(user));
        owned.map_err(|error| HarnessError::File {
            what: "setting the owner of",
            path: folder.clone(),
            error,
        })?;
        command.uid(user).gid(user);
        Self::start_in(folder, guard, command)
    }

    /// Starts a service by the given command. Adds `--runtime-dir`.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not start.
    pub fn start_command(command: Command) -> HarnessResult<Self> {
        let (folder, guard) = own_folder()?;
        Self::start_in(folder, guard, command)
    }

    fn start_in(folder: PathBuf, guard: CleanupGuard, mut command: Command) -> HarnessResult<Self> {
        complete(&mut command, &folder)?;
        let running = Mutex::new(Running::start(&mut command, &folder)?);
        Ok(Self { running, folder, next: Next::Command(Mutex::new(command)), _guard: guard })
    }

    /// Starts a service with an FD store, so that it can be killed and restarted.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not start.
    pub fn start_with_fd_store(arguments: &[&str]) -> HarnessResult<Self> {
        Self::start_program_with_fd_store(program("fdmapd")?, arguments)
    }

    /// The same with a program that executes the service.
    ///
    /// # Errors
    /// As [`Self::start_with_fd_store`].
    pub fn start_program_with_fd_store(program: PathBuf, arguments: &[&str]) -> HarnessResult<Self> {
        let (folder, guard) = own_folder()?;
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let stored = Stored { fd_store: FdStoreParent::start(&folder)?, program, arguments };
        let running = Mutex::new(Running::start_stored(&stored, &folder)?);
        Ok(Self { running, folder, next: Next::Stored(stored), _guard: guard })
    }

    /// The FD store of the service.
    ///
    /// # Panics
    /// If the service was started without an FD store.
    #[must_use]
    pub fn fd_store(&self) -> &FdStoreParent {
        let Next::Stored(stored) = &self.next else { panic!("the service has no FD store") };
        &stored.fd_store
    }

    /// Kills the service as a crash would, and waits for its end.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn kill(&self) -> HarnessResult<()> {
        let mut running = self.running();
        let failed = |error: std::io::Error| HarnessError::Agent(format!("killing the service: {error}"));
        running.child.kill().and_then(|()| running.child.wait()).map_err(failed)?;
        match &self.next {
            Next::Command(_) => Ok(()),
            Next::Stored(stored) => stored.fd_store.settle(),
        }
    }

    /// Starts a new process of a service that has ended, with the same arguments and the stored descriptors.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with its log if it does not start.
    pub fn restart(&self) -> HarnessResult<()> {
        let next = match &self.next {
            Next::Command(command) => {
                Running::start(&mut command.lock().unwrap_or_else(PoisonError::into_inner), &self.folder)
            }
            Next::Stored(stored) => Running::start_stored(stored, &self.folder),
        };
        *self.running() = next?;
        Ok(())
    }

    /// The same, with other arguments from now on.
    ///
    /// # Errors
    /// As [`Self::restart`].
    ///
    /// # Panics
    /// If the service was started without an FD store.
    pub fn restart_with(&mut self, arguments: &[&str]) -> HarnessResult<()> {
        let Next::Stored(stored) = &mut self.next else { panic!("the service has no FD store") };
        stored.arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        self.restart()
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::in_runtime_dir(&self.folder)
    }

    /// The runtime directory.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.running().child.id()
    }

    /// The log of all processes of this service.
    #[must_use]
    pub fn log(&self) -> String {
        read(self.folder.join("log")).unwrap_or_default()
    }

    /// A new gRPC client.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub async fn client(&self) -> HarnessResult<Client> {
        Ok(Client::connect(&self.endpoint(), Timeouts::default()).await?)
    }

    /// A new fdpass session.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub fn fdpass(&self) -> HarnessResult<FdpassClient> {
        Ok(FdpassClient::connect(&self.endpoint(), Timeouts::default())?)
    }

    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.pid()) {
            // The service may have ended.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Sends SIGSTOP, and waits until all threads are stopped.
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

    /// Waits until the service ends. Returns false after `within`.
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
        // A stopped process handles no other signal.
        self.signal(Signal::SIGCONT);
        self.signal(Signal::SIGTERM);
        if !self.ended(Duration::from_secs(5)) {
            let mut running = self.running();
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
        if crate::harness::is_failing() {
            eprintln!("log of the service:\n{}", last_lines(&self.log(), MAX_SHOWN_LINES));
        }
    }
}

impl Running {
    fn start_stored(stored: &Stored, folder: &Path) -> HarnessResult<Self> {
        let mut command = stored.fd_store.command(&stored.program, &stored.arguments)?;
        complete(&mut command, folder)?;
        Self::start(&mut command, folder)
    }

    /// Runs a complete command, and waits until fdpass sessions are accepted.
    fn start(command: &mut Command, folder: &Path) -> HarnessResult<Self> {
        let shown = format!("{command:?}");
        let child = command
            .spawn()
            .map_err(|error| HarnessError::Program { program: shown.clone(), message: error.to_string() })?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let mut running = Self { child, _process: process };
        let started = Instant::now();
        while FdpassClient::connect(&Endpoint::in_runtime_dir(folder), Timeouts::default()).is_err() {
            let ended = running.child.try_wait().ok().flatten();
            if ended.is_some() || started.elapsed() > SERVICE_START_TIMEOUT {
                let message = read(folder.join("log")).unwrap_or_default();
                return Err(HarnessError::Program { program: shown, message });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(running)
    }
}

/// Adds the runtime directory and the log to a command.
fn complete(command: &mut Command, folder: &Path) -> HarnessResult<()> {
    let path = folder.join("log");
    let log = File::options().create(true).append(true).open(&path);
    let log = log.map_err(|error| HarnessError::File { what: "creating", path, error })?;
    command.arg("--runtime-dir").arg(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    // ^C interrupts only the test, which ends this process.
    command.process_group(0);
    Ok(())
}

/// A new runtime directory.
fn own_folder() -> HarnessResult<(PathBuf, CleanupGuard)> {
    let (folder, guard) = crate::host::temp_dir("fdmap-service-")?;
    // Other users connect too. The sockets have their own modes.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    let opened = std::fs::set_permissions(&folder, open);
    opened.map_err(|error| HarnessError::File {
        what: "setting the mode of",
        path: folder.clone(),
        error,
    })?;
    Ok((folder, guard))
}

/// The last lines of a log, and how many are left out.
fn last_lines(log: &str, max: usize) -> String {
    let lines: Vec<_> = log.lines().collect();
    let left_out = lines.len().saturating_sub(max);
    let shown = lines[left_out..].join("\n");
    if left_out == 0 { shown } else { format!("({left_out} earlier lines)\n{shown}") }
}

/// Refers to a file of the caller by `NAME`, or to one of any user by `USER/NAME`.
///
/// # Panics
/// If the text has another form.
#[must_use]
pub fn named(name: &str) -> FileName {
    fdmap_client::file_name::parse(name).expect("a file name")
}

/// `fdmap` as another user, whose group has the same number.
///
/// # Errors
/// [`HarnessError`]
pub fn fdmap_as(service: &Service, user: u32) -> HarnessResult<Command> {
    // Other users cannot enter the target directory.
    let copy = copied(service.folder(), "fdmap")?;
    let mut command = Command::new(&copy);
    command.arg("--runtime-dir").arg(service.folder()).uid(user).gid(user);
    Ok(command)
}

/// A program of the workspace, copied to a directory that other users can enter. Another process copies it: no process that a thread of
/// this one starts meanwhile has the copy open for writing, which execve(2) refuses with ETXTBSY.
///
/// # Errors
/// [`HarnessError`]
pub fn copied(folder: &Path, name: &str) -> HarnessResult<PathBuf> {
    static COPIES: AtomicU32 = AtomicU32::new(0);
    let copy = folder.join(name);
    if !copy.exists() {
        // Under another name until it is complete.
        let part = folder.join(format!("{name}.{}", COPIES.fetch_add(1, Ordering::Relaxed)));
        let status = Command::new("cp").arg("-p").arg(program(name)?).arg(&part).status();
        let copied = status.and_then(|status| match status.success() {
            true => std::fs::rename(&part, &copy),
            false => Err(io::Error::other(format!("cp: {status}"))),
        });
        copied.map_err(|error| HarnessError::File {
            what: "copying a program to",
            path: copy.clone(),
            error,
        })?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_lines_of_a_log_are_shown() {
        assert_eq!(last_lines("a\nb\n", 2), "a\nb");
        assert_eq!(last_lines("a\nb\nc\n", 2), "(1 earlier lines)\nb\nc");
    }
}
