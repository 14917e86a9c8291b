//! Creates userfaultfds inside of another process by injecting system calls into one of its threads.
//!
//! ```text
//! choose a thread -> PTRACE_SEIZE -> PTRACE_INTERRUPT -> [stopped] -> save registers and signal mask
//!                                                            |
//!     for each call (userfaultfd, close):                    v
//!         block all signals, set the call's registers -> [entry] -> [exit] -> restore registers and mask
//!                                                            |
//!                                                            v
//!                                                      PTRACE_DETACH
//! ```
//!
//! The thread has registers that are not its own only while one injected call runs. At every other stop it can resume by
//! itself: the kernel detaches it if fdmap is killed, treats it as if a signal had arrived, and restarts an interrupted call
//! by the restored registers, with the time that remains. If SIGKILL hits fdmap while a call runs, the thread resumes with the
//! call's registers, and the process ends sooner or later. All other signals to the calling thread wait until the detach.
//!
//! The calls are not single-stepped: SIGTRAP would reset what the process does about that signal.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fdmap_sys::process::{SignalsBlocked, raise_priority};
use fdmap_sys::ptrace::{Registers, ResumeUntil, SignalMask, Stop, TracedThread};
use fdmap_sys::syscall_restart::{ERESTARTNOHAND, eintr_call};
use fdmap_sys::thread::ThreadState;
use fdmap_sys::{Errno, SyscallError};
use nix::libc;

use super::syscall_insn::{self, StopEffect};
use super::tracee::Tracee;
use super::{AdoptError, ResumeOutcome, ThreadStop};
use crate::ClientError;

/// How long fdmap waits for a thread that is not in a timed wait before it refuses, or ends the wait.
const TIMED_WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long fdmap tries to stop any thread.
const STOP_ANY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one thread may take to stop before fdmap tries another one.
const STOP_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a thread may take from one stop to the next during an injected call. After this time fdmap injects no further
/// call, but it still waits to restore the registers.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// `__USER_CS` of `asm/segment.h`: 64-bit code
const USER_CS: u64 = 0x33;

/// Makes a process create `count` userfaultfds, and takes them out of it.
pub(super) fn create_userfaultfds(
    tracee: &Tracee,
    count: usize,
    allow_eintr: bool,
) -> Result<(Vec<OwnedFd>, ThreadStop), AdoptError> {
    let instruction = syscall_insn::find(tracee)?;
    let began = Instant::now();
    let mut failed = Vec::new();
    loop {
        let mut candidates = candidates(tracee)?;
        candidates.retain(|candidate| !failed.contains(&candidate.tid));
        candidates.sort_by_key(Candidate::rank);
        let Some(candidate) = candidates.first() else {
            if began.elapsed() > STOP_ANY_TIMEOUT {
                return Err(AdoptError::NotStopped);
            }
            tracee.check_injectable()?;
            failed.clear();
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        if candidate.effect == StopEffect::LosesTimeout {
            if began.elapsed() < TIMED_WAIT_TIMEOUT {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if let (false, ThreadState::InSyscall(call)) = (allow_eintr, candidate.state) {
                let syscall = eintr_call(&call).map_or("call", |(name, _)| name);
                return Err(AdoptError::TimedWait { tid: candidate.tid, syscall });
            }
        }
        match inject_on_own_thread(tracee, candidate, instruction, count)? {
            Some(created) => return Ok(created),
            None => failed.push(candidate.tid),
        }
    }
}

/// A thread that could be stopped.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    tid: u32,
    state: ThreadState,
    effect: StopEffect,
}

fn candidates(tracee: &Tracee) -> Result<Vec<Candidate>, AdoptError> {
    let threads = tracee.threads()?.into_iter().map(|(tid, state)| {
        let effect = match state {
            ThreadState::InSyscall(call) => syscall_insn::stop_effect(&call, tracee),
            _ => StopEffect::None,
        };
        Candidate { tid, state, effect }
    });
    Ok(threads.collect())
}

impl Candidate {
    /// The least is best. A running thread may enter any call before it stops, so sleeping ones are preferred. Among
    /// equals the main thread, which has the lowest number, comes last: the others are more likely to be idle.
    fn rank(&self) -> impl Ord + use<> {
        let class = match (self.state, self.effect) {
            (ThreadState::Unavailable, _) => 5,
            (ThreadState::Running, _) => 2,
            (_, StopEffect::None) => 0,
            (_, StopEffect::Reissued) => 1,
            (_, StopEffect::DriverDefined) => 3,
            (_, StopEffect::LosesTimeout) => 4,
        };
        (class, std::cmp::Reverse(self.tid))
    }
}

type Created = (Vec<OwnedFd>, ThreadStop);

/// Runs [`inject`] on a thread of its own, whose exit detaches whatever is still traced.
fn inject_on_own_thread(
    tracee: &Tracee,
    candidate: &Candidate,
    instruction: Option<u64>,
    count: usize,
) -> Result<Option<Created>, AdoptError> {
    // No signal may end fdmap during an injected call.
    let _blocked = SignalsBlocked::new();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("fdmap-tracer".to_owned());
        let thread = thread.spawn_scoped(scope, || inject(tracee, candidate, instruction, count));
        let thread = thread.map_err(|error| ClientError::Path {
            what: "starting a thread to trace",
            path: format!("/proc/{}/task/{}", tracee.pid, candidate.tid).into(),
            error,
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Stops a thread and creates the userfaultfds. `None` if the thread did not stop, or not where calls can be injected.
fn inject(
    tracee: &Tracee,
    candidate: &Candidate,
    instruction: Option<u64>,
    count: usize,
) -> Result<Option<Created>, AdoptError> {
    raise_priority();
    let Some(mut thread) = StoppedThread::stop(tracee, candidate, instruction)? else { return Ok(None) };
    let created = thread.create_userfaultfds(tracee, count);
    let stop = thread.detach();
    Ok(Some((created?, stop?)))
}

/// A stopped thread into which calls can be injected.
struct StoppedThread {
    thread: TracedThread,
    tid: u32,
    since: Instant,
    /// Its registers, as it is to resume with them.
    registers: Registers,
    mask: SignalMask,
    /// The address of the `syscall` instruction that injected calls use.
    instruction: u64,
    syscall: Option<i64>,
    outcome: ResumeOutcome,
    /// An injected call took longer than [`CALL_TIMEOUT`].
    slow: bool,
}

impl StoppedThread {
    fn stop(
        tracee: &Tracee,
        candidate: &Candidate,
        instruction: Option<u64>,
    ) -> Result<Option<Self>, AdoptError> {
        let tid = candidate.tid;
        let thread = match TracedThread::seize(tid) {
            Ok(thread) => thread,
            Err(SyscallError { errno: Errno::ESRCH, .. }) => return Ok(None),
            Err(error @ SyscallError { errno: Errno::EPERM | Errno::EACCES, .. }) => {
                // The kernel also refuses to trace a thread that has exited.
                return if tracee.has_thread(tid)? { Err(AdoptError::Denied(error)) } else { Ok(None) };
            }
            Err(error) => return Err(error.into()),
        };
        // The thread may have exited and its number been reused. A thread of another process is not interrupted.
        if !tracee.has_thread(tid)? {
            return Ok(None);
        }
        let since = Instant::now();
        let Some(interrupted) = thread.stop(since + STOP_TIMEOUT)? else { return Ok(None) };
        let mut registers = thread.registers()?;
        let mask = thread.signal_mask()?;
        let found = syscall_insn::call_of(&thread, &registers, instruction);
        let Some((call, instruction)) = found.filter(|_| registers.cs == USER_CS) else {
            thread.detach(0)?;
            return Err(AdoptError::Untrackable(format!(
                "thread {tid} does not run 64-bit code, or the process called execve"
            )));
        };
        let in_call = call.number >= 0;
        // The sequence is a few instructions long. Detaching makes the kernel abort and restart it.
        if !in_call && thread.in_restartable_sequence(registers.rip)? {
            thread.detach(0)?;
            return Ok(None);
        }
        let accepts_eintr =
            candidate.effect == StopEffect::LosesTimeout && candidate.state == ThreadState::InSyscall(call);
        let outcome =
            syscall_insn::resume_outcome(&call, registers.rax.cast_signed(), interrupted, accepts_eintr);
        if outcome == ResumeOutcome::Reissued {
            registers.rax = ERESTARTNOHAND.cast_unsigned();
            thread.set_registers(&registers)?;
        }
        if thread.dispatches_syscalls()? {
            thread.detach(0)?;
            return Err(AdoptError::Untrackable(
                "it handles its own system calls (PR_SET_SYSCALL_USER_DISPATCH)".to_owned(),
            ));
        }
        let syscall = in_call.then_some(call.number);
        Ok(Some(Self { thread, tid, since, registers, mask, instruction, syscall, outcome, slow: false }))
    }

    /// Creates the userfaultfds and takes them out of the process.
    fn create_userfaultfds(&mut self, tracee: &Tracee, count: usize) -> Result<Vec<OwnedFd>, AdoptError> {
        let mut numbers = Vec::new();
        let created = (0..count).try_for_each(|_| {
            numbers.push(self.userfaultfd()?);
            Ok::<_, AdoptError>(())
        });
        let taken = created.and_then(|()| {
            let take = |number: &i32| tracee.take_descriptor(*number).map_err(AdoptError::from);
            numbers.iter().map(take).collect::<Result<Vec<_>, _>>()
        });
        for number in numbers {
            let closed = self.call("close", libc::SYS_close, u64::try_from(number).unwrap_or(u64::MAX));
            // An earlier error is the one to report.
            if taken.is_ok() {
                closed?;
            }
        }
        taken
    }

    /// userfaultfd(2), with `UFFD_USER_MODE_ONLY` where the process may not have more.
    fn userfaultfd(&mut self) -> Result<i32, AdoptError> {
        /// `linux/userfaultfd.h`
        const UFFD_USER_MODE_ONLY: i32 = 1;
        const FLAGS: i32 = libc::O_CLOEXEC | libc::O_NONBLOCK;
        if self.slow {
            return Err(AdoptError::Frozen(self.tid));
        }
        let flags = |flags: i32| u64::try_from(flags).unwrap_or(0);
        let number = match self.call("userfaultfd", libc::SYS_userfaultfd, flags(FLAGS)) {
            Err(AdoptError::Injected { errno: Errno::EPERM, .. }) => {
                self.call("userfaultfd", libc::SYS_userfaultfd, flags(FLAGS | UFFD_USER_MODE_ONLY))
            }
            other => other,
        }?;
        i32::try_from(number).map_err(|_| AdoptError::Injected { call: "userfaultfd", errno: Errno::EBADF })
    }

    /// Injects a system call of one argument. Whatever happens, the thread has its own registers and mask afterwards.
    fn call(&mut self, call: &'static str, number: i64, argument: u64) -> Result<u64, AdoptError> {
        /// The kernel leaves SIGKILL and SIGSTOP unblocked.
        const ALL_SIGNALS: SignalMask = SignalMask(u64::MAX);
        /// `linux/err.h`
        const MAX_ERRNO: i64 = 4095;
        let registers = Registers {
            rip: self.instruction,
            rax: number.cast_unsigned(),
            // In no call: the kernel restarts nothing.
            orig_rax: u64::MAX,
            rdi: argument,
            ..self.registers
        };
        self.thread.set_signal_mask(ALL_SIGNALS)?;
        let ran = self.thread.set_registers(&registers).map_err(AdoptError::from);
        let ran = ran.and_then(|()| self.run_to_syscall_stop(true));
        let ran = ran.and_then(|()| self.run_to_syscall_stop(false));
        let result = ran.and_then(|()| Ok(self.thread.registers()?.rax));
        let restored = self.thread.set_registers(&self.registers);
        let restored = restored.and(self.thread.set_signal_mask(self.mask));
        let result = result?;
        restored?;
        let value = result.cast_signed();
        if (-MAX_ERRNO..0).contains(&value) {
            let errno = Errno::from_raw(i32::try_from(-value).unwrap_or(0));
            return Err(AdoptError::Injected { call, errno });
        }
        Ok(result)
    }

    /// Resumes the thread until it enters (`entry`) or leaves a system call. A thread that does not come to enter it, as in a
    /// frozen cgroup, is asked to stop before; a call that was entered always ends.
    fn run_to_syscall_stop(&mut self, entry: bool) -> Result<(), AdoptError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let (mut signal, mut asked) = (0, false);
        loop {
            self.thread.resume(ResumeUntil::Syscall, signal)?;
            let stop = match self.thread.wait(deadline)? {
                Some(stop) => stop,
                None => {
                    self.slow = true;
                    if entry && !asked {
                        self.thread.interrupt()?;
                        asked = true;
                    }
                    self.wait_indefinitely()?
                }
            };
            signal = match stop {
                Stop::Syscall => return Ok(()),
                Stop::Interrupted | Stop::Group(_) if asked => return Err(AdoptError::Frozen(self.tid)),
                // SIGSTOP, which cannot be blocked: it stops the process, and this thread resumes here.
                Stop::Signal(signal) => signal,
                Stop::Interrupted | Stop::Group(_) => 0,
                Stop::Ended => return Err(AdoptError::ThreadExited(self.tid)),
            };
        }
    }

    /// Waits for the next stop without a limit: giving up would leave the thread with the registers of the injected call.
    fn wait_indefinitely(&self) -> Result<Stop, SyscallError> {
        if let Some(stop) = self.thread.wait(Instant::now() + CALL_TIMEOUT)? {
            return Ok(stop);
        }
        // Not eprintln!, which panics if standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "fdmap: thread {} does not resume (frozen cgroup?); fdmap waits to restore its registers. \
             SIGKILL to fdmap before then ends the process.",
            self.tid
        );
        loop {
            if let Some(stop) = self.thread.wait(Instant::now() + CALL_TIMEOUT)? {
                return Ok(stop);
            }
        }
    }

    /// Resumes the thread. The detach has the effect of a signal: the kernel restarts an interrupted call.
    fn detach(self) -> Result<ThreadStop, AdoptError> {
        self.thread.detach(0)?;
        let Self { tid, syscall, outcome, since, .. } = self;
        Ok(ThreadStop { tid, syscall, duration: since.elapsed(), outcome })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_outside_of_timed_waits_come_first() {
        let call = ThreadState::InSyscall(fdmap_sys::thread::Syscall { number: 0, arguments: [0; 6] });
        let candidate = |tid, state, effect| Candidate { tid, state, effect };
        let mut all = [
            candidate(1, call, StopEffect::LosesTimeout),
            candidate(2, ThreadState::Unavailable, StopEffect::None),
            candidate(3, call, StopEffect::DriverDefined),
            candidate(4, ThreadState::Running, StopEffect::None),
            candidate(5, call, StopEffect::Reissued),
            candidate(6, call, StopEffect::None),
            candidate(7, ThreadState::Paused, StopEffect::None),
        ];
        all.sort_by_key(Candidate::rank);
        assert_eq!(all.map(|candidate| candidate.tid), [7, 6, 5, 4, 3, 1, 2]);
    }
}
