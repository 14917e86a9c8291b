//! Why a process cannot be adopted.

use fdmap_sys::{Errno, SyscallError};

use crate::ClientError;

/// Why a process, or a file of it, cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The service, or a look at the process.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Something stands in the way of a system call inside of the process. Nothing was done to it.
    #[error("its mappings cannot be tracked: {0}")]
    Unfit(String),
    /// The caller may not trace the process. Nothing was done to it.
    #[error(
        "it may not be traced by this user: run as root, as its user (kernel.yama.ptrace_scope 0) or with CAP_SYS_PTRACE"
    )]
    Denied(#[source] SyscallError),
    /// No thread came to a stop in time. They all go on as they were.
    #[error("none of its threads could be stopped: they wait uninterruptibly, or end")]
    NotStopped,
    /// The only threads there are wait in calls whose time would begin anew. Nothing was done to them.
    #[error(
        "thread {tid} waits in system call {number}, and the time that remains of it cannot be kept; it can begin anew if that \
         is allowed (--allow-longer-waits)"
    )]
    Time {
        /// The thread.
        tid: u32,
        /// The call's number.
        number: i64,
    },
    /// The thread ended, or its process became another program, while it was stopped.
    #[error("thread {0} ended, or its process became another program meanwhile")]
    Ended(u32),
    /// The thread did not go on for a while, as in a frozen control group. It has its own registers again.
    #[error("thread {0} did not go on, as if it was frozen; it was left as it was")]
    Stuck(u32),
    /// The system call failed inside of the process, which goes on as it was.
    #[error("{call} inside of the process")]
    Inside {
        /// Which call.
        call: &'static str,
        /// Why.
        #[source]
        errno: Errno,
    },
    /// There is no such thing to adopt.
    #[error("{0}")]
    Nothing(String),
    /// Not on this architecture.
    #[error("mappings of other processes can be tracked on x86-64 only")]
    Architecture,
}

impl From<SyscallError> for AdoptError {
    fn from(error: SyscallError) -> Self {
        Self::Client(error.into())
    }
}
