//! `membarrier(2)`: waits for code that runs without preemption.

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};

// linux/membarrier.h
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// Waits until every BPF program that runs now at a tracepoint has ended: the kernel runs them without preemption, and the call
/// waits for an RCU grace period, some 10 ms.
///
/// # Errors
/// `membarrier`: `EINVAL` if this kernel was booted with `nohz_full`, `ENOSYS` if it lacks the call.
pub fn wait_for_bpf_programs() -> Result<(), SyscallError> {
    // SAFETY: the call reads and writes no memory of the process.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    Errno::result(result).call(|| "membarrier(MEMBARRIER_CMD_GLOBAL)".to_owned())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_returns() {
        match wait_for_bpf_programs() {
            Ok(()) => {}
            Err(error) => assert!([Errno::EINVAL, Errno::ENOSYS].contains(&error.errno), "{error}"),
        }
    }
}
