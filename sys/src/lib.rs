//! The kernel interfaces that fdmap uses, one file per interface, and nearly all `unsafe` code of the project. The crate makes no
//! policy decisions and holds no state other than descriptors and mappings.

pub mod address;
pub mod cachestat;
pub mod capabilities;
pub mod clock;
pub mod error;
pub mod fanotify;
pub mod fd;
pub mod fiemap;
pub mod inotify;
pub mod lease;
pub mod loop_device;
pub mod lru;
pub mod mapping;
pub mod maps;
pub mod membarrier;
pub mod memfd;
pub mod mincore;
pub mod ownership;
pub mod pagemap;
pub mod peer;
pub mod pidfd;
pub mod process;
pub mod procfile;
#[cfg(target_arch = "x86_64")]
pub mod ptrace;
pub mod sched;
pub mod scm;
pub mod seek;
pub mod smaps;
pub mod splice;
#[cfg(target_arch = "x86_64")]
pub mod syscall_restart;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod thread;
pub mod uffd;
pub mod unix_stream;

pub use error::SyscallError;
pub use nix::errno::Errno;
