//! A systemd that runs the unit file of this project: the first process of its own pid namespace, with its own units and cgroups.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::pidfd::all_processes;

use crate::built_programs::program;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::host::{SERVICE_START_TIMEOUT, children_of, root, temp_dir};
use crate::host_io::{read, write};
use crate::{HarnessError, HarnessResult};

const SYSTEMD: &str = "/lib/systemd/systemd";
/// Hierarchies of cgroups that systemd uses: version 1, then version 2.
const HIERARCHIES: [&str; 2] = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup"];
const TARGET: &str = "fdmap-test.target";

/// A running systemd, killed on drop with all processes of its pid namespace.
#[derive(Debug)]
pub struct Systemd {
    unshare: Child,
    /// The first process of the pid namespace.
    pid: u32,
    folder: PathBuf,
    /// Dropped after the processes have ended, in this order.
    _process: CleanupGuard,
    _cgroup: CleanupGuard,
    _folder: CleanupGuard,
}

impl Systemd {
    /// Starts systemd with the unit `fdmapd.service`, and waits until the unit is active.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without root, systemd, or a hierarchy of cgroups that it can use.
    pub fn start() -> HarnessResult<Self> {
        root()?;
        if !Path::new(SYSTEMD).exists() {
            return Err(HarnessError::Missing(SYSTEMD.to_owned()));
        }
        let (folder, removed) = temp_dir("fdmap-systemd-")?;
        let (units, programs) = (folder.join("units"), folder.join("programs"));
        write_units(&units)?;
        file("creating", &programs, std::fs::create_dir)?;
        let (built, fdmapd) = (program("fdmapd")?, programs.join("fdmapd"));
        file("copying", &fdmapd, |to| std::fs::copy(built, to))?;
        file("setting the mode of", &fdmapd, |path| {
            std::fs::set_permissions(path, Permissions::from_mode(0o755))
        })?;
        let (cgroup, cgroup_guard) = own_cgroup()?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/systemd.sh");
        let log_path = folder.join("log");
        let log = file("creating", &log_path, std::fs::File::create)?;
        // The shell enters the cgroup first, which is the root of those that systemd sees.
        let entered = "echo $$ > \"$1/cgroup.procs\"; shift; exec \"$@\"";
        let mut command = Command::new("/bin/sh");
        command.args(["-c", entered, "sh"]).arg(&cgroup);
        command.args([
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--cgroup",
            "--uts",
            "--ipc",
            "/bin/sh",
        ]);
        command.arg(script).args([&units, &programs, &log_path]).arg(TARGET).process_group(0);
        let errors =
            log.try_clone().map_err(|error| failed("duplicating the descriptor of", &folder, error))?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let unshare = command.spawn().map_err(|error| failed("starting", Path::new("unshare"), error))?;
        let process = CleanupGuard::new(Cleanup::process(unshare.id()))?;
        let mut systemd =
            Self { unshare, pid: 0, folder, _process: process, _cgroup: cgroup_guard, _folder: removed };
        systemd.pid = systemd
            .until("systemd has no process", || children_of(systemd.unshare.id()).ok()?.first().copied())?;
        systemd.wait_until_active()?;
        Ok(systemd)
    }

    /// Waits until the unit is active.
    ///
    /// # Errors
    /// [`HarnessError::Program`] with the log if it is not in time.
    pub fn wait_until_active(&self) -> HarnessResult<()> {
        self.until("fdmapd.service is not active", || {
            let output = self.command("systemctl").args(["is-active", "fdmapd"]).output().ok()?;
            (output.stdout == b"active\n").then_some(())
        })
    }

    fn until<T>(&self, what: &str, condition: impl Fn() -> Option<T>) -> HarnessResult<T> {
        let begun = Instant::now();
        loop {
            if let Some(found) = condition() {
                return Ok(found);
            }
            if begun.elapsed() > SERVICE_START_TIMEOUT {
                let message = format!("{what}: {}", self.log());
                return Err(HarnessError::Program { program: SYSTEMD.to_owned(), message });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A command that runs a program in the namespaces of systemd.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.pid.to_string()).args(["--mount", "--pid", "--"]).arg(program);
        command
    }

    /// Runs `systemctl`.
    ///
    /// # Errors
    /// [`HarnessError::Program`] if it fails.
    pub fn systemctl(&self, arguments: &[&str]) -> HarnessResult<String> {
        let output = self.command("systemctl").args(arguments).output();
        let output = output.map_err(|error| failed("starting", Path::new("nsenter"), error))?;
        text_of(&format!("systemctl {}", arguments.join(" ")), output)
    }

    /// The value of a property of the unit.
    ///
    /// # Errors
    /// [`HarnessError::Program`]
    pub fn property(&self, name: &str) -> HarnessResult<String> {
        Ok(self.systemctl(&["show", "fdmapd", "--value", "--property", name])?.trim().to_owned())
    }

    /// The processes of its pid namespace whose names begin with `prefix`, in ascending order.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`]
    pub fn processes_named(&self, prefix: &str) -> HarnessResult<Vec<u32>> {
        let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = namespace(self.pid);
        let mut found = all_processes()?;
        found.retain(|pid| {
            let is_named = read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(prefix));
            is_named && namespace(*pid) == own
        });
        Ok(found)
    }

    /// What systemd and the service logged.
    #[must_use]
    pub fn log(&self) -> String {
        let of_service = format!("/proc/{}/root/run/fdmapd.log", self.pid);
        read(self.folder.join("log")).unwrap_or_default() + &read(of_service).unwrap_or_default()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Its end kills the first process of the pid namespace, and that all others.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// The standard output of a program that succeeded.
fn text_of(program: &str, output: Output) -> HarnessResult<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(HarnessError::Program { program: program.to_owned(), message: text(&output.stderr) })
    }
}

/// Writes the unit file as `make install` does, and a target that wants it and nothing else.
fn write_units(units: &Path) -> HarnessResult<()> {
    file("creating", units, std::fs::create_dir)?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/fdmapd.service.in");
    // Its default dependencies are units of the host.
    let unit = read(source)?
        .replace("@PREFIX@", "/usr/local")
        .replacen("[Unit]", "[Unit]\nDefaultDependencies=no", 1)
        .replacen("[Service]", "[Service]\nStandardError=append:/run/fdmapd.log", 1);
    write(units.join("fdmapd.service"), &unit)?;
    let target = "[Unit]\nDefaultDependencies=no\nWants=fdmapd.service\n";
    write(units.join(TARGET), target)
}

/// Makes a cgroup in which systemd makes others.
fn own_cgroup() -> HarnessResult<(PathBuf, CleanupGuard)> {
    let is_hierarchy = |path: &&&str| Path::new(path).join("cgroup.procs").exists();
    let Some(hierarchy) = HIERARCHIES.iter().find(is_hierarchy) else {
        return Err(HarnessError::Missing("a hierarchy of cgroups for systemd".to_owned()));
    };
    let path = Path::new(hierarchy).join(format!("fdmap-systemd-{}", std::process::id()));
    file("creating", &path, std::fs::create_dir)?;
    let guard = CleanupGuard::new(Cleanup::RemoveCgroup { path: path.clone(), home: hierarchy.into() })?;
    Ok((path, guard))
}

fn file<'a, T>(
    what: &'static str,
    path: &'a Path,
    operation: impl FnOnce(&'a Path) -> std::io::Result<T>,
) -> HarnessResult<T> {
    operation(path).map_err(|error| failed(what, path, error))
}

fn failed(what: &'static str, path: &Path, error: std::io::Error) -> HarnessError {
    HarnessError::File { what, path: path.to_owned(), error }
}
