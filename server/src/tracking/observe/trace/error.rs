//! Why writes cannot be traced.

use fdmap_sys::{Errno, SyscallError};

use crate::bpf::LoadError;

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The programs read the registers of x86-64 only.
    #[error("system calls can be traced on x86-64 only")]
    Architecture,
    #[error("loading the programs that trace writes")]
    Load(#[from] LoadError),
    #[error("attaching BPF program {program}: {error:#}")]
    Attach { program: String, error: libbpf_rs::Error },
    #[error("tracing writes")]
    Syscall(#[from] SyscallError),
    #[error("BPF_PROG_TEST_RUN of {program} for descriptor {fd}")]
    Run {
        program: &'static str,
        fd: i32,
        #[source]
        errno: Errno,
    },
    /// The program ran, and refused the descriptor.
    #[error("following descriptor {fd}: {why}")]
    Refused { fd: i32, why: &'static str },
}
