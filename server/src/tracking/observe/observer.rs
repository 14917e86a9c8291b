//! Reads all that one observation of a file needs.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_proto::file::FileInfo;
use fdmap_proto::units::PageRange;
use fdmap_sys::clock::monotonic_ns;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{Errno, SyscallError, fd, lru, memfd, pidfd};

use super::address_spaces::AddressSpaces;
use super::data_pages::data_pages;
use super::devices::Devices;
use super::event_sources::EventSources;
use super::fork_events::{ChildCharges, ForkEvents};
use super::forks::ForkSubscription;
use super::holder::{CallError, HeldSpace};
use super::kernel_objects::KernelObjects;
use super::kernel_writers::KernelWriters;
use super::mappers;
use super::modify_events::{Signals, Watch};
use super::observation::{
    EndedMapping, FileTraits, MapperAudit, Modifiers, Observation, PinScan, PinnedPages,
};
use super::remaps::{RemapCounts, RemapHistory, Remaps};
use super::trace::FollowedId;
use super::traced_calls::{self, OtherCallHistory, TakenCalls};
use crate::probe::{KernelAddress, MapperWalk, PinKind, Probe, ScanError, ScanTarget};
use crate::scan::{ScanCoalescer, ScanSource};
use crate::tracking::baseline::InodeBaseline;
use crate::tracking::error::TrackingError;
use crate::tracking::mapping::MappedFile;
use crate::tracking::{ranges, seal};

/// How long a checkpoint waits for the events of forks that have happened.
const FORK_EVENT_TIMEOUT: Duration = Duration::from_millis(200);

/// The features that every tracked mapping needs.
pub const REQUIRED_FEATURES: UffdFeatures =
    UffdFeatures::WP_ASYNC.union(UffdFeatures::WP_UNPOPULATED).union(UffdFeatures::WP_HUGETLBFS_SHMEM);

/// The event sources and descriptors of one file.
pub(crate) struct Observer {
    scans: Arc<ScanCoalescer>,
    probe: Arc<dyn Probe>,
    sources: Arc<EventSources>,
    file: MappedFile,
    traits: FileTraits,
    watch: Watch,
    signals: Arc<Signals>,
    fork_events: Arc<ForkEvents>,
    /// `None`: system calls on the file are not traced.
    traced: Option<FollowedId>,
    /// When calls on the file began to be traced.
    kernel_writers_before: KernelWriters,
}

/// Host-wide counters at the last observation.
#[derive(Debug, Default)]
pub(crate) struct SignalHistory {
    /// Number of processes and threads created since boot, when forks that are not counted were last judged.
    tasks_created: Option<u64>,
    other_calls: OtherCallHistory,
    pub(crate) remaps: RemapHistory,
    pub(crate) devices: Devices,
}

impl Observer {
    /// Starts to receive signals of the file. `unnotified_descriptors`: the service did not create the memfd.
    ///
    /// # Errors
    /// `inotify_add_watch`, or a failed `fstatfs`.
    pub(crate) fn new(
        scans: Arc<ScanCoalescer>,
        probe: Arc<dyn Probe>,
        sources: Arc<EventSources>,
        file: &FileInfo,
        unnotified_descriptors: bool,
    ) -> Result<Self, SyscallError> {
        let source = scans.source();
        let origin = memfd::origin(source.fd.as_fd())?;
        let (watch, signals) = sources.modify_events().watch(&scans)?;
        let traits = FileTraits { hugetlb: source.hugetlb_order.is_some(), unnotified_descriptors, origin };
        let (device, inode, page_size) = (file.device, file.inode, source.page_size);
        let file = MappedFile { device, inode, page_size, hugetlb: traits.hugetlb };
        let traced = sources.trace().and_then(|trace| {
            let followed = trace.follow(source.fd.as_fd());
            followed
                .inspect_err(|error| {
                    let error = fdmap_proto::error_chain(error);
                    tracing::warn!(error, "system calls on a file cannot be traced");
                })
                .ok()
        });
        let (fork_events, kernel_writers_before) = (Arc::default(), KernelWriters::of_host());
        Ok(Self {
            scans,
            probe,
            sources,
            file,
            traits,
            watch,
            signals,
            fork_events,
            traced,
            kernel_writers_before,
        })
    }

    /// The counters from which the first observation starts. `loop_device`: a loop device has the file open, or may have.
    pub(crate) fn initial_history(&self, loop_device: bool) -> SignalHistory {
        let trace = self.sources.trace().filter(|_| self.traced.is_some());
        let other_calls = trace.map_or_else(OtherCallHistory::default, |trace| {
            OtherCallHistory::starting_at(trace.host_counters(), monotonic_ns())
        });
        let devices = Devices::starting_with(loop_device);
        let remaps = self.sources.trace().map_or_else(RemapHistory::default, |trace| {
            let counts = RemapCounts { calls: trace.remaps(), forgotten: trace.forgotten_remaps() };
            RemapHistory::starting_at(counts)
        });
        SignalHistory { tasks_created: None, other_calls, remaps, devices }
    }

    pub(crate) const fn file(&self) -> MappedFile {
        self.file
    }

    /// For the log.
    pub(crate) fn file_name(&self) -> &Arc<str> {
        &self.source().name
    }

    pub(crate) const fn traits(&self) -> FileTraits {
        self.traits
    }

    pub(crate) const fn sources(&self) -> &Arc<EventSources> {
        &self.sources
    }

    /// The kernel writers of the host: now, and when calls on the file began to be traced.
    pub(crate) fn kernel_writers(&self) -> [KernelWriters; 2] {
        [KernelWriters::of_host(), self.kernel_writers_before]
    }

    /// Searches for calls on the file that began before they were traced. Without it, the first observation is not complete.
    pub(crate) fn find_earlier_calls(&self) {
        if let Some((trace, file)) = self.sources.trace().zip(self.traced) {
            trace.find_earlier_calls(file);
        }
    }

    /// True if an io_uring request without a completion event may be in progress that writes to the file by a descriptor that raises no event.
    pub(crate) fn requests_were_skipped(&self) -> bool {
        let trace = self.sources.trace().zip(self.traced).filter(|_| self.traits.unnotified_descriptors);
        trace.is_some_and(|(trace, file)| trace.requests_were_skipped(file))
    }

    /// True if the file was passed to what may write to it at any time: iommufd, FUSE passthrough.
    pub(crate) fn is_permanently_attached(&self) -> bool {
        let trace = self.sources.trace().zip(self.traced);
        trace.is_some_and(|(trace, file)| trace.is_permanently_attached(file))
    }

    /// True if system calls on the file are traced.
    pub(crate) const fn traces_calls(&self) -> bool {
        self.traced.is_some()
    }

    /// True if the probe can see pins.
    pub(crate) fn sees_pins(&self) -> bool {
        self.probe.attributes().maybe_pinned
    }

    /// The unit in which writes are observed, in base pages: 1, or the size of a hugetlb page.
    pub(crate) fn granularity_pages(&self) -> u64 {
        self.source().hugetlb_order.map_or(1, |order| 1 << order)
    }

    /// Reads the signals since the last observation, and checks the tracked mappings.
    ///
    /// # Errors
    /// A failed system call on the file.
    pub(crate) fn observe(
        &self,
        spaces: &mut AddressSpaces,
        history: &mut SignalHistory,
        baseline: &InodeBaseline,
    ) -> Result<Observation, SyscallError> {
        let (time, now_ns) = (Instant::now(), monotonic_ns());
        // The order matters. A write that ended before has raised its signal by now. A write that begins later changes the ctime
        // again, and the ctime is read first.
        let inode = self.inode()?;
        let (modifiers, signals_lost, calls) = self.take_writes(history, now_ns);
        let ctime_changed = inode.ctime != baseline.ctime;
        let attached = calls.as_ref().is_some_and(|calls| calls.attached);
        let permanently_attached = calls.as_ref().is_some_and(|calls| calls.permanently_attached);
        let may_be_new = ctime_changed && (calls.is_none() || self.has_unobserved_overlay());
        let loop_device = history.devices.update(attached, may_be_new, || self.loop_device_has_open());
        let mut calls = calls.map(|calls| calls.writes);
        let uncounted_forks = spaces.has_uncounted_forks() && tasks_were_created(history);
        if spaces.take_fork_events_due(self.file.page_size) || uncounted_forks {
            self.wait_for_forks(spaces);
        }
        self.receive_forks(spaces);
        let forked = spaces.take_forked(self.file.page_size);
        let child_reaped = spaces.child_was_reaped();
        let forks_possible = spaces.has_unobserved_forks() && uncounted_forks;
        if let Some(calls) = &mut calls {
            let unknown_children = !forked.is_empty() || child_reaped || forks_possible;
            let mapping = spaces.known().filter(|_| !unknown_children);
            calls.remaps = self.remaps(&mut history.remaps, mapping.as_ref());
        }
        let intact_vmas = self.intact_vmas(spaces);
        let bits_taken = spaces.bits_were_taken();
        let writable_vmas = self.writable_vmas();
        Ok(Observation {
            inode,
            modifiers,
            signals_lost,
            writable_vmas,
            intact_vmas,
            bits_taken,
            forked,
            child_reaped,
            forks_possible,
            calls,
            loop_device,
            permanently_attached,
            time,
        })
    }

    /// Takes the writers that events name, whether events were lost, and the traced calls.
    ///
    /// The event of a write is queued before its call ends. So all calls that explain the events that are read first are in flight
    /// or recorded when the calls are taken. An event that is read after that belongs to a call that was taken, or is kept for the
    /// next observation.
    fn take_writes(&self, history: &mut SignalHistory, now_ns: u64) -> (Modifiers, bool, Option<TakenCalls>) {
        let take = || {
            self.sources.modify_events().deliver();
            self.signals.take()
        };
        self.sources.modify_events().resume(&self.watch);
        let (mut modifiers, lost) = take();
        let Some((trace, file)) = self.sources.trace().zip(self.traced) else {
            return (modifiers, lost, None);
        };
        let mut calls =
            traced_calls::take(trace, file, &mut history.other_calls, self.file.page_size, now_ns);
        let (later, lost_later) = take();
        let (taken, kept): (BTreeSet<_>, BTreeSet<_>) =
            later.threads.into_iter().partition(|thread| calls.writes.threads.contains(thread));
        // A call by path that the counters do not show yet may have raised an event without a name.
        let is_current = history.other_calls.is(trace.host_counters());
        let unnamed = later.unnamed && !calls.writes.threads.is_empty() && is_current;
        self.signals.put_back(Modifiers { threads: kept, unnamed: later.unnamed && !unnamed }, false);
        modifiers.threads.extend(taken);
        modifiers.unnamed |= unnamed;
        let mounted = self.traits.origin == memfd::FileOrigin::Mounted;
        calls.look_up(trace, &modifiers.threads, mounted);
        // Another observer may have made room in the map meanwhile, or a thread had none.
        calls.writes.other.unmatched |= !history.other_calls.unmatched_is(trace.host_counters());
        (modifiers, lost || lost_later, Some(calls))
    }

    /// The calls since the last observation that changed a mapping of an unknown file. `mapping`: the address spaces that map the file;
    /// `None`: unknown ones do, or did.
    fn remaps(&self, history: &mut RemapHistory, mapping: Option<&BTreeSet<KernelAddress>>) -> Remaps {
        let Some(trace) = self.sources.trace() else { return Remaps::None };
        let calls = trace.remaps();
        let spaces: BTreeSet<_> = history.spaces().chain(mapping.into_iter().flatten().copied()).collect();
        let last = trace.remaps_of(spaces.into_iter());
        let counts = RemapCounts { calls, forgotten: trace.forgotten_remaps() };
        let remaps = history.update(counts, mapping, last);
        trace.forget_remaps();
        remaps
    }

    /// Signals were taken and not processed: the next observation reports that signals were lost.
    pub(crate) fn lose_signals(&self) {
        self.signals.put_back(Modifiers::default(), true);
    }

    /// The inode now.
    ///
    /// # Errors
    /// `fstat`, `fcntl(F_GET_SEALS)`.
    pub(crate) fn inode(&self) -> Result<InodeBaseline, SyscallError> {
        let source = self.source();
        let stat = fd::stat(&source.fd)?;
        let seals = memfd::seals(source.fd.as_fd())?;
        let fine_ctime = self.sources.fine_ctime();
        Ok(InodeBaseline::new(&stat, source.page_size, seal::writers_sealed(seals), fine_ctime))
    }

    /// Writable shared VMAs of the file, as the kernel counts them; `None`: the probe cannot read the count.
    pub(crate) fn writable_vmas(&self) -> Option<u64> {
        self.probe.writable_mappings(self.source().fd.as_fd()).unwrap_or_else(|error| {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(error, "count of the writable mappings of a file failed");
            None
        })
    }

    /// Number of VMAs of tracked mappings; `None`: at least one mapping changed or was unmapped, or is unknown.
    fn intact_vmas(&self, spaces: &AddressSpaces) -> Option<u64> {
        let extents = spaces.extent_count();
        // If there are other writable VMAs, all mappers are found later. The walk waits for no process.
        if extents > 0 && self.writable_vmas() == Some(extents) {
            match self.probe.mappers_at_once(self.source().fd.as_fd()) {
                Ok(MapperWalk::Found(vmas)) if spaces.are_found_in(&vmas) => return Some(extents),
                Ok(_) => {}
                Err(error) => {
                    let error = fdmap_proto::error_chain(&error);
                    tracing::warn!(error, "short walk of the mappers of a file failed");
                }
            }
        }
        spaces.intact_vmas(self.file)
    }

    /// The writable mappings in all processes. `owner`: the user who is charged for the file.
    pub(crate) fn find_mappers(&self, owner: u32) -> MapperAudit {
        let fd = self.source().fd.as_fd();
        mappers::find(&*self.probe, fd, self.file, owner, self.sources.mapper_search())
    }

    /// Finds the kernel objects by which [`Self::find_mappers`] identifies address spaces.
    pub(crate) fn kernel_objects(&self) -> KernelObjects<'_> {
        KernelObjects(&*self.probe)
    }

    /// True if a loop device can write to the file through overlayfs without an event or a traced call.
    fn has_unobserved_overlay(&self) -> bool {
        self.traits.origin == memfd::FileOrigin::Mounted
            && !self.sources.loop_devices().overlayfs_raises_events()
    }

    /// True if a loop device has the file open, or if this is unknown.
    pub(crate) fn loop_device_has_open(&self) -> bool {
        let MappedFile { device, inode, .. } = self.file;
        self.sources.loop_devices().any_has_open(self.source().fd.as_fd(), (device, inode))
    }

    /// The pages of the normalized set `wanted` that hold data.
    ///
    /// # Errors
    /// The error of the probe.
    pub(crate) fn data_pages(&self, wanted: &[PageRange]) -> Result<Vec<PageRange>, ScanError> {
        data_pages(&*self.probe, self.source(), wanted)
    }

    /// Searches the normalized set `candidates` for pinned pages. `file_pages`: the size of the file.
    pub(crate) fn scan_pins(&self, candidates: &[PageRange], file_pages: u64) -> PinScan {
        let candidates = ranges::within(candidates, PageRange::first(file_pages));
        if candidates.is_empty() {
            return PinScan::NoCandidates;
        }
        let source = self.source();
        let target = ScanTarget {
            fd: source.fd.as_fd(),
            page_size: source.page_size,
            file_pages,
            hugetlb_order: source.hugetlb_order,
        };
        let mut pins = Vec::new();
        let scanned = self.probe.pins(&target, &candidates, &mut pins).unwrap_or_else(|error| {
            tracing::warn!(error = fdmap_proto::error_chain(&error), "scan for pinned pages failed");
            false
        });
        if !scanned {
            return PinScan::Unavailable { supported: self.sees_pins() };
        }
        let of = |kind| {
            let mut pages: Vec<_> = pins.iter().filter(|pin| pin.kind == kind).map(|pin| pin.range).collect();
            ranges::normalize(&mut pages);
            pages
        };
        PinScan::Found(PinnedPages { dma: of(PinKind::Dma), referenced: of(PinKind::ExtraReference) })
    }

    /// As [`Self::scan_pins`], after the LRU batches of all processors were drained. A page in a batch has an extra reference.
    pub(crate) fn scan_pins_drained(&self, candidates: &[PageRange], file_pages: u64) -> PinScan {
        if let Err(error) = lru::drain_batches() {
            tracing::debug!(error = fdmap_proto::error_chain(&error), "LRU batches are not drained");
        }
        self.scan_pins(candidates, file_pages)
    }

    /// Waits for the events of forks whose children may have run. If the events are late, every tracked process of that user may
    /// have forked.
    pub(crate) fn wait_for_forks(&self, spaces: &mut AddressSpaces) {
        let deadline = Instant::now() + FORK_EVENT_TIMEOUT;
        for user in spaces.observed_users() {
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.sources.forks(user).is_some_and(|forks| forks.wait_for_events(left)) {
                spaces.add_possible_children(user, self.file.page_size);
            }
        }
    }

    /// Removes unidentified children that have exited. Returns the mappings that they had. Their own children descend from them:
    /// if the events of these are late, all stay.
    pub(crate) fn remove_exited_children(&self, spaces: &mut AddressSpaces) -> Vec<EndedMapping> {
        let (exited, users) = spaces.exited_children();
        let deadline = Instant::now() + FORK_EVENT_TIMEOUT;
        let are_read = |user: &u32| {
            let left = deadline.saturating_duration_since(Instant::now());
            self.sources.forks(*user).is_some_and(|forks| forks.wait_for_events(left))
        };
        if exited.is_empty() || !users.iter().all(are_read) {
            return Vec::new();
        }
        self.receive_forks(spaces);
        spaces.remove_exited_children(&exited)
    }

    /// Adds the children of fork events that have arrived.
    pub(crate) fn receive_forks(&self, spaces: &mut AddressSpaces) {
        spaces.add_forks(self.fork_events.take(), self.file.page_size);
    }

    /// UFFDIO_API. If forks can be observed, their events are read from here on, so that no process waits that forks. Children are
    /// charged by `child_charges`.
    ///
    /// Forks of hugetlb mappings are not observed. If the last descriptor is closed while a fork event is unread (the service is
    /// killed with all its processes), the kernel lets the child fault on protected huge pages for ever.
    ///
    /// # Errors
    /// [`TrackingError::NotTrackable`], [`TrackingError::Unsupported`], [`TrackingError::Forks`]
    pub(crate) fn enable_uffd(
        &self,
        userfaultfd: &HeldSpace,
        child_charges: Arc<dyn ChildCharges>,
    ) -> Result<Option<ForkSubscription>, TrackingError> {
        let enable = |features| userfaultfd.with(|own| own.api(features)).ok_or(CallError::Closed);
        let forks = (!self.traits.hugetlb).then(|| self.sources.forks(userfaultfd.holder().user())).flatten();
        if let Some(forks) = forks {
            match enable(REQUIRED_FEATURES | UffdFeatures::EVENT_FORK)? {
                Ok(_) => {
                    let following = forks.follow(userfaultfd, self.fork_events.sink(child_charges))?;
                    self.fork_events.close_if_broken(following.id(), userfaultfd);
                    return Ok(Some(following));
                }
                // EVENT_FORK takes CAP_SYS_PTRACE.
                Err(SyscallError { errno: Errno::EPERM, .. }) => {}
                Err(error) => return Err(not_enabled(error)),
            }
        }
        enable(REQUIRED_FEATURES)?.map_err(not_enabled)?;
        Ok(None)
    }

    fn source(&self) -> &ScanSource {
        self.scans.source()
    }
}

/// True if a process or thread was created on this host since the last call, or if this is unknown.
fn tasks_were_created(history: &mut SignalHistory) -> bool {
    let now = pidfd::tasks_created().ok();
    let before = std::mem::replace(&mut history.tasks_created, now);
    now.is_none() || now != before
}

/// UFFDIO_API fails with `EINVAL` if the client has already called it, and if this kernel lacks a feature.
fn not_enabled(error: SyscallError) -> TrackingError {
    if error.errno == Errno::EINVAL && Userfaultfd::supports_wp_async() == Ok(false) {
        TrackingError::Unsupported(error)
    } else {
        TrackingError::NotTrackable(error)
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.fork_events.end();
        self.sources.modify_events().unwatch(self.source().fd.as_fd(), &self.watch, &self.signals);
        if let (Some(trace), Some(file)) = (self.sources.trace(), self.traced) {
            trace.unfollow(file);
        }
    }
}
