//! One thread of a process, stopped for as long as it takes to have it make userfaultfds.
//!
//! ```text
//!  seize -> interrupt -> [stopped] -> registers and signal mask are read
//!                            |        its own call:  userfaultfd ... close ...   (each between two stops)
//!                        [stopped where signals are taken] -> registers and mask are put back -> detach
//!                                                                                             -> stay until its call ends
//! ```
//!
//! The last stop must be where the kernel takes signals: leaving there it looks at the registers, and makes an interrupted
//! call again by itself, with the time that remained (`restart_block` is the thread's, and no call of ours touches it).
//! Not by single steps: their SIGTRAP would change what the process does about that signal.
//!
//! Between the two last brackets the thread has registers that are not its own, for some hundred microseconds. If we are
//! killed (SIGKILL) just then the kernel lets it go on with them, and that is its end; all other signals wait.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use fdmap_sys::pidfd::PidFd;
use fdmap_sys::ptrace::{Memory, Registers, SignalMask, Stop, Tracee, Until};
use fdmap_sys::{Errno, SyscallError, process};
use nix::libc;

use super::calls::{Found, Limit, RESTARTNOHAND, found};
use super::rest::{PutBack, call_of, disturbs, shorten};
use super::slept::slept;
use super::threads::{Candidate, Disturbs, Place};
use super::{AdoptError, Left, Stopped, place, stay};

/// How long a thread may take to stop, before another one is tried.
const STOPS: Duration = Duration::from_millis(100);

/// How long it may take from one stop to the next while it makes calls for us. After that it makes no more of them; but it is not
/// given up while its registers are not its own.
const CALLS: Duration = Duration::from_secs(2);

/// The process that is stopped, and what for.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) pid: u32,
    pub(super) process: PidFd,
    pub(super) memory: Memory,
    /// An instruction `syscall` for threads that are in none.
    pub(super) instruction: Option<u64>,
    /// How many userfaultfds.
    pub(super) wanted: usize,
    /// Calls may begin their time anew.
    pub(super) longer_waits: bool,
}

/// What comes of an attempt at one thread.
pub(super) type Attempt = Result<Option<(Vec<OwnedFd>, Stopped)>, AdoptError>;

/// Tries one thread; `None` if it could not be stopped and goes on. To be called on a thread of its own, whose end is the end of
/// all tracing. The answer is told as soon as it is there; it may take until the thread's call ends before this returns.
///
/// # Errors
/// If an argument of its call could not be put back.
pub(super) fn attempt(
    task: &Arc<Task>,
    candidate: Candidate,
    tell: &SyncSender<Attempt>,
) -> Result<(), SyscallError> {
    let (attempt, staying) = match begin(task, candidate) {
        Ok(Some(mut still)) => {
            let made = still.make_all();
            match still.finish() {
                Ok((report, staying)) => (made.map(|made| Some((made, report))), staying),
                Err(error) => (made.and(Err(error)), None),
            }
        }
        Ok(None) => (Ok(None), None),
        Err(error) => (Err(error), None),
    };
    // Nobody listens if the caller has ended for another reason.
    let _ = tell.send(attempt);
    staying.map_or(Ok(()), stay::Staying::until_its_call_ends)
}

/// Of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Beginning,
    End,
}

/// A thread that stands still.
struct Still {
    task: Arc<Task>,
    tracee: Tracee,
    memory: Memory,
    tid: u32,
    began: Instant,
    /// Its own registers, as it shall go on with them.
    own: Registers,
    mask: SignalMask,
    /// Where it makes our calls.
    instruction: u64,
    /// True where signals are taken.
    takes_signals: bool,
    /// A signal that it was about to take.
    signal: i32,
    left: Left,
    put_back: PutBack,
    number: Option<i64>,
    /// A stop took longer than [`CALLS`].
    late: bool,
}

/// How long the thread has slept in its call, before it is touched; `None` if that cannot be told and may be left so.
fn measure(task: &Task, candidate: &Candidate) -> Result<Option<Duration>, AdoptError> {
    /// Who runs has done so at the last tick.
    const TICKS: Duration = Duration::from_millis(20);
    let Candidate { tid, place, disturbs } = *candidate;
    Ok(match (place, disturbs) {
        (Place::In(call), Disturbs::Limited(_) | Disturbs::Hidden) => {
            let slept = slept(task.pid, tid).filter(|_| disturbs != Disturbs::Hidden);
            if slept.is_none() && !task.longer_waits {
                return Err(AdoptError::Time { tid, number: call.number });
            }
            slept
        }
        // It may have been woken at the end of its time, and not have come to run yet.
        (Place::Running, _) => {
            Some(slept(task.pid, tid).filter(|slept| *slept > TICKS).unwrap_or(Duration::ZERO))
        }
        // If it has a call with a time when it stops, it has only just begun it.
        _ => Some(Duration::ZERO),
    })
}

/// Stops the thread and reads what is to be restored. Nothing is changed yet but the timeout of a socket.
fn begin(task: &Arc<Task>, candidate: Candidate) -> Result<Option<Still>, AdoptError> {
    let tid = candidate.tid;
    process::hurry();
    let measured = measure(task, &candidate)?;
    let tracee = match Tracee::seize(tid) {
        Ok(tracee) => tracee,
        Err(SyscallError { errno: Errno::ESRCH, .. }) => return Ok(None),
        Err(error @ SyscallError { errno: Errno::EPERM | Errno::EACCES, .. }) => {
            return Err(AdoptError::Denied(error));
        }
        Err(error) => return Err(error.into()),
    };
    let began = Instant::now();
    tracee.interrupt()?;
    let by_us = loop {
        match tracee.wait(began + STOPS)? {
            None | Some(Stop::Ended) => return Ok(None),
            Some(Stop::Interrupted) => break true,
            Some(Stop::Group(_)) => break false,
            // Any stop is taken for the one that was asked for.
            Some(Stop::Signal(signal)) => {
                tracee.interrupt()?;
                tracee.resume(Until::Interrupted, signal)?;
            }
            Some(Stop::Syscall) => {
                tracee.interrupt()?;
                tracee.resume(Until::Interrupted, 0)?;
            }
        }
    };
    let own = tracee.registers()?;
    let mask = tracee.signal_mask()?;
    let call = call_of(&own);
    /// `__USER_CS` of `asm/segment.h`: code of 64 bits.
    const USER_CS: u64 = 0x33;
    // What was ended by us only is made again, whole: nothing of it was changed. Calls of 32 bits have other numbers.
    let ended = by_us && own.cs == USER_CS && matches!(found(&call, own.rax.cast_signed()), Found::Ending(_));
    let let_go = |tracee: Tracee| -> Result<(), SyscallError> {
        if ended {
            tracee.set_registers(&Registers { rax: RESTARTNOHAND.cast_unsigned(), ..own })?;
        }
        tracee.detach(0)
    };
    // Until now it could become another program. From here on it could not without ending this thread.
    let memory = match Memory::open(task.pid) {
        Ok(memory) => memory,
        Err(error) => {
            let_go(tracee)?;
            return Err(error.into());
        }
    };
    let in_call = call.number >= 0;
    // One of 32 bits has another instruction before: what it would be made again by is lost with a call of ours.
    let instruction = if in_call { Some(own.rip.wrapping_sub(2)) } else { task.instruction };
    let instruction = instruction.filter(|address| place::is_syscall(&memory, *address));
    let Some(instruction) = instruction.filter(|_| own.cs == USER_CS) else {
        // A call that was not made by this instruction has a number of 32 bits: not to be judged by it.
        tracee.detach(0)?;
        return Err(AdoptError::Unfit(format!(
            "thread {tid} runs no code of 64 bits, or its process became another program"
        )));
    };
    // It is a few instructions long. The kernel has it begin again now, and it is tried again.
    if !in_call && tracee.in_restartable_sequence(&memory, own.rip)? {
        tracee.detach(0)?;
        return Ok(None);
    }
    if tracee.dispatches_syscalls()? {
        let_go(tracee)?;
        return Err(AdoptError::Unfit("it answers its own system calls (syscall user dispatch)".to_owned()));
    }
    let mut still = Still {
        task: Arc::clone(task),
        tracee,
        memory,
        tid,
        began,
        own,
        mask,
        instruction,
        takes_signals: true,
        signal: 0,
        left: Left::AsItWas,
        put_back: PutBack::Nothing,
        number: in_call.then_some(call.number),
        late: false,
    };
    match found(&call, own.rax.cast_signed()) {
        Found::Between => {}
        Found::Restarting => still.left = Left::Restarted,
        // SIGSTOP and SIGCONT end such calls without us as well.
        Found::Ending(limit) if by_us => {
            // A thread that was in another call when it was looked at has begun this one just now.
            let same = matches!(candidate.place, Place::Running) || candidate.place == Place::In(call);
            still.make_again(limit, if same { measured } else { Some(Duration::ZERO) });
        }
        Found::Ending(_) => {}
    }
    Ok(Some(still))
}

impl Still {
    /// Has its call made again, unless a handler of a signal runs first: then it ends with EINTR, as it would have.
    fn make_again(&mut self, limit: Limit, slept: Option<Duration>) {
        let Task { pid, process, .. } = &*self.task;
        let disturbs = disturbs(*pid, process, &self.memory, &call_of(&self.own), limit);
        self.left = match (disturbs, slept) {
            (Disturbs::Forever | Disturbs::Nothing, _) => Left::MadeAgain,
            (Disturbs::Limited(whole), Some(slept)) => {
                let rest = whole.saturating_sub(slept);
                // Where that cannot be done it waits longer, which is better than EINTR.
                match shorten(*pid, process, &self.memory, limit, &mut self.own, rest) {
                    Ok(put_back) => {
                        self.put_back = put_back;
                        Left::WithTheRest(rest)
                    }
                    Err(_) => Left::Anew,
                }
            }
            (Disturbs::Limited(_), None) | (Disturbs::Hidden, _) => Left::Anew,
        };
        self.own.rax = RESTARTNOHAND.cast_unsigned();
    }

    /// Makes userfaultfds and takes them out.
    fn make_all(&mut self) -> Result<Vec<OwnedFd>, AdoptError> {
        /// What is not blocked cannot be, or would have the kernel change what the process does about a signal.
        const ALL: SignalMask = SignalMask(u64::MAX);
        self.tracee.set_signal_mask(ALL)?;
        let mut inside = Vec::new();
        let made = (0..self.task.wanted).try_for_each(|_| {
            if self.late {
                return Err(AdoptError::Stuck(self.tid));
            }
            let number = self.make()?;
            inside.push(number);
            Ok::<_, AdoptError>(())
        });
        let ours = made.and_then(|()| {
            let descriptor = |number: &i32| self.task.process.descriptor(*number).map_err(AdoptError::from);
            inside.iter().map(descriptor).collect::<Result<Vec<_>, _>>()
        });
        for number in inside {
            let closed = self.call("close", libc::SYS_close, u64::try_from(number).unwrap_or(u64::MAX));
            // The first error is the one to tell.
            if ours.is_ok() {
                closed?;
            }
        }
        ours
    }

    fn make(&mut self) -> Result<i32, AdoptError> {
        /// `linux/userfaultfd.h`
        const UFFD_USER_MODE_ONLY: i32 = 1;
        const FLAGS: i32 = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let flags = |flags: i32| u64::try_from(flags).unwrap_or(0);
        let made = match self.call("userfaultfd", libc::SYS_userfaultfd, flags(FLAGS)) {
            Err(AdoptError::Inside { errno: Errno::EPERM, .. }) => {
                self.call("userfaultfd", libc::SYS_userfaultfd, flags(FLAGS | UFFD_USER_MODE_ONLY))
            }
            other => other,
        }?;
        i32::try_from(made).map_err(|_| AdoptError::Inside { call: "userfaultfd", errno: Errno::EBADF })
    }

    /// Has it make a system call of one argument.
    fn call(&mut self, call: &'static str, number: i64, argument: u64) -> Result<u64, AdoptError> {
        let mut registers = self.own;
        registers.rip = self.instruction;
        registers.rax = number.cast_unsigned();
        // In no call: what it returns is nothing to be made again.
        registers.orig_rax = u64::MAX;
        registers.rdi = argument;
        self.tracee.set_registers(&registers)?;
        self.go_to_syscall(End::Beginning)?;
        self.go_to_syscall(End::End)?;
        let result = self.tracee.registers()?.rax;
        /// `MAX_ERRNO` of `linux/err.h`
        const MAX_ERRNO: i64 = 4095;
        let value = result.cast_signed();
        if (-MAX_ERRNO..0).contains(&value) {
            let errno = Errno::from_raw(i32::try_from(-value).unwrap_or(0));
            return Err(AdoptError::Inside { call, errno });
        }
        Ok(result)
    }

    /// Lets it go on to the next beginning or end of a system call. Where it does not come to begin one, as in a frozen control
    /// group, it is asked to stop before it; one that was begun has an end.
    fn go_to_syscall(&mut self, end: End) -> Result<(), AdoptError> {
        let mut signal = std::mem::take(&mut self.signal);
        let deadline = Instant::now() + CALLS;
        let mut asked = false;
        loop {
            self.tracee.resume(Until::Syscall, signal)?;
            self.takes_signals = false;
            let stop = match self.tracee.wait(deadline)? {
                Some(stop) => stop,
                None => {
                    self.late = true;
                    if end == End::Beginning && !asked {
                        self.tracee.interrupt()?;
                        asked = true;
                    }
                    self.wait_for_long()?
                }
            };
            signal = match stop {
                Stop::Syscall => return Ok(()),
                Stop::Interrupted | Stop::Group(_) if asked => {
                    self.takes_signals = true;
                    return Err(AdoptError::Stuck(self.tid));
                }
                // All are blocked that can be; SIGSTOP has it stop, and then go on here.
                Stop::Signal(signal) => signal,
                Stop::Interrupted | Stop::Group(_) => 0,
                Stop::Ended => return Err(AdoptError::Ended(self.tid)),
            };
        }
    }

    /// Waits for its next stop for as long as that takes: its registers are not its own, and who gave up would leave it so.
    fn wait_for_long(&self) -> Result<Stop, SyscallError> {
        if let Some(stop) = self.tracee.wait(Instant::now() + CALLS)? {
            return Ok(stop);
        }
        // Not by a macro that panics if nobody reads.
        let _ = writeln!(
            std::io::stderr(),
            "fdmap: thread {} of process {} does not go on, as if it was frozen. It gets its registers back as soon as it does: \
             killing fdmap until then ends that process.",
            self.tid,
            self.task.pid
        );
        loop {
            if let Some(stop) = self.tracee.wait(Instant::now() + CALLS)? {
                return Ok(stop);
            }
        }
    }

    /// To a stop where signals are taken.
    fn go_to_signals(&mut self) -> Result<(), AdoptError> {
        if self.takes_signals {
            return Ok(());
        }
        self.tracee.interrupt()?;
        // It may be running if a request to it has failed.
        let _ = self.tracee.resume(Until::Interrupted, 0);
        loop {
            match self.wait_for_long()? {
                Stop::Interrupted | Stop::Group(_) => break,
                Stop::Signal(signal) => {
                    self.signal = signal;
                    break;
                }
                Stop::Syscall => {
                    self.tracee.interrupt()?;
                    self.tracee.resume(Until::Interrupted, 0)?;
                }
                Stop::Ended => return Err(AdoptError::Ended(self.tid)),
            }
        }
        self.takes_signals = true;
        Ok(())
    }

    /// Puts all back and lets it go on.
    fn finish(mut self) -> Result<(Stopped, Option<stay::Staying>), AdoptError> {
        let put_back = std::mem::replace(&mut self.put_back, PutBack::Nothing);
        let (pid, tid) = (self.task.pid, self.tid);
        let gone_on = self.go_on(put_back.is_at_the_end());
        if let PutBack::Socket(again) = &put_back {
            again.put_back(pid, tid)?;
        }
        let (report, staying) = gone_on?;
        let staying = staying.map(|(tracee, memory)| stay::Staying { tracee, memory, put_back });
        Ok((report, staying))
    }

    fn go_on(mut self, stay: bool) -> Result<(Stopped, Option<(Tracee, Memory)>), AdoptError> {
        self.go_to_signals()?;
        self.tracee.set_registers(&self.own)?;
        self.tracee.set_signal_mask(self.mask)?;
        let Self { tracee, memory, tid, number, began, signal, left, .. } = self;
        let staying = if stay {
            tracee.resume(Until::Syscall, signal)?;
            Some((tracee, memory))
        } else {
            tracee.detach(signal)?;
            None
        };
        Ok((Stopped { tid, number, stopped: began.elapsed(), left }, staying))
    }
}
