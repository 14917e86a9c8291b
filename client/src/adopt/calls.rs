//! Which system calls the kernel makes again by itself after a stop, which it ends with `EINTR`, and what is to be done about
//! the latter. Pure.

use std::time::Duration;

use nix::libc;

/// A system call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// Its arguments, in their order.
    pub arguments: [u64; 6],
}

/// What bounds the wait of a call that ends with `EINTR` when its thread is stopped, and where it is said. Such a call had no
/// effect yet, so it can be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Nothing.
    None,
    /// Milliseconds in this argument; negative: nothing.
    Milliseconds(usize),
    /// A `timespec` at the address in this argument; 0: nothing.
    Timespec(usize),
    /// The receive timeout of the socket in the first argument. Of other files nothing, and the kernel makes the call again.
    Receive,
    /// Its send timeout, likewise.
    Send,
    /// Something that cannot be changed from outside.
    Hidden,
}

/// `None` for calls that the kernel makes again by itself, with the time that remains where there is one (`read` of a pipe,
/// `futex`, `nanosleep`, `poll`, `select`, `wait4`), and for calls that must not be made twice (`close`). signal(7) lists them.
#[must_use]
pub const fn limit_of(call: &Call) -> Option<Limit> {
    /// `IORING_ENTER_EXT_ARG` of `linux/io_uring.h`: a timeout may be among what the fifth argument points to.
    const EXT_ARG: u64 = 1 << 3;
    /// Not in every libc crate.
    const SYS_IO_PGETEVENTS: i64 = 333;
    Some(match call.number {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Limit::Milliseconds(3),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => Limit::Timespec(3),
        libc::SYS_rt_sigtimedwait => Limit::Timespec(2),
        libc::SYS_io_getevents | SYS_IO_PGETEVENTS => Limit::Timespec(4),
        libc::SYS_semop => Limit::None,
        libc::SYS_io_uring_enter if call.arguments[3] & EXT_ARG == 0 => Limit::None,
        libc::SYS_io_uring_enter => Limit::Hidden,
        libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_accept
        | libc::SYS_accept4 => Limit::Receive,
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_connect => Limit::Send,
        _ => return None,
    })
}

/// What a stop found a thread at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// In no call, or at the end of one that has its result. It goes on as it was.
    Between,
    /// In a call that the kernel makes again.
    Restarting,
    /// In a call that would end with `EINTR`.
    Ending(Limit),
}

/// By the registers at a stop: the number of the call, -1 in none, and what it would return.
#[must_use]
pub const fn found(call: &Call, result: i64) -> Found {
    if call.number < 0 {
        return Found::Between;
    }
    match result {
        RESTARTSYS | RESTARTNOINTR | RESTARTNOHAND | RESTART_RESTARTBLOCK => Found::Restarting,
        EINTR => match limit_of(call) {
            Some(limit) => Found::Ending(limit),
            None => Found::Between,
        },
        _ => Found::Between,
    }
}

// linux/errno.h: not for programs, but for who traces them.
const RESTARTSYS: i64 = -512;
const RESTARTNOINTR: i64 = -513;
/// The kernel makes the call again unless a handler of a signal ran: then it ends with `EINTR`.
pub const RESTARTNOHAND: i64 = -514;
const RESTART_RESTARTBLOCK: i64 = -516;
const EINTR: i64 = -(libc::EINTR as i64); // casts between constants lose nothing

/// The milliseconds of an argument, an `int`; `None`: it waits forever.
#[must_use]
pub fn milliseconds(argument: u64) -> Option<Duration> {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    u64::try_from(i32::from_le_bytes([a, b, c, d])).ok().map(Duration::from_millis)
}

/// The argument that says a time: rounded up, as the kernel does with times.
#[must_use]
pub fn to_milliseconds(time: Duration) -> u64 {
    let milliseconds = u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
    milliseconds.min(0x7fff_ffff)
}

/// The time that a `struct timespec` says; `None` for one that the kernel refuses.
#[must_use]
pub fn timespec(bytes: [u8; 16]) -> Option<Duration> {
    let word = |at: usize| -> Option<i64> { Some(i64::from_le_bytes(bytes[at..at + 8].try_into().ok()?)) };
    let (seconds, nanos) = (u64::try_from(word(0)?).ok()?, u32::try_from(word(8)?).ok()?);
    (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos))
}

/// A `struct timespec`.
#[must_use]
pub fn to_timespec(time: Duration) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (seconds, nanos) = bytes.split_at_mut(8);
    seconds.copy_from_slice(&time.as_secs().to_le_bytes());
    nanos.copy_from_slice(&u64::from(time.subsec_nanos()).to_le_bytes());
    bytes
}

/// Where 16 bytes can be put below what the thread's stack holds: beyond the 128 bytes below its pointer, which the ABI lets
/// functions use (the red zone).
#[must_use]
pub const fn below_the_stack(stack_pointer: u64) -> u64 {
    (stack_pointer.saturating_sub(128) & !15).saturating_sub(16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn call(number: i64, arguments: [u64; 6]) -> Call {
        Call { number, arguments }
    }

    #[test]
    fn interrupted_calls_are_told_apart() {
        let of = |number, result| found(&call(number, [0; 6]), result);
        assert_eq!(of(-1, -514), Found::Between, "in user space registers mean nothing");
        assert_eq!(of(libc::SYS_read, -512), Found::Restarting);
        assert_eq!(of(libc::SYS_nanosleep, -516), Found::Restarting);
        assert_eq!(of(libc::SYS_epoll_wait, -4), Found::Ending(Limit::Milliseconds(3)));
        assert_eq!(of(libc::SYS_epoll_wait, 1), Found::Between, "it has its result");
        assert_eq!(of(libc::SYS_close, -4), Found::Between, "a close is not made twice");
        let extended = call(libc::SYS_io_uring_enter, [3, 0, 1, 9, 0, 0]);
        assert_eq!(found(&extended, -4), Found::Ending(Limit::Hidden));
    }

    #[test]
    fn times_of_arguments_are_read() {
        assert_eq!(milliseconds(u64::MAX), None);
        assert_eq!(milliseconds(0xffff_ffff), None, "an int in a register of 64 bits");
        assert_eq!(milliseconds(0xdead_0000_0000 + 250), Some(Duration::from_millis(250)));
        assert_eq!(to_milliseconds(Duration::from_micros(1)), 1);
        assert_eq!(to_milliseconds(Duration::MAX), 0x7fff_ffff);
        assert_eq!(timespec([0xff; 16]), None);
    }

    proptest! {
        #[test]
        fn times_survive_the_way_there_and_back(seconds in 0..1_u64 << 40, nanos in 0..1_000_000_000_u32) {
            let time = Duration::new(seconds, nanos);
            prop_assert_eq!(timespec(to_timespec(time)), Some(time));
            let again = milliseconds(to_milliseconds(time)).unwrap();
            prop_assert!(again >= time || again == Duration::from_millis(0x7fff_ffff));
        }

        #[test]
        fn room_below_the_stack_is_aligned_and_clear_of_the_red_zone(stack in 4096..u64::MAX) {
            let room = below_the_stack(stack);
            prop_assert!(room.is_multiple_of(16) && room + 16 <= stack - 128 && room >= stack - 160);
        }
    }
}
