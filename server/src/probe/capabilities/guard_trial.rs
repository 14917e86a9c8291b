//! Whether `madvise(MADV_GUARD_INSTALL)` of write-protected shmem returns (`docs/kernel-reports.md`). It is tried in a process of
//! its own, because only the end of the process ends a call that does not return.

use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError, memfd};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;

use super::capability::{Availability, Capability};
use crate::own_program::OwnProgram;
use crate::tracking::REQUIRED_FEATURES;

/// First argument of `fdmapd` that starts the trial.
pub const ARGUMENT: &str = "guard-trial";

/// Exit code of a trial on a kernel without guard regions in shmem.
const NO_GUARD_REGIONS: u8 = 10;

/// Size of the trial file, a multiple of every supported page size.
const BYTES: u64 = 64 << 10;

/// A call that uses more processor time never returns; others take microseconds.
const CPU_LIMIT: Duration = Duration::from_millis(50);

/// Longest wait for the trial, on a host whose processors are busy.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Result of the trial.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Returns,
    NoGuardRegions,
    NeverReturns,
    /// The call could not be tried.
    Unknown(String),
}

/// Runs the trial in this process, which is killed if the call does not return.
#[must_use]
pub fn main() -> ExitCode {
    match install() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(NO_GUARD_REGIONS),
        Err(error) => {
            eprintln!("{}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Installs a guard region in write-protected memory. `false` if the kernel has none in shmem.
fn install() -> Result<bool, SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    memfd::resize(file.as_fd(), BYTES)?;
    let map = || SharedMapping::shared(&file, 0, to_usize(BYTES), true);
    match map()?.guard() {
        Err(SyscallError { errno: Errno::EINVAL, .. }) => return Ok(false),
        other => other?,
    }
    let mapping = map()?;
    mapping.write_at(0, b"fdmap");
    let start = to_u64(mapping.as_ptr().addr());
    let range = AddressRange { start, end: start + BYTES };
    let userfaultfd = Userfaultfd::create()?;
    userfaultfd.api(REQUIRED_FEATURES)?;
    userfaultfd.register_wp(range)?;
    userfaultfd.write_protect(range, true)?;
    let _timer = limit_cpu_time()?;
    mapping.guard()?;
    Ok(true)
}

/// Arms a timer that sends SIGKILL after this process has used [`CPU_LIMIT`] more processor time.
fn limit_cpu_time() -> Result<Timer, SyscallError> {
    let call = || "timer_create(CLOCK_PROCESS_CPUTIME_ID)".to_owned();
    let notify = SigevNotify::SigevSignal { signal: Signal::SIGKILL, si_value: 0 };
    let mut timer = Timer::new(ClockId::CLOCK_PROCESS_CPUTIME_ID, SigEvent::new(notify)).call(call)?;
    let expiration = Expiration::OneShot(TimeSpec::from_duration(CPU_LIMIT));
    timer.set(expiration, TimerSetTimeFlags::empty()).call(call)?;
    Ok(timer)
}

/// `traced`: the service removes the write protection while such a call runs.
pub(super) fn capability(traced: bool) -> Capability {
    describe(try_in_child(), traced)
}

fn try_in_child() -> Outcome {
    let started = io::pipe().and_then(|(messages, theirs)| {
        Ok((messages, OwnProgram::new([ARGUMENT]).stderr(theirs.into()).start()?))
    });
    let (mut messages, mut child) = match started {
        Ok(started) => started,
        Err(error) => return Outcome::Unknown(format!("starting /proc/self/exe {ARGUMENT}: {error}")),
    };
    let Some(status) = wait(&mut child) else {
        // Both fail only for a process that has ended.
        let _ = child.kill();
        let _ = child.wait();
        return Outcome::Unknown(format!("the trial did not end within {} s", TRIAL_TIMEOUT.as_secs()));
    };
    match (status.code(), status.signal()) {
        (Some(0), _) => Outcome::Returns,
        (Some(code), _) if code == i32::from(NO_GUARD_REGIONS) => Outcome::NoGuardRegions,
        (None, Some(signal)) if signal == Signal::SIGKILL as i32 => Outcome::NeverReturns,
        _ => {
            let mut why = String::new();
            // Without a message, the status is the reason.
            let _ = messages.read_to_string(&mut why);
            Outcome::Unknown(format!("{status} {}", why.trim_end()))
        }
    }
}

/// Waits until the process ends. `None` after [`TRIAL_TIMEOUT`].
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let began = Instant::now();
    while began.elapsed() < TRIAL_TIMEOUT {
        if let Some(status) = child.try_wait().ok()? {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn describe(outcome: Outcome, traced: bool) -> Capability {
    let (availability, detail) = match outcome {
        Outcome::Returns => (Availability::Available, "tried on a file of fdmapd".to_owned()),
        Outcome::NoGuardRegions => {
            (Availability::Available, "this kernel has no guard regions in shmem".to_owned())
        }
        Outcome::NeverReturns => {
            let remedy = if traced {
                "fdmapd removes the write protection while such a call runs, but not while one of io_uring does"
            } else {
                "run fdmapd with call tracing, or the program by `fdmap exec`, or detach the mapping before the call"
            };
            let detail = format!("MADV_GUARD_INSTALL of write-protected shmem never returns; {remedy}");
            (Availability::Unavailable, detail)
        }
        Outcome::Unknown(why) => (Availability::Unknown, why),
    };
    let impact = if traced {
        ""
    } else {
        "madvise(MADV_GUARD_INSTALL) in tracked mappings; without it, a thread that makes this call spins in the kernel until \
         it is killed"
    };
    Capability { name: "guard-regions".into(), availability, detail, impact: impact.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_never_returns_has_an_impact_unless_calls_are_traced() {
        let described = |outcome, traced| {
            let Capability { availability, detail, impact, .. } = describe(outcome, traced);
            (availability, detail, impact.is_empty())
        };
        let (availability, detail, harmless) = described(Outcome::NeverReturns, false);
        assert_eq!((availability, harmless), (Availability::Unavailable, false));
        assert!(detail.contains("fdmap exec"), "{detail}");
        let (availability, detail, harmless) = described(Outcome::NeverReturns, true);
        assert_eq!((availability, harmless), (Availability::Unavailable, true));
        assert!(detail.contains("io_uring"), "{detail}");
        for outcome in [Outcome::Returns, Outcome::NoGuardRegions] {
            assert_eq!(described(outcome, false).0, Availability::Available);
        }
        assert_eq!(described(Outcome::Unknown("why".to_owned()), true).0, Availability::Unknown);
    }
}
