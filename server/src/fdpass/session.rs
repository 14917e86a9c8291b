//! One client's session on the fdpass socket.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fdmap_proto::convert::FileName;
use fdmap_proto::error_chain;
use fdmap_proto::file::{Access, Backing, Lifetime, Right};
use fdmap_proto::shared_snapshot::{BodyLayout, Header};
use fdmap_proto::tracking::{ClientMapping, CoveragePolicy};
use fdmap_proto::units::MappingId;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_sys::memfd::MemfdFlags;
use fdmap_sys::pidfd::{self, PidFd};
use tokio::time::timeout;

use super::error::OperationError;
use super::passed::{Closer, Closes, PassedDescriptors, PassedFd};
use super::protocol::{Operation, Packet, SnapshotRequest, TrackRequest, decode_packet};
use super::snapshot;
use crate::blocking::Call;
use crate::files::{Caller, FileError, Registry, ServiceFile};
use crate::pages::{ScanOptions, Snapshot};
use crate::probe::ScanError;
use crate::query::resolve_range;
use crate::service::Service;
use crate::status::GrpcCode as _;
use crate::tracking::holder::Holder;
use crate::tracking::{Charge, MappingExtent, Registration, Tracker, TrackingError, parse_extents};
use crate::watchdog::{self, Phase};

/// How long a Track request waits for the end of charges, if its user has too many.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(300);
/// How long a reply waits for a holder that is to get userfaultfds, and for the closes of other descriptors. The end of a session waits
/// as long for the holder.
const SEND_TIMEOUT: Duration = Duration::from_millis(500);
const RELEASE_INTERVAL: Duration = Duration::from_millis(10);

/// The reply to one packet.
#[derive(Debug)]
pub struct SessionReply {
    pub message: v1::FdpassReply,
    /// The descriptors to send with the message.
    pub descriptors: Vec<OwnedFd>,
    /// The service closes the session after this reply.
    pub last: bool,
}

/// The process that connected.
#[derive(Debug)]
pub struct Peer {
    pid: u32,
    /// `None`: it has exited, or is in another pid namespace.
    process: Option<PidFd>,
}

impl Peer {
    #[must_use]
    pub const fn new(pid: u32, process: Option<PidFd>) -> Self {
        Self { pid, process }
    }

    /// The process, if it still has its pid. Another process may use the socket after it has exited.
    fn process(&self) -> Result<&PidFd, OperationError> {
        let process = self.process.as_ref().filter(|_| self.pid != 0).ok_or(OperationError::PeerGone)?;
        if process.exited().map_err(OperationError::Peer)? {
            return Err(OperationError::PeerGone);
        }
        Ok(process)
    }
}

/// One client's session.
pub struct Session {
    service: Arc<Service>,
    caller: Caller,
    peer: Peer,
    /// Gets the userfaultfds, until it is known whose process they are of.
    holder: Arc<Holder>,
    /// That of the last process that an administrator tracked.
    target: Weak<Holder>,
    /// Of the other descriptors of the last packet.
    closes: Option<Closes>,
    open: bool,
}

type OperationResult = Result<(Reply, Vec<OwnedFd>), OperationError>;

impl Session {
    /// A session that waits for Hello.
    #[must_use]
    pub fn new(service: Arc<Service>, caller: Caller, peer: Peer) -> Self {
        let holder = service.holder_of(caller.uid);
        Self { service, caller, peer, holder, target: Weak::new(), closes: None, open: false }
    }

    /// True once the client has sent Hello.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// Fails if the user can pass no further userfaultfd.
    ///
    /// # Errors
    /// [`OperationError::Closing`]
    pub(super) fn check_closing(&self) -> Result<(), OperationError> {
        if self.holder.is_full() { Err(OperationError::Closing) } else { Ok(()) }
    }

    /// Performs the operation of one packet. The future may be dropped at any time, also before the first poll: the last close of a
    /// userfaultfd is not made here.
    pub fn handle<'a>(
        &'a mut self,
        packet: Packet<'a>,
        descriptors: Vec<OwnedFd>,
    ) -> impl Future<Output = SessionReply> + Send + use<'a> {
        let user = self.service.owner_of(self.caller.uid);
        let (closer, closes) = Closer::new(self.service.blocking.clone(), user);
        self.closes = Some(closes);
        let descriptors = PassedDescriptors::new(descriptors, &self.holder, &closer);
        self.handle_passed(packet, descriptors)
    }

    async fn handle_passed(&mut self, packet: Packet<'_>, descriptors: PassedDescriptors) -> SessionReply {
        let has_descriptors = packet.descriptors > 0;
        let result = self.result_of(packet, descriptors).await;
        if has_descriptors {
            self.wait_until_released().await;
            // Others may have the threads: the next packet waits for longer.
            let _ = timeout(SEND_TIMEOUT, self.wait_until_closed()).await;
        }
        let (reply, descriptors, last) = match result {
            Ok((reply, descriptors)) => (reply, descriptors, false),
            Err(error) => {
                let (code, fatal) = (i32::from(error.code()), error.is_fatal());
                let message = error_chain(&error);
                (Reply::Error(v1::Error { code, message, fatal }), Vec::new(), fatal)
            }
        };
        SessionReply { message: v1::FdpassReply { result: Some(reply) }, descriptors, last }
    }

    async fn result_of(&mut self, packet: Packet<'_>, descriptors: PassedDescriptors) -> OperationResult {
        // Whatever the packet asks for, also if it is invalid: each one can bring other userfaultfds.
        self.check_closing()?;
        match decode_packet(packet, self.open) {
            Ok(operation) if packet.foreign_descriptors => Err(foreign_descriptors(&operation)),
            Ok(operation) => self.perform(operation, descriptors).await,
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until holders have the userfaultfds of requests that did not use them. The receiver closes its copies after the reply: until
    /// then the last close is not that of the service, even if it is killed.
    pub async fn wait_until_released(&self) {
        let (began, last) = (Instant::now(), self.holder.last_unsent());
        let is_sending = || {
            let of_target = || self.target.upgrade().is_some_and(|target| target.is_sending(last));
            self.holder.is_sending(last) || of_target()
        };
        while is_sending() && began.elapsed() < SEND_TIMEOUT {
            tokio::time::sleep(RELEASE_INTERVAL).await;
        }
    }

    /// Waits until the other descriptors of the last packet are closed, so that a user has few of them however slow their closes are.
    pub async fn wait_until_closed(&mut self) {
        if let Some(closes) = &mut self.closes {
            closes.wait().await;
        }
    }

    async fn perform(&mut self, operation: Operation, mut descriptors: PassedDescriptors) -> OperationResult {
        match operation {
            Operation::Hello { version, client } => Ok(self.hello(version, &client)),
            Operation::Open { file, writable } => self.open_file(&file, writable),
            Operation::Track(request) => self.track(request, descriptors).await,
            Operation::SetCoveragePolicy { file, policy } => self.set_coverage_policy(&file, policy).await,
            Operation::Untrack { file, mappings } => self.untrack(file, mappings).await,
            Operation::Detach { file, pid, mappings } => self.detach(file, pid, mappings).await,
            Operation::MemfdCreate { name, memfd_name, flags, lifetime } => {
                self.memfd_create(name, memfd_name, flags, lifetime).await
            }
            Operation::Adopt { name, access, lifetime } => {
                self.adopt(descriptors.other()?, name, access, lifetime).await
            }
            Operation::FetchSnapshot(request) => self.fetch_snapshot(request).await,
        }
    }

    fn hello(&mut self, version: u32, client: &str) -> (Reply, Vec<OwnedFd>) {
        tracing::debug!(client, uid = self.caller.uid, pid = self.peer.pid, "fdpass session opened");
        self.open = true;
        let welcome = v1::Welcome {
            version,
            server: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.service.instance,
            page_size: self.service.page_size.bytes(),
        };
        (Reply::Welcome(welcome), Vec::new())
    }

    async fn memfd_create(
        &self,
        name: String,
        memfd_name: String,
        flags: MemfdFlags,
        lifetime: Option<Lifetime>,
    ) -> OperationResult {
        let (service, caller) = (Arc::clone(&self.service), self.caller.clone());
        let create = move || {
            service.add_file(|files| files.memfd_create(&caller, name.clone(), &memfd_name, flags, lifetime))
        };
        let file = self.service.blocking.run(&self.caller, Call::new("MemfdCreate"), create).await??;
        file.note_sent();
        let sent = self.send_file(&file, true);
        if sent.is_err() {
            let (service, caller, name) =
                (Arc::clone(&self.service), self.caller.clone(), FileName::Id(file.id()));
            // No client has a descriptor. Waits for a call that works on the file.
            let delete = move || service.registry.delete(&caller, &name).map(|file| service.drop_ended(file));
            // Return the first error.
            let _ = self.service.blocking.run(&self.caller, Call::about("Delete", &file), delete).await;
        }
        sent
    }

    fn open_file(&self, file: &FileName, writable: bool) -> OperationResult {
        let file = self.service.registry.find(&self.caller, file, Right::Read)?;
        file.note_sent();
        // A sweep may have deleted the file just before.
        let file = self.service.registry.find(&self.caller, &FileName::Id(file.id()), Right::Read)?;
        self.send_file(&file, writable)
    }

    fn send_file(&self, file: &ServiceFile, writable: bool) -> OperationResult {
        let descriptor = file.open_for(&self.caller, writable)?;
        let message = v1::File::from(file.info(&self.caller)?);
        Ok((Reply::Opened(v1::Opened { file: Some(message) }), vec![descriptor]))
    }

    async fn track(&mut self, request: TrackRequest, mut descriptors: PassedDescriptors) -> OperationResult {
        let TrackRequest { file, mappings, pagemap, maps, pid } = request;
        let (pid, process) = self.target_process(pid)?;
        // First: whatever fails later, the close of the userfaultfd may wait for this process.
        let holder = self.holder_for(pid, &process)?;
        let (user, is_full) = (holder.user(), holder.is_full());
        self.target = Arc::downgrade(&holder);
        let userfaultfd = descriptors.userfaultfd()?.given_to(holder);
        let userfaultfd = userfaultfd.ok_or(OperationError::ForeignDescriptor)?;
        if is_full {
            return Err(OperationError::TargetClosing(user));
        }
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let named: Vec<_> = mappings
            .iter()
            .map(|ClientMapping { address, length_bytes, first_page, .. }| {
                (*address, *length_bytes, *first_page)
            })
            .collect();
        let extents = parse_extents(&named, self.service.page_size)?;
        let charge = self.charge_tracked(file.backing(), &extents).await?;
        let child_charges = self.service.tracked.of_children(user, file.backing(), &extents);
        userfaultfd.set_charge(Arc::clone(&charge));
        let registration = Registration {
            pid,
            process,
            userfaultfd,
            pagemap: pagemap.then(|| descriptors.pagemap()).transpose()?,
            maps: maps.then(|| descriptors.maps()).transpose()?,
            extents,
            charge,
            child_charges,
        };
        let ids = self.use_tracker("Track", file, move |tracker| tracker.track(registration)).await?;
        let mapping_ids = ids.into_iter().map(MappingId::get).collect();
        Ok((Reply::Tracked(v1::Tracked { mapping_ids }), Vec::new()))
    }

    /// Charges the caller for a tracked address space. Waits for a moment for those that were untracked just now, which count until
    /// their userfaultfds are closed, and their page tables until they are freed.
    async fn charge_tracked(&self, backing: Backing, extents: &[MappingExtent]) -> Result<Charge, FileError> {
        let began = Instant::now();
        loop {
            let is_releasing = self.holder.is_releasing();
            match self.service.tracked.acquire(&self.caller, backing, extents) {
                Err(FileError::Limit { .. })
                    if began.elapsed() < RELEASE_TIMEOUT
                        && (is_releasing || !self.service.tracked.is_measured_since(&self.caller, began)) =>
                {
                    tokio::time::sleep(RELEASE_INTERVAL).await;
                }
                charged => return charged,
            }
        }
    }

    async fn detach(&self, file: FileName, pid: Option<u32>, mappings: Vec<MappingId>) -> OperationResult {
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let (pid, process) = self.target_process(pid)?;
        let detach = move |tracker: &Arc<Tracker>| tracker.detach(pid, &process, &mappings);
        let detached = self.use_tracker("Detach", file, detach).await?;
        let mappings = u32::try_from(detached).unwrap_or(u32::MAX);
        Ok((Reply::Detached(v1::Detached { mappings }), Vec::new()))
    }

    /// The process whose mappings the request concerns, if the client may track them: its own, or one of the same user.
    fn target_process(&self, pid: Option<u32>) -> Result<(u32, PidFd), OperationError> {
        let Some(pid) = pid.filter(|pid| *pid != self.peer.pid) else {
            let process = self.peer.process()?.try_clone().map_err(OperationError::Peer)?;
            return Ok((self.peer.pid, process));
        };
        // The kernel reports root as the owner of a process that is not dumpable.
        match pidfd::open(pid).and_then(|process| Ok((process, pidfd::owner(pid)?))) {
            Ok((process, owner)) if self.caller.admin || owner == self.caller.uid => Ok((pid, process)),
            Err(error) if self.caller.admin => Err(OperationError::NoProcess(pid, error)),
            _ => Err(OperationError::Foreign { pid, uid: self.caller.uid }),
        }
    }

    /// The holder for a process that the client tracks. An administrator tracks processes of others: what these block, they block for
    /// their own user.
    fn holder_for(&self, pid: u32, process: &PidFd) -> Result<Arc<Holder>, OperationError> {
        if !self.caller.admin {
            return Ok(Arc::clone(&self.holder));
        }
        let user = pidfd::user_of(pid, process).map_err(|error| OperationError::NoProcess(pid, error))?;
        Ok(self.service.holder_of(user))
    }

    async fn untrack(&self, file: FileName, mappings: Vec<MappingId>) -> OperationResult {
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let (pid, process) = self.target_process(None)?;
        let untrack = move |tracker: &Arc<Tracker>| tracker.untrack(pid, &process, &mappings);
        self.use_tracker("Untrack", file, untrack).await?;
        Ok((Reply::Untracked(v1::Untracked {}), Vec::new()))
    }

    async fn set_coverage_policy(&self, file: &FileName, policy: CoveragePolicy) -> OperationResult {
        let file = self.service.registry.find(&self.caller, file, Right::Write)?;
        let set = move |tracker: &Arc<Tracker>| tracker.set_coverage_policy(policy);
        self.use_tracker("SetCoveragePolicy", file, set).await?;
        Ok((Reply::CoveragePolicySet(v1::SetCoveragePolicyResponse {}), Vec::new()))
    }

    /// Runs work with the tracker of a file, when it is the turn of this call, if the client still has the write right then.
    async fn use_tracker<T: Send + 'static>(
        &self,
        operation: &'static str,
        file: Arc<ServiceFile>,
        work: impl FnOnce(&Arc<Tracker>) -> Result<T, TrackingError> + Send + 'static,
    ) -> Result<T, OperationError> {
        let (service, caller, id) = (Arc::clone(&self.service), self.caller.clone(), file.id());
        let call = Call::on(operation, &file);
        let permitted = move || {
            service.registry.find(&caller, &FileName::Id(id), Right::Write)?;
            Ok::<_, OperationError>(work(&file.tracker()?)?)
        };
        self.service.blocking.run(&self.caller, call, permitted).await?
    }

    async fn adopt(
        &self,
        memfd: PassedFd,
        name: String,
        access: Option<Access>,
        lifetime: Option<Lifetime>,
    ) -> OperationResult {
        let (service, caller) = (Arc::clone(&self.service), self.caller.clone());
        let adopted = self.service.blocking.run(&self.caller, Call::new("Adopt"), move || {
            let fd = memfd.fd()?;
            let adopt = |files: &Registry| files.adopt(&caller, fd, name.clone(), access, lifetime);
            let file = service.add_file(adopt);
            memfd.close();
            Ok::<_, OperationError>(file?.info(&caller)?)
        });
        let info = adopted.await??;
        Ok((Reply::Adopted(v1::Adopted { file: Some(info.into()) }), Vec::new()))
    }

    async fn fetch_snapshot(&self, request: SnapshotRequest) -> OperationResult {
        let SnapshotRequest { file, range, layout, max_age } = request;
        let file = self.service.registry.find(&self.caller, &file, Right::Inspect)?;
        let file_pages = file.scans().source().file_pages()?;
        let range = resolve_range(range, file_pages)?;
        let result = {
            let call = self.service.blocking.begin_scan(&self.caller, file.id())?;
            file.scans().read_when(call.turn(), &[range], ScanOptions::default(), max_age).await?
        };
        // The right may have been revoked meanwhile.
        self.service.registry.find(&self.caller, &FileName::Id(file.id()), Right::Inspect)?;
        let (service, snapshot) = (Arc::clone(&self.service), result.snapshot.clone());
        let describe = move || service.provenance(&snapshot, &[range]);
        let provenance =
            self.service.blocking.run(&self.caller, Call::rest("FetchSnapshot", &file), describe).await??;
        let header = Header {
            layout,
            slots: layout == BodyLayout::Entries && self.service.probe.reports_slots(),
            page_size: self.service.page_size,
            range,
            file: file.id(),
            file_pages: result.snapshot.file_pages(),
            provenance,
        };
        self.send_snapshot(&file, header, result.snapshot).await
    }

    async fn send_snapshot(&self, file: &ServiceFile, header: Header, states: Snapshot) -> OperationResult {
        let bytes = header.total_bytes().unwrap_or(u64::MAX);
        let reservation = self.service.shared_snapshots.reserve(&self.caller, bytes, header.page_size)?;
        // Dropped with this future, when the client disconnects. The build then stops.
        let waiting = Arc::new(());
        let waiters = Arc::downgrade(&waiting);
        let reply = v1::Snapshot {
            provenance: Some(header.provenance.into()),
            range: Some(header.range.into()),
            size_bytes: bytes,
        };
        let call = Call::about("FetchSnapshot", file);
        let build = move || {
            watchdog::enter(Phase::SharedSnapshot);
            snapshot::build(&header, &states, || waiters.strong_count() == 0)
        };
        let built = self.service.blocking.run(&self.caller, call, build).await?.map_err(FileError::from)?;
        drop(waiting);
        let built = built.ok_or(ScanError::Cancelled)?;
        self.service.shared_snapshots.add(built.service_fd, reservation);
        Ok((Reply::Snapshot(reply), vec![built.client_fd]))
    }
}

/// A receiver has closed the descriptors of a packet.
fn foreign_descriptors(operation: &Operation) -> OperationError {
    match operation {
        Operation::Adopt { .. } => FileError::NotAdoptable(
            "it is neither a memfd nor other shared memory, or it is an O_PATH descriptor",
        )
        .into(),
        _ => OperationError::ForeignDescriptor,
    }
}
