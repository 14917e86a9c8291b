//! A scenario: a file, its writers, its consumers, and the outcome.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::Backing;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::check::{Verdict, check};
use super::consumer::Consumer;
use super::log::Log;
use super::mirror::Mirror;
use super::pages::PageSet;
use crate::cgroup::Cgroup;
use crate::service::{Service, named};
use crate::test_agent::{AgentMapping, TestAgent};
use crate::{HarnessError, HarnessResult};

const PAGE: u64 = 4096;

/// A file with its log of writes and its consumers.
#[derive(Debug)]
pub struct Scenario<'a> {
    service: &'a Service,
    name: String,
    pages: u64,
    log: Log,
    consumers: Vec<Consumer>,
}

/// The outcome for one consumer.
#[derive(Debug)]
pub struct Outcome {
    /// The verdict on its answers.
    pub verdict: Verdict,
    /// Pages of its mirror that differ from the file.
    pub stale: Option<PageSet>,
}

impl<'a> Scenario<'a> {
    /// Creates a file of `pages` pages, whose writers use `log`.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub async fn new(
        service: &'a Service,
        name: &str,
        pages: u64,
        backing: Backing,
        log: Log,
    ) -> HarnessResult<Self> {
        let file =
            CreateFile { name: name.to_owned(), size_bytes: pages * PAGE, backing, ..CreateFile::default() };
        service.client().await?.create(file).await?;
        Ok(Self { service, name: name.to_owned(), pages, log, consumers: Vec::new() })
    }

    /// The log of the writers.
    #[must_use]
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// Pages of the file.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Starts a writer with the log and no mapping.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn writer(&self, cgroup: Option<&Cgroup>) -> HarnessResult<TestAgent> {
        let mut writer = TestAgent::start(cgroup)?;
        writer.use_log(&self.log)?;
        Ok(writer)
    }

    /// Makes a writer map the file, tracked or untracked.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn map(&self, writer: &mut TestAgent, tracked: bool) -> HarnessResult<AgentMapping> {
        writer.map(self.service, &self.name, tracked)
    }

    /// Seals the file against new writers; existing mappings stay writable.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub async fn seal_writers(&self) -> HarnessResult<()> {
        self.service.client().await?.seal_writers(&named(&self.name)).await?;
        Ok(())
    }

    /// Adds a consumer, which makes its first checkpoint immediately.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub async fn consumer(&mut self, seed: u64, mirror: bool) -> HarnessResult<&mut Consumer> {
        let client = self.service.client().await?;
        let mut consumer = Consumer::new(client, named(&self.name), self.pages, seed);
        if mirror {
            consumer.set_mirror(Mirror::of(self.service.fdpass()?.map(&named(&self.name), false)?));
        }
        consumer.step(true).await?;
        let place = self.consumers.len();
        self.consumers.push(consumer);
        Ok(&mut self.consumers[place])
    }

    /// The consumer that was added first.
    ///
    /// # Panics
    /// If no consumer was added.
    pub fn first(&mut self) -> &mut Consumer {
        self.consumers.first_mut().expect("a consumer")
    }

    /// Runs the consumers until each writer has replied. Kills the writers after `timeout`.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if a writer does not reply within `timeout`; [`HarnessError`]
    ///
    /// # Panics
    /// If a thread panics.
    pub async fn watch(
        &mut self,
        mut writers: Vec<TestAgent>,
        timeout: Duration,
    ) -> HarnessResult<Vec<TestAgent>> {
        let pids: Vec<_> = writers.iter().map(TestAgent::pid).collect();
        let busy = Arc::new(AtomicBool::new(true));
        let writers_busy = Arc::clone(&busy);
        let mut waiting = tokio::task::spawn_blocking(move || {
            let done = writers.iter_mut().try_for_each(|writer| writer.reply().map(drop));
            writers_busy.store(false, Ordering::Release);
            done.map(|()| writers)
        });
        let ended = async {
            if let Ok(writers) = tokio::time::timeout(timeout, &mut waiting).await {
                return writers.expect("waiting does not panic");
            }
            let stuck = stuck(&pids);
            // A process that waits for the service in the kernel can be killed. Its pid is not reused before it is
            // waited for.
            for pid in pids {
                let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
            }
            let _ = waiting.await;
            Err(HarnessError::Agent(format!("timed out: {stuck}")))
        };
        let (watched, writers) = tokio::join!(self.watch_while(&busy), ended);
        watched.and(writers)
    }

    /// Runs the consumers while `busy` is true, and once more after that.
    ///
    /// # Errors
    /// [`HarnessError`]. In that case the writers are asked to stop.
    ///
    /// # Panics
    /// If a thread panics.
    pub async fn watch_while(&mut self, busy: &Arc<AtomicBool>) -> HarnessResult<()> {
        let mut watching = Vec::new();
        for mut consumer in std::mem::take(&mut self.consumers) {
            let busy = Arc::clone(busy);
            watching.push(tokio::spawn(async move { consumer.watch(&busy).await.map(|()| consumer) }));
        }
        let mut failed = Ok(());
        for consumer in watching {
            match consumer.await.expect("a consumer does not panic") {
                Ok(consumer) => self.consumers.push(consumer),
                Err(error) => {
                    // Without consumers, the writers need not continue.
                    self.log.stop();
                    failed = Err(error);
                }
            }
        }
        failed
    }

    /// Deletes the file and returns the outcome for each consumer.
    ///
    /// # Errors
    /// [`HarnessError::Client`]; [`HarnessError::History`] if the answers to a consumer contradict each other.
    pub async fn finish(self) -> HarnessResult<Vec<Outcome>> {
        self.service.client().await?.delete(&named(&self.name)).await?;
        let writes = || (0..self.log.lanes()).flat_map(|lane| self.log.writes(lane));
        let outcome = |consumer: Consumer| {
            let (history, mirror) = consumer.finish()?;
            let stale = mirror.map(|mirror| mirror.stale());
            Ok(Outcome { verdict: check(&history, writes()), stale })
        };
        self.consumers.into_iter().map(outcome).collect()
    }

    /// A writable descriptor of the file.
    ///
    /// # Errors
    /// [`HarnessError::Client`]
    pub fn descriptor(&self) -> HarnessResult<std::os::fd::OwnedFd> {
        Ok(self.service.fdpass()?.open(&named(&self.name), true)?.0)
    }
}

/// The kernel functions in which the threads of these processes, and of their children, wait.
fn stuck(pids: &[u32]) -> String {
    let mut pids = pids.to_vec();
    let mut text = String::new();
    while let Some(pid) = pids.pop() {
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let of = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let children = of("children");
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            text += &format!("{pid}: {} ", of("wchan"));
        }
    }
    text
}
