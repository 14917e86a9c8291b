//! A call that is made again, with the time that remains of it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fdmap_sys::pidfd::PidFd;
use fdmap_sys::ptrace::{Memory, Registers};
use fdmap_sys::{SyscallError, error::CallContext as _};
use nix::sys::socket::{GetSockOpt, getsockopt, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::calls::{self, Call, Limit};
use super::threads::{Disturbs, Place, place_of};

/// Of registers: the call, by the number that it had when it was entered.
pub(super) fn call_of(registers: &Registers) -> Call {
    let Registers { orig_rax, rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
    Call { number: orig_rax.cast_signed(), arguments: [rdi, rsi, rdx, r10, r8, r9] }
}

/// The register of an argument.
fn argument(registers: &mut Registers, index: usize) -> Option<&mut u64> {
    let Registers { rdi, rsi, rdx, r10, r8, r9, .. } = registers;
    [rdi, rsi, rdx, r10, r8, r9].into_iter().nth(index)
}

/// What ends the wait of a call, found out.
pub(super) fn disturbs(pid: u32, process: &PidFd, memory: &Memory, call: &Call, limit: Limit) -> Disturbs {
    let forever = |time: Option<Duration>| time.map_or(Disturbs::Forever, Disturbs::Limited);
    match limit {
        Limit::None => Disturbs::Forever,
        Limit::Hidden => Disturbs::Hidden,
        Limit::Milliseconds(index) => forever(calls::milliseconds(call.arguments[index])),
        Limit::Timespec(index) => {
            let bytes = memory.read(call.arguments[index]).ok().filter(|_| call.arguments[index] != 0);
            forever(bytes.and_then(calls::timespec))
        }
        Limit::Receive | Limit::Send => {
            let Some(socket) = socket(pid, process, call) else { return Disturbs::Nothing };
            match SocketTime::of(socket, limit) {
                Some(time) if !time.whole.is_zero() => Disturbs::Limited(time.whole),
                _ => Disturbs::Nothing,
            }
        }
    }
}

/// The socket that a call waits for; `None` if it is something else.
fn socket(pid: u32, process: &PidFd, call: &Call) -> Option<OwnedFd> {
    let [a, b, c, d, ..] = call.arguments[0].to_le_bytes();
    let number = i32::from_le_bytes([a, b, c, d]);
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
    link.to_str()?.starts_with("socket:").then(|| process.descriptor(number).ok())?
}

/// The timeout of a socket, which is no argument of the call.
#[derive(Debug)]
struct SocketTime {
    socket: OwnedFd,
    receive: bool,
    /// What the program has set; none is 0.
    whole: Duration,
}

impl SocketTime {
    fn of(socket: OwnedFd, limit: Limit) -> Option<Self> {
        let receive = limit == Limit::Receive;
        let time =
            if receive { get(&socket, sockopt::ReceiveTimeout) } else { get(&socket, sockopt::SendTimeout) };
        let micros = u64::try_from(time.ok()?.num_microseconds()).ok()?;
        Some(Self { socket, receive, whole: Duration::from_micros(micros) })
    }

    fn set(&self, time: Duration) -> Result<(), SyscallError> {
        let value = TimeVal::microseconds(i64::try_from(time.as_micros()).unwrap_or(i64::MAX));
        let set = if self.receive {
            setsockopt(&self.socket, sockopt::ReceiveTimeout, &value)
        } else {
            setsockopt(&self.socket, sockopt::SendTimeout, &value)
        };
        set.call(|| format!("setsockopt of a timeout of {time:?} on a socket of another process"))
    }
}

fn get<O: GetSockOpt>(socket: &OwnedFd, option: O) -> nix::Result<O::Val> {
    getsockopt(socket, option)
}

/// What has to be put back when a call that was made again has taken its time from it, or has ended.
#[derive(Debug)]
pub(super) enum PutBack {
    /// Nothing.
    Nothing,
    /// An argument, and what lay on the stack, when it has ended.
    Argument {
        /// Which.
        index: usize,
        /// What it was.
        value: u64,
        /// Address and bytes.
        stack: Option<(u64, [u8; 16])>,
    },
    /// The socket's timeout, as soon as it waits again.
    Socket(SocketAgain),
}

/// A socket whose timeout is another one for a moment.
#[derive(Debug)]
pub(super) struct SocketAgain(SocketTime);

impl SocketAgain {
    /// Waits until the thread waits in its call again, and has read the timeout, then sets the former one.
    pub(super) fn put_back(&self, pid: u32, tid: u32) -> Result<(), SyscallError> {
        let deadline = Instant::now() + Duration::from_millis(200);
        while place_of(pid, tid) == Place::Running && Instant::now() < deadline {
            std::thread::yield_now();
        }
        self.0.set(self.0.whole)
    }
}

/// Has a call wait for `rest` when it is made again: changes `registers`, the process's stack or a socket.
pub(super) fn shorten(
    pid: u32,
    process: &PidFd,
    memory: &Memory,
    limit: Limit,
    registers: &mut Registers,
    rest: Duration,
) -> Result<PutBack, SyscallError> {
    let call = call_of(registers);
    let stack = calls::below_the_stack(registers.rsp);
    let mut put = |index, word| {
        let place = argument(registers, index);
        place.map_or(0, |place| std::mem::replace(place, word))
    };
    match limit {
        Limit::Milliseconds(index) => {
            let value = put(index, calls::to_milliseconds(rest));
            Ok(PutBack::Argument { index, value, stack: None })
        }
        Limit::Timespec(index) => {
            let before = memory.read(stack)?;
            memory.write(stack, &calls::to_timespec(rest))?;
            let value = put(index, stack);
            Ok(PutBack::Argument { index, value, stack: Some((stack, before)) })
        }
        Limit::Receive | Limit::Send => {
            let Some(time) = socket(pid, process, &call).and_then(|socket| SocketTime::of(socket, limit))
            else {
                return Ok(PutBack::Nothing);
            };
            // 0 would be forever.
            time.set(rest.max(Duration::from_micros(1)))?;
            Ok(PutBack::Socket(SocketAgain(time)))
        }
        Limit::None | Limit::Hidden => Ok(PutBack::Nothing),
    }
}

impl PutBack {
    /// Puts an argument back into `registers`, and the bytes on the stack.
    pub(super) fn argument(&self, registers: &mut Registers, memory: &Memory) {
        if let Self::Argument { index, value, stack } = self {
            if let Some(place) = argument(registers, *index) {
                *place = *value;
            }
            if let Some((address, bytes)) = stack {
                // Dead bytes by the ABI: whoever took the stack away meanwhile did not need them.
                let _ = memory.write(*address, bytes);
            }
        }
    }

    /// True if the thread must be stopped again at the end of its call.
    pub(super) const fn is_at_the_end(&self) -> bool {
        matches!(self, Self::Argument { .. })
    }
}
