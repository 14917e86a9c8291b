//! userfaultfds of another process: which thread makes them, and when.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fdmap_sys::ptrace::Memory;
use fdmap_sys::{Errno, SyscallError, pidfd};
use nix::sys::signal::{SigSet, SigmaskHow};

use super::calls::{Limit, limit_of};
use super::rest::disturbs;
use super::stop::{Task, attempt};
use super::target::Target;
use super::threads::{Candidate, Disturbs, Place, order, threads};
use super::{AdoptError, Inside, place};
use crate::ClientError;

/// How long a thread is waited for that can be stopped without measuring its time.
const PATIENCE: Duration = Duration::from_millis(500);

/// The same where its time is not its own to change, but a socket's.
const PATIENCE_WITH_SOCKETS: Duration = Duration::from_secs(2);

/// How long it is tried to stop any thread at all.
const TRIES: Duration = Duration::from_secs(5);

/// All signals that can be are blocked while this lives: nobody is to end us while another process has our registers.
#[derive(Debug)]
struct Quiet(SigSet);

impl Quiet {
    fn begin() -> Self {
        Self(SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).unwrap_or_else(|_| SigSet::empty()))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // It was a mask before.
        let _ = self.0.thread_set_mask();
    }
}

/// A thread of ours that stays with one of the process until its call has ended.
#[derive(Debug)]
pub(super) struct Staying {
    thread: Option<JoinHandle<Result<(), SyscallError>>>,
    _quiet: Quiet,
}

impl Staying {
    /// Waits for that: at most a minute.
    pub(super) fn join(mut self) -> Result<(), SyscallError> {
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or(Ok(())))
    }
}

impl Drop for Staying {
    fn drop(&mut self) {
        // Whoever does not ask must wait all the same: the thread's registers are changed.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether a process can be made to, as far as it can be told without touching it. Gives its memory.
pub(super) fn check(pid: u32) -> Result<Memory, AdoptError> {
    Target::look(pid)?.check()?;
    match Memory::open(pid) {
        Err(error @ SyscallError { errno: Errno::EACCES | Errno::EPERM, .. }) => {
            Err(AdoptError::Denied(error))
        }
        other => Ok(other?),
    }
}

/// Has a process make `wanted` userfaultfds, and takes them.
pub(super) fn userfaultfds(pid: u32, wanted: usize, longer_waits: bool) -> Result<Inside, AdoptError> {
    let memory = check(pid)?;
    let process = pidfd::open(pid)?;
    let instruction = place::find(pid, &memory)?;
    let task = Arc::new(Task { pid, process, memory, instruction, wanted, longer_waits });
    let began = Instant::now();
    let mut failed = Vec::new();
    loop {
        let mut candidates = candidates(&task)?;
        candidates.retain(|candidate| !failed.contains(&candidate.tid));
        order(&mut candidates);
        let Some(candidate) = candidates.first().copied() else {
            if began.elapsed() > TRIES || Target::look(pid)?.check().is_err() {
                return Err(AdoptError::NotStopped);
            }
            failed.clear();
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        if !candidate.is_easy() && began.elapsed() < patience(&candidate) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let quiet = Quiet::begin();
        let (tell, told) = sync_channel(1);
        let ours = Arc::clone(&task);
        let thread = std::thread::Builder::new().name("adopt".to_owned());
        let thread = thread.spawn(move || attempt(&ours, candidate, &tell));
        let thread = thread.map_err(|error| ClientError::Path {
            what: "starting a thread to trace",
            path: format!("/proc/{pid}/task/{}", candidate.tid).into(),
            error,
        })?;
        let attempt = told.recv().unwrap_or(Ok(None));
        let staying = Staying { thread: Some(thread), _quiet: quiet };
        match attempt? {
            Some((descriptors, stopped)) => return Ok(Inside { descriptors, stopped, staying }),
            None => {
                drop(staying);
                failed.push(candidate.tid);
            }
        }
    }
}

fn patience(candidate: &Candidate) -> Duration {
    match candidate.place {
        Place::In(call) if matches!(limit_of(&call), Some(Limit::Receive | Limit::Send)) => {
            PATIENCE_WITH_SOCKETS
        }
        _ => PATIENCE,
    }
}

fn candidates(task: &Task) -> Result<Vec<Candidate>, AdoptError> {
    let path = std::path::PathBuf::from(format!("/proc/{}/task", task.pid));
    let threads = threads(task.pid).map_err(|error| ClientError::Path { what: "reading", path, error })?;
    let of = |(tid, place)| {
        let disturbs = match place {
            Place::In(call) => limit_of(&call).map_or(Disturbs::Nothing, |limit| {
                disturbs(task.pid, &task.process, &task.memory, &call, limit)
            }),
            _ => Disturbs::Nothing,
        };
        Candidate { tid, place, disturbs }
    };
    Ok(threads.into_iter().map(of).collect())
}
