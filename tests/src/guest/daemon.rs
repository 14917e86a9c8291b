//! A vhost-user device: qemu-storage-daemon, which maps the memory of the guest and reads a disk into it.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::disk::Disk;
use super::machine::Wrapper;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// How long the daemon may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A running daemon with one disk, killed on drop.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    _process: CleanupGuard,
    _folder: CleanupGuard,
}

impl Daemon {
    /// Starts the daemon through a wrapper.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(wrapper: &Wrapper, disk: &Disk) -> HarnessResult<Self> {
        let (folder, guard) = crate::host::temp_dir("fdmap-daemon-")?;
        let socket = folder.join("socket");
        let mut command = wrapper.command("qemu-storage-daemon");
        command.arg("--blockdev").arg(drive(disk.path()));
        let export = "type=vhost-user-blk,id=export,node-name=disk,writable=off,addr.type=unix,addr.path=";
        command.arg("--export").arg(format!("{export}{}", socket.display()));
        command.process_group(0).stdin(Stdio::null());
        let child = command.spawn().map_err(|error| super::machine::not_started(&command, &error))?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let mut daemon = Self { child, socket, _process: process, _folder: guard };
        let begun = Instant::now();
        while !daemon.socket.exists() {
            if begun.elapsed() > START_TIMEOUT || daemon.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Err(HarnessError::Program {
                    program: format!("{command:?}"),
                    message: "no socket".to_owned(),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The vhost-user socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bypasses the page cache, so that the disk itself writes to the memory of the guest.
fn drive(path: &Path) -> String {
    format!("driver=file,node-name=disk,filename={},read-only=on,aio=native,cache.direct=on", path.display())
}
