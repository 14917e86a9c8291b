//! The source of a migration: reads a file of the service on this host, and sends it.
//!
//! ```text
//!   connect -> round 1: all pages with data -> round 2: what was written since -> ... until the rest fits the downtime, or --rounds
//!           -> pause the writers -> last round -> both digests are equal -> fence the file -> commit -> done: the writers stay paused
//!                  |                    |                  |                       |           |
//!                  +--------------------+-- error, ^C -----+-----------------------+           +-- refused: the fence ends, the writers run
//!                                       v                                                      +-- lost: Unknown, all stays as it is
//!                       the writers run, the destination has no file
//! ```
//!
//! With [`MigrationMonitor::new`]`(true)`, rounds follow until [`MigrationMonitor::finalize`] is called: the caller has paused the writers.
//!
//! A round closes a generation first, as a round of a dump does. After the last round a further checkpoint shows whether the writers were
//! paused: pages that direct I/O wrote meanwhile, or that are still pinned for it, are sent again.

mod link;
mod round;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_proto::convert::{backing_to_wire, seals_to_wire};
use fdmap_proto::units::{Generation, to_u64};
use fdmap_proto::v1;
use fdmap_proto::v1::receive_request::Step;
use fdmap_proto::{FileInfo, PageIndex, PageRange, Rights};
use tokio::runtime::Handle;

use super::digest::PageHashes;
use super::error::MigrationError;
use super::message::compression_to_wire;
use super::monitor::{MigrationMonitor, MigrationState};
use crate::error::{ClientError, RefusalCode};
use crate::image::dump::{ContentReader, DumpSource, Extent, Packed, PauseMethod, Paused, Written};
use crate::image::{Compression, Control, ImageError, PAGE_BYTES, PageSet, Phase, SlotAccess, process};
pub use link::DestinationAddress;
use link::Link;
use round::{RoundContent, hashed, sorted};

/// Time after the pause in which direct I/O and DMA may still write pages.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time until pages that are pinned are looked at again.
const PIN_INTERVAL: Duration = Duration::from_millis(1);
/// Characters of the host in the reason of a fence.
const MAX_HOST_CHARS: usize = 100;
/// Time between two rounds while Finalize is awaited.
const READY_INTERVAL: Duration = Duration::from_secs(1);
/// Rounds in a report: the first one, and the last ones.
const MAX_ROUND_REPORTS: usize = 256;
/// Ranges of zero pages in one step.
const MAX_ZERO_RANGES: usize = 512;

/// How a file is migrated.
#[derive(Clone, Debug)]
pub struct MigrateOptions {
    pub destination: DestinationAddress,
    pub compression: Compression,
    /// Threads that read and compress; at least 1.
    pub jobs: usize,
    pub pause: PauseMethod,
    /// The writers are paused when the rest can be sent in this time.
    pub downtime: Duration,
    /// And after this number of rounds in any case.
    pub rounds: u32,
    /// If it awaits Finalize, the migration is only ready then, and `pause` is [`PauseMethod::ByCaller`].
    pub monitor: Arc<MigrationMonitor>,
}

/// One round.
#[derive(Clone, Copy, Debug)]
pub struct RoundReport {
    /// Pages that were read.
    pub pages: u64,
    /// Of them, and of those without data, pages that were sent as zero.
    pub zero_pages: u64,
    /// Bytes of content, as they were sent.
    pub sent_bytes: u64,
    pub elapsed: Duration,
    /// While the writers were paused.
    pub paused: bool,
}

/// A file that was migrated.
#[derive(Clone, Debug)]
pub struct MigrateReport {
    /// The file at the destination.
    pub file: FileInfo,
    pub rounds: Vec<RoundReport>,
    /// From the pause of the writers until the destination had the file.
    pub downtime: Duration,
    /// All writers were observed.
    pub exact: bool,
    /// Times that the connection was opened again.
    pub reconnections: u32,
}

/// Migrates a file. `runtime` runs the connection; another thread drives it. Blocks; do not call it on a thread of an async runtime.
///
/// # Errors
/// [`MigrationError`]. But for [`MigrationError::Unknown`] and [`MigrationError::StaysFenced`], the file and its writers are as before, and
/// the destination has no file.
pub fn migrate(
    source: &DumpSource,
    options: &MigrateOptions,
    runtime: &Handle,
    control: &Control,
) -> Result<MigrateReport, MigrationError> {
    let migrated = migrate_watched(source, options, runtime, control);
    match &migrated {
        Ok(report) => options.monitor.complete(&report.file, report.downtime, report.exact),
        Err(error) => options.monitor.fail(error),
    }
    migrated
}

fn migrate_watched(
    source: &DumpSource,
    options: &MigrateOptions,
    runtime: &Handle,
    control: &Control,
) -> Result<MigrateReport, MigrationError> {
    let info = migratable(source)?;
    let begin = begin_message(&info, random_id()?);
    let fence_reason = reason_of(&options.destination.address.uri, begin.migration_id);
    let monitor = &options.monitor;
    let link = runtime.block_on(Link::connect(&options.destination, begin, control, monitor))?;
    let mut migration = Migration {
        source,
        options,
        runtime,
        control,
        link,
        sent: PageHashes::default(),
        size_bytes: info.size_bytes,
        info,
        fence_reason,
        rounds: Vec::new(),
        exact: true,
    };
    match migration.run() {
        Ok((file, downtime)) => Ok(MigrateReport {
            file,
            rounds: migration.rounds,
            downtime,
            exact: migration.exact,
            reconnections: migration.link.reconnections,
        }),
        Err(error) => {
            if !matches!(error, MigrationError::Unknown { .. }) {
                runtime.block_on(migration.link.abort());
            }
            Err(error)
        }
    }
}

/// The file, if the caller may migrate it.
fn migratable(source: &DumpSource) -> Result<FileInfo, MigrationError> {
    let info = source.current_info()?;
    if !info.caller_rights.contains(Rights::MIGRATE) {
        // As the service says it when the file is fenced, which is late.
        let message = format!("the caller lacks the migrate right to file {:?}", info.name);
        return Err(ClientError::Refused { code: RefusalCode::PermissionDenied, message }.into());
    }
    Ok(info)
}

fn begin_message(info: &FileInfo, migration_id: u64) -> v1::BeginMigration {
    let (backing, hugetlb_page_size) = backing_to_wire(info.backing);
    v1::BeginMigration {
        migration_id,
        resumed: false,
        name: info.name.clone(),
        size_bytes: info.size_bytes,
        backing,
        hugetlb_page_size,
        seals: seals_to_wire(info.seals),
        access: Some(info.access.into()),
    }
}

/// The reason of the fence, which has the form of a file name. No other migration has the same.
fn reason_of(destination: &str, migration_id: u64) -> String {
    let host = destination.strip_prefix("https://").unwrap_or(destination);
    let host: String = host.chars().filter(|c| *c != '/').take(MAX_HOST_CHARS).collect();
    format!("migrated to {host}, migration {migration_id:016x}")
}

fn random_id() -> Result<u64, MigrationError> {
    let mut bytes = [0; 8];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut bytes));
    read.map_err(|error| MigrationError::Serve { what: "reading /dev/urandom".to_owned(), error })?;
    Ok(u64::from_le_bytes(bytes))
}

/// A migration in progress.
struct Migration<'a> {
    source: &'a DumpSource,
    options: &'a MigrateOptions,
    runtime: &'a Handle,
    control: &'a Control,
    link: Link<'a>,
    /// The file when the migration began.
    info: FileInfo,
    fence_reason: String,
    /// Hashes of the pages at the destination.
    sent: PageHashes,
    size_bytes: u64,
    rounds: Vec<RoundReport>,
    exact: bool,
}

impl Migration<'_> {
    fn run(&mut self) -> Result<(FileInfo, Duration), MigrationError> {
        let generation = self.send_rounds()?;
        self.options.monitor.enter(&MigrationState::Finalizing);
        let paused = self.options.pause.pause(self.control)?;
        let since = Instant::now();
        self.send_rest(generation)?;
        let digest = self.sent.digest(self.size_bytes);
        self.send(Step::Verify(digest.to_vec()))?;
        self.runtime.block_on(self.link.flush())?;
        let committed = self.commit(&paused);
        if matches!(committed, Ok(_) | Err(MigrationError::Unknown { .. })) {
            let _ = paused.leave();
        }
        Ok((committed?, since.elapsed()))
    }

    /// Sends rounds while the writers run. Returns the generation that the last one has closed.
    fn send_rounds(&mut self) -> Result<Generation, MigrationError> {
        let mut generation = self.source.checkpoint()?.generation;
        self.options.monitor.enter(&MigrationState::Copying);
        self.send_round(None, false)?;
        let (mut rounds, mut fits) = (1, false);
        while !self.has_all_rounds(rounds, fits)? {
            let closed = self.source.checkpoint()?;
            let changed = self.written_since(generation)?.pages;
            generation = closed.generation;
            let expected = self.time_of(changed.pages());
            self.control.expect_downtime(expected);
            fits = expected <= self.options.downtime;
            self.send_round(Some(changed), false)?;
            rounds = rounds.saturating_add(1);
        }
        Ok(generation)
    }

    /// Whether the writers are paused now. `fits`: what was written last can be sent within the downtime.
    fn has_all_rounds(&self, rounds: u32, fits: bool) -> Result<bool, MigrationError> {
        let is_ready = fits || rounds >= self.options.rounds;
        let monitor = &self.options.monitor;
        if !monitor.awaits_finalize() {
            return Ok(is_ready);
        }
        let state = if is_ready { MigrationState::Ready } else { MigrationState::Copying };
        monitor.enter(&state);
        let interval = if is_ready { READY_INTERVAL } else { Duration::ZERO };
        Ok(monitor.wait_for_finalize(interval, self.control)?)
    }

    /// Fences the file, and has the destination complete its own.
    fn commit(&mut self, paused: &Paused<'_>) -> Result<FileInfo, MigrationError> {
        self.control.enter(Phase::Completing);
        self.control.check()?;
        self.options.monitor.enter(&MigrationState::Committing);
        let destination = &self.options.destination.address.uri;
        let fenced = self.source.fence(&self.fence_reason).map_err(MigrationError::from);
        let complete = fenced.and_then(|info| self.check_unchanged(&info).and_then(|()| Ok(paused.check()?)));
        // The service may have fenced the file, and not have answered in time.
        complete.map_err(|error| self.unfenced(error))?;
        let committed = self
            .send(Step::Commit(v1::CommitMigration {}))
            .and_then(|()| self.runtime.block_on(self.link.committed()))
            .and_then(|file| Ok(FileInfo::try_from(file).map_err(ClientError::from)?));
        match committed {
            Err(error @ MigrationError::Refused { .. }) => Err(self.unfenced(error)),
            Err(error) => Err(MigrationError::Unknown {
                destination: destination.clone(),
                reason: fdmap_proto::error_chain(&error),
            }),
            Ok(file) => Ok(file),
        }
    }

    /// Fails if what the destination sets at its end, from the first message, is no longer as it was.
    fn check_unchanged(&self, now: &FileInfo) -> Result<(), MigrationError> {
        let before = &self.info;
        let changed = match () {
            () if now.size_bytes != self.size_bytes => "size",
            () if now.seals != before.seals => "seals",
            () if now.access != before.access => "owner or rights",
            () => return Ok(()),
        };
        Err(MigrationError::Changed { file: now.caller_name(), what: changed })
    }

    /// Ends the fence after an error. Returns the error.
    fn unfenced(&self, error: MigrationError) -> MigrationError {
        match self.source.end_fence(&self.fence_reason) {
            // The fence is that of another migration, or of a user.
            Ok(())
            | Err(ImageError::Client(ClientError::Refused {
                code: RefusalCode::FailedPrecondition, ..
            })) => error,
            Err(_) => MigrationError::StaysFenced(Box::new(error)),
        }
    }

    /// Sends the pages that were written since, until a checkpoint finds no more. The writers are paused.
    ///
    /// Pages that are pinned for DMA count as written in each generation. The freezer of a cgroup does not end DMA: they are read again until
    /// they are not pinned any more. Other pauses end it. Pages that may have been written by a writer that is not observed are read once
    /// more, in case a write ended meanwhile.
    fn send_rest(&mut self, since: Generation) -> Result<(), MigrationError> {
        let mut generation = self.source.checkpoint()?.generation;
        let changed = self.written_since(since)?.pages;
        self.send_round(Some(changed), true)?;
        let begun = Instant::now();
        loop {
            let Some(closed) = self.source.checkpoint_of_writes()? else { return Ok(()) };
            let written = self.written_since(generation)?;
            generation = closed;
            let Some(first) = written.pages.ranges().first().copied() else { return Ok(()) };
            // Without a gap, pages are reported because of a write, whose range may be unknown.
            let waits_for_dma = written.has_pinned && matches!(self.options.pause, PauseMethod::Cgroup(_));
            let is_certain = written.is_exact || written.first_observed.is_some() || waits_for_dma;
            let is_late = begun.elapsed() >= PAUSE_TIMEOUT;
            let before = self.sent.digest(self.size_bytes);
            self.send_round(Some(written.pages), true)?;
            if !is_certain && self.sent.digest(self.size_bytes) == before {
                return Ok(());
            }
            if is_late {
                return Err(MigrationError::NotPaused(written.first_observed.unwrap_or(first)));
            }
            if waits_for_dma {
                self.control.check()?;
                std::thread::sleep(PIN_INTERVAL);
            }
        }
    }

    fn written_since(&mut self, since: Generation) -> Result<Written, MigrationError> {
        let written = self.source.written_since(since)?;
        self.exact &= written.is_exact;
        Ok(written)
    }

    /// Time that pages take, by the rate so far.
    fn time_of(&self, pages: u64) -> Duration {
        let elapsed: Duration = self.rounds.iter().map(|round| round.elapsed).sum();
        let sent: u64 = self.rounds.iter().map(|round| round.pages).sum();
        if pages == 0 || sent == 0 {
            return if pages == 0 { Duration::ZERO } else { Duration::MAX };
        }
        let nanos = elapsed.as_nanos().saturating_mul(u128::from(pages)) / u128::from(sent);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn send(&mut self, step: Step) -> Result<(), MigrationError> {
        self.runtime.block_on(self.link.send(step))
    }

    /// Sends one round.
    fn send_round(&mut self, changed: Option<PageSet>, paused: bool) -> Result<(), MigrationError> {
        let begun = Instant::now();
        self.control.begin_round();
        let round = RoundContent::prepare(self.source, changed, &self.sent)?;
        self.control.expect(round.pages);
        self.options.monitor.skip(round.size_bytes.div_ceil(PAGE_BYTES).saturating_sub(round.pages));
        self.control.enter(Phase::Copying);
        if round.size_bytes != self.size_bytes {
            self.send(Step::ResizeBytes(round.size_bytes))?;
            self.size_bytes = round.size_bytes;
            self.sent.clear_from(PageIndex(round.size_bytes.div_ceil(PAGE_BYTES)));
        }
        let mut report =
            RoundReport { pages: round.pages, zero_pages: 0, sent_bytes: 0, elapsed: Duration::ZERO, paused };
        for zero in round.zero.chunks(MAX_ZERO_RANGES) {
            self.send_pages(Vec::new(), Vec::new(), zero.to_vec(), &mut report)?;
        }
        let slots = SlotAccess::default();
        let workers = (0..self.options.jobs.max(1)).map(|_| {
            let compression = self.options.compression;
            let reader = ContentReader::new(self.source, round.size_bytes, compression, self.control, &slots);
            let mut reader = reader.with_page_digests();
            move |batch: &Vec<Extent>| Ok::<_, ImageError>((reader.read(batch)?, batch.clone()))
        });
        let mut failed = None;
        let processed = process(&round.batches, workers.collect(), |(packed, batch)| {
            let sent = self.send_batch(&batch, packed, &mut report);
            sent.map_err(|error| {
                failed = Some(error);
                ImageError::Cancelled
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        processed?;
        self.runtime.block_on(self.link.flush())?;
        report.elapsed = begun.elapsed();
        if self.rounds.len() == MAX_ROUND_REPORTS {
            self.rounds.remove(1);
        }
        self.rounds.push(report);
        Ok(())
    }

    fn send_batch(
        &mut self,
        batch: &[Extent],
        packed: Packed,
        report: &mut RoundReport,
    ) -> Result<(), MigrationError> {
        let (content, zero) = sorted(batch, &packed);
        // Of the others, the destination has no data.
        let zero: Vec<_> = zero.ranges().iter().flat_map(|range| self.sent.present(*range)).collect();
        for (page, hash) in hashed(&content, &packed) {
            self.sent.set(page, hash);
        }
        let frame = packed.chunk.map(|(_, frame)| frame).unwrap_or_default();
        if content.is_empty() && zero.is_empty() {
            return Ok(());
        }
        self.send_pages(content, frame, zero, report)
    }

    fn send_pages(
        &mut self,
        content: Vec<PageRange>,
        frame: Vec<u8>,
        zero: Vec<PageRange>,
        report: &mut RoundReport,
    ) -> Result<(), MigrationError> {
        report.sent_bytes += to_u64(frame.len());
        for range in &zero {
            report.zero_pages += range.len();
            self.sent.clear(*range);
        }
        self.send(Step::Pages(v1::MigratedPages {
            content: content.into_iter().map(Into::into).collect(),
            frame: frame.into(),
            compression: compression_to_wire(self.options.compression).into(),
            zero: zero.into_iter().map(Into::into).collect(),
        }))
    }
}
