//! A parent process that stores the descriptors of a service between its runs, like systemd's FD store. Unlike
//! systemd, it drops a descriptor only on request and does not detect duplicates.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use fdmap_sys::fd::{dup2_inheritable, duplicate_above};
use fdmap_sys::scm;

use crate::host::SERVICE_START_TIMEOUT;
use crate::{HarnessError, HarnessResult};

/// `SD_LISTEN_FDS_START` of sd-daemon.h
const FIRST_FD: i32 = 3;
/// `FileDescriptorStoreMax` of the unit file, as the service reads it from its environment.
const MAX_STORED_FDS: usize = 65536;
/// Messages from the test to the thread. A service never sends them.
const SYNC: &[u8] = b"TESTS=sync";
const STOP: &[u8] = b"TESTS=stop";

/// Stored descriptors by name, in the order of their arrival.
type StoredFds = Vec<(String, OwnedFd)>;

#[derive(Debug)]
pub struct FdStoreParent {
    path: PathBuf,
    own: UnixDatagram,
    stored: Arc<Mutex<StoredFds>>,
    synced: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FdStoreParent {
    /// Listens on a notify socket in a directory.
    ///
    /// # Errors
    /// [`HarnessError::File`] if the socket cannot be created.
    pub fn start(folder: &Path) -> HarnessResult<Self> {
        let path = folder.join("notify");
        let failed = |error| HarnessError::File { what: "listening at", path: path.clone(), error };
        let socket = UnixDatagram::bind(&path).map_err(failed)?;
        let own = UnixDatagram::unbound().map_err(failed)?;
        let stored = Arc::new(Mutex::new(StoredFds::new()));
        let (sender, synced) = channel();
        let thread_stored = Arc::clone(&stored);
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 4096];
            // fdmapd sends no empty message.
            while let Ok(Some(packet)) = scm::receive(socket.as_fd(), &mut buffer) {
                match &buffer[..packet.len] {
                    SYNC => {
                        // The receiver may have been dropped.
                        let _ = sender.send(());
                    }
                    STOP => return,
                    message => handle_message(
                        &mut lock(&thread_stored),
                        &String::from_utf8_lossy(message),
                        packet.descriptors,
                    ),
                }
            }
        });
        Ok(Self { path, own, stored, synced: Mutex::new(synced), thread: Some(thread) })
    }

    /// A command that starts the service with all stored descriptors. Spawn it before the next call.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`] if this process cannot open enough descriptors.
    pub fn command(&self, program: &Path, arguments: &[String]) -> HarnessResult<Command> {
        let stored = lock(&self.stored);
        // LISTEN_PID is the pid of the service, which the shell keeps.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "LISTEN_PID=$$; export LISTEN_PID; exec \"$@\"", "sh"]);
        command
            .arg(program)
            .args(arguments)
            .env("NOTIFY_SOCKET", &self.path)
            .env("FDSTORE", MAX_STORED_FDS.to_string());
        let end = FIRST_FD + i32::try_from(stored.len()).unwrap_or(i32::MAX);
        let names: Vec<_> = stored.iter().map(|(name, _)| name.as_str()).collect();
        if !names.is_empty() {
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        // Duplicates above the final numbers, so that dup2 overwrites none of them.
        let above = |(_, fd): &(String, OwnedFd)| Ok(duplicate_above(fd.as_fd(), end)?);
        let mut passed: Vec<OwnedFd> = stored.iter().map(above).collect::<HarnessResult<_>>()?;
        let place = move || {
            for (fd, number) in std::mem::take(&mut passed).into_iter().zip(FIRST_FD..) {
                dup2_inheritable(fd, number).map_err(|error| std::io::Error::from(error.errno))?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec, the closure only calls dup2 and close, and frees memory.
        unsafe { command.pre_exec(place) };
        Ok(command)
    }

    /// Waits until the thread has read all messages of a service, which must have ended.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the thread ended.
    pub fn settle(&self) -> HarnessResult<()> {
        let synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.send_to(SYNC, &self.path).map_err(|error| HarnessError::Agent(error.to_string()))?;
        synced.recv_timeout(SERVICE_START_TIMEOUT).map_err(|error| HarnessError::Agent(error.to_string()))
    }

    /// The names of the stored descriptors.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        lock(&self.stored).iter().map(|(name, _)| name.clone()).collect()
    }

    /// Replaces or removes a stored descriptor. Returns it.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] if the name is unknown.
    pub fn replace(&self, name: &str, by: Option<OwnedFd>) -> HarnessResult<OwnedFd> {
        let mut stored = lock(&self.stored);
        let at = stored.iter().position(|(known, _)| known == name);
        let at = at.ok_or_else(|| HarnessError::Missing(format!("a stored descriptor named {name}")))?;
        Ok(match by {
            Some(fd) => std::mem::replace(&mut stored[at].1, fd),
            None => stored.remove(at).1,
        })
    }

    /// Stores a descriptor as if the service had sent it.
    pub fn put(&self, name: &str, fd: OwnedFd) {
        lock(&self.stored).push((name.to_owned(), fd));
    }
}

impl Drop for FdStoreParent {
    fn drop(&mut self) {
        let sent = self.own.send_to(STOP, &self.path).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| sent) {
            // The panic handler has already printed a panic of the thread.
            let _ = thread.join();
        }
    }
}

fn lock(stored: &Mutex<StoredFds>) -> MutexGuard<'_, StoredFds> {
    stored.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles a message: one line per variable.
fn handle_message(stored: &mut StoredFds, message: &str, descriptors: Vec<OwnedFd>) {
    let value = |name: &str| message.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let name = value("FDNAME").unwrap_or("stored");
    if value("FDSTORE") == Some("1") {
        stored.extend(descriptors.into_iter().map(|fd| (name.to_owned(), fd)));
    }
    if value("FDSTOREREMOVE") == Some("1") {
        stored.retain(|(known, _)| known != name);
    }
}
