//! Why BPF programs cannot be used.

use nix::errno::Errno;

/// Why a BPF object cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// libbpf or the verifier refused the object.
    #[error("loading the BPF programs: {0:#}")]
    Libbpf(#[from] libbpf_rs::Error),
    /// The object does not contain a program or map of this name, or the map has another value size.
    #[error("the BPF object has no usable {0:?}")]
    Missing(&'static str),
    #[error("mmap of a BPF map")]
    Map(#[from] fdmap_sys::SyscallError),
    #[error("dup of a BPF descriptor")]
    Duplicate(#[source] std::io::Error),
}

/// Why system calls cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The programs read the registers of x86-64 only.
    #[error("system calls can be traced on x86-64 only")]
    Architecture,
    #[error(
        "the service is in a time namespace: run it in that of the host, whose clock the BPF programs read"
    )]
    TimeNamespace,
    #[error("loading the programs that trace system calls")]
    Load(#[from] LoadError),
    #[error("attaching BPF program {program}: {error:#}")]
    Attach { program: String, error: libbpf_rs::Error },
    #[error("tracing system calls")]
    Syscall(#[from] fdmap_sys::SyscallError),
    #[error("BPF_PROG_TEST_RUN of {program} for descriptor {fd}")]
    Run {
        program: &'static str,
        fd: i32,
        #[source]
        errno: Errno,
    },
    #[error("starting the thread that serves guard regions")]
    Thread(#[source] std::io::Error),
    /// The program ran, and refused the descriptor.
    #[error("{program} for descriptor {fd}: {why}")]
    Refused { program: &'static str, fd: i32, why: &'static str },
}
