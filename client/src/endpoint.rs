//! Where the service is.

use std::path::PathBuf;

/// The folder of the sockets, unless something else is said.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/fdmap";

/// The sockets of a service on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The gRPC socket.
    pub socket: PathBuf,
    /// The fdpass socket.
    pub fdpass: PathBuf,
}

impl Endpoint {
    /// The sockets in a folder.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        Self { socket: folder.join("fdmap.sock"), fdpass: folder.join("fdpass.sock") }
    }

    /// As the environment says: `FDMAP_RUNTIME_DIR` for both, `FDMAP_SOCKET` and `FDMAP_FDPASS_SOCKET` for one of them;
    /// else in `/run/fdmap`.
    #[must_use]
    pub fn from_env() -> Self {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = path("FDMAP_RUNTIME_DIR").unwrap_or_else(|| PathBuf::from(DEFAULT_RUNTIME_DIR));
        let default = Self::in_folder(folder);
        Self {
            socket: path("FDMAP_SOCKET").unwrap_or(default.socket),
            fdpass: path("FDMAP_FDPASS_SOCKET").unwrap_or(default.fdpass),
        }
    }
}

impl Default for Endpoint {
    fn default() -> Self {
        Self::in_folder(DEFAULT_RUNTIME_DIR)
    }
}
