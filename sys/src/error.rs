//! A system call that failed.

use std::io;

use nix::errno::Errno;

/// A system call that failed, with its operands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}")]
pub struct SyscallError {
    /// The call and its operands, such as `mincore of pages 0..512`.
    pub call: String,
    /// What the kernel said.
    #[source]
    pub errno: Errno,
}

impl From<SyscallError> for io::Error {
    fn from(error: SyscallError) -> Self {
        Self::from_raw_os_error(error.errno as i32)
    }
}

/// Names the call behind an error.
pub trait Call<T> {
    /// `call` is asked for the call and its operands if it failed.
    ///
    /// # Errors
    /// The same failure with the call's name.
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError>;
}

impl<T> Call<T> for Result<T, Errno> {
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError> {
        self.map_err(|errno| SyscallError { call: call(), errno })
    }
}

impl<T> Call<T> for io::Result<T> {
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError> {
        self.map_err(|error| SyscallError { call: call(), errno: errno_of(&error) })
    }
}

/// The errno of an I/O error; `EIO` for the few that std makes up itself.
#[must_use]
pub fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
