//! Listening unix sockets for one user, at paths of that user's choice.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, umask};

use super::CliError;

/// A listening socket. Its file is removed on drop.
#[derive(Debug)]
pub struct PrivateSocket {
    pub listener: UnixListener,
    pub path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl PrivateSocket {
    /// Creates a socket that only its owner and administrators can connect to. Takes the place of a stale one, which a killed process of the
    /// caller has left; any other file stays, and is an error.
    pub fn listen(path: PathBuf) -> Result<Self, CliError> {
        let failed = |error| CliError::Io { what: format!("listening on {}", path.display()), error };
        let listener = match bind(&path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && is_stale(&path).map_err(failed)? => {
                std::fs::remove_file(&path).map_err(failed)?;
                bind(&path)
            }
            bound => bound,
        };
        let listener = listener.map_err(failed)?;
        let file = identity(&path).map_err(failed)?;
        Ok(Self { listener, path, file })
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // It may have been removed, and the path may be that of another file now.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    // No other thread creates files yet.
    let before = umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    listener
}

/// True for a socket of the caller at which no process listens.
fn is_stale(path: &Path) -> io::Result<bool> {
    let metadata = std::fs::symlink_metadata(path)?;
    let is_own = metadata.uid() == nix::unistd::geteuid().as_raw();
    if !metadata.file_type().is_socket() || !is_own {
        return Ok(false);
    }
    Ok(UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_stale_sockets_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = PrivateSocket::listen(path.clone()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(PrivateSocket::listen(path.clone()).is_err(), "a process listens there");
        drop(socket);
        assert!(!path.exists());

        drop(UnixListener::bind(&path).unwrap());
        let socket = PrivateSocket::listen(path.clone()).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        // Another file at the path is not removed.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "data").unwrap();
        drop(socket);
        assert!(PrivateSocket::listen(path.clone()).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");

        let link = folder.path().join("link");
        drop(UnixListener::bind(folder.path().join("stale")).unwrap());
        std::os::unix::fs::symlink("stale", &link).unwrap();
        assert!(PrivateSocket::listen(link).is_err(), "a link is another file");
    }
}
