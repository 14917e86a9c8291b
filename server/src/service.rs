//! The state that the gRPC and the fdpass socket share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fdmap_proto::error_chain;
use fdmap_proto::provenance::Provenance;
use fdmap_proto::units::{PageRange, PageSize};
use fdmap_sys::process;
use tokio::sync::watch;

use crate::blocking::{BlockingCalls, Call};
use crate::files::{
    EphemeralSweep, FileError, KeepPolicy, Limits, Measure, Quota, Quotas, Registry, ServiceFile,
    SharedSnapshots, TrackedQuota,
};
use crate::log_limit::LogLimit;
use crate::pages::Snapshot;
use crate::probe::capabilities::{Capability, HostCapabilities};
use crate::probe::{Probe, ScanError};
use crate::random::random_id;
use crate::scan::PageStateReader;
use crate::tracking::EventSources;
use crate::tracking::holder::Holder;
use crate::watchdog::{self, Phase};

/// Interval of the checks whether requests still use a file that ended.
const IN_USE_INTERVAL: Duration = Duration::from_millis(100);

/// Signals all tasks to stop.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

impl Shutdown {
    /// Returns the signal and its sender. Sending `true` or dropping the sender raises the signal.
    #[must_use]
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Waits for the signal.
    pub async fn wait(mut self) {
        // An error means that the sender was dropped.
        let _ = self.0.wait_for(|raised| *raised).await;
    }
}

/// The running service.
pub struct Service {
    pub registry: Registry,
    pub probe: Arc<dyn Probe>,
    pub limits: Limits,
    /// The capabilities of the host, as found at start.
    pub capabilities: Vec<Capability>,
    /// The base page size.
    pub page_size: PageSize,
    /// Bytes, all sizes that the host has.
    pub hugetlb_page_sizes: Vec<u64>,
    /// Random, not 0. Distinguishes this process from earlier and later ones.
    pub instance: u64,
    pub started: SystemTime,
    /// The user that the service runs as.
    pub uid: u32,
    pub fdpass_path: PathBuf,
    /// Connections to both unix sockets.
    pub sessions: Arc<Quota>,
    /// Authenticated TCP connections.
    pub tcp_sessions: Arc<Quota>,
    /// Watch and `WatchCheckpoints` streams.
    pub watches: Arc<Quota>,
    /// Open streams of answers, watches among them.
    pub streams: Arc<Quota>,
    /// Bytes of requests until their answers begin, and of answers that are not sent.
    pub(crate) buffered: Arc<Quota>,
    /// Bytes of messages of streams that are not sent.
    pub(crate) buffered_streams: Arc<Quota>,
    pub retained: Arc<Quota>,
    /// Track requests whose mappings exist.
    pub tracked: TrackedQuota,
    ephemeral: EphemeralSweep,
    pub shared_snapshots: SharedSnapshots,
    pub(crate) blocking: BlockingCalls,
    quotas: Quotas,
    event_sources: Arc<EventSources>,
}

impl Service {
    /// A service without files.
    #[must_use]
    pub fn new(
        host: HostCapabilities,
        probe: Arc<dyn Probe>,
        event_sources: Arc<EventSources>,
        limits: Limits,
        keep: KeepPolicy,
        fdpass_path: PathBuf,
    ) -> Arc<Self> {
        let HostCapabilities { capabilities, page_size, hugetlb_page_sizes, .. } = host;
        let reader = PageStateReader::new(Arc::clone(&probe));
        let quotas = Quotas::new(limits.users_at_limit);
        let quota = |resource, max_per_user: u32| quotas.quota(resource, u64::from(max_per_user));
        let tracked = TrackedQuota::new(&quotas, &limits, &measure_page_tables(Arc::clone(&probe)));
        Arc::new(Self {
            registry: Registry::new(
                reader,
                Arc::clone(&event_sources),
                page_size,
                hugetlb_page_sizes.clone(),
                &quotas,
                limits,
                keep,
            ),
            probe,
            capabilities,
            page_size,
            hugetlb_page_sizes,
            instance: random_id(|id| (id != 0).then_some(id)),
            started: SystemTime::now(),
            uid: nix::unistd::geteuid().as_raw(),
            fdpass_path,
            sessions: quota("connections", limits.sessions_per_user),
            tcp_sessions: quota("TCP connections", limits.sessions_per_user),
            watches: quota("watches", limits.watches_per_user),
            streams: quota("streams", limits.streams_per_user),
            buffered: quotas
                .quota("bytes of unread answers and of requests in progress", limits.buffered_bytes_per_user),
            buffered_streams: quotas.quota("bytes of unread streams", limits.buffered_bytes_per_user),
            retained: quota("retained snapshots", limits.retained_per_user),
            tracked,
            ephemeral: EphemeralSweep::default(),
            shared_snapshots: SharedSnapshots::new(&quotas, &limits),
            blocking: BlockingCalls::new(&quotas, limits.calls_per_user, limits.threads_per_user),
            quotas,
            event_sources,
            limits,
        })
    }

    pub(crate) const fn event_sources(&self) -> &Arc<EventSources> {
        &self.event_sources
    }

    /// The holder of the userfaultfds of a user. Subordinate users have that of their owner.
    pub(crate) fn holder_of(&self, uid: u32) -> Arc<Holder> {
        self.event_sources.holders().of_user(self.owner_of(uid))
    }

    /// The user who is charged for what `uid` uses: of a subordinate user id, its owner.
    pub(crate) fn owner_of(&self, uid: u32) -> u32 {
        self.quotas.owner_of(uid)
    }

    /// The provenance of an answer about `ranges` of a snapshot.
    ///
    /// # Errors
    /// [`ScanError::Panicked`] if the snapshot does not cover the ranges, which is a bug in the service.
    pub fn provenance(
        &self,
        snapshot: &Snapshot,
        ranges: &[PageRange],
    ) -> Result<Provenance, Arc<ScanError>> {
        let provenance = snapshot.provenance(ranges, self.probe.kind(), self.instance);
        provenance.ok_or_else(|| Arc::new(ScanError::Panicked))
    }

    /// Drops expired retained snapshots, shared snapshots that no client has, ephemeral files that no process uses, and charges for page
    /// tables that were freed. Also reads the subordinate user ids again, if they have changed. Must be called within the async runtime.
    pub fn sweep(self: &Arc<Self>) {
        let _operation = watchdog::Operation::begin_without_file("sweep", Phase::Computation);
        self.quotas.reload();
        for file in self.ephemeral.sweep(&self.registry) {
            tracing::info!(%file, id = %file.id(), "deleted an ephemeral file that no process uses");
            tokio::spawn(Arc::clone(self).finish(file));
        }
        self.shared_snapshots.sweep();
        self.tracked.sweep();
        self.event_sources.holders().send_again();
        for file in self.registry.all() {
            file.retained().sweep();
        }
        process::trim_heap();
    }

    /// Drops what the service still has of a file that ended, after calls that work on the file.
    async fn finish(self: Arc<Self>, file: Arc<ServiceFile>) {
        let its = Arc::clone(&self);
        let finish = move |file: Arc<ServiceFile>| {
            its.registry.finish(&file);
            its.drop_ended(file);
        };
        self.end_file(file, finish).await;
    }

    /// Drops a file that was removed from the registry. The last drop may free much memory. Where requests still use the file, none of
    /// them makes it: the thread that serves a request serves all users. Must be called within the async runtime, outside of its worker
    /// threads.
    pub(crate) fn drop_ended(self: &Arc<Self>, file: Arc<ServiceFile>) {
        // No request finds it any more, so the number does not grow again.
        if Arc::strong_count(&file) == 1 {
            return;
        }
        let service = Arc::clone(self);
        tokio::spawn(async move {
            while Arc::strong_count(&file) > 1 {
                tokio::time::sleep(IN_USE_INTERVAL).await;
            }
            service.end_file(file, drop).await;
        });
    }

    /// Runs work on a file that ended, in a thread for such work.
    async fn end_file(&self, file: Arc<ServiceFile>, work: impl FnOnce(Arc<ServiceFile>) + Send + 'static) {
        let (call, name) = (Call::on("end of a file", &file), file.to_string());
        let owner = self.owner_of(file.access().uid);
        if let Err(error) = self.blocking.end(owner, call, move || work(file)).await {
            tracing::error!(name, error = error_chain(&error), "cannot drop a file that ended");
        }
    }

    /// Creates or adopts a file. Sweeps and tries again if there are too many, at most once a second.
    ///
    /// # Errors
    /// That of `add`.
    pub fn add_file(
        self: &Arc<Self>,
        add: impl Fn(&Registry) -> Result<Arc<ServiceFile>, FileError>,
    ) -> Result<Arc<ServiceFile>, FileError> {
        add(&self.registry).or_else(|error| {
            if !matches!(error, FileError::Limit { .. }) || !self.ephemeral.may_force_sweep() {
                return Err(error);
            }
            self.sweep();
            add(&self.registry)
        })
    }
}

/// Measures the page tables of an address space, where `probe` can.
fn measure_page_tables(probe: Arc<dyn Probe>) -> Measure {
    static UNKNOWN: LogLimit = LogLimit::new();
    Arc::new(move |pagemap| {
        probe.page_tables(pagemap).unwrap_or_else(|error| {
            if let Some(omitted) = UNKNOWN.permit() {
                let error = error_chain(&error);
                tracing::warn!(error, omitted, "page tables of an address space cannot be counted");
            }
            None
        })
    })
}

#[cfg(test)]
mod tests;
