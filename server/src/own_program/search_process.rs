//! Search processes. Each one searches the host once, may wait for any process or file system, and writes lines to standard output,
//! the last of which is `end`. One that misses its deadline is killed, and the next one starts when it has ended.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::io::{self, PipeReader, Read as _};
use std::os::fd::AsFd as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::to_usize;
use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::{Errno, process};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::search_turns::{SearchLimits, SearchTurns};
use super::starters::LATE;
use super::{OwnProgram, reaper};
use crate::confinement::{self, ConfinementError};
use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;

/// No search starts while this many processes that were started too late, and killed, have not ended.
const MAX_LATE_CHILDREN: usize = 16;

/// No process may write more.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The last line of each answer.
pub(crate) const LAST_LINE: &str = "end\n";

/// `st_dev` and `st_ino`.
pub(crate) type Inode = (u64, u64);

/// Starts processes of one kind.
#[derive(Debug)]
pub(crate) struct SearchProcess {
    /// What they search for.
    subject: &'static str,
    capabilities: Capabilities,
    /// Of those that were killed and have not ended.
    max_killed: usize,
}

impl SearchProcess {
    /// A process has `capabilities`, if the service has them.
    pub(crate) const fn new(subject: &'static str, capabilities: Capabilities, max_killed: usize) -> Self {
        Self { subject, capabilities, max_killed }
    }

    /// Starts this program with `arguments`. Returns the lines that it has written until it ended, or until the deadline. `None`: too
    /// many processes before it have not ended yet.
    ///
    /// # Errors
    /// Those of [`OwnProgram::start_within`], and of `pipe`.
    pub(crate) fn run<const N: usize>(
        &self,
        arguments: [&str; N],
        deadline: Instant,
    ) -> io::Result<Option<String>> {
        if reaper::count(self.subject) >= self.max_killed || reaper::count(LATE) >= MAX_LATE_CHILDREN {
            return Ok(None);
        }
        let (out, theirs) = io::pipe()?;
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        let program = OwnProgram::new(arguments).capabilities(self.capabilities);
        let program = program.stdout(theirs.into()).stderr(stderr);
        let child = program.start_within(deadline.saturating_duration_since(Instant::now()))?;
        let text = read_until(out, deadline);
        reaper::kill(self.subject, child);
        Ok(Some(text))
    }
}

/// Searches of one kind, some of which can run at the same time.
#[derive(Debug)]
pub(crate) struct SearchProcesses {
    process: SearchProcess,
    turns: SearchTurns,
    min_retry_interval: Duration,
    last_failure: Mutex<Option<Instant>>,
    last_answer: Mutex<Option<Answer>>,
    log_limit: LogLimit,
}

/// Shared by searches that waited for it.
#[derive(Debug)]
struct Answer {
    began: Instant,
    arguments: Vec<String>,
    text: String,
}

/// A longer answer is not shared.
const MAX_SHARED_BYTES: usize = 1 << 20;

/// Why a search has no answer.
enum SearchFailure {
    Start(io::Error),
    TooManyKilled,
    Timeout,
    /// The process ended early.
    Incomplete,
}

impl SearchProcesses {
    /// `min_retry_interval`: time after a failed search without others.
    pub(crate) fn new(
        subject: &'static str,
        capabilities: Capabilities,
        limits: SearchLimits,
        min_retry_interval: Duration,
    ) -> Self {
        Self {
            process: SearchProcess::new(subject, capabilities, to_usize(limits.all.into())),
            turns: SearchTurns::new(limits),
            min_retry_interval,
            last_failure: Mutex::default(),
            last_answer: Mutex::default(),
            log_limit: LogLimit::new(),
        }
    }

    /// Starts this program with `arguments`, for a file of `owner`, and waits for other searches first if too many run. Returns what `parse` finds in
    /// the lines that it has written, or in those of another search with these arguments that began meanwhile. `None`: the search failed,
    /// which is logged, or another one failed shortly before, or its turn did not come in the first half of `timeout`.
    pub(crate) fn search<T, const N: usize>(
        &self,
        owner: u32,
        arguments: [&str; N],
        timeout: Duration,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let asked = Instant::now();
        let deadline = asked + timeout;
        let run = || {
            let shared =
                lock(&self.last_answer).as_ref().and_then(|answer| answer.shared(asked, &arguments, &parse));
            // Another search may have failed meanwhile. One that has little time left fails on a healthy host, too.
            if shared.is_some() || self.has_just_failed() || asked.elapsed() > timeout / 2 {
                return shared;
            }
            let began = Instant::now();
            let failure = match self.process.run(arguments, deadline) {
                Ok(Some(text)) => match parse(&text) {
                    Some(found) => {
                        self.share(began, &arguments, text);
                        return Some(found);
                    }
                    None if Instant::now() >= deadline => SearchFailure::Timeout,
                    None => SearchFailure::Incomplete,
                },
                Ok(None) => SearchFailure::TooManyKilled,
                Err(error) => SearchFailure::Start(error),
            };
            self.fail(&failure);
            None
        };
        if self.has_just_failed() { None } else { self.turns.run(owner, deadline, run).flatten() }
    }

    fn share(&self, began: Instant, arguments: &[&str], text: String) {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let answer = Answer { began, arguments, text };
        *lock(&self.last_answer) = (answer.text.len() <= MAX_SHARED_BYTES).then_some(answer);
    }

    fn fail(&self, failure: &SearchFailure) {
        *lock(&self.last_failure) = Some(Instant::now());
        if matches!(failure, SearchFailure::Timeout) {
            incidents::count(Incident::SearchLate);
        }
        let Some(omitted) = self.log_limit.permit() else { return };
        let subject = self.process.subject;
        match failure {
            SearchFailure::Start(error) => {
                tracing::warn!(omitted, %error, "cannot start a search for {subject}");
            }
            SearchFailure::TooManyKilled => {
                tracing::warn!(
                    omitted,
                    "no search for {subject}: too many processes that were killed have not ended"
                );
            }
            SearchFailure::Timeout => tracing::warn!(omitted, "a search for {subject} timed out"),
            SearchFailure::Incomplete => {
                tracing::warn!(omitted, "a search for {subject} returned no complete answer");
            }
        }
    }

    fn has_just_failed(&self) -> bool {
        lock(&self.last_failure).is_some_and(|failed| failed.elapsed() < self.min_retry_interval)
    }
}

impl Answer {
    /// Only if it is at least as new as that of a search that begins at `asked`.
    fn shared<T>(&self, asked: Instant, arguments: &[&str], parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        (self.began >= asked && self.arguments == arguments).then(|| parse(&self.text)).flatten()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No search leaves these values inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads until the end of the output or the deadline.
fn read_until(mut out: PipeReader, deadline: Instant) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let mut fds = [PollFd::new(out.as_fd(), PollFlags::POLLIN)];
        // The timeout is in whole milliseconds.
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => break,
        }
        match out.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(read) if bytes.len() + read > MAX_ANSWER_BYTES => break,
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Prepares a search process: it may open files to read them, and is killed if it makes another call that no helper makes. `service`:
/// the pid of its parent, with which it ends.
///
/// # Errors
/// [`ConfinementError`]
pub(crate) fn prepare(service: u32, kept: Capabilities, name: &CStr) -> Result<(), ConfinementError> {
    confinement::enter_file_reader(kept)?;
    // The service starts it with all signals blocked.
    process::ignore_signals(&[])?;
    process::terminate_with_parent(service)?;
    Ok(process::set_name(name)?)
}

/// The lines of an answer that is a set of inodes.
pub(crate) fn inode_lines(inodes: &BTreeSet<Inode>) -> String {
    let mut text = String::new();
    for (device, inode) in inodes {
        // A write to a String never fails.
        let _ = writeln!(text, "file {device} {inode}");
    }
    text + LAST_LINE
}

/// The inodes of an answer. `None`: it is not complete.
pub(crate) fn inodes_of(text: &str) -> Option<BTreeSet<Inode>> {
    let mut inodes = BTreeSet::new();
    for line in text.strip_suffix(LAST_LINE)?.lines() {
        if let ["file", device, inode] = *line.split(' ').collect::<Vec<_>>() {
            inodes.insert((device.parse().ok()?, inode.parse().ok()?));
        }
    }
    Some(inodes)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn answer_without_its_last_line_is_incomplete() {
        let inodes = BTreeSet::from([(1, 1029), (26, 7)]);
        assert_eq!(inode_lines(&inodes), "file 1 1029\nfile 26 7\nend\n");
        assert_eq!(inodes_of(&inode_lines(&inodes)), Some(inodes.clone()));
        assert_eq!(inodes_of("process 1\nfile 26 7\nprocess 20\nfile 1 1029\nend\n"), Some(inodes));
        assert_eq!(inodes_of("end\n"), Some(BTreeSet::new()));
        for incomplete in ["", "process 1\nfile 1 5\n", "file 1 5\nen", "file 1 5\nend", "file 1 x\nend\n"] {
            assert_eq!(inodes_of(incomplete), None, "{incomplete:?}");
        }
    }

    #[test]
    fn reading_ends_at_the_deadline() {
        let (out, mut writer) = io::pipe().unwrap();
        writer.write_all(b"process 7\n").unwrap();
        let began = Instant::now();
        let text = read_until(out, began + Duration::from_millis(100));
        assert_eq!(text, "process 7\n");
        assert!((Duration::from_millis(100)..Duration::from_secs(30)).contains(&began.elapsed()));
    }

    #[test]
    fn no_process_starts_before_the_previous_one_has_ended() {
        let process = SearchProcess::new("nothing", Capabilities::empty(), 0);
        assert_eq!(process.run(["unused"], Instant::now()).unwrap(), None);
    }

    const NO_TEST: [&str; 2] = ["--exact", "no test has this name"];
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn failed_search_is_not_repeated_for_a_while() {
        let interval = Duration::from_secs(1);
        let limits = SearchLimits { all: 4, per_owner: 4 };
        let searches = SearchProcesses::new("nothing", Capabilities::empty(), limits, interval);
        let parsed = AtomicUsize::new(0);
        let search = |answer: Option<u8>| {
            let parse = |_: &str| {
                parsed.fetch_add(1, Ordering::SeqCst);
                answer
            };
            searches.search(7, NO_TEST, LONG, parse)
        };
        assert_eq!((search(Some(1)), search(Some(2))), (Some(1), Some(2)));
        let began = Instant::now();
        assert_eq!((search(None), parsed.load(Ordering::SeqCst)), (None, 3));
        while search(Some(3)).is_none() {
            assert_eq!(parsed.load(Ordering::SeqCst), 3, "none runs");
            assert!(began.elapsed() < LONG, "no search runs any more");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(began.elapsed() >= interval, "{:?}", began.elapsed());
        assert_eq!(search(Some(4)), Some(4));
    }

    #[test]
    fn answer_is_shared_with_searches_that_waited_for_it() {
        let (now, parse) = (Instant::now(), |text: &str| Some(text.len()));
        let [earlier, later] = [now - Duration::from_millis(1), now + Duration::from_millis(1)];
        let arguments = ["loop-search".to_owned(), "7".to_owned()].into();
        let answer = Answer { began: now, arguments, text: "end\n".to_owned() };
        for (asked, arguments, shared) in [
            (earlier, ["loop-search", "7"], Some(4)),
            (now, ["loop-search", "7"], Some(4)),
            (later, ["loop-search", "7"], None),
            (earlier, ["loop-search", "8"], None),
        ] {
            assert_eq!(answer.shared(asked, &arguments, parse), shared, "{arguments:?}");
        }
    }
}
