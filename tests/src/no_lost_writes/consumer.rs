//! A consumer: takes checkpoints at random moments, lists the changes since its previous one, and records all answers.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::grpc::{self, ChangedBatch, ChangesEncoding, ChangesOptions};
use fdmap_client::proto::GapKind;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, ClientError};
use fdmap_sys::clock::monotonic_ns;

use super::history::{Checkpoint, History, HistoryError};
use super::mirror::Mirror;
use super::pages::PageSet;
use crate::host::SERVICE_START_TIMEOUT;
use crate::pattern::mix;
use crate::{HarnessError, HarnessResult};

/// A consumer of one file.
#[derive(Debug)]
pub struct Consumer {
    client: Client,
    file: FileName,
    pages: u64,
    word: u64,
    since: Generation,
    granularity: u64,
    checkpoints: Vec<Checkpoint>,
    mirror: Option<Mirror>,
    /// Maximum pause between two steps in microseconds.
    max_pause: u64,
    /// Requests are retried when the connection ends, because the service may be restarted.
    survives_restarts: bool,
    /// The last answered checkpoint: idempotency key, generation, unchanged.
    last_answer: Option<(u64, Generation, bool)>,
    retried: u64,
}

/// The answer to `changes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedPages {
    /// All changed pages.
    pub changed: PageSet,
    /// The changed pages that are conservative.
    pub conservative: PageSet,
    /// Every writer was observed.
    pub coverage_exact: bool,
    /// The kinds of coverage gaps.
    pub gaps: BTreeSet<GapKind>,
}

impl Consumer {
    /// A consumer of a file of `pages` pages that starts at generation 0. `seed` determines the times of its
    /// checkpoints.
    #[must_use]
    pub const fn new(client: Client, file: FileName, pages: u64, seed: u64) -> Self {
        Self {
            client,
            file,
            pages,
            word: mix(seed),
            since: Generation::NONE,
            granularity: 1,
            checkpoints: Vec::new(),
            mirror: None,
            max_pause: 20_000,
            survives_restarts: false,
            last_answer: None,
            retried: 0,
        }
    }

    /// Sets the maximum pause between two steps in microseconds. The default is 20,000.
    pub const fn set_max_pause(&mut self, micros: u64) {
        self.max_pause = micros;
    }

    /// Retries a request with the same idempotency key when the connection ends, and sometimes repeats an answered
    /// request. The service must return the same answer, even after a restart.
    pub const fn survive_restarts(&mut self) {
        self.survives_restarts = true;
    }

    /// Requests that were retried because the connection ended.
    #[must_use]
    pub const fn retried(&self) -> u64 {
        self.retried
    }

    /// Sets a mirror, which each step updates.
    pub fn set_mirror(&mut self, mirror: Mirror) {
        self.mirror = Some(mirror);
    }

    /// Takes a checkpoint and lists the changes since the previous one.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    ///
    /// # Panics
    /// If a repeated request gets a different answer.
    pub async fn step(&mut self, exact: bool) -> HarnessResult<&Checkpoint> {
        if let Some((request, generation, unchanged)) = self.last_answer
            && self.draw(4) == 0
        {
            let again = self.checkpoint(false, Some(request)).await?;
            assert_eq!((again.generation, again.unchanged), (generation, unchanged), "request {request:#x}");
        }
        let request = self.survives_restarts.then(|| self.draw(u64::MAX) + 1);
        let called = monotonic_ns();
        let made = self.checkpoint(exact, request).await?;
        let returned = monotonic_ns();
        self.last_answer = request.map(|request| (request, made.generation, made.unchanged));
        let encoding = if self.draw(2) == 0 { ChangesEncoding::Runs } else { ChangesEncoding::Bitmaps };
        let mut since = None;
        let ChangedPages { changed, conservative, coverage_exact, gaps } = loop {
            match self.changes(self.since, encoding).await {
                Err(HarnessError::Client(error)) => self.wait_before_retry(error, &mut since).await?,
                other => break other?,
            }
        };
        let listed = monotonic_ns();
        if let Some(mirror) = &mut self.mirror {
            mirror.update(&changed);
        }
        self.since = made.generation;
        self.granularity = made.coverage.granularity_pages;
        let index = self.checkpoints.len();
        self.checkpoints.push(Checkpoint {
            called,
            returned,
            listed,
            exact,
            generation: made.generation.get(),
            unchanged: made.unchanged,
            changed,
            conservative,
            coverage_exact,
            gaps,
        });
        Ok(&self.checkpoints[index])
    }

    async fn checkpoint(&mut self, exact: bool, request: Option<u64>) -> HarnessResult<grpc::Checkpoint> {
        let mut since = None;
        loop {
            match self.client.checkpoint(&self.file, exact, request).await {
                Err(error) => self.wait_before_retry(error, &mut since).await?,
                Ok(made) => return Ok(made),
            }
        }
    }

    /// Waits before a retry. `since` is the time of the first failure.
    async fn wait_before_retry(
        &mut self,
        error: ClientError,
        since: &mut Option<Instant>,
    ) -> HarnessResult<()> {
        let ended = matches!(error, ClientError::Broken(_) | ClientError::Unreachable { .. });
        self.retried += u64::from(ended && since.is_none());
        if !self.survives_restarts
            || !ended
            || since.get_or_insert_with(Instant::now).elapsed() > SERVICE_START_TIMEOUT
        {
            return Err(error.into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    }

    /// Lists the changes since a generation without recording them.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn changes(&self, since: Generation, encoding: ChangesEncoding) -> HarnessResult<ChangedPages> {
        let options = ChangesOptions { since, encoding, ..ChangesOptions::default() };
        let mut changes = self.client.changes(&self.file, options).await?;
        let coverage_exact = changes.header().coverage.exact;
        let gaps = changes.header().coverage.gaps.iter().map(|gap| gap.kind).collect();
        let (mut changed, mut conservative) = (PageSet::of(self.pages), PageSet::of(self.pages));
        while let Some(batch) = changes.next().await? {
            match batch {
                ChangedBatch::Runs(runs) => {
                    for run in runs {
                        let range = run.run.range.start().0..run.run.range.end().0;
                        changed.extend(range.clone());
                        if run.run.conservative {
                            conservative.extend(range);
                        }
                    }
                }
                ChangedBatch::Bitmaps(maps) => {
                    let first = maps.range.start().0;
                    let set = |bytes: &[u8], set: &mut PageSet| {
                        let pages = (0..bytes.len() as u64 * 8)
                            .filter(|bit| bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 1);
                        set.extend(pages.map(|page| first + page));
                    };
                    set(&maps.changed, &mut changed);
                    set(&maps.conservative, &mut conservative);
                }
                ChangedBatch::Entries { .. } => unreachable!("the request asks for runs or bitmaps"),
            }
        }
        Ok(ChangedPages { changed, conservative, coverage_exact, gaps })
    }

    /// Steps at random moments while `busy` is true, and once more afterwards, to close the last generation.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn watch(&mut self, busy: &AtomicBool) -> HarnessResult<()> {
        loop {
            let still = busy.load(Ordering::Acquire);
            let exact = !still || self.draw(4) == 0;
            self.step(exact).await?;
            if !still {
                return Ok(());
            }
            // Sometimes there is no pause.
            let micros = if self.draw(8) == 0 { 0 } else { self.draw(self.max_pause) };
            tokio::time::sleep(Duration::from_micros(micros)).await;
        }
    }

    /// The last closed generation that this consumer knows.
    #[must_use]
    pub const fn since(&self) -> Generation {
        self.since
    }

    /// The recorded checkpoints, and the mirror.
    ///
    /// # Errors
    /// [`HistoryError`] if the answers contradict each other.
    pub fn finish(self) -> Result<(History, Option<Mirror>), HistoryError> {
        Ok((History::new(self.checkpoints, self.pages, self.granularity)?, self.mirror))
    }

    const fn draw(&mut self, end: u64) -> u64 {
        self.word = mix(self.word);
        self.word % end
    }
}
