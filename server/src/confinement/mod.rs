//! Confinement of helper processes, which handle what clients pass: no capabilities, no files, no network, and only the system calls
//! that a helper lists. So a helper that a client takes over reaches nothing but the descriptors that it has.
//!
//! ```text
//!   main() --enter()--> without privileges --starts its threads--> restrict(calls) --> all threads confined
//! ```
//!
//! The service itself uses neither mechanism: it opens files of `/proc/PID` of all clients, which Landlock refuses (its rules limit
//! ptrace, too), and starts programs.

mod calls;
mod landlock;

use std::io;

use fdmap_sys::capabilities::{self, Capabilities};
use fdmap_sys::{SyscallError, pidfd, process};
use nix::libc;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

pub(crate) use calls::{CallRule, call, call_with};
pub(crate) use landlock::try_landlock;

/// A helper is not confined, and must not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfinementError {
    #[error(transparent)]
    Syscall(#[from] SyscallError),
    #[error("compiling a seccomp filter")]
    Compile(#[from] seccompiler::BackendError),
    #[error("installing a seccomp filter")]
    Install(#[source] seccompiler::Error),
}

/// Gives up all privileges of the calling thread, and of threads that it starts: capabilities, files by path, TCP, abstract
/// sockets, and signals to other processes. What the kernel has no Landlock for, [`restrict`] refuses as well.
pub(crate) fn enter() -> Result<(), ConfinementError> {
    enter_with(Capabilities::empty())
}

/// The same, but for the capabilities `kept`.
pub(crate) fn enter_with(kept: Capabilities) -> Result<(), ConfinementError> {
    keep_only(kept)?;
    landlock::deny_all();
    Ok(())
}

/// For a helper that reads files of `/proc` or devices, which Landlock would refuse: it keeps the capabilities `kept`, may open files to
/// read them, and is killed if it makes another of the [`calls::deadly`] calls.
pub(crate) fn enter_file_reader(kept: Capabilities) -> Result<(), ConfinementError> {
    keep_only(kept)?;
    refuse_deadly(&[
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open,
        libc::SYS_openat,
    ])
}

fn keep_only(kept: Capabilities) -> Result<(), ConfinementError> {
    capabilities::forbid_new_privileges()?;
    capabilities::keep_only(kept)?;
    // Other helpers have the same user, and may not trace this one.
    Ok(process::set_undumpable()?)
}

/// From now on all threads of the process can make only the calls in `allowed`, and those of the Rust runtime. No thread can be
/// started; those that exist must have reached their own code, since their start makes further calls. Others fail with ENOSYS, as on
/// an older kernel, which libc expects of calls that it can do without. Calls that no libc would make in a helper kill the process: it
/// starts programs, opens files or connects to a socket only if a client has taken it over.
///
/// Does nothing if the kernel lacks seccomp, which is reported as a capability.
pub(crate) fn restrict(allowed: &[CallRule]) -> Result<(), ConfinementError> {
    let Ok(architecture) = TargetArch::try_from(std::env::consts::ARCH) else { return Ok(()) };
    let (allow, kill) = (SeccompAction::Allow, SeccompAction::KillProcess);
    let unlisted = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let deadly = calls::deadly(&[])?;
    let allowed = calls::rules(calls::RUNTIME.iter().chain(allowed))?;
    // The kernel executes the strictest action of both filters. The second one refuses the installation of others.
    install(&SeccompFilter::new(deadly, allow.clone(), kill, architecture)?.try_into()?)?;
    install(&SeccompFilter::new(allowed, unlisted, allow, architecture)?.try_into()?)
}

/// The process is killed from now on if it makes one of the [`calls::deadly`] calls, except `needed` ones. If it may open files, it is
/// killed if it writes, creates or truncates one by that. Threads can still be started.
///
/// Does nothing if the kernel lacks seccomp.
pub(crate) fn refuse_deadly(needed: &[libc::c_long]) -> Result<(), ConfinementError> {
    let Ok(architecture) = TargetArch::try_from(std::env::consts::ARCH) else { return Ok(()) };
    let (allow, kill) = (SeccompAction::Allow, SeccompAction::KillProcess);
    install(&SeccompFilter::new(calls::deadly(needed)?, allow, kill, architecture)?.try_into()?)
}

/// Installs a filter in all threads.
fn install(program: &BpfProgram) -> Result<(), ConfinementError> {
    match seccompiler::apply_filter_all_threads(program) {
        Err(seccompiler::Error::Seccomp(error)) if is_missing(&error) => Ok(()),
        other => other.map_err(ConfinementError::Install),
    }
}

/// The errors of a kernel without seccomp, or without filters.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
}

/// Installs a filter in a thread of its own, and makes a call that it refuses.
pub(crate) fn try_seccomp() -> Result<(), String> {
    let refuse_one_call = || -> Result<(), String> {
        let architecture = std::env::consts::ARCH.try_into().map_err(|error| format!("seccomp: {error}"))?;
        let rules = calls::rules(&[call(libc::SYS_pidfd_open)]).map_err(|error| error.to_string())?;
        let refused = SeccompAction::Errno(libc::EXDEV.cast_unsigned());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, architecture);
        let program = filter.and_then(BpfProgram::try_from).map_err(|error| error.to_string())?;
        seccompiler::apply_filter(&program).map_err(|error| error.to_string())?;
        match pidfd::open(std::process::id()).map_err(|error| error.errno) {
            Err(fdmap_sys::Errno::EXDEV) => Ok(()),
            other => Err(format!("a call that a seccomp filter refuses returned {other:?}")),
        }
    };
    in_a_thread(refuse_one_call)
}

/// Runs an attempt whose effects end with its thread.
fn in_a_thread(attempt: impl FnOnce() -> Result<(), String> + Send) -> Result<(), String> {
    std::thread::scope(|scope| scope.spawn(attempt).join().unwrap_or_else(|_| Err("panicked".to_owned())))
}

#[cfg(test)]
mod tests;
