//! Socket paths of a service on this host.

use std::path::PathBuf;

/// Default directory of the sockets.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/fdmap";

/// Socket paths of a service on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// gRPC socket.
    pub socket: PathBuf,
    /// fdpass socket.
    pub fdpass: PathBuf,
}

impl Endpoint {
    /// The sockets `fdmap.sock` and `fdpass.sock` in a directory.
    #[must_use]
    pub fn in_runtime_dir(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        Self { socket: directory.join("fdmap.sock"), fdpass: directory.join("fdpass.sock") }
    }

    /// Reads the environment: `FDMAP_RUNTIME_DIR` sets the directory of both sockets, `FDMAP_SOCKET` and
    /// `FDMAP_FDPASS_SOCKET` set one path each. The default directory is [`DEFAULT_RUNTIME_DIR`].
    #[must_use]
    pub fn from_env() -> Self {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let directory = path("FDMAP_RUNTIME_DIR").unwrap_or_else(|| PathBuf::from(DEFAULT_RUNTIME_DIR));
        let default = Self::in_runtime_dir(directory);
        Self {
            socket: path("FDMAP_SOCKET").unwrap_or(default.socket),
            fdpass: path("FDMAP_FDPASS_SOCKET").unwrap_or(default.fdpass),
        }
    }
}

impl Default for Endpoint {
    fn default() -> Self {
        Self::in_runtime_dir(DEFAULT_RUNTIME_DIR)
    }
}
