//! The error of a failed system call.

use std::io;

use nix::errno::Errno;

/// A system call that failed, with its operands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}")]
pub struct SyscallError {
    /// The call and its operands, such as `mincore of pages 0..512`.
    pub call: String,
    /// The error number that the call returned.
    #[source]
    pub errno: Errno,
}

impl From<SyscallError> for io::Error {
    fn from(error: SyscallError) -> Self {
        Self::from_raw_os_error(error.errno as i32)
    }
}

/// Adds the failed call and its operands to an error.
pub trait CallContext<T> {
    /// Evaluates `call`, the text of the call and its operands, only on failure.
    ///
    /// # Errors
    /// The original errno, with that text.
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError>;
}

impl<T> CallContext<T> for Result<T, Errno> {
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError> {
        self.map_err(|errno| SyscallError { call: call(), errno })
    }
}

impl<T> CallContext<T> for io::Result<T> {
    fn call(self, call: impl FnOnce() -> String) -> Result<T, SyscallError> {
        self.map_err(|error| SyscallError { call: call(), errno: errno_of(&error) })
    }
}

/// Extracts the errno of an I/O error; `EIO` for errors that std creates without one.
#[must_use]
pub fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
