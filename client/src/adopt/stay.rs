//! Staying with a thread until the call that it makes again has ended, to put back the argument that said how long.
//!
//! The kernel keeps all registers over a call but two, and compilers rely on it. So the thread is stopped once more, at the end of
//! the call, by whatever it ends.

use std::time::{Duration, Instant};

use fdmap_sys::ptrace::{Memory, Stop, Tracee, Until};
use fdmap_sys::{Errno, SyscallError, process};
use nix::sys::signal::Signal;

use super::calls::RESTARTNOHAND;
use super::rest::PutBack;

/// How long a call is stayed with. After that it is made again with the time that it was given first: it may wait longer than it
/// should.
const LONGEST: Duration = Duration::from_secs(60);

/// A thread that goes on, and is still traced.
pub(super) struct Staying {
    pub(super) tracee: Tracee,
    pub(super) memory: Memory,
    pub(super) put_back: PutBack,
}

impl Staying {
    /// Waits for the end of its call, for [`LONGEST`], or until we are asked to end.
    pub(super) fn until_its_call_ends(self) -> Result<(), SyscallError> {
        match self.stay() {
            // It has ended, and nothing of it is left to put back.
            Err(SyscallError { errno: Errno::ESRCH | Errno::ECHILD, .. }) => Ok(()),
            other => other,
        }
    }

    fn stay(self) -> Result<(), SyscallError> {
        /// Between two looks at whether we are asked to end.
        const LOOKS: Duration = Duration::from_millis(20);
        let began = Instant::now();
        let (mut entered, mut asked) = (false, false);
        let interrupted = -i64::from(Errno::EINTR as i32);
        let signal = loop {
            match self.tracee.wait(Instant::now() + LOOKS)? {
                None => {
                    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
                    if !asked && (began.elapsed() > LONGEST || process::is_pending(&ending)) {
                        self.tracee.interrupt()?;
                        asked = true;
                    }
                }
                Some(Stop::Syscall) if !entered => {
                    entered = true;
                    self.tracee.resume(Until::Syscall, 0)?;
                }
                // The end of the call; but if that is our doing, to where it can be made again. It may be without our having
                // asked: signals that the process ignores interrupt calls of who is traced.
                Some(Stop::Syscall) if asked || self.tracee.registers()?.rax.cast_signed() == interrupted => {
                    // It was taken for the stop that was asked for.
                    self.tracee.interrupt()?;
                    self.tracee.resume(Until::Interrupted, 0)?;
                }
                Some(Stop::Syscall) => break 0,
                Some(Stop::Signal(signal)) => break signal,
                Some(Stop::Interrupted | Stop::Group(_)) => break 0,
                Some(Stop::Ended) => return Ok(()),
            }
        };
        let mut registers = self.tracee.registers()?;
        self.put_back.argument(&mut registers, &self.memory);
        // If a handler runs the kernel makes EINTR of it again.
        if registers.rax.cast_signed() == interrupted {
            registers.rax = RESTARTNOHAND.cast_unsigned();
        }
        self.tracee.set_registers(&registers)?;
        self.tracee.detach(signal)
    }
}
