//! How long a thread has slept.

use std::fs;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::threads::{exec_start_in, processor_in};

/// How long a thread of a process has slept, by the clock of the processor on which it went to sleep: the calling thread goes
/// there to read it, since these clocks differ by the time that hosts have stolen. `None` where the kernel does not tell
/// (`/proc/PID/sched` takes `CONFIG_SCHED_DEBUG` in some), or that processor is not ours to use.
///
/// Time that interrupts took there may be missing (`CONFIG_IRQ_TIME_ACCOUNTING`). A thread that woke up in between without
/// leaving its call has slept since then.
pub(super) fn slept(pid: u32, tid: u32) -> Option<Duration> {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).ok();
    let processor = processor_in(&read("stat")?)?;
    let own = Pid::from_raw(0);
    let all = sched_getaffinity(own).ok()?;
    let mut one = CpuSet::new();
    one.set(processor).ok()?;
    sched_setaffinity(own, &one).ok()?;
    // What is told is the time of the last look at the clock, at the last tick perhaps.
    std::thread::yield_now();
    let now = fs::read_to_string("/proc/thread-self/sched").ok();
    let since = read("sched");
    sched_setaffinity(own, &all).ok()?;
    let nanos = exec_start_in(&now?)?.saturating_sub(exec_start_in(&since?)?);
    Some(Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn sleep_of_a_child_is_measured() {
        if fs::metadata("/proc/self/sched").is_err() {
            eprintln!("not run: this kernel has no /proc/PID/sched");
            return;
        }
        let began = Instant::now();
        let mut child = std::process::Command::new("sleep").arg("20").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(600));
        let (told, truly) = (slept(child.id(), child.id()), began.elapsed());
        child.kill().unwrap();
        child.wait().unwrap();
        let told = told.unwrap();
        assert!(told <= truly + Duration::from_millis(20), "{told:?} of {truly:?}");
        assert!(told >= truly - Duration::from_millis(150), "{told:?} of {truly:?}");
    }
}
