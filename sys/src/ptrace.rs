//! ptrace(2) of one thread of another process. x86-64 only.
//!
//! The kernel takes the calling *thread* for the tracer, not its process: every request must come from the thread that
//! seized, and the kernel detaches everything that a thread has seized when that thread exits.

use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};
use crate::thread::Syscall;

/// The registers of a thread, `struct user_regs_struct`.
pub type Registers = libc::user_regs_struct;

/// The call that a stopped thread is in. Its number is negative if the thread is in none.
impl From<&Registers> for Syscall {
    fn from(registers: &Registers) -> Self {
        let Registers { orig_rax, rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
        // The kernel ignores the upper half of the number.
        Self { number: orig_rax.cast_signed() << 32 >> 32, arguments: [rdi, rsi, rdx, r10, r8, r9] }
    }
}

/// A signal set in the kernel's format: bit 0 is signal 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalMask(pub u64);

/// A thread that the calling thread traces.
#[derive(Debug)]
pub struct TracedThread {
    tid: libc::pid_t,
    /// Not `Send`: only the thread that seized may make requests.
    _not_send: PhantomData<*const ()>,
}

/// Why a thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// [`TracedThread::interrupt`], or SIGCONT to the process. The thread is where the kernel delivers signals: when it
    /// resumes, the kernel restarts an interrupted system call if the registers ask for it.
    Interrupted,
    /// This signal (SIGSTOP and the like) stopped the process. The thread is where the kernel delivers signals.
    Group(i32),
    /// Entry to or exit from a system call.
    Syscall,
    /// This signal is about to be delivered. The thread is where the kernel delivers signals.
    Signal(i32),
    /// The thread exited, or another thread of its process called execve.
    Ended,
}

/// Where a resumed thread stops next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeUntil {
    /// At the next entry to or exit from a system call.
    Syscall,
    /// At the next interrupt or signal.
    Interrupted,
}

impl TracedThread {
    /// `PTRACE_SEIZE`: traces a thread without stopping it.
    ///
    /// # Errors
    /// `EPERM` if the thread is traced already or the caller lacks the right; `ESRCH` if there is no such thread.
    pub fn seize(tid: u32) -> Result<Self, SyscallError> {
        let call = || format!("ptrace(PTRACE_SEIZE) of thread {tid}");
        let tid = libc::pid_t::try_from(tid).map_err(|_| Errno::ESRCH).call(call)?;
        let thread = Self { tid, _not_send: PhantomData };
        // TRACESYSGOOD distinguishes stops at system calls from SIGTRAP. No EXITKILL: the thread outlives its tracer.
        thread.request("PTRACE_SEIZE", libc::PTRACE_SEIZE, 0, usize_of(libc::PTRACE_O_TRACESYSGOOD))?;
        Ok(thread)
    }

    /// `PTRACE_INTERRUPT`: asks the thread to stop. [`Self::wait`] returns the stop.
    ///
    /// # Errors
    /// `ESRCH` if the thread exited.
    pub fn interrupt(&self) -> Result<(), SyscallError> {
        self.request("PTRACE_INTERRUPT", libc::PTRACE_INTERRUPT, 0, 0)
    }

    /// Waits for the next stop. `None` if the thread does not stop before `deadline`.
    ///
    /// # Errors
    /// `waitpid`: `ECHILD` if the caller no longer traces the thread.
    pub fn wait(&self, deadline: Instant) -> Result<Option<Stop>, SyscallError> {
        /// A thread usually stops within microseconds. After this time sleeping beats yielding: on a loaded host the
        /// scheduler serves a thread that yields last.
        const SPIN_TIMEOUT: Duration = Duration::from_micros(30);
        const MIN_SLEEP: Duration = Duration::from_micros(20);
        const MAX_SLEEP: Duration = Duration::from_millis(1);
        let began = Instant::now();
        let mut sleep = MIN_SLEEP;
        loop {
            let mut status = 0;
            // SAFETY: the kernel writes one int to status, which outlives the call; the other arguments are integers.
            let got = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match Errno::result(got) {
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).call(|| format!("waitpid of thread {}", self.tid)),
                Ok(0) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                    if began.elapsed() < SPIN_TIMEOUT {
                        std::hint::spin_loop();
                    } else {
                        std::thread::sleep(sleep);
                        sleep = (sleep * 3 / 2).min(MAX_SLEEP);
                    }
                }
                Ok(_) => return Ok(Some(decode_status(status))),
            }
        }
    }

    /// Interrupts the thread and waits until it is where the kernel delivers signals. True if the interrupt stopped it, false if
    /// a signal had stopped its process before. `None` if it exits, or does not stop before `deadline`.
    ///
    /// # Errors
    /// As [`Self::interrupt`] and [`Self::wait`].
    pub fn stop(&self, deadline: Instant) -> Result<Option<bool>, SyscallError> {
        self.interrupt()?;
        loop {
            let signal = match self.wait(deadline)? {
                None | Some(Stop::Ended) => return Ok(None),
                Some(Stop::Interrupted) => return Ok(Some(true)),
                Some(Stop::Group(_)) => return Ok(Some(false)),
                Some(Stop::Signal(signal)) => signal,
                Some(Stop::Syscall) => 0,
            };
            // Any stop consumes the interrupt.
            self.interrupt()?;
            self.resume(ResumeUntil::Interrupted, signal)?;
        }
    }

    /// `PTRACE_GETREGS`. This and all requests below need a stopped thread.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn registers(&self) -> Result<Registers, SyscallError> {
        let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
        self.request("PTRACE_GETREGS", libc::PTRACE_GETREGS, 0, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: Registers consists of integers only; it was zeroed above and then written by the kernel.
        Ok(unsafe { registers.assume_init() })
    }

    /// `PTRACE_SETREGS`.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped; `EIO` for values that the kernel refuses.
    pub fn set_registers(&self, registers: &Registers) -> Result<(), SyscallError> {
        let address = std::ptr::from_ref(registers).expose_provenance();
        self.request("PTRACE_SETREGS", libc::PTRACE_SETREGS, 0, address)
    }

    /// `PTRACE_GETSIGMASK`: the blocked signals. In a call that replaces the mask for its duration (ppoll), the mask that
    /// the kernel restores afterwards.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn signal_mask(&self) -> Result<SignalMask, SyscallError> {
        let mut mask = SignalMask(0);
        let address = std::ptr::from_mut(&mut mask.0).expose_provenance();
        self.request("PTRACE_GETSIGMASK", PTRACE_GETSIGMASK, size_of::<u64>(), address)?;
        Ok(mask)
    }

    /// `PTRACE_SETSIGMASK`.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn set_signal_mask(&self, mask: SignalMask) -> Result<(), SyscallError> {
        let address = std::ptr::from_ref(&mask.0).expose_provenance();
        self.request("PTRACE_SETSIGMASK", PTRACE_SETSIGMASK, size_of::<u64>(), address)
    }

    /// `PTRACE_PEEKDATA`: the 8 bytes at `address` in the thread's current address space.
    ///
    /// # Errors
    /// `EIO` if not all of them are mapped; `ESRCH` if the thread is not stopped.
    pub fn peek(&self, address: u64) -> Result<[u8; 8], SyscallError> {
        let address = usize::try_from(address)
            .map_err(|_| Errno::EIO)
            .call(|| format!("ptrace(PTRACE_PEEKDATA) of thread {} at {address:#x}", self.tid))?;
        let mut word = 0_u64;
        let into = std::ptr::from_mut(&mut word).expose_provenance();
        self.request("PTRACE_PEEKDATA", libc::PTRACE_PEEKDATA, address, into)?;
        Ok(word.to_ne_bytes())
    }

    /// The two bytes at `address`. `None` if they are not mapped.
    #[must_use]
    pub fn instruction_at(&self, address: u64) -> Option<[u8; 2]> {
        let byte = |address: u64| -> Option<u8> {
            let word = self.peek(address & !7).ok()?;
            word.get(usize::try_from(address & 7).ok()?).copied()
        };
        Some([byte(address)?, byte(address.wrapping_add(1))?])
    }

    /// True if a handler of the process answers the thread's system calls (`PR_SET_SYSCALL_USER_DISPATCH`), as in Wine.
    /// False on kernels that cannot report it (before 6.4).
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn dispatches_syscalls(&self) -> Result<bool, SyscallError> {
        /// `struct ptrace_sud_config`: mode, selector, offset, len
        const WORDS: usize = 4;
        let mut config = [0_u64; WORDS];
        let address = config.as_mut_ptr().expose_provenance();
        let read = self.request(
            "PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG",
            PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG,
            size_of_val(&config),
            address,
        );
        match read {
            Err(SyscallError { errno: Errno::EIO | Errno::EINVAL, .. }) => Ok(false),
            Err(error) => Err(error),
            Ok(()) => Ok(config[0] != 0),
        }
    }

    /// True if `address`, that of the next instruction, lies in a restartable sequence (rseq). The kernel aborts such a
    /// sequence when it preempts the thread there, but not when a tracer moves the thread elsewhere in between.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped; [`Self::peek`].
    pub fn in_restartable_sequence(&self, address: u64) -> Result<bool, SyscallError> {
        /// `struct ptrace_rseq_configuration`: the address of the thread's `struct rseq`, then three 32-bit numbers.
        const WORDS: usize = 3;
        /// Offset of `rseq_cs` in `struct rseq`.
        const RSEQ_CS: u64 = 8;
        let mut config = [0_u64; WORDS];
        let into = config.as_mut_ptr().expose_provenance();
        let size = size_of_val(&config);
        match self.request("PTRACE_GET_RSEQ_CONFIGURATION", PTRACE_GET_RSEQ_CONFIGURATION, size, into) {
            // Before Linux 5.13, or a kernel built without it.
            Err(SyscallError { errno: Errno::EIO | Errno::EINVAL, .. }) => return Ok(false),
            other => other?,
        }
        if config[0] == 0 {
            return Ok(false);
        }
        let sequence = u64::from_ne_bytes(self.peek(config[0] + RSEQ_CS)?);
        if sequence == 0 {
            return Ok(false);
        }
        // struct rseq_cs: version and flags (8 bytes), start_ip, post_commit_offset, abort_ip
        let start = u64::from_ne_bytes(self.peek(sequence + 8)?);
        let length = u64::from_ne_bytes(self.peek(sequence + 16)?);
        Ok(is_within(start, length, address))
    }

    /// Resumes the thread. `signal` is delivered to it; 0 is none.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn resume(&self, until: ResumeUntil, signal: i32) -> Result<(), SyscallError> {
        let signal = usize::try_from(signal).unwrap_or(0);
        match until {
            ResumeUntil::Syscall => self.request("PTRACE_SYSCALL", libc::PTRACE_SYSCALL, 0, signal),
            ResumeUntil::Interrupted => self.request("PTRACE_CONT", libc::PTRACE_CONT, 0, signal),
        }
    }

    /// `PTRACE_DETACH`: resumes the thread and stops tracing it. `signal` is delivered to it; 0 is none.
    ///
    /// # Errors
    /// `ESRCH` if the thread is not stopped.
    pub fn detach(self, signal: i32) -> Result<(), SyscallError> {
        self.request("PTRACE_DETACH", libc::PTRACE_DETACH, 0, usize::try_from(signal).unwrap_or(0))
    }

    fn request(
        &self,
        name: &str,
        request: libc::c_uint,
        address: usize,
        data: usize,
    ) -> Result<(), SyscallError> {
        // The raw system call: libc's wrapper replaces `data` for PEEK requests.
        // SAFETY: each caller passes integers where the request takes integers, and elsewhere the exposed address of a value
        // of the size that the request reads or writes; the kernel touches no other memory of this process.
        let done = unsafe { libc::syscall(libc::SYS_ptrace, request, self.tid, address, data) };
        Errno::result(done).call(|| format!("ptrace({name}) of thread {}", self.tid)).map(drop)
    }
}

/// Decodes a wait status of waitpid(2).
fn decode_status(status: i32) -> Stop {
    /// `PTRACE_EVENT_STOP` of `linux/ptrace.h`
    const EVENT_STOP: i32 = 128;
    const SYSCALL: i32 = libc::SIGTRAP | 0x80;
    if !libc::WIFSTOPPED(status) {
        return Stop::Ended;
    }
    match (libc::WSTOPSIG(status), status >> 16) {
        (libc::SIGTRAP, EVENT_STOP) => Stop::Interrupted,
        (signal, EVENT_STOP) => Stop::Group(signal),
        (SYSCALL, _) => Stop::Syscall,
        (signal, _) => Stop::Signal(signal),
    }
}

/// True if `address` is one of the `length` addresses from `start` on.
const fn is_within(start: u64, length: u64, address: u64) -> bool {
    address.wrapping_sub(start) < length
}

fn usize_of(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

// linux/ptrace.h and asm/ptrace.h
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;

/// The memory of another process, read through `/proc/PID/mem`. Bound to the address space at the time of the open: after
/// an execve, reads fail.
pub struct ProcessMemory {
    file: File,
    pid: u32,
}

impl ProcessMemory {
    /// # Errors
    /// `open`: `EACCES` if the caller may not trace the process, `ENOENT` if there is none.
    pub fn open(pid: u32) -> Result<Self, SyscallError> {
        let path = format!("/proc/{pid}/mem");
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, pid })
    }

    /// Fills `out` from `address` on.
    ///
    /// # Errors
    /// `EIO` or `EFAULT` if part of it is not mapped or cannot be read, as mappings of devices.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), SyscallError> {
        let length = out.len();
        let call = || format!("pread of {length} bytes at {address:#x} of /proc/{}/mem", self.pid);
        self.file.read_exact_at(out, address).call(call)
    }
}

impl fmt::Debug for ProcessMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessMemory").field("pid", &self.pid).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
