//! A guest that runs programs of the host: an initramfs with the programs and their shared libraries, at the paths that they
//! have on the host, a cgroup of version 2 and zram. `programs/guest_system.c` is its init.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use super::initramfs::Archive;
use super::kernel::{CPU, KernelFiles, read};
use super::machine::not_started;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::host::{output, temp_dir};
use crate::{HarnessError, HarnessResult};

/// Far longer than the programs of any test take.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

const MEMORY_MIB: u64 = 1024;

/// Modules for swap. zram of Linux 6.1 loads its compressor by name.
const MODULES: [&str; 2] = ["lzo-rle", "zram"];

/// A guest system and the program that it runs.
#[derive(Debug)]
pub struct System<'a> {
    /// The kernel's version, such as `6.1`.
    pub kernel: &'a str,
    /// Programs that the guest contains. Those of the workspace are stripped.
    pub programs: &'a [PathBuf],
    /// Environment of the program that runs, `NAME=VALUE`.
    pub environment: &'a [String],
    /// The path of the program that runs, which must be one of `programs`, and its arguments.
    pub command: &'a [String],
}

impl System<'_> {
    /// Boots the guest and runs the program. Returns its exit code, or 128 and its signal, and its output.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without QEMU or the kernel; [`HarnessError::Agent`] with the output and the end of the kernel's
    /// log if the guest does not end by itself.
    pub fn run(&self) -> HarnessResult<(i32, String)> {
        let (folder, _guard) = temp_dir("fdmap-system-")?;
        let kernel = KernelFiles::find(self.kernel)?;
        let initramfs = folder.join("initramfs");
        let written = fs::write(&initramfs, self.archive(&kernel, &folder)?);
        written.map_err(|error| HarnessError::File { what: "writing", path: initramfs.clone(), error })?;
        let console = folder.join("console");
        let mut command = machine(&kernel.image, &initramfs, &console);
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| not_started(&command, &error))?;
        let _process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let text = output_of(&mut child);
        let status = text.as_ref().ok().and_then(|text| {
            text.lines().rev().find_map(|line| line.trim().strip_prefix("status ")?.parse().ok())
        });
        let text = text.unwrap_or_else(|reason| reason);
        status.map(|status| (status, text.clone())).ok_or_else(|| {
            let log = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
            let lines: Vec<_> = log.lines().collect();
            let log = lines[lines.len().saturating_sub(30)..].join("\n");
            HarnessError::Agent(format!("{text}\nthe end of the log of Linux {}:\n{log}", self.kernel))
        })
    }

    fn archive(&self, kernel: &KernelFiles, folder: &Path) -> HarnessResult<Vec<u8>> {
        let mut files = Files::default();
        for name in ["dev", "proc", "sys", "modules"] {
            files.folder(Path::new(name));
        }
        files.add(Path::new("/init"), &read(&init(folder)?)?);
        let lines: Vec<_> = self.environment.iter().chain(self.command).map(String::as_str).collect();
        files.add(Path::new("/command"), format!("{}\n", lines.join("\n")).as_bytes());
        for path in self.programs {
            let stripped = folder.join("stripped");
            output("strip", &["-o", &stripped.to_string_lossy(), &path.to_string_lossy()])?;
            files.add(path, &read(&stripped)?);
            // Lines such as "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f...)".
            let needed = output("ldd", &[&path.to_string_lossy()])?;
            for library in needed.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new) {
                files.add(library, &read(library)?);
            }
        }
        kernel.load_modules(&mut files.archive, &MODULES)?;
        Ok(files.archive.finish())
    }
}

/// An archive of files at absolute paths.
#[derive(Default)]
struct Files {
    archive: Archive,
    known: BTreeSet<PathBuf>,
}

impl Files {
    /// Adds a directory after its parents. `path` is relative to the root.
    fn folder(&mut self, path: &Path) {
        if path.as_os_str().is_empty() || !self.known.insert(path.to_owned()) {
            return;
        }
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        self.archive.folder(&path.to_string_lossy());
    }

    fn add(&mut self, path: &Path, content: &[u8]) {
        let path = path.strip_prefix("/").unwrap_or(path);
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        if self.known.insert(path.to_owned()) {
            self.archive.file(&path.to_string_lossy(), content);
        }
    }
}

/// Builds the init without shared libraries.
fn init(folder: &Path) -> HarnessResult<PathBuf> {
    let built = folder.join("init");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/guest_system.c");
    let (to, from) = (built.to_string_lossy(), source.to_string_lossy());
    output("cc", &["-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", &to, &from])?;
    Ok(built)
}

fn machine(image: &Path, initramfs: &Path, console: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-machine", "pc", "-accel", "tcg,tb-size=256", "-cpu", CPU]);
    command.args(["-m", &format!("{MEMORY_MIB}M")]);
    command.arg("-kernel").arg(image).arg("-initrd").arg(initramfs);
    let words = "console=ttyS0 quiet panic=-1 nosmp nokaslr mitigations=off no_timer_check";
    command.args(["-append", words, "-serial", &format!("file:{}", console.display()), "-serial", "stdio"]);
    command
}

/// All that the guest prints until it powers off; the reason and what it printed if it does not.
fn output_of(child: &mut Child) -> Result<String, String> {
    let Some(mut stdout) = child.stdout.take() else { return Err("QEMU has no standard output".to_owned()) };
    let (sender, receiver) = channel();
    // Reads in a thread, so that waiting can have a timeout. The thread ends with QEMU.
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.read_to_end(&mut bytes);
        let _ = sender.send(());
        String::from_utf8_lossy(&bytes).into_owned()
    });
    let ended = receiver.recv_timeout(RUN_TIMEOUT).is_ok();
    let _ = child.kill();
    let _ = child.wait();
    let text = reader.join().unwrap_or_default();
    if ended { Ok(text) } else { Err(format!("{text}\nthe guest did not end within {RUN_TIMEOUT:?}")) }
}
