//! Processes that map a file and know nothing of fdmap: `tests/programs/mapper.c` and `lock_holder.c`.

use std::os::fd::{AsFd, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::cleanup::CleanupGuard;
use crate::host;
use crate::line_process::LineProcess;
use crate::programs::Compiled;
use crate::{HarnessError, HarnessResult};

/// A process that maps a file, or the parent of such processes. Killed on drop, with its children.
#[derive(Debug)]
pub struct MapperProcess {
    /// The process that maps the file; with [`MapperKind::Many`] and [`MapperKind::Churn`] the parent of those that do.
    pub pid: u32,
    _process: LineProcess,
}

/// How a file is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapperKind {
    /// By a process.
    Plain,
    /// By a process whose first thread has ended.
    LeaderEnded,
    /// By a process of another pid and mount namespace.
    Namespaces,
    /// By this number of processes.
    Many(u32),
    /// By this number of processes, which map and unmap pages all the time.
    Churn(u32),
}

/// The path by which another process opens the file of `fd`.
#[must_use]
pub fn path_of(fd: impl AsFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_fd().as_raw_fd()).into()
}

/// The compiled program.
#[derive(Debug)]
pub struct MapperProgram(Compiled);

impl MapperProgram {
    /// Compiles the program.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with the messages of the compiler.
    pub fn compile() -> HarnessResult<Self> {
        Compiled::new("mapper").map(Self)
    }

    /// Maps two pages of the file at `path`, and waits until they are mapped.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn map(&self, path: &Path, how: MapperKind) -> HarnessResult<MapperProcess> {
        let mut command = Command::new(self.0.path());
        command.arg(path);
        match how {
            MapperKind::Plain => command.arg("map"),
            MapperKind::LeaderEnded => command.arg("leader"),
            MapperKind::Namespaces => command.arg("namespaces"),
            MapperKind::Many(count) => command.args(["many", &count.to_string()]),
            MapperKind::Churn(count) => command.args(["churn", &count.to_string()]),
        };
        MapperProcess::start(command)
    }

    /// Mounts a tmpfs on the directory `at`, in a mount namespace of its own, and maps a file of it through an overlay file
    /// system. Also returns the path of the file itself.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn map_through_overlay(&self, at: &Path) -> HarnessResult<(MapperProcess, PathBuf)> {
        host::root()?;
        let mut command = Command::new(self.0.path());
        command.arg(at).arg("overlay");
        let mapper = MapperProcess::start(command)?;
        let path = format!("/proc/{}/root{}/u/f", mapper.pid, at.display()).into();
        Ok((mapper, path))
    }
}

impl MapperProcess {
    fn start(command: Command) -> HarnessResult<Self> {
        let (pid, process) = start(command)?;
        Ok(Self { pid, _process: process })
    }
}

/// Starts a program that prints `ok PID`.
fn start(command: Command) -> HarnessResult<(u32, LineProcess)> {
    let mut process = LineProcess::start(command, None)?;
    let line = process.receive()?;
    let pid = line.strip_prefix("ok ").and_then(|pid| pid.parse().ok());
    Ok((pid.ok_or(HarnessError::Agent(line))?, process))
}

/// A process that maps a file, and can hold the `mmap_lock` of its address space for writing, or the lock of the file's inode. Ended
/// on drop.
#[derive(Debug)]
pub struct LockHolder {
    pub pid: u32,
    /// The FUSE server that keeps the process waiting.
    server: LineProcess,
    _program: Arc<Compiled>,
    /// The mount point, removed last.
    _folder: CleanupGuard,
}

impl LockHolder {
    /// Waits until the process maps two pages of the file at `path` and holds the lock.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn start(path: &Path) -> HarnessResult<Self> {
        let mut holder = Self::prepare(path)?;
        holder.hold()?;
        Ok(holder)
    }

    /// Waits until the process maps two pages of the file at `path`. It does not hold the lock yet.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without root or FUSE; [`HarnessError`]
    pub fn prepare(path: &Path) -> HarnessResult<Self> {
        Self::prepare_as(path, 0)
    }

    /// The same, with a process of user `uid`.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_as(path: &Path, uid: u32) -> HarnessResult<Self> {
        Self::prepare_by(&Self::compile()?, path, uid)
    }

    /// Compiles the program, for several processes.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn compile() -> HarnessResult<Arc<Compiled>> {
        host::root()?;
        if std::fs::File::open("/dev/fuse").is_err() {
            return Err(HarnessError::Missing("FUSE".to_owned()));
        }
        Compiled::new("lock_holder").map(Arc::new)
    }

    /// The same as [`Self::prepare_as`] with a compiled program.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn prepare_by(program: &Arc<Compiled>, path: &Path, uid: u32) -> HarnessResult<Self> {
        let (folder, guard) = host::temp_dir("fdmap-fuse-")?;
        let mut command = Command::new(program.path());
        command.arg(path).arg(&folder).arg(uid.to_string());
        let (pid, server) = start(command)?;
        Ok(Self { pid, server, _program: Arc::clone(program), _folder: guard })
    }

    /// Waits until the process holds the lock.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn hold(&mut self) -> HarnessResult<()> {
        self.begin("hold")
    }

    /// Waits until the process holds the lock of the file's inode (`i_rwsem`).
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn hold_inode(&mut self) -> HarnessResult<()> {
        self.begin("hold-inode")
    }

    fn begin(&mut self, line: &str) -> HarnessResult<()> {
        self.server.send(line)?;
        while !self.holds() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// True while a thread of the process waits with a lock.
    #[must_use]
    pub fn holds(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        stats.into_iter().any(|stat| stat.contains(") D "))
    }

    /// Returns when the process no longer holds a lock.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn release(&mut self) -> HarnessResult<()> {
        self.command("release")
    }

    /// The process writes the first byte of a page.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn write(&mut self, page: u64, value: u8) -> HarnessResult<()> {
        self.command(&format!("write {page} {value}"))
    }

    /// The process creates userfaultfds. While it holds its `mmap_lock`, the last close of one does not return.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn create_userfaultfds(&mut self, count: u32) -> HarnessResult<()> {
        self.command(&format!("userfaultfds {count}"))
    }

    /// The process connects once for each userfaultfd. `kind`: `stream` or `seqpacket`.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn connect(&mut self, kind: &str, path: &Path) -> HarnessResult<()> {
        self.command(&format!("connect {kind} {}", path.display()))
    }

    /// The process sends each userfaultfd by its connection, and closes it.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn pass(&mut self) -> HarnessResult<()> {
        self.command("pass")
    }

    /// The same, each at once after its connection was made.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn connect_and_pass(&mut self, kind: &str, path: &Path) -> HarnessResult<()> {
        self.command(&format!("connect-and-pass {kind} {}", path.display()))
    }

    fn command(&mut self, line: &str) -> HarnessResult<()> {
        self.server.send(line)?;
        match self.server.receive()? {
            line if line == "ok" => Ok(()),
            line => Err(HarnessError::Agent(line)),
        }
    }
}
