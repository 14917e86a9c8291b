//! Who starts a service and keeps its descriptors while it is away, as systemd does: the other end of the FD store. Unlike
//! systemd it lets go of nothing by itself, and does not look whether it has the same descriptor already.

use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fdmap_sys::error::CallContext as _;
use fdmap_sys::fd::dup2_inheritable;
use fdmap_sys::scm;
use nix::fcntl::{FcntlArg, fcntl};

use crate::{HarnessError, HarnessResult};

/// Where descriptors begin that are passed on: `SD_LISTEN_FDS_START` of sd-daemon.h.
const FIRST: i32 = 3;
/// How many a service may have kept, as it is told.
const ROOM: usize = 4096;
/// Words of ours to the thread; a service says other things.
const HEARD: &[u8] = b"TESTS=heard";
const STOP: &[u8] = b"TESTS=stop";

/// What is kept, in the order in which it came.
type Kept = Vec<(String, OwnedFd)>;

/// Keeps descriptors.
#[derive(Debug)]
pub struct FdStoreParent {
    path: PathBuf,
    own: UnixDatagram,
    kept: Arc<Mutex<Kept>>,
    heard: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FdStoreParent {
    /// Listens in a folder.
    ///
    /// # Errors
    /// [`HarnessError::File`] if there can be no socket.
    pub fn start(folder: &Path) -> HarnessResult<Self> {
        let path = folder.join("notify");
        let failed = |error| HarnessError::File { what: "listening at", path: path.clone(), error };
        let socket = UnixDatagram::bind(&path).map_err(failed)?;
        let own = UnixDatagram::unbound().map_err(failed)?;
        let kept = Arc::new(Mutex::new(Kept::new()));
        let (sender, heard) = channel();
        let its = Arc::clone(&kept);
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 4096];
            // A service of ours sends nothing that is empty.
            while let Ok(Some(packet)) = scm::receive(socket.as_fd(), &mut buffer) {
                match &buffer[..packet.len] {
                    HEARD => {
                        // Whoever wanted to know may have gone.
                        let _ = sender.send(());
                    }
                    STOP => return,
                    message => hear(&mut lock(&its), &String::from_utf8_lossy(message), packet.descriptors),
                }
            }
        });
        Ok(Self { path, own, kept, heard: Mutex::new(heard), thread: Some(thread) })
    }

    /// A service that is given all that is kept. It must run before this is called again.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`] if there are not as many descriptors.
    pub fn command(&self, program: &Path, arguments: &[String]) -> HarnessResult<Command> {
        let kept = lock(&self.kept);
        // $LISTEN_PID is the service's own, which nobody knows before it runs.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "LISTEN_PID=$$; export LISTEN_PID; exec \"$@\"", "sh"]);
        command
            .arg(program)
            .args(arguments)
            .env("NOTIFY_SOCKET", &self.path)
            .env("FDSTORE", ROOM.to_string());
        let end = FIRST + i32::try_from(kept.len()).unwrap_or(i32::MAX);
        let names: Vec<_> = kept.iter().map(|(name, _)| name.as_str()).collect();
        if !names.is_empty() {
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        // Out of the way of one another: above where they are to be.
        let above = |(_, fd): &(String, OwnedFd)| {
            let call = || format!("fcntl(F_DUPFD_CLOEXEC) of descriptor {} from {end} on", fd.as_raw_fd());
            let raw = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(end)).call(call)?;
            // SAFETY: fcntl just made this descriptor and nobody else knows of it.
            Ok(unsafe { OwnedFd::from_raw_fd(raw) })
        };
        let mut passed: Vec<OwnedFd> = kept.iter().map(above).collect::<HarnessResult<_>>()?;
        let place = move || {
            for (fd, number) in std::mem::take(&mut passed).into_iter().zip(FIRST..) {
                dup2_inheritable(fd, number).map_err(|error| std::io::Error::from(error.errno))?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec only dup2 and close are called, and memory is freed.
        unsafe { command.pre_exec(place) };
        Ok(command)
    }

    /// Waits until all that a service has said is heard: it must have ended.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if nobody listens.
    pub fn settle(&self) -> HarnessResult<()> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.send_to(HEARD, &self.path).map_err(|error| HarnessError::Agent(error.to_string()))?;
        heard.recv_timeout(Duration::from_secs(10)).map_err(|error| HarnessError::Agent(error.to_string()))
    }

    /// The names of what is kept.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        lock(&self.kept).iter().map(|(name, _)| name.clone()).collect()
    }

    /// Keeps something else, or nothing, by a name that is known.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] if nothing is kept by it.
    pub fn replace(&self, name: &str, by: Option<OwnedFd>) -> HarnessResult<OwnedFd> {
        let mut kept = lock(&self.kept);
        let at = kept.iter().position(|(known, _)| known == name);
        let at = at.ok_or_else(|| HarnessError::Missing(format!("a descriptor that is kept as {name}")))?;
        Ok(match by {
            Some(fd) => std::mem::replace(&mut kept[at].1, fd),
            None => kept.remove(at).1,
        })
    }

    /// Keeps something by a name of the caller's, as if the service had sent it.
    pub fn put(&self, name: &str, fd: OwnedFd) {
        lock(&self.kept).push((name.to_owned(), fd));
    }
}

impl Drop for FdStoreParent {
    fn drop(&mut self) {
        let told = self.own.send_to(STOP, &self.path).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| told) {
            // If it panicked, that has been said.
            let _ = thread.join();
        }
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does what a message says, which has a line for each variable.
fn hear(kept: &mut Kept, message: &str, descriptors: Vec<OwnedFd>) {
    let value = |name: &str| message.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let name = value("FDNAME").unwrap_or("stored");
    if value("FDSTORE") == Some("1") {
        kept.extend(descriptors.into_iter().map(|fd| (name.to_owned(), fd)));
    }
    if value("FDSTOREREMOVE") == Some("1") {
        kept.retain(|(known, _)| known != name);
    }
}
