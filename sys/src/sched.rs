//! How the kernel schedules a thread.

use std::time::Duration;

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext as _, SyscallError};

/// `struct sched_attr` of `linux/sched/types.h`, in its first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SCHED_FLAG_KEEP_POLICY: u64 = 0x08;

/// Sets the time slice of the calling thread, 100 us to 100 ms, or that of the kernel if it is zero: the kernel runs a thread with a short
/// slice soon after it wakes, before others whose slices are longer, but for no more time in all. Returns the previous slice. No effect before
/// Linux 6.12, and for a thread of a real-time or deadline policy.
///
/// # Errors
/// `sched_getattr` or `sched_setattr`: `EPERM` where a filter of system calls forbids it.
pub fn set_time_slice(slice: Duration) -> Result<Duration, SyscallError> {
    let mut attributes = attributes()?;
    let before = Duration::from_nanos(attributes.runtime);
    // Of SCHED_DEADLINE, the runtime is the budget.
    if ![libc::SCHED_OTHER, libc::SCHED_BATCH].map(i32::cast_unsigned).contains(&attributes.policy) {
        return Ok(before);
    }
    attributes.flags = SCHED_FLAG_KEEP_POLICY;
    attributes.runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads as many bytes of `attributes` as it has: its field `size`.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    Errno::result(set).map(|_| before).call(|| format!("sched_setattr of a time slice of {slice:?}"))
}

/// Those of the calling thread.
fn attributes() -> Result<SchedAttr, SyscallError> {
    let mut attributes = SchedAttr::default();
    let size = size_of::<SchedAttr>();
    // SAFETY: the kernel writes at most `size` bytes to `attributes`, which has as many.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    Errno::result(read).call(|| "sched_getattr of the calling thread".to_owned())?;
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_slice_is_that_of_the_calling_thread() {
        let slice = || attributes().unwrap().runtime;
        let before = slice();
        let thread = std::thread::spawn(move || {
            let nice = attributes().unwrap().nice;
            let previous = set_time_slice(Duration::from_micros(300)).unwrap();
            let set = slice();
            assert_eq!(set_time_slice(previous).unwrap().as_nanos(), u128::from(set));
            (set, slice(), attributes().unwrap().nice - nice)
        });
        // Kernels that do not know time slices report none.
        let set = if before == 0 { 0 } else { 300_000 };
        assert_eq!(thread.join().unwrap(), (set, before, 0));
        assert_eq!(slice(), before, "other threads keep theirs");
    }
}
