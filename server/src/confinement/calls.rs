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

/// On an argument. Only the lower 32 bits are compared: the kernel ignores the others of commands.
#[derive(Clone, Copy, Debug)]
enum Condition {
    /// The argument, masked, has this value.
    Masked { argument: u8, mask: u32, value: u32 },
    /// It has another value.
    Not { argument: u8, value: u32 },
}

/// A call with any arguments.
pub(crate) const fn call(number: libc::c_long) -> CallRule {
    CallRule { number, condition: None }
}

/// A call whose `argument`, counted from 0, is `value`, such as the command of an ioctl. For other values, list it again.
pub(crate) const fn call_with(number: libc::c_long, argument: u8, value: u32) -> CallRule {
    CallRule { number, condition: Some(Condition::Masked { argument, mask: u32::MAX, value }) }
}

/// A call that makes memory accessible, but not executable.
const fn not_executable(number: libc::c_long) -> CallRule {
    let mask = libc::PROT_EXEC.cast_unsigned();
    CallRule { number, condition: Some(Condition::Masked { argument: 2, mask, value: 0 }) }
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

/// A call whose `argument` is not `value`.
const fn call_except(number: libc::c_long, argument: u8, value: u32) -> CallRule {
    CallRule { number, condition: Some(Condition::Not { argument, value }) }
}

/// A call whose `argument` has all bits of `bits`.
const fn with_bits(number: libc::c_long, argument: u8, bits: libc::c_int) -> CallRule {
    let bits = bits.cast_unsigned();
    CallRule { number, condition: Some(Condition::Masked { argument, mask: bits, value: bits }) }
}

/// The number of `fchmodat2` on each architecture.
const FCHMODAT2: libc::c_long = 452;

// asm-generic/fcntl.h and asm-generic/sockios.h.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;

/// Opens that write, create or truncate a file. They kill also a helper that may open files.
const DEADLY_OPENS: &[CallRule] = &[
    #[cfg(target_arch = "x86_64")]
    with_bits(libc::SYS_open, 1, libc::O_WRONLY),
    #[cfg(target_arch = "x86_64")]
    with_bits(libc::SYS_open, 1, libc::O_RDWR),
    #[cfg(target_arch = "x86_64")]
    with_bits(libc::SYS_open, 1, libc::O_CREAT),
    #[cfg(target_arch = "x86_64")]
    with_bits(libc::SYS_open, 1, libc::O_TRUNC),
    with_bits(libc::SYS_openat, 2, libc::O_WRONLY),
    with_bits(libc::SYS_openat, 2, libc::O_RDWR),
    with_bits(libc::SYS_openat, 2, libc::O_CREAT),
    with_bits(libc::SYS_openat, 2, libc::O_TRUNC),
];

const DEADLY: &[CallRule] = &[
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
    call(libc::SYS_tkill),
    call(libc::SYS_rt_sigqueueinfo),
    call(libc::SYS_rt_tgsigqueueinfo),
    call(libc::SYS_pidfd_send_signal),
    call(libc::SYS_process_madvise),
    call(libc::SYS_unlinkat),
    #[cfg(not(target_arch = "riscv64"))]
    call(libc::SYS_renameat),
    call(libc::SYS_renameat2),
    call(libc::SYS_linkat),
    call(libc::SYS_symlinkat),
    call(libc::SYS_mkdirat),
    call(libc::SYS_mknodat),
    call(libc::SYS_fchmodat),
    call(FCHMODAT2),
    call(libc::SYS_fchownat),
    call(libc::SYS_truncate),
    call(libc::SYS_setxattr),
    call(libc::SYS_lsetxattr),
    call(libc::SYS_removexattr),
    call(libc::SYS_lremovexattr),
    call(libc::SYS_mount),
    call(libc::SYS_umount2),
    call(libc::SYS_open_tree),
    call(libc::SYS_move_mount),
    call(libc::SYS_fsopen),
    call(libc::SYS_fspick),
    call(libc::SYS_pivot_root),
    call(libc::SYS_chroot),
    call(libc::SYS_setns),
    call(libc::SYS_unshare),
    // Signals of descriptors to other processes, and limits of those.
    call_with(libc::SYS_fcntl, 1, libc::F_SETOWN.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, F_SETOWN_EX),
    call_with(libc::SYS_fcntl, 1, F_SETSIG),
    call_with(libc::SYS_ioctl, 1, FIOSETOWN),
    call_with(libc::SYS_ioctl, 1, SIOCSPGRP),
    call_except(libc::SYS_prlimit64, 0, 0),
    call(libc::SYS_perf_event_open),
    call(libc::SYS_bpf),
    call(libc::SYS_io_uring_setup),
    call(libc::SYS_userfaultfd),
];

/// Deadly calls that newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLDER_DEADLY: &[CallRule] = &[
    call(libc::SYS_open),
    call(libc::SYS_creat),
    call(libc::SYS_unlink),
    call(libc::SYS_rename),
    call(libc::SYS_link),
    call(libc::SYS_symlink),
    call(libc::SYS_mkdir),
    call(libc::SYS_rmdir),
    call(libc::SYS_mknod),
    call(libc::SYS_chmod),
    call(libc::SYS_chown),
    call(libc::SYS_lchown),
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_DEADLY: &[CallRule] = &[];

/// The rules of calls for which a helper is killed, except `needed` ones: they reach other processes, files, sockets or namespaces. If it
/// may open files, it may only read them. tgkill of the process itself is no such call: abort(3) makes it.
pub(super) fn deadly(needed: &[libc::c_long]) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let is_needed = |rule: &&CallRule| needed.contains(&rule.number);
    let unneeded = DEADLY.iter().chain(OLDER_DEADLY).filter(|rule| !is_needed(rule));
    let signal = call_except(libc::SYS_tgkill, 0, std::process::id());
    let mut deadly = rules(unneeded.chain(DEADLY_OPENS.iter().filter(is_needed)).chain([&signal]))?;
    if cfg!(target_arch = "x86_64") {
        let numbered: Vec<_> =
            deadly.iter().map(|(number, rules)| (number | X32_BIT, rules.clone())).collect();
        deadly.extend(numbered);
        deadly.extend(X32_DEADLY.map(|number| (number | X32_BIT, Vec::new())));
    }
    Ok(deadly)
}

/// In the number of a call of the x32 ABI, which a kernel for x86-64 may have. The numbers are otherwise the same, but for some.
const X32_BIT: i64 = 0x4000_0000;
/// Those of ioctl, execve, ptrace, rt_sigqueueinfo, rt_tgsigqueueinfo, process_vm_readv, process_vm_writev and execveat.
const X32_DEADLY: [i64; 8] = [514, 520, 521, 524, 536, 539, 540, 545];

/// The rules of a list, by the number of their call.
pub(super) fn rules<'a>(
    calls: impl IntoIterator<Item = &'a CallRule>,
) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for CallRule { number, condition } in calls {
        // Without rules, a call matches with any arguments.
        let of_call = rules.entry(*number).or_default();
        let (argument, operator, value) = match *condition {
            None => continue,
            Some(Condition::Masked { argument, mask, value }) => {
                (argument, CmpOp::MaskedEq(mask.into()), value)
            }
            Some(Condition::Not { argument, value }) => (argument, CmpOp::Ne, value),
        };
        let condition = SeccompCondition::new(argument, ArgLen::Dword, operator, value.into())?;
        of_call.push(SeccompRule::new(vec![condition])?);
    }
    Ok(rules)
}
