//! What a ptrace stop does to system calls: the kernel's restart codes, and the calls that return `EINTR` instead.
//!
//! A stop ends every interruptible call. Most calls then return a restart code, which only tracers see, and the kernel
//! restarts them when the thread resumes: in full (`ERESTARTSYS`, `ERESTARTNOINTR`, `ERESTARTNOHAND`) or, through the thread's
//! `restart_block`, with the time that remains (`ERESTART_RESTARTBLOCK`: nanosleep, poll, futex). Some calls return `EINTR`,
//! and the kernel forgets how long they have waited.

use nix::libc;

use crate::thread::Syscall;

/// Timeout of a call that returns `EINTR` when its thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EintrTimeout {
    /// The call waits without a limit.
    None,
    /// The arguments bound the wait, or may do so.
    Bounded,
    /// If the first argument is a socket with `SO_RCVTIMEO`, that bounds the wait. Otherwise the kernel restarts the call.
    Receive,
    /// Likewise with `SO_SNDTIMEO`.
    Send,
}

/// Where the timeout of a call is.
#[derive(Clone, Copy, Debug)]
enum TimeoutIn {
    Nothing,
    /// Milliseconds in this argument, an `int`; negative: none.
    Milliseconds(usize),
    /// A `struct timespec` at the address in this argument; 0: none.
    Timespec(usize),
    ReceiveOption,
    SendOption,
    /// `struct io_uring_getevents_arg`, if the flags in argument 3 have `IORING_ENTER_EXT_ARG`.
    IoUringArgument,
}

/// Missing in some versions of the libc crate.
const SYS_IO_PGETEVENTS: i64 = 333;

/// Calls that return `EINTR` when their thread is stopped, and had no effect by then. See "Interruption of system calls"
/// in signal(7). Calls that are not listed are never made again: close(2), for one, must not be.
const EINTR_CALLS: [(i64, &str, TimeoutIn); 22] = [
    (libc::SYS_epoll_wait, "epoll_wait", TimeoutIn::Milliseconds(3)),
    (libc::SYS_epoll_pwait, "epoll_pwait", TimeoutIn::Milliseconds(3)),
    (libc::SYS_epoll_pwait2, "epoll_pwait2", TimeoutIn::Timespec(3)),
    (libc::SYS_semop, "semop", TimeoutIn::Nothing),
    (libc::SYS_semtimedop, "semtimedop", TimeoutIn::Timespec(3)),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait", TimeoutIn::Timespec(2)),
    (libc::SYS_io_getevents, "io_getevents", TimeoutIn::Timespec(4)),
    (SYS_IO_PGETEVENTS, "io_pgetevents", TimeoutIn::Timespec(4)),
    (libc::SYS_io_uring_enter, "io_uring_enter", TimeoutIn::IoUringArgument),
    (libc::SYS_read, "read", TimeoutIn::ReceiveOption),
    (libc::SYS_readv, "readv", TimeoutIn::ReceiveOption),
    (libc::SYS_recvfrom, "recvfrom", TimeoutIn::ReceiveOption),
    (libc::SYS_recvmsg, "recvmsg", TimeoutIn::ReceiveOption),
    (libc::SYS_recvmmsg, "recvmmsg", TimeoutIn::ReceiveOption),
    (libc::SYS_accept, "accept", TimeoutIn::ReceiveOption),
    (libc::SYS_accept4, "accept4", TimeoutIn::ReceiveOption),
    (libc::SYS_write, "write", TimeoutIn::SendOption),
    (libc::SYS_writev, "writev", TimeoutIn::SendOption),
    (libc::SYS_sendto, "sendto", TimeoutIn::SendOption),
    (libc::SYS_sendmsg, "sendmsg", TimeoutIn::SendOption),
    (libc::SYS_sendmmsg, "sendmmsg", TimeoutIn::SendOption),
    (libc::SYS_connect, "connect", TimeoutIn::SendOption),
];

/// The name and the timeout of a call that returns `EINTR` when its thread is stopped; `None` for all other calls.
#[must_use]
pub fn eintr_call(call: &Syscall) -> Option<(&'static str, EintrTimeout)> {
    /// `linux/io_uring.h`
    const IORING_ENTER_EXT_ARG: u64 = 1 << 3;
    let (_, name, timeout) = EINTR_CALLS.iter().find(|(number, ..)| *number == call.number)?;
    let bounded = match *timeout {
        TimeoutIn::ReceiveOption => return Some((name, EintrTimeout::Receive)),
        TimeoutIn::SendOption => return Some((name, EintrTimeout::Send)),
        TimeoutIn::Nothing => false,
        TimeoutIn::Milliseconds(index) => as_int(call.arguments[index]) >= 0,
        TimeoutIn::Timespec(index) => call.arguments[index] != 0,
        TimeoutIn::IoUringArgument => call.arguments[3] & IORING_ENTER_EXT_ARG != 0,
    };
    Some((name, if bounded { EintrTimeout::Bounded } else { EintrTimeout::None }))
}

/// The kernel restarts the call in full unless a signal handler runs first; then the call returns `EINTR`.
pub const ERESTARTNOHAND: i64 = -514;

/// True if a call with this result is one that the kernel restarts.
#[must_use]
pub const fn is_restart_code(result: i64) -> bool {
    // linux/errno.h
    const ERESTARTSYS: i64 = -512;
    const ERESTARTNOINTR: i64 = -513;
    const ERESTART_RESTARTBLOCK: i64 = -516;
    matches!(result, ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
}

/// An argument of type `int`: the kernel ignores the upper half of the register.
#[must_use]
pub fn as_int(argument: u64) -> i32 {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(number: i64, arguments: [u64; 6]) -> Option<EintrTimeout> {
        eintr_call(&Syscall { number, arguments }).map(|(_, timeout)| timeout)
    }

    #[test]
    fn timed_calls_are_recognized_by_their_arguments() {
        let (bounded, unbounded) = (Some(EintrTimeout::Bounded), Some(EintrTimeout::None));
        let epoll = |milliseconds| timeout(libc::SYS_epoll_wait, [3, 0, 1, milliseconds, 0, 0]);
        assert_eq!(epoll(u64::MAX), unbounded);
        assert_eq!(epoll(0xffff_ffff), unbounded, "an int in a 64-bit register");
        assert_eq!(epoll(0xdead_0000_0000 + 250), bounded);
        assert_eq!(timeout(libc::SYS_rt_sigtimedwait, [1, 0, 0, 8, 0, 0]), unbounded);
        assert_eq!(timeout(libc::SYS_rt_sigtimedwait, [1, 0, 4096, 8, 0, 0]), bounded);
        assert_eq!(timeout(libc::SYS_semop, [0; 6]), unbounded);
        assert_eq!(timeout(libc::SYS_io_uring_enter, [3, 0, 1, 1, 0, 0]), unbounded);
        assert_eq!(timeout(libc::SYS_io_uring_enter, [3, 0, 1, 9, 0, 0]), bounded);
        assert_eq!(timeout(libc::SYS_recvfrom, [0; 6]), Some(EintrTimeout::Receive));
        assert_eq!(timeout(libc::SYS_nanosleep, [4096; 6]), None, "the kernel keeps the time");
        assert_eq!(timeout(libc::SYS_close, [0; 6]), None);
        assert_eq!(eintr_call(&Syscall { number: 232, arguments: [0; 6] }).unwrap().0, "epoll_wait");
    }

    #[test]
    fn restart_codes_are_recognized() {
        assert_eq!([-512, -513, -514, -515, -516].map(is_restart_code), [true, true, true, false, true]);
        assert!(!is_restart_code(i64::from(-libc::EINTR)) && !is_restart_code(0));
    }
}
