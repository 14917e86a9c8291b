//! The unix sockets of the service: creation, permissions, and the locks that keep a second service from taking them.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fdmap_sys::{fd, scm};
use nix::unistd::Gid;
use tokio::net::UnixListener;

use crate::config::Config;

/// Mode of the sockets: owner and group connect.
const SOCKET_MODE: u32 = 0o660;
/// Mode of folders that the service creates. Every user passes them; the sockets' mode decides who connects.
const FOLDER_MODE: u32 = 0o755;

/// A socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// An operation on a socket, its lock or its folder failed.
    #[error("{operation} {path}")]
    Path {
        operation: &'static str,
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("another fdmapd holds the lock of {0}")]
    Running(PathBuf),
    #[error("group {0:?} not found")]
    Group(String),
}

/// The listening unix sockets.
pub(crate) struct Sockets {
    pub(crate) grpc: UnixListener,
    pub(crate) fdpass: UnixListener,
    /// Connections carry descriptors: the kernel cannot refuse them.
    pub(crate) pass_descriptors: bool,
    /// Held while the service runs.
    pub(crate) locks: Vec<SocketLock>,
}

impl Sockets {
    pub(crate) fn bind(config: &Config) -> Result<Self, SocketError> {
        let (grpc_path, fdpass_path) = (config.socket_path(), config.fdpass_path());
        let group = config.group.as_deref().map(group_id).transpose()?;
        let locks = vec![SocketLock::acquire(grpc_path.clone())?, SocketLock::acquire(fdpass_path.clone())?];
        let grpc = UnixListener::bind(&grpc_path).map_err(failed("listening on", &grpc_path))?;
        let grpc_refuses = refuse_descriptors(&grpc);
        let fdpass = scm::listen_at(&fdpass_path)
            .map_err(io::Error::from)
            .and_then(|socket| UnixListener::from_std(socket.into()))
            .map_err(failed("listening on", &fdpass_path))?;
        // A receiver allows them for each session.
        let pass_descriptors = !refuse_descriptors(&fdpass) || !grpc_refuses;
        for path in [&grpc_path, &fdpass_path] {
            let operation = "setting the group and mode of";
            std::os::unix::fs::chown(path, None, group.map(Gid::as_raw)).map_err(failed(operation, path))?;
            let mode = fs::Permissions::from_mode(SOCKET_MODE);
            fs::set_permissions(path, mode).map_err(failed(operation, path))?;
        }
        Ok(Self { grpc, fdpass, pass_descriptors, locks })
    }
}

/// Connections to `listener` carry no descriptors: the close of one may never return. False before Linux 6.16, where they do.
fn refuse_descriptors(listener: &UnixListener) -> bool {
    scm::pass_descriptors(listener, false).is_ok()
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SocketError + use<> {
    let path = path.to_owned();
    move |error| SocketError::Path { operation, path, error }
}

/// Resolves a group name or number.
fn group_id(group: &str) -> Result<Gid, SocketError> {
    if let Ok(number) = group.parse() {
        return Ok(Gid::from_raw(number));
    }
    lookup(group).ok_or_else(|| SocketError::Group(group.to_owned()))
}

#[cfg(not(target_feature = "crt-static"))]
fn lookup(group: &str) -> Option<Gid> {
    nix::unistd::Group::from_name(group).ok().flatten().map(|found| found.gid)
}

/// getgrnam(3) of a static program loads shared libraries of the host's glibc (NSS), and crashes if they are of another version.
#[cfg(target_feature = "crt-static")]
fn lookup(group: &str) -> Option<Gid> {
    find_group(&fs::read_to_string("/etc/group").ok()?, group)
}

/// The id of a group in the text of `/etc/group`. Pure.
#[cfg(any(test, target_feature = "crt-static"))]
fn find_group(text: &str, group: &str) -> Option<Gid> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok().map(Gid::from_raw)).flatten()
    })
}

/// The exclusive right to a socket path: a record lock (`F_SETLK`) on PATH.lock. The holder knows that a socket at the path is stale,
/// left by a process that was killed. Unlike an flock(2), no child inherits the lock, and it ends before the kernel closes what
/// else the process has open, which may take forever.
pub(crate) struct SocketLock {
    path: PathBuf,
    /// The only descriptor of the file in this process: the close of any one would end the lock.
    _lock: fs::File,
}

impl SocketLock {
    /// Locks the path and removes a stale socket.
    fn acquire(path: PathBuf) -> Result<Self, SocketError> {
        create_parent_folders(&path)?;
        let lock_path = path.with_added_extension("lock");
        let mut options = fs::OpenOptions::new();
        let file = options.create(true).write(true).truncate(false).open(&lock_path);
        let file = file.map_err(failed("opening lock", &lock_path))?;
        if !fd::try_lock(&file).map_err(io::Error::from).map_err(failed("locking", &lock_path))? {
            return Err(SocketError::Running(path));
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing stale socket", &path)(error));
            }
            _ => {}
        }
        Ok(Self { path, _lock: file })
    }
}

impl Drop for SocketLock {
    fn drop(&mut self) {
        // Keep the lock file: processes that open it later must lock the same inode.
        let _ = fs::remove_file(&self.path);
    }
}

/// Creates missing folders, from the top, with [`FOLDER_MODE`] in spite of the umask.
fn create_parent_folders(path: &Path) -> Result<(), SocketError> {
    let Some(parent) = path.parent().filter(|folder| !folder.exists()) else { return Ok(()) };
    let mut missing: Vec<_> = parent.ancestors().take_while(|folder| !folder.exists()).collect();
    missing.retain(|folder| !folder.as_os_str().is_empty());
    for folder in missing.into_iter().rev() {
        fs::create_dir(folder).map_err(failed("creating folder", folder))?;
        let mode = fs::Permissions::from_mode(FOLDER_MODE);
        fs::set_permissions(folder, mode).map_err(failed("setting the mode of", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_found_by_its_whole_name() {
        let text = "root:x:0:\nkvm:x:108:a,b\nbroken\nkvmx:x:nine:\n";
        assert_eq!(find_group(text, "kvm"), Some(Gid::from_raw(108)));
        for missing in ["kv", "kvmx", "broken", "a", ""] {
            assert_eq!(find_group(text, missing), None, "{missing}");
        }
    }
}
