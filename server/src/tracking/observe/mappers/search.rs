//! The search for the mappers of a file in `/proc`, in a process of its own: it may wait for any process.
//!
//! It writes `mapper PID START END OFFSET` for each writable mapping, addresses and offset in bytes, then `unread` if at least one
//! process was not read, and `end`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd::{all_processes, read_threads};

use super::audit::{self, Audited, Unreadable};
use crate::own_program::search_process::{self, Inode};

/// First argument of `fdmapd` that starts the process. The others are the pid of the service, and `st_dev` and `st_ino` of the file.
pub const ARGUMENT: &str = "mapper-search";

/// To open the maps of processes of other users.
pub(super) const KEPT: Capabilities = Capabilities::DAC_READ_SEARCH.union(Capabilities::SYS_PTRACE);

/// Time in which the maps of all processes must be read. A process that holds its mmap_lock delays that.
const READ_TIMEOUT: Duration = Duration::from_millis(400);

/// The search ends if no thread returns a process for this time: then each of them waits for one that blocks.
const STALL_TIMEOUT: Duration = Duration::from_millis(100);

/// An answer has no more, and is incomplete then.
const MAX_MAPPINGS: usize = 65_536;

/// A writable shared mapping of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WritableMapping {
    pub(super) pid: u32,
    pub(super) range: AddressRange,
    /// Offset in the file, in bytes.
    pub(super) offset: u64,
}

/// Reads the maps of every process of this pid namespace, for [`READ_TIMEOUT`] at most.
pub(super) fn read_all(file: Inode) -> Audited<WritableMapping> {
    // With `hidepid`, /proc lists only processes that this one may trace, and those are not all.
    read_listed(|| all_processes().ok().filter(|listed| listed.contains(&1)), file)
}

/// The same of the processes that `list` returns. `None`: they are unknown.
fn read_listed(list: impl Fn() -> Option<Vec<u32>>, file: Inode) -> Audited<WritableMapping> {
    let deadline = Instant::now() + READ_TIMEOUT;
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    let incomplete = loop {
        let Some(listed) = list() else { break true };
        let unseen: Vec<_> = listed.into_iter().filter(|pid| seen.insert(*pid)).collect();
        // A process that lost its mappings before it was read may have left them to one that was not listed.
        if unseen.is_empty() {
            break false;
        }
        let round = audit::all(unseen, deadline, STALL_TIMEOUT, move |pid| mappings_of(pid, file));
        found.extend(round.found);
        if round.incomplete || found.len() > MAX_MAPPINGS {
            break true;
        }
    };
    found.truncate(MAX_MAPPINGS);
    Audited { found, incomplete }
}

/// The writable mappings of one process: none if it has ended.
fn mappings_of(pid: u32, file: Inode) -> Result<Vec<WritableMapping>, Unreadable> {
    let mut found = Vec::new();
    let read = |tid| {
        // All threads have the same mappings until they exit.
        if found.is_empty() {
            found = mappings_in(tid, file)?;
        }
        Some(())
    };
    read_threads(pid, read).ok_or(Unreadable)?;
    Ok(found.into_iter().map(|mapping| WritableMapping { pid, ..mapping }).collect())
}

/// Those that `/proc/TID` shows of a thread: none once it exits. `None`: they cannot be read.
fn mappings_in(tid: u32, (device, inode): Inode) -> Option<Vec<WritableMapping>> {
    let vmas = match Maps::open(tid).and_then(|maps| maps.shared_of(device, inode)) {
        // It exits, or is a kernel thread.
        Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH) => Vec::new(),
        other => other.ok()?,
    };
    // A mapping without proof that it cannot be written counts as writable.
    let writable = vmas.iter().filter(|vma| vma.writable || may_write(tid, vma).unwrap_or(true));
    Some(writable.map(|vma| WritableMapping { pid: tid, range: vma.range, offset: vma.offset }).collect())
}

/// The lines of an answer.
fn lines(audited: &Audited<WritableMapping>) -> String {
    let mut text = String::new();
    for WritableMapping { pid, range, offset } in &audited.found {
        // A write to a String never fails.
        let _ = writeln!(text, "mapper {pid} {} {} {offset}", range.start, range.end);
    }
    if audited.incomplete {
        text.push_str("unread\n");
    }
    text + search_process::LAST_LINE
}

/// Reads [`lines`]. `None`: the last line is missing.
pub(super) fn parse(text: &str) -> Option<Audited<WritableMapping>> {
    let mut audited = Audited { found: Vec::new(), incomplete: false };
    for line in text.strip_suffix(search_process::LAST_LINE)?.lines() {
        let words: Vec<_> = line.split(' ').collect();
        match *words {
            ["mapper", pid, start, end, offset] => {
                let (start, end) = (start.parse().ok()?, end.parse().ok()?);
                let range = AddressRange { start, end };
                audited.found.push(WritableMapping {
                    pid: pid.parse().ok()?,
                    range,
                    offset: offset.parse().ok()?,
                });
            }
            ["unread"] => audited.incomplete = true,
            _ => return None,
        }
    }
    Some(audited)
}

/// Runs the search in this process.
#[must_use]
pub fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(2).map(|text| text.parse::<u64>().ok());
    let mut argument = || arguments.next().flatten();
    let (Some(service), Some(device), Some(inode)) = (argument(), argument(), argument()) else {
        eprintln!(
            "fdmapd: {ARGUMENT} is internal: it needs the pid of fdmapd, and the device and the inode of a file"
        );
        return ExitCode::FAILURE;
    };
    let service = u32::try_from(service).unwrap_or(0);
    if let Err(error) = search_process::prepare(service, KEPT, c"fdmapd-mappers") {
        eprintln!("fdmapd: {}", error_chain(&error));
        return ExitCode::FAILURE;
    }
    match io::stdout().write_all(lines(&read_all((device, inode))).as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_read_as_it_was_written() {
        let found = |pid, start| WritableMapping {
            pid,
            range: AddressRange::at(start, 0x3000).unwrap(),
            offset: 4096,
        };
        for incomplete in [false, true] {
            let audited = Audited { found: vec![found(7, 0x1000), found(9, 1 << 47)], incomplete };
            let text = lines(&audited);
            for len in 0..text.len() {
                assert_eq!(parse(&text[..len]), None, "{text:?} is cut after {len} bytes");
            }
            assert_eq!(parse(&text), Some(audited));
        }
        assert_eq!(parse("end\n"), Some(Audited { found: Vec::new(), incomplete: false }));
        for other in ["mapper 7 1 2\nend\n", "mapper 7 1 2 x\nend\n", "another\nend\n"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }

    /// For 10 s, each process starts the next one, and ends.
    const CHAIN: &str = "
import mmap, os, time
memfd = os.memfd_create('handed-on')
os.ftruncate(memfd, 4096)
memory = mmap.mmap(memfd, 4096)
print(os.fstat(memfd).st_dev, os.fstat(memfd).st_ino, flush=True)
end = time.monotonic() + 10
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.01)
";

    mod needs_root {
        use std::io::{BufRead as _, BufReader};
        use std::process::{Command, Stdio};

        use super::*;

        #[test]
        fn mapping_that_processes_hand_on_is_found_or_unknown() {
            let mut python = Command::new("python3");
            let mut chain = python.args(["-c", CHAIN]).stdout(Stdio::piped()).spawn().expect("python3 runs");
            let line = BufReader::new(chain.stdout.take().unwrap()).lines().next().unwrap().unwrap();
            let (device, inode) = line.split_once(' ').unwrap();
            let file = (device.parse().unwrap(), inode.parse().unwrap());
            // On some hosts not even root may read the maps of process 1.
            let mut unreadable = all_processes().unwrap();
            unreadable.retain(|pid| mappings_in(*pid, file).is_none());
            let list = || {
                let mut listed = all_processes().ok()?;
                listed.retain(|pid| !unreadable.contains(pid));
                Some(listed)
            };
            let (began, mut complete) = (Instant::now(), 0);
            while began.elapsed() < Duration::from_secs(5) {
                let audited = read_listed(list, file);
                assert!(audited.incomplete || !audited.found.is_empty(), "the mapping is missed");
                complete += u32::from(!audited.incomplete);
            }
            assert!(complete > 0, "no search is complete");
            chain.wait().unwrap();
        }
    }
}
