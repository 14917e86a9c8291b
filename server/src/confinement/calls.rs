//! Lists of system calls, and the seccomp rules that they stand for.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BackendError, SeccompCmpArgLen as ArgLen, SeccompCmpOp as CmpOp, SeccompCondition, SeccompRule,
};

/// A system call in a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallRule {
    number: libc::c_long,
    /// `None`: any arguments.
    condition: Option<Condition>,
}

/// Holds if an argument, masked, has this value. Only the lower 32 bits are compared: the kernel ignores the others of commands.
#[derive(Clone, Copy, Debug)]
struct Condition {
    argument: u8,
    mask: u32,
    value: u32,
}

impl CallRule {
    pub(super) const fn number(&self) -> libc::c_long {
        self.number
    }
}

/// A call with any arguments.
pub(crate) const fn call(number: libc::c_long) -> CallRule {
    CallRule { number, condition: None }
}

/// A call whose `argument`, counted from 0, is `value`, such as the command of an ioctl. For other values, list it again.
pub(crate) const fn call_with(number: libc::c_long, argument: u8, value: u32) -> CallRule {
    CallRule { number, condition: Some(Condition { argument, mask: u32::MAX, value }) }
}

/// A call that makes memory accessible, but not executable.
const fn not_executable(number: libc::c_long) -> CallRule {
    CallRule {
        number,
        condition: Some(Condition { argument: 2, mask: libc::PROT_EXEC.cast_unsigned(), value: 0 }),
    }
}

/// What Rust and libc call in a process whose threads run: memory, locks, time, messages on standard error, and the end.
pub(super) const RUNTIME: &[CallRule] = &[
    call(libc::SYS_brk),
    not_executable(libc::SYS_mmap),
    not_executable(libc::SYS_mprotect),
    call(libc::SYS_mremap),
    call(libc::SYS_munmap),
    call(libc::SYS_madvise),
    call(libc::SYS_futex),
    call(libc::SYS_sched_yield),
    call(libc::SYS_sched_getaffinity),
    call(libc::SYS_gettid),
    call(libc::SYS_clock_gettime),
    call(libc::SYS_clock_nanosleep),
    call(libc::SYS_nanosleep),
    call(libc::SYS_getrandom),
    call(libc::SYS_sigaltstack),
    call(libc::SYS_rt_sigprocmask),
    call(libc::SYS_rt_sigreturn),
    call(libc::SYS_restart_syscall),
    call_with(libc::SYS_write, 0, libc::STDERR_FILENO.cast_unsigned()),
    call(libc::SYS_close),
    call(libc::SYS_exit),
    call(libc::SYS_exit_group),
];

/// Calls for which a helper is killed: they reach other processes, files or sockets.
pub(super) const DEADLY: &[CallRule] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_open),
    call(libc::SYS_openat),
    call(libc::SYS_openat2),
    call(libc::SYS_open_by_handle_at),
    call(libc::SYS_execve),
    call(libc::SYS_execveat),
    call(libc::SYS_socket),
    call(libc::SYS_connect),
    call(libc::SYS_bind),
    call(libc::SYS_ptrace),
    call(libc::SYS_process_vm_readv),
    call(libc::SYS_process_vm_writev),
    call(libc::SYS_pidfd_getfd),
    call(libc::SYS_kill),
    call(libc::SYS_bpf),
    call(libc::SYS_io_uring_setup),
    call(libc::SYS_userfaultfd),
];

/// The rules of a list, by the number of their call.
pub(super) fn rules<'a>(
    calls: impl IntoIterator<Item = &'a CallRule>,
) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for CallRule { number, condition } in calls {
        // Without rules, a call matches with any arguments.
        let of_call = rules.entry(*number).or_default();
        if let Some(Condition { argument, mask, value }) = *condition {
            let masked = CmpOp::MaskedEq(mask.into());
            let condition = SeccompCondition::new(argument, ArgLen::Dword, masked, value.into())?;
            of_call.push(SeccompRule::new(vec![condition])?);
        }
    }
    Ok(rules)
}
