//! One client's session on the fdpass socket.

use fdmap_proto::error_chain;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Right};
use fdmap_proto::shared_snapshot::{BodyLayout, Header};
use fdmap_proto::tracking::{ClientMapping, CoveragePolicy};
use fdmap_proto::units::MappingId;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{SyscallError, pidfd};
use tonic::Code;

use super::protocol::{Arrived, Operation, ProtocolError, operation};
use super::snapshot;
use crate::files::{Caller, FileError, ServiceFile};
use crate::pages::ScanOptions;
use crate::probe::ScanError;
use crate::query::{QueryError, resolve_range};
use crate::rpc::Coded;
use crate::service::Service;
use crate::tracking::{Registration, TrackingError, parse_extents};

/// What goes back to the client.
#[derive(Debug)]
pub struct Answer {
    /// The message.
    pub reply: v1::FdpassReply,
    /// The descriptors that go along.
    pub descriptors: Vec<OwnedFd>,
    /// The session ends after it.
    pub last: bool,
}

/// One client's session.
pub struct Session {
    service: Arc<Service>,
    caller: Caller,
    /// The client's process, as the kernel vouches for it.
    pid: u32,
    greeted: bool,
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Query(#[from] QueryError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Scan(#[from] Arc<ScanError>),
    #[error(transparent)]
    Dirty(#[from] TrackingError),
    #[error("a descriptor is not what it should be")]
    Descriptor(#[source] SyscallError),
    #[error("there is no process {0}")]
    NoProcess(u32, #[source] SyscallError),
    #[error("process {pid} belongs to user {owner}, and user {uid} may not have its mappings tracked")]
    Foreign { pid: u32, owner: u32, uid: u32 },
}

impl Failed {
    fn code(&self) -> Code {
        match self {
            Self::Protocol(ProtocolError::Meaning(error)) | Self::Query(error) => error.code(),
            Self::Protocol(ProtocolError::DescriptorsLost) => Code::ResourceExhausted,
            Self::Protocol(ProtocolError::NoOperation) => Code::Unimplemented,
            Self::Protocol(_) => Code::InvalidArgument,
            Self::File(error) => error.code(),
            Self::Scan(error) => error.code(),
            Self::Dirty(error) => error.code(),
            Self::Descriptor(_) => Code::InvalidArgument,
            Self::NoProcess(..) => Code::NotFound,
            Self::Foreign { .. } => Code::PermissionDenied,
        }
    }

    const fn is_fatal(&self) -> bool {
        matches!(self, Self::Protocol(error) if error.is_fatal())
    }
}

impl From<ScanError> for Failed {
    fn from(error: ScanError) -> Self {
        Self::Scan(Arc::new(error))
    }
}

type Done = Result<(Reply, Vec<OwnedFd>), Failed>;

impl Session {
    /// A session that has not begun yet.
    #[must_use]
    pub const fn new(service: Arc<Service>, caller: Caller, pid: u32) -> Self {
        Self { service, caller, pid, greeted: false }
    }

    /// True once the client has said Hello.
    #[must_use]
    pub const fn greeted(&self) -> bool {
        self.greeted
    }

    /// Does what one packet asks for.
    pub async fn answer(&mut self, arrived: Arrived<'_>, descriptors: Vec<OwnedFd>) -> Answer {
        let done = match operation(arrived, self.greeted) {
            Ok(operation) => self.perform(operation, descriptors).await,
            Err(error) => Err(error.into()),
        };
        match done {
            Ok((reply, descriptors)) => {
                Answer { reply: v1::FdpassReply { result: Some(reply) }, descriptors, last: false }
            }
            Err(failed) => {
                let (code, message, fatal) =
                    (i32::from(failed.code()), error_chain(&failed), failed.is_fatal());
                let error = Reply::Error(v1::Error { code, message, fatal });
                Answer {
                    reply: v1::FdpassReply { result: Some(error) },
                    descriptors: Vec::new(),
                    last: fatal,
                }
            }
        }
    }

    async fn perform(&mut self, operation: Operation, descriptors: Vec<OwnedFd>) -> Done {
        match operation {
            Operation::Hello { version, client } => {
                tracing::debug!(client, uid = self.caller.uid, "fdpass session begins");
                self.greeted = true;
                let welcome = v1::Welcome {
                    version,
                    server: env!("CARGO_PKG_VERSION").to_owned(),
                    instance: self.service.instance,
                    page_size: self.service.page_size.bytes(),
                };
                Ok((Reply::Welcome(welcome), Vec::new()))
            }
            Operation::Open { file, writable } => self.open(&file, writable),
            Operation::Track { file, mappings, pagemap, maps, pid } => {
                self.track(file, &mappings, (pagemap, maps), pid, descriptors).await
            }
            Operation::SetCoveragePolicy { file, policy } => self.set_coverage_policy(&file, policy).await,
            Operation::Untrack { file, mappings } => self.untrack(file, mappings).await,
            Operation::Detach { file, pid, mappings } => self.detach(file, pid, mappings).await,
            Operation::MemfdCreate { name, memfd_name, flags } => {
                let file = self.service.registry.memfd_create(&self.caller, name, &memfd_name, flags)?;
                self.hand_over(&file, true).inspect_err(|_| {
                    // Nobody has it. The first error is the one to tell.
                    let _ = self.service.registry.delete(&self.caller, &FileName::Id(file.id()));
                })
            }
            Operation::Adopt { name, access, ephemeral } => match descriptors.into_iter().next() {
                Some(memfd) => self.adopt(memfd, name, access, ephemeral).await,
                // operation() has counted them.
                None => Err(ProtocolError::Descriptors { operation: "Adopt", expected: 1, got: 0 }.into()),
            },
            Operation::Snapshot { file, range, layout, max_age } => {
                let file = self.service.registry.find(&self.caller, &file, Right::Inspect)?;
                let file_pages = file.scans().source().file_pages()?;
                let range = resolve_range(range, file_pages)?;
                let reading = file.scans().read(&[range], ScanOptions::default(), max_age).await?;
                let header = Header {
                    layout,
                    slots: layout == BodyLayout::Entries && self.service.probe.reports_slots(),
                    page_size: self.service.page_size,
                    range,
                    file: file.id(),
                    file_pages: reading.snapshot.file_pages(),
                    provenance: self.service.provenance(&reading.snapshot, &[range])?,
                };
                self.hand_out(header, reading.snapshot).await
            }
        }
    }

    fn open(&self, file: &FileName, writable: bool) -> Done {
        let file = self.service.registry.find(&self.caller, file, Right::Read)?;
        self.service.lent.hand_out(file.id());
        // It may have been let go of in between.
        let file = self.service.registry.find(&self.caller, &FileName::Id(file.id()), Right::Read)?;
        self.hand_over(&file, writable)
    }

    fn hand_over(&self, file: &ServiceFile, writable: bool) -> Done {
        let descriptor = file.open_for(&self.caller, writable)?;
        let message = v1::File::from(file.info(&self.caller)?);
        Ok((Reply::Opened(v1::Opened { file: Some(message) }), vec![descriptor]))
    }

    async fn track(
        &self,
        file: FileName,
        mappings: &[ClientMapping],
        (pagemap, maps): (bool, bool),
        pid: Option<u32>,
        descriptors: Vec<OwnedFd>,
    ) -> Done {
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let named: Vec<_> = mappings.iter().map(|m| (m.address, m.length, m.first_page)).collect();
        let extents = parse_extents(&named, self.service.page_size)?;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or(ProtocolError::DescriptorsLost);
        let tracking = Registration {
            pid: self.acts_for(pid)?,
            userfaultfd: Userfaultfd::from_fd(next()?).map_err(Failed::Descriptor)?,
            pagemap: if pagemap {
                Some(Pagemap::from_fd(next()?).map_err(Failed::Descriptor)?)
            } else {
                None
            },
            maps: if maps { Some(Maps::from_fd(next()?).map_err(Failed::Descriptor)?) } else { None },
            extents,
        };
        let tracked = tokio::task::spawn_blocking(move || file.tracker()?.track(tracking));
        let ids = tracked.await.map_err(|_| ScanError::Panicked)??;
        let mapping_ids = ids.into_iter().map(MappingId::get).collect();
        Ok((Reply::Tracked(v1::Tracked { mapping_ids }), Vec::new()))
    }

    async fn detach(&self, file: FileName, pid: Option<u32>, mappings: Vec<MappingId>) -> Done {
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let pid = self.acts_for(pid)?;
        let detached = tokio::task::spawn_blocking(move || file.tracker()?.detach(pid, &mappings));
        let detached = detached.await.map_err(|_| ScanError::Panicked)??;
        let mappings = u32::try_from(detached).unwrap_or(u32::MAX);
        Ok((Reply::Detached(v1::Detached { mappings }), Vec::new()))
    }

    /// The process that is meant, if the client may have its mappings tracked.
    fn acts_for(&self, pid: Option<u32>) -> Result<u32, Failed> {
        let Some(pid) = pid.filter(|pid| *pid != self.pid) else { return Ok(self.pid) };
        // The kernel gives it to root where the process cannot be dumped.
        let owner = pidfd::owner(pid).map_err(|error| Failed::NoProcess(pid, error))?;
        if self.caller.admin || owner == self.caller.uid {
            return Ok(pid);
        }
        Err(Failed::Foreign { pid, owner, uid: self.caller.uid })
    }

    async fn untrack(&self, file: FileName, mappings: Vec<MappingId>) -> Done {
        let file = self.service.registry.find(&self.caller, &file, Right::Write)?;
        let pid = self.pid;
        let untracked = tokio::task::spawn_blocking(move || file.tracker()?.untrack(pid, &mappings));
        untracked.await.map_err(|_| ScanError::Panicked)??;
        Ok((Reply::Untracked(v1::Untracked {}), Vec::new()))
    }

    async fn set_coverage_policy(&self, file: &FileName, policy: CoveragePolicy) -> Done {
        let file = self.service.registry.find(&self.caller, file, Right::Write)?;
        let set = tokio::task::spawn_blocking(move || file.tracker()?.set_coverage_policy(policy));
        set.await.map_err(|_| ScanError::Panicked)??;
        Ok((Reply::CoveragePolicySet(v1::SetCoveragePolicyResponse {}), Vec::new()))
    }

    async fn adopt(&self, memfd: OwnedFd, name: String, access: Option<Access>, ephemeral: bool) -> Done {
        let (service, caller) = (Arc::clone(&self.service), self.caller.clone());
        let adopted = tokio::task::spawn_blocking(move || {
            if ephemeral {
                if service.lent.full().is_some() && service.lent.may_look() {
                    service.sweep();
                }
                if let Some(most) = service.lent.full() {
                    let limit =
                        format!("no more files until nobody uses them: there are {most} of all users");
                    return Err(FileError::Limit { uid: caller.uid, limit });
                }
            }
            let file = service.registry.adopt(&caller, memfd.as_fd(), name, access)?;
            if ephemeral {
                service.lent.add(file.id(), file.inode());
            }
            file.info(&caller)
        });
        let info = adopted.await.map_err(|_| ScanError::Panicked)??;
        Ok((Reply::Adopted(v1::Adopted { file: Some(info.into()) }), Vec::new()))
    }

    async fn hand_out(&self, header: Header, states: crate::pages::Snapshot) -> Done {
        let bytes = header.total_bytes().unwrap_or(u64::MAX);
        let room = self.service.shared.reserve(&self.caller, bytes, header.page_size)?;
        // Gone with this future: then nobody waits for the snapshot.
        let waiting = Arc::new(());
        let watched = Arc::downgrade(&waiting);
        let reply = v1::Snapshot {
            provenance: Some(header.provenance.into()),
            range: Some(header.range.into()),
            size_bytes: bytes,
        };
        let built = tokio::task::spawn_blocking(move || {
            snapshot::build(&header, &states, || watched.strong_count() == 0)
        });
        let built = built.await.map_err(|_| ScanError::Panicked)?.map_err(FileError::from)?;
        drop(waiting);
        let built = built.ok_or(ScanError::Cancelled)?;
        self.service.shared.handed(built.ours, room);
        Ok((Reply::Snapshot(reply), vec![built.theirs]))
    }
}
