//! A service of our own.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fdmap_client::proto::convert::FileName;
use fdmap_client::{Client, Handover, Place, Timeouts};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::read;
use crate::undo::{Guard, Undo};
use crate::{Bed, BedError};

/// A running `fdmapd` in a folder of its own, killed on drop.
#[derive(Debug)]
pub struct Service {
    child: Child,
    folder: PathBuf,
    /// Dropped after the child was waited for: its process, its folder.
    _guards: [Guard; 2],
}

/// How long the service may take to start.
const START: Duration = Duration::from_secs(20);

impl Service {
    /// Starts one with more arguments.
    ///
    /// # Errors
    /// [`BedError::Program`] with its log if it does not come up.
    pub fn start(arguments: &[&str]) -> Bed<Self> {
        let mut command = Command::new(program("fdmapd")?);
        command.args(arguments);
        Self::start_command(command)
    }

    /// Starts one by a command of the caller's: a wrapper, another user. `--runtime-dir` is added to it.
    ///
    /// # Errors
    /// [`BedError::Program`] with its log if it does not come up.
    pub fn start_command(mut command: Command) -> Bed<Self> {
        let (folder, guard) = crate::host::folder("fdmap-service-")?;
        let failed = |error| BedError::File { what: "making", path: folder.clone(), error };
        // Other users come here too: sockets have modes of their own.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&folder, open).map_err(failed)?;
        let log = File::create(folder.join("log")).map_err(failed)?;
        command.arg("--runtime-dir").arg(&folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // ^C is for the process that started it.
        command.process_group(0);
        let shown = format!("{command:?}");
        let child = command
            .spawn()
            .map_err(|error| BedError::Program { program: shown.clone(), said: error.to_string() })?;
        let process = Guard::new(Undo::process(child.id()))?;
        let mut service = Self { child, folder, _guards: [process, guard] };
        let started = Instant::now();
        while Handover::connect(&service.place(), Timeouts::default()).is_err() {
            let ended = service.child.try_wait().ok().flatten();
            if ended.is_some() || started.elapsed() > START {
                return Err(BedError::Program { program: shown, said: service.log() });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(service)
    }

    /// Its sockets.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::in_folder(&self.folder)
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        read(self.folder.join("log")).unwrap_or_default()
    }

    /// A client of it.
    ///
    /// # Errors
    /// [`BedError::Client`]
    pub async fn client(&self) -> Bed<Client> {
        Ok(Client::connect(&self.place(), Timeouts::default()).await?)
    }

    /// A hand-over session with it.
    ///
    /// # Errors
    /// [`BedError::Client`]
    pub fn handover(&self) -> Bed<Handover> {
        Ok(Handover::connect(&self.place(), Timeouts::default())?)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // It may have ended.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Waits until it ends, at most so long. `false` if it does not.
    pub fn ended(&mut self, within: Duration) -> bool {
        let started = Instant::now();
        while started.elapsed() < within {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
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
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("the log of the service:\n{}", self.log());
        }
    }
}

/// The path of a program of this project, built as this one was.
///
/// # Errors
/// [`BedError::Program`] if it cannot be built.
pub fn program(name: &str) -> Bed<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = BUILT.get_or_init(|| build().map_err(|error| crate::host::chain(&error)));
    match folder {
        Ok(folder) => Ok(folder.join(name)),
        Err(said) => Err(BedError::Program { program: "cargo build".to_owned(), said: said.clone() }),
    }
}

/// Builds the programs into the folder where this one is, unless whoever started us has.
fn build() -> Bed<PathBuf> {
    let failed = |error| BedError::File { what: "finding", path: PathBuf::from("/proc/self/exe"), error };
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
/// [`BedError`]
pub fn fdmap_as(service: &Service, user: u32) -> Bed<Command> {
    // Where it was built, others may not come.
    let copy = copied(service.folder(), "fdmap")?;
    let mut command = Command::new(&copy);
    command.arg("--runtime-dir").arg(service.folder()).uid(user).gid(user);
    Ok(command)
}

/// A program of this project, copied to a folder where other users may come.
///
/// # Errors
/// [`BedError`]
pub fn copied(folder: &Path, name: &str) -> Bed<PathBuf> {
    let copy = folder.join(name);
    if !copy.exists() {
        std::fs::copy(program(name)?, &copy).map_err(|error| BedError::File {
            what: "copying a program to",
            path: copy.clone(),
            error,
        })?;
    }
    Ok(copy)
}
