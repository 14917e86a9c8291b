//! Threads that start processes, each with a descriptor table of its own.
//!
//! The caller passes the descriptors of a process through a socket to a thread that is free, then the job. The thread replies with the
//! child, and is free again. A start that is late keeps its thread, and its child is killed.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fdmap_sys::process::{self, SignalsBlocked};
use fdmap_sys::scm;

use super::reaper;

/// Threads that start processes. They end when this is dropped.
pub(super) struct Starters<T> {
    /// A caller that has taken an index from `free` is the only user of that thread.
    threads: Vec<Mutex<Starter<T>>>,
    free: Arc<Free>,
    make: Box<dyn Fn() -> io::Result<Starter<T>> + Send + Sync>,
}

impl<T> fmt::Debug for Starters<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Starters")
            .field("threads", &self.threads.len())
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}

/// Indices of the threads that are free.
#[derive(Debug, Default)]
struct Free {
    indices: Mutex<Vec<usize>>,
    added: Condvar,
}

#[derive(Debug)]
struct Starter<T> {
    jobs: Sender<Job<T>>,
    /// The other end is in the descriptor table of the thread. The queue holds the packet of one job at most.
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Job<T> {
    program: T,
    turn: Turn,
    /// Without a buffer, so that no child stays in it when its caller has left.
    reply: SyncSender<io::Result<Child>>,
}

/// Purpose of children that were started too late.
pub(super) const LATE: &str = "start";

/// Time in which a thread closes the descriptors of others in its table.
const READY_TIMEOUT: Duration = Duration::from_secs(5);

/// The use of a thread. Its drop frees the thread, also if that has ended.
#[derive(Debug)]
struct Turn {
    free: Arc<Free>,
    index: usize,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.free.add(self.index);
    }
}

/// The bytes of a packet that passes descriptors to a thread.
const PACKET: &[u8] = b"start";

impl<T: Send + 'static> Starters<T> {
    /// `start`: starts a process from the descriptors that are passed. Its thread stays the parent.
    ///
    /// # Errors
    /// `socketpair`, clone of a thread, `close_range`.
    pub(super) fn new<F>(count: usize, start: F) -> io::Result<Self>
    where
        F: Fn(T, Vec<OwnedFd>) -> io::Result<Child> + Clone + Send + Sync + 'static,
    {
        let free = Arc::new(Free::default());
        let make = Box::new(move || Starter::new(start.clone()));
        let threads = (0..count).map(|index| {
            let thread = make()?;
            free.add(index);
            Ok(Mutex::new(thread))
        });
        Ok(Self { threads: threads.collect::<io::Result<_>>()?, free, make })
    }

    /// Starts a process, and closes the descriptors here.
    ///
    /// # Errors
    /// `TimedOut` if no thread is free or the process is not started within `timeout`, or only later, then it is killed; those of the
    /// start; `sendmsg`.
    pub(super) fn start(
        &self,
        program: T,
        descriptors: Vec<OwnedFd>,
        timeout: Duration,
    ) -> io::Result<Child> {
        let deadline = Instant::now() + timeout;
        let late = |what: &str| io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {timeout:?}"));
        let index = self.free.take(timeout).ok_or_else(|| late("no thread that starts processes is free"))?;
        let turn = Turn { free: Arc::clone(&self.free), index };
        let (reply, started) = sync_channel(0);
        self.pass(index, Job { program, turn, reply }, descriptors)?;
        started.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(
            |error| match error {
                RecvTimeoutError::Timeout => late("the process is not started"),
                RecvTimeoutError::Disconnected => ended(),
            },
        )?
    }

    /// Passes a job to the thread of an index. Makes another thread if that one has ended.
    fn pass(&self, index: usize, job: Job<T>, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let mut starter = self.threads[index].lock().unwrap_or_else(PoisonError::into_inner);
        if starter.thread.is_finished() {
            *starter = (self.make)()?;
        }
        let passed: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
        scm::send(starter.socket.as_fd(), PACKET, &passed)?;
        // The packet has copies.
        drop(descriptors);
        starter.jobs.send(job).map_err(|_| ended())
    }
}

fn ended() -> io::Error {
    io::Error::other("the thread that starts processes has ended")
}

impl<T: Send + 'static> Starter<T> {
    fn new<F>(start: F) -> io::Result<Self>
    where
        F: Fn(T, Vec<OwnedFd>) -> io::Result<Child> + Send + 'static,
    {
        let (socket, theirs) = scm::socket_pair()?;
        let number = theirs.as_raw_fd();
        let (jobs, received) = channel();
        let (ready, is_ready) = channel();
        let run = move || {
            let _blocked = SignalsBlocked::new();
            let separated = process::separate_descriptors(theirs.as_fd());
            // `theirs` is now the descriptor of that number in the table of this thread.
            let is_separate = separated.is_ok();
            if ready.send(separated).is_ok() && is_separate {
                serve(&received, &theirs, start);
            }
        };
        let thread = std::thread::Builder::new().name("starter".to_owned()).spawn(run)?;
        is_ready.recv_timeout(READY_TIMEOUT).map_err(|_| ended())??;
        // Closes it in the table of the other threads.
        nix::unistd::close(number)?;
        Ok(Self { jobs, socket, thread })
    }
}

/// Returns when the service drops the other end of `jobs`, or a call fails.
fn serve<T>(jobs: &Receiver<Job<T>>, socket: &OwnedFd, start: impl Fn(T, Vec<OwnedFd>) -> io::Result<Child>) {
    while let Ok(Job { program, turn, reply }) = jobs.recv() {
        let packet = scm::receive(socket.as_fd(), &mut [0; PACKET.len()]);
        let started = match packet {
            Ok(packet) => start(program, packet.map_or_else(Vec::new, |packet| packet.descriptors)),
            // A packet that stayed in the queue would be that of the next job: another thread replaces this one.
            Err(_) => return,
        };
        // The caller has left.
        if let Err(SendError(Ok(child))) = reply.send(started) {
            reaper::kill(LATE, child);
        }
        drop(turn);
    }
}

impl Free {
    fn add(&self, index: usize) {
        self.lock().push(index);
        self.added.notify_one();
    }

    /// `None`: no thread is free within `timeout`.
    fn take(&self, timeout: Duration) -> Option<usize> {
        let wait = self.added.wait_timeout_while(self.lock(), timeout, |indices| indices.is_empty());
        wait.unwrap_or_else(PoisonError::into_inner).0.pop()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.indices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use fdmap_sys::memfd;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// Targets of the descriptors of threads with the name `starter`. `None`: there is no such thread.
    fn targets_of_starters() -> Option<Vec<PathBuf>> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let is_starter =
            |task: &PathBuf| std::fs::read(task.join("comm")).is_ok_and(|name| name == b"starter\n");
        let starters: Vec<_> = tasks.filter(is_starter).collect();
        let targets = starters.iter().flat_map(|task| targets_of(task)).collect();
        (!starters.is_empty()).then_some(targets)
    }

    /// Targets of the descriptors of a thread. None, if the thread has ended.
    fn targets_of(task: &Path) -> Vec<PathBuf> {
        let descriptors = std::fs::read_dir(task.join("fd")).into_iter().flatten().flatten();
        descriptors.flat_map(|fd| std::fs::read_link(fd.path())).collect()
    }

    /// Waits for the permission to start it.
    struct Gated(Option<Receiver<()>>);

    /// The pids of the processes that it starts go to the receiver.
    fn gated_starters(count: usize) -> (Starters<Gated>, Receiver<u32>) {
        let (pids, started) = channel();
        let start = move |Gated(gate): Gated, _| {
            if let Some(gate) = gate {
                gate.recv().map_err(io::Error::other)?;
            }
            let child = Command::new("sleep").arg("1000").spawn()?;
            pids.send(child.id()).unwrap();
            Ok(child)
        };
        (Starters::new(count, start).unwrap(), started)
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn descriptors_of_this_process_are_in_no_table_of_processes_that_start() {
        let _marker = memfd::create("marker", None).unwrap();
        let starters = gated_starters(2);
        let is_marker = |target: &PathBuf| target == Path::new("/memfd:marker (deleted)");
        assert!(targets_of(Path::new("/proc/thread-self")).iter().any(is_marker), "its own table has it");
        let began = Instant::now();
        // Another test may start a thread, which has all descriptors at first.
        while targets_of_starters().expect("a thread").iter().any(is_marker) {
            assert!(began.elapsed() < TIMEOUT, "a thread has the descriptors of this process");
        }
        drop(starters);
    }

    #[test]
    fn late_start_takes_one_thread_and_its_child_is_killed() {
        let (starters, started) = gated_starters(2);
        let is_late = |gate| {
            let error = starters.start(Gated(gate), Vec::new(), Duration::from_millis(50)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            error.to_string()
        };
        let (open, gate) = channel();
        assert_eq!(is_late(Some(gate)), "the process is not started within 50ms");
        end(starters.start(Gated(None), Vec::new(), TIMEOUT).unwrap());
        started.recv().unwrap();
        let (open_too, gate) = channel();
        assert_eq!(is_late(Some(gate)), "the process is not started within 50ms");
        assert_eq!(is_late(None), "no thread that starts processes is free within 50ms");

        open.send(()).unwrap();
        let killed = started.recv_timeout(TIMEOUT).unwrap();
        // The thread is free again.
        end(starters.start(Gated(None), Vec::new(), TIMEOUT).unwrap());
        let began = Instant::now();
        while Path::new(&format!("/proc/{killed}")).exists() {
            reaper::reap();
            assert!(began.elapsed() < TIMEOUT, "{killed} was left");
            std::thread::yield_now();
        }
        drop(open_too);
    }

    #[test]
    fn thread_that_has_ended_is_replaced() {
        let (starters, _started) = gated_starters(1);
        let ended = Starter {
            jobs: channel().0,
            socket: scm::socket_pair().unwrap().0,
            thread: std::thread::spawn(|| ()),
        };
        while !ended.thread.is_finished() {
            std::thread::yield_now();
        }
        *starters.threads[0].lock().unwrap() = ended;
        for _ in 0..2 {
            end(starters.start(Gated(None), Vec::new(), TIMEOUT).unwrap());
        }
    }

    #[test]
    fn starts_wait_for_a_thread_that_is_free() {
        let (starters, started) = gated_starters(1);
        let (open, gate) = channel();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| starters.start(Gated(Some(gate)), Vec::new(), TIMEOUT).unwrap());
            let second = scope.spawn(|| starters.start(Gated(None), Vec::new(), TIMEOUT).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            open.send(()).unwrap();
            [first, second].into_iter().for_each(|child| end(child.join().unwrap()));
        });
        assert_eq!(started.iter().take(2).count(), 2);
    }
}
