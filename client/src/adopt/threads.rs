//! The threads of a process: which of them is stopped with the least ado.

use std::fs;
use std::time::Duration;

use super::calls::Call;

/// Where a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It runs, or is about to.
    Running,
    /// It waits for something else than a system call: a page, say.
    Paused,
    /// It waits in this call.
    In(Call),
    /// It waits uninterruptibly, has ended, or cannot be looked at.
    Hard,
}

/// What stopping a thread would do to where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbs {
    /// Nothing: the kernel makes its call again, or it is in none.
    Nothing,
    /// Its call must be made again, and waits forever.
    Forever,
    /// Its call must be made again with the time that remains of this.
    Limited(Duration),
    /// Its call must be made again, and its time is not to be changed.
    Hidden,
}

/// A thread that could be stopped, and how well it is suited: the least rank is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number.
    pub tid: u32,
    /// Where it is.
    pub place: Place,
    /// What a stop would do.
    pub disturbs: Disturbs,
}

impl Candidate {
    /// Waiting threads stand still at once; running ones may be about to enter any call.
    const fn rank(&self) -> u8 {
        match (self.place, self.disturbs) {
            (Place::Hard, _) => 5,
            (Place::In(_) | Place::Paused, Disturbs::Nothing) => 0,
            (_, Disturbs::Nothing) => 1,
            (_, Disturbs::Forever) => 2,
            (_, Disturbs::Limited(_)) => 3,
            (_, Disturbs::Hidden) => 4,
        }
    }

    /// True if it is left as it was without a time's being measured.
    #[must_use]
    pub const fn is_easy(&self) -> bool {
        self.rank() < 3
    }
}

/// Best first; of equals the process's first thread last: the others are more likely to be idle.
pub fn order(candidates: &mut [Candidate]) {
    candidates.sort_by_key(|candidate| (candidate.rank(), std::cmp::Reverse(candidate.tid)));
}

/// The threads of a process, with where they are.
///
/// # Errors
/// `readdir` of `/proc/PID/task`.
pub fn threads(pid: u32) -> std::io::Result<Vec<(u32, Place)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let Some(tid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        found.push((tid, place_of(pid, tid)));
    }
    Ok(found)
}

/// Where a thread is now.
#[must_use]
pub fn place_of(pid: u32, tid: u32) -> Place {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).ok();
    let (Some(stat), Some(call)) = (read("stat"), read("syscall")) else { return Place::Hard };
    parse(&stat, &call).unwrap_or(Place::Hard)
}

/// `/proc/PID/task/TID/stat` and `syscall`.
fn parse(stat: &str, call: &str) -> Option<Place> {
    let (_, rest) = stat.rsplit_once(')')?;
    match rest.split_ascii_whitespace().next()? {
        "R" | "S" | "T" => {}
        _ => return Some(Place::Hard),
    }
    let mut words = call.split_ascii_whitespace();
    let first = words.next()?;
    if first == "running" {
        return Some(Place::Running);
    }
    let number: i64 = first.parse().ok()?;
    if number < 0 {
        return Some(Place::Paused);
    }
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(Place::In(Call { number, arguments }))
}

/// The processor on which a thread was last; field 39 of its `stat`.
#[must_use]
pub fn processor_in(stat: &str) -> Option<usize> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(36)?.parse().ok()
}

/// `se.exec_start` of a thread's `sched`, nanoseconds: when it last began to run or, of one that sleeps, when it stopped to.
#[must_use]
pub fn exec_start_in(sched: &str) -> Option<u64> {
    let value = sched.lines().find_map(|line| line.strip_prefix("se.exec_start"))?;
    let value = value.trim_start().strip_prefix(':')?.trim();
    let (milliseconds, nanos) = value.split_once('.')?;
    let nanos: u64 = Some(nanos).filter(|nanos| nanos.len() == 6)?.parse().ok()?;
    milliseconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEPS: &str = "7 (a ) b) S 1 7";

    #[test]
    fn places_are_read() {
        let call = "0 0x3 0x7fd1 0x20000 0x0 0xffffffff 0x0 0x7ffc 0x7fd1";
        let arguments = [3, 0x7fd1, 0x20000, 0, 0xffff_ffff, 0];
        assert_eq!(parse(SLEEPS, call), Some(Place::In(Call { number: 0, arguments })));
        assert_eq!(parse("7 (a) R 1", "running\n"), Some(Place::Running));
        assert_eq!(parse(SLEEPS, "-1 0x7ffc 0x7fd1"), Some(Place::Paused));
        assert_eq!(parse("7 (a) D 1", call), Some(Place::Hard));
        assert_eq!(parse(SLEEPS, "0 0x3"), None);
        let own = std::process::id();
        assert_ne!(place_of(own, own), Place::Hard);
        assert!(threads(own).unwrap().len() >= 2);
    }

    #[test]
    fn undisturbed_threads_come_first() {
        let call = Place::In(Call { number: 0, arguments: [0; 6] });
        let of = |tid, place, disturbs| Candidate { tid, place, disturbs };
        let mut all = [
            of(1, call, Disturbs::Limited(Duration::from_secs(1))),
            of(2, Place::Hard, Disturbs::Nothing),
            of(3, call, Disturbs::Hidden),
            of(4, Place::Running, Disturbs::Nothing),
            of(5, call, Disturbs::Forever),
            of(6, call, Disturbs::Nothing),
            of(7, call, Disturbs::Nothing),
        ];
        order(&mut all);
        assert_eq!(all.map(|candidate| candidate.tid), [7, 6, 4, 5, 1, 3, 2]);
        assert_eq!(all.map(|candidate| candidate.is_easy()), [true, true, true, true, false, false, false]);
    }

    #[test]
    fn times_and_processors_are_read() {
        let sched = "cat (19021, #threads: 1)\n---\nse.exec_start            :      35831824.574891\nse.vruntime : 1.0\n";
        assert_eq!(exec_start_in(sched), Some(35_831_824_574_891));
        assert_eq!(exec_start_in("se.exec_start : much"), None);
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(processor_in(&stat).is_some());
        assert_eq!(processor_in("7 (a) S 1"), None);
    }
}
