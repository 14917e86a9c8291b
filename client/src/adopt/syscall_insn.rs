//! The `syscall` instruction that injected calls use, and what a ptrace stop does to the call that a thread is in.
//!
//! No injected call changes the thread's `restart_block`, so the kernel restarts an interrupted call as after any stop if the
//! thread resumes with its original registers. Calls that return `EINTR` instead (`fdmap_sys::syscall_restart`) had no effect
//! yet and are made again, unless that would prolong their wait.

use std::fs;

use fdmap_sys::ptrace::{Registers, TracedThread};
use fdmap_sys::syscall_restart::{EintrTimeout, as_int, eintr_call, is_restart_code};
use fdmap_sys::thread::Syscall;
use fdmap_sys::{SyscallError, process};
use nix::libc;
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::time::TimeValLike as _;

use super::ResumeOutcome;
use super::tracee::Tracee;

/// `syscall`
const SYSCALL_INSN: [u8; 2] = [0x0f, 0x05];

/// Finds a `syscall` instruction in an executable mapping, the vDSO first. `None` if there is none. Reads only.
pub(super) fn find(tracee: &Tracee) -> Result<Option<u64>, SyscallError> {
    /// Bytes of each mapping that are searched.
    const MAX_SEARCHED_BYTES: u64 = 1 << 22;
    let vdso = process::vdso_address(tracee.pid);
    let mut vmas = tracee.maps.all()?;
    vmas.retain(|vma| vma.executable);
    vmas.sort_by_key(|vma| Some(vma.range.start) != vdso);
    for vma in vmas {
        let mut bytes = vec![0; usize::try_from(vma.range.len().min(MAX_SEARCHED_BYTES)).unwrap_or(0)];
        // Some mappings, such as those of devices, cannot be read.
        if tracee.read_memory(vma.range.start, &mut bytes).is_ok()
            && let Some(offset) = bytes.windows(2).position(|window| window == SYSCALL_INSN)
        {
            return Ok(Some(vma.range.start + u64::try_from(offset).unwrap_or(0)));
        }
    }
    Ok(None)
}

/// The call that a stopped thread is in (number -1 for none), and the `syscall` instruction for injected calls: the call's own,
/// before rip, else `instruction`. `None` if another instruction made the call (32-bit), or execve has replaced it. At the start
/// of a signal handler `orig_rax` still has the number of the interrupted call, which the thread is no longer in.
pub(super) fn call_of(
    thread: &TracedThread,
    registers: &Registers,
    instruction: Option<u64>,
) -> Option<(Syscall, u64)> {
    /// `int $0x80` and `sysenter`
    const OTHER_INSNS: [[u8; 2]; 2] = [[0xcd, 0x80], [0x0f, 0x34]];
    let is_syscall = |address: &u64| thread.instruction_at(*address) == Some(SYSCALL_INSN);
    let call = Syscall::from(registers);
    let own = registers.rip.wrapping_sub(2);
    if call.number >= 0 && is_syscall(&own) {
        return Some((call, own));
    }
    let other = thread.instruction_at(own).is_some_and(|insn| OTHER_INSNS.contains(&insn));
    if call.number >= 0 && (other || is_restart_code(registers.rax.cast_signed())) {
        return None;
    }
    Some((Syscall { number: -1, ..call }, instruction.filter(is_syscall)?))
}

/// What stopping a thread does to its system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopEffect {
    /// None: the kernel restarts the call, or the thread is in none.
    None,
    /// The call returns `EINTR` and has no timeout: fdmap makes it again, which the program cannot notice.
    Reissued,
    /// A device driver decides (ioctl): it restarts, or returns `EINTR` as on every signal.
    DriverDefined,
    /// The call returns `EINTR`, and the time that it has waited is lost.
    LosesTimeout,
}

/// What a stop would do to a call of the process.
pub(super) fn stop_effect(call: &Syscall, tracee: &Tracee) -> StopEffect {
    let socket_timeout = |send| has_socket_timeout(tracee, as_int(call.arguments[0]), send);
    match eintr_call(call).map(|(_, timeout)| timeout) {
        None if call.number == libc::SYS_ioctl => StopEffect::DriverDefined,
        None => StopEffect::None,
        Some(EintrTimeout::Receive) if !socket_timeout(false) => StopEffect::None,
        Some(EintrTimeout::Send) if !socket_timeout(true) => StopEffect::None,
        Some(EintrTimeout::None) => StopEffect::Reissued,
        Some(_) => StopEffect::LosesTimeout,
    }
}

/// How a thread is to resume after a stop that found it in `call` with `result` in its return register.
///
/// `interrupted` is true if fdmap's stop ended the call (and not SIGSTOP). `accepts_eintr` is true if the thread was chosen
/// although it was in this call. Otherwise it entered the call just before the stop, and a timed call is made again with its
/// full time.
pub(super) fn resume_outcome(
    call: &Syscall,
    result: i64,
    interrupted: bool,
    accepts_eintr: bool,
) -> ResumeOutcome {
    const EINTR: i64 = -(libc::EINTR as i64); // lossless: a cast between constants
    match result {
        _ if call.number < 0 => ResumeOutcome::Unchanged,
        _ if is_restart_code(result) => ResumeOutcome::Restarted,
        EINTR if !interrupted => ResumeOutcome::Unchanged,
        EINTR if accepts_eintr || eintr_call(call).is_none() => ResumeOutcome::Interrupted,
        EINTR => ResumeOutcome::Reissued,
        _ => ResumeOutcome::Unchanged,
    }
}

/// True if descriptor `number` is a socket with a receive or send timeout.
fn has_socket_timeout(tracee: &Tracee, number: i32, send: bool) -> bool {
    let link = fs::read_link(format!("/proc/{}/fd/{number}", tracee.pid));
    if !link.is_ok_and(|link| link.to_string_lossy().starts_with("socket:")) {
        return false;
    }
    let Ok(socket) = tracee.take_descriptor(number) else { return false };
    let timeout = if send {
        getsockopt(&socket, sockopt::SendTimeout)
    } else {
        getsockopt(&socket, sockopt::ReceiveTimeout)
    };
    timeout.is_ok_and(|timeout| timeout.num_microseconds() != 0)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;
    use std::time::Duration;

    use super::*;

    fn call(number: i64, arguments: [u64; 6]) -> Syscall {
        Syscall { number, arguments }
    }

    #[test]
    fn interrupted_calls_are_distinguished() {
        let outcome = |number, result| resume_outcome(&call(number, [0; 6]), result, true, false);
        assert_eq!(outcome(-1, -514), ResumeOutcome::Unchanged, "the thread is in no call");
        assert_eq!(outcome(libc::SYS_read, -512), ResumeOutcome::Restarted);
        assert_eq!(outcome(libc::SYS_nanosleep, -516), ResumeOutcome::Restarted);
        assert_eq!(outcome(libc::SYS_epoll_wait, -4), ResumeOutcome::Reissued);
        assert_eq!(outcome(libc::SYS_epoll_wait, 1), ResumeOutcome::Unchanged, "the call has its result");
        assert_eq!(outcome(libc::SYS_close, -4), ResumeOutcome::Interrupted, "close is never made again");
        let wait = call(libc::SYS_epoll_wait, [0; 6]);
        assert_eq!(resume_outcome(&wait, -4, true, true), ResumeOutcome::Interrupted);
        assert_eq!(resume_outcome(&wait, -4, false, true), ResumeOutcome::Unchanged, "SIGSTOP ended it");
    }

    #[test]
    fn socket_timeout_makes_a_call_timed() {
        let tracee = Tracee::open(std::process::id()).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let number = u64::try_from(socket.as_raw_fd()).unwrap();
        let effect = |syscall| stop_effect(&call(syscall, [number, 0, 0, 0, 0, 0]), &tracee);
        assert_eq!(effect(libc::SYS_recvfrom), StopEffect::None);
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        assert_eq!(effect(libc::SYS_recvfrom), StopEffect::LosesTimeout);
        assert_eq!(effect(libc::SYS_sendto), StopEffect::None);
        assert_eq!(effect(libc::SYS_semop), StopEffect::Reissued);
        assert_eq!(effect(libc::SYS_ioctl), StopEffect::DriverDefined);
        assert_eq!(effect(libc::SYS_nanosleep), StopEffect::None, "the kernel keeps the time");
    }

    #[test]
    fn syscall_instruction_is_found_in_the_vdso() {
        let tracee = Tracee::open(std::process::id()).unwrap();
        let address = find(&tracee).unwrap().unwrap();
        let vdso = process::vdso_address(std::process::id()).unwrap();
        assert!((vdso..vdso + 0x10000).contains(&address), "{address:#x}, vDSO at {vdso:#x}");
    }
}
