//! ptrace: one thread of another process, stopped for a moment. x86-64 only.
//!
//! The kernel knows a thread as the tracer, not a process: all requests must come from the thread that seized, and all it
//! has seized go on by themselves when it ends.

use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};

/// The registers of a thread, `struct user_regs_struct`.
pub type Registers = libc::user_regs_struct;

/// A set of signals as the kernel has it: bit 0 is signal 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalMask(pub u64);

/// A thread that is traced by the calling thread.
#[derive(Debug)]
pub struct Tracee {
    tid: libc::pid_t,
    /// Bound to the thread that seized it.
    _here: PhantomData<*const ()>,
}

/// Why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// [`Tracee::interrupt`] was obeyed, or its process was continued. The thread stands where signals are taken: it makes an
    /// interrupted call again, or not, by the registers that it has when it goes on from here.
    Interrupted,
    /// Its process is stopped by this signal (SIGSTOP and the like). It stands at the same place.
    Group(i32),
    /// At the beginning or the end of a system call.
    Syscall,
    /// It is about to take this signal. It stands at the same place.
    Signal(i32),
    /// It has ended, or its process became another program while this was not its first thread.
    Ended,
}

/// How far a thread goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// To the next beginning or end of a system call.
    Syscall,
    /// Until it is interrupted or takes a signal.
    Interrupted,
}

impl Tracee {
    /// `PTRACE_SEIZE`: traces a thread and does not stop it.
    ///
    /// # Errors
    /// `EPERM` if it is traced already or the caller may not; `ESRCH` if there is none.
    pub fn seize(tid: u32) -> Result<Self, SyscallError> {
        let call = || format!("ptrace(PTRACE_SEIZE) of thread {tid}");
        let tid = libc::pid_t::try_from(tid).map_err(|_| Errno::ESRCH).call(call)?;
        let tracee = Self { tid, _here: PhantomData };
        // So that stops at system calls are told from SIGTRAP. Not EXITKILL: it shall live on if we do not.
        tracee.request("PTRACE_SEIZE", libc::PTRACE_SEIZE, 0, usize_of(libc::PTRACE_O_TRACESYSGOOD))?;
        Ok(tracee)
    }

    /// `PTRACE_INTERRUPT`: has it stop soon. [`Self::wait`] tells when.
    ///
    /// # Errors
    /// `ESRCH` if it has ended.
    pub fn interrupt(&self) -> Result<(), SyscallError> {
        self.request("PTRACE_INTERRUPT", libc::PTRACE_INTERRUPT, 0, 0)
    }

    /// Waits until it stops. `None`: it did not, until `deadline`.
    ///
    /// # Errors
    /// `waitpid`: `ECHILD` if it is not ours any more.
    pub fn wait(&self, deadline: Instant) -> Result<Option<Stop>, SyscallError> {
        /// Mostly it stops in microseconds. After that it is better to sleep than to yield: on a busy host who yields comes last.
        const SOON: Duration = Duration::from_micros(30);
        const SHORTEST: Duration = Duration::from_micros(20);
        const LONGEST: Duration = Duration::from_millis(1);
        let began = Instant::now();
        let mut sleep = SHORTEST;
        loop {
            let mut status = 0;
            // SAFETY: status outlives the call and is where the kernel writes; nothing else is passed.
            let got = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match Errno::result(got) {
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).call(|| format!("waitpid of thread {}", self.tid)),
                Ok(0) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                    if began.elapsed() < SOON {
                        std::hint::spin_loop();
                    } else {
                        std::thread::sleep(sleep);
                        sleep = (sleep * 3 / 2).min(LONGEST);
                    }
                }
                Ok(_) => return Ok(Some(stop_of(status))),
            }
        }
    }

    /// `PTRACE_GETREGS`. Only while it is stopped, as all that follows.
    ///
    /// # Errors
    /// `ESRCH` if it is not.
    pub fn registers(&self) -> Result<Registers, SyscallError> {
        let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
        self.request("PTRACE_GETREGS", libc::PTRACE_GETREGS, 0, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: all of it is plain numbers, zeroed above and then written by the kernel.
        Ok(unsafe { registers.assume_init() })
    }

    /// `PTRACE_SETREGS`.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped, `EIO` for values that the kernel does not let through.
    pub fn set_registers(&self, registers: &Registers) -> Result<(), SyscallError> {
        let address = std::ptr::from_ref(registers).expose_provenance();
        self.request("PTRACE_SETREGS", libc::PTRACE_SETREGS, 0, address)
    }

    /// `PTRACE_GETSIGMASK`: the signals that it blocks; for one in a call that blocks others meanwhile (ppoll), those that it
    /// blocks afterwards.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped.
    pub fn signal_mask(&self) -> Result<SignalMask, SyscallError> {
        let mut mask = SignalMask(0);
        let address = std::ptr::from_mut(&mut mask.0).expose_provenance();
        self.request("PTRACE_GETSIGMASK", PTRACE_GETSIGMASK, size_of::<u64>(), address)?;
        Ok(mask)
    }

    /// `PTRACE_SETSIGMASK`.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped.
    pub fn set_signal_mask(&self, mask: SignalMask) -> Result<(), SyscallError> {
        let address = std::ptr::from_ref(&mask.0).expose_provenance();
        self.request("PTRACE_SETSIGMASK", PTRACE_SETSIGMASK, size_of::<u64>(), address)
    }

    /// True if its system calls are not made but answered by a handler of its own (`PR_SET_SYSCALL_USER_DISPATCH`), as wine
    /// has it. Kernels that cannot tell (before 6.4) say no.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped.
    pub fn dispatches_syscalls(&self) -> Result<bool, SyscallError> {
        /// `struct ptrace_sud_config`: mode, selector, offset, len
        const WORDS: usize = 4;
        let mut config = [0_u64; WORDS];
        let address = config.as_mut_ptr().expose_provenance();
        let asked = self.request(
            "PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG",
            PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG,
            size_of_val(&config),
            address,
        );
        match asked {
            Err(SyscallError { errno: Errno::EIO | Errno::EINVAL, .. }) => Ok(false),
            Err(error) => Err(error),
            Ok(()) => Ok(config[0] != 0),
        }
    }

    /// True if its next instruction, at `address`, is within a restartable sequence (rseq): one that the kernel has begin again
    /// when it was interrupted. It would not, had the thread been elsewhere meanwhile.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped; [`Memory::read`].
    pub fn in_restartable_sequence(&self, memory: &Memory, address: u64) -> Result<bool, SyscallError> {
        /// `struct ptrace_rseq_configuration`: where the thread's `struct rseq` is, and three numbers of 32 bits.
        const WORDS: usize = 3;
        /// Of `rseq_cs` in `struct rseq`.
        const SEQUENCE: u64 = 8;
        let mut config = [0_u64; WORDS];
        let into = config.as_mut_ptr().expose_provenance();
        let size = size_of_val(&config);
        match self.request("PTRACE_GET_RSEQ_CONFIGURATION", PTRACE_GET_RSEQ_CONFIGURATION, size, into) {
            // Before Linux 5.13, or built without.
            Err(SyscallError { errno: Errno::EIO | Errno::EINVAL, .. }) => return Ok(false),
            other => other?,
        }
        if config[0] == 0 {
            return Ok(false);
        }
        let sequence = u64::from_ne_bytes(memory.read(config[0] + SEQUENCE)?);
        Ok(sequence != 0 && is_within(&memory.read(sequence)?, address))
    }

    /// Lets it go on, with a signal that it was about to take, or 0.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped.
    pub fn resume(&self, until: Until, signal: i32) -> Result<(), SyscallError> {
        let signal = usize::try_from(signal).unwrap_or(0);
        match until {
            Until::Syscall => self.request("PTRACE_SYSCALL", libc::PTRACE_SYSCALL, 0, signal),
            Until::Interrupted => self.request("PTRACE_CONT", libc::PTRACE_CONT, 0, signal),
        }
    }

    /// `PTRACE_DETACH`: lets it go on, with a signal that it was about to take, or 0, and traces it no longer.
    ///
    /// # Errors
    /// `ESRCH` if it is not stopped.
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
        // SAFETY: each caller passes, exposed, the address of a value of the size that this request reads or writes, or numbers
        // where it takes numbers; it touches no other memory of ours.
        let done = unsafe { libc::ptrace(request, self.tid, address, data) };
        Errno::result(done).call(|| format!("ptrace({name}) of thread {}", self.tid)).map(drop)
    }
}

/// What a status of waitpid(2) says.
fn stop_of(status: i32) -> Stop {
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

/// Whether an address is in a sequence, of which this is the `struct rseq_cs`: version, flags, start_ip, post_commit_offset,
/// abort_ip.
fn is_within(sequence: &[u8; 32], address: u64) -> bool {
    let word = |at: usize| sequence[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
    address.wrapping_sub(word(8)) < word(16)
}

fn usize_of(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

// linux/ptrace.h and asm/ptrace.h
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;

/// The memory of another process, by `/proc/PID/mem`.
pub struct Memory {
    file: File,
    pid: u32,
}

impl Memory {
    /// Of process `pid`; of the address space that it has now.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not trace it, `ENOENT` if there is none.
    pub fn open(pid: u32) -> Result<Self, SyscallError> {
        let path = format!("/proc/{pid}/mem");
        let file = File::options().read(true).write(true).open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, pid })
    }

    /// Reads `N` bytes.
    ///
    /// # Errors
    /// `EIO` if there is nothing mapped; `EFAULT`.
    pub fn read<const N: usize>(&self, address: u64) -> Result<[u8; N], SyscallError> {
        let mut bytes = [0; N];
        self.read_into(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads as many bytes as `out` has.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_into(&self, address: u64, out: &mut [u8]) -> Result<(), SyscallError> {
        let wanted = out.len();
        let call = || format!("pread of {wanted} bytes at {address:#x} of /proc/{}/mem", self.pid);
        self.file.read_exact_at(out, address).call(call)
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), SyscallError> {
        let call = || format!("pwrite of {} bytes at {address:#x} of /proc/{}/mem", bytes.len(), self.pid);
        self.file.write_all_at(bytes, address).call(call)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("pid", &self.pid).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
