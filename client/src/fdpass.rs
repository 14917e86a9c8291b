//! Blocking client of the fdpass socket. Needs no async runtime and starts no threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use fdmap_proto::convert::{FileName, duration_to_wire, lifetime_to_wire};
use fdmap_proto::shared_snapshot::BodyLayout;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{
    Access, ClientMapping, ConvertError, FDPASS_VERSION, FileInfo, Lifetime, MAX_FDPASS_MESSAGE_BYTES,
    MappingId, PageRange, PageSize, v1,
};
use fdmap_sys::{fd, scm};
use prost::Message as _;

use crate::error::RefusalCode;
use crate::{ClientError, Endpoint, MappedFile, SharedSnapshot, Timeouts, trust};

/// Session on the fdpass socket.
#[derive(Debug)]
pub struct FdpassClient {
    socket: OwnedFd,
    endpoint: Endpoint,
    timeouts: Timeouts,
    page_size: PageSize,
    buffer: Vec<u8>,
}

impl FdpassClient {
    /// Connects and negotiates the protocol version.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if no service listens on the socket, or a user who is not trusted does;
    /// [`ClientError::TimedOut`].
    pub fn connect(endpoint: &Endpoint, timeouts: Timeouts) -> Result<Self, ClientError> {
        let path = &endpoint.fdpass;
        // The socket timeout applies to connect first; below it is set to the answer timeout.
        let socket =
            scm::connect_to(path, timeouts.connect).map_err(|error| {
                match ClientError::of_connection("connect", timeouts.connect, error) {
                    ClientError::Syscall(error) => {
                        let address = path.display().to_string();
                        ClientError::Unreachable { address, reason: error.errno.desc().to_owned() }
                    }
                    other => other,
                }
            })?;
        trust::check_service(&socket, path)?;
        scm::set_timeout(&socket, timeouts.answer)?;
        let page_size = PageSize::new(4096).ok_or(ClientError::Unexpected("page size"))?;
        let mut session = Self {
            socket,
            endpoint: endpoint.clone(),
            timeouts,
            page_size,
            buffer: vec![0; MAX_FDPASS_MESSAGE_BYTES],
        };
        let client = concat!("fdmap ", env!("CARGO_PKG_VERSION")).to_owned();
        let hello = Op::Hello(v1::Hello { version: FDPASS_VERSION, client });
        let (Reply::Welcome(welcome), _) = session.call("Hello", hello, &[])? else {
            return Err(ClientError::Unexpected("reply to Hello is not Welcome"));
        };
        if welcome.version != FDPASS_VERSION {
            return Err(ClientError::Unexpected("unsupported version of the fdpass protocol"));
        }
        session.page_size =
            PageSize::new(welcome.page_size).ok_or(ClientError::Unexpected("invalid page size"))?;
        Ok(session)
    }

    /// Base page size of the host.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Opens a file. The descriptor is close-on-exec and has an open file description of its own.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to read (and write); [`ClientError`] of the connection.
    pub fn open(&mut self, file: &FileName, writable: bool) -> Result<(OwnedFd, FileInfo), ClientError> {
        let mode = if writable { v1::open::Mode::ReadWrite } else { v1::open::Mode::ReadOnly };
        let open = Op::Open(v1::Open { file: Some(file.clone().into()), mode: mode.into() });
        match self.call("Open", open, &[])? {
            (Reply::Opened(opened), Some(fd)) => Ok((fd, info(opened.file)?)),
            _ => Err(ClientError::Unexpected("reply is not Opened with a descriptor")),
        }
    }

    /// Opens a file and maps all of it.
    ///
    /// # Errors
    /// As [`Self::open`]; [`ClientError::Syscall`] of mmap(2).
    pub fn map(&mut self, file: &FileName, writable: bool) -> Result<MappedFile, ClientError> {
        let (fd, info) = self.open(file, writable)?;
        self.map_opened(fd, info, writable)
    }

    /// Maps all of a file that this client has opened.
    pub(crate) fn map_opened(
        &self,
        fd: OwnedFd,
        info: FileInfo,
        writable: bool,
    ) -> Result<MappedFile, ClientError> {
        MappedFile::new(fd, info, self.page_size, writable, (self.endpoint.clone(), self.timeouts))
    }

    /// Transfers a memfd, open for reading and writing, to the service. Descriptors and mappings of this process stay valid.
    /// An empty name selects the memfd's own name; without `access` only the caller has rights. The file has the default lifetime:
    /// one that an administrator owns and adopts is kept, all others are ephemeral.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the service cannot adopt it; [`ClientError`] of the connection.
    pub fn adopt(
        &mut self,
        memfd: BorrowedFd<'_>,
        name: &str,
        access: Option<Access>,
    ) -> Result<FileInfo, ClientError> {
        self.adopt_with_lifetime(memfd, name, access, None)
    }

    /// Transfers a memfd like [`Self::adopt`]. `None`: with the default lifetime. [`Lifetime::Kept`] needs permission of the service
    /// (`fdmapd --allow-keep`).
    ///
    /// # Errors
    /// As [`Self::adopt`].
    pub fn adopt_with_lifetime(
        &mut self,
        memfd: BorrowedFd<'_>,
        name: &str,
        access: Option<Access>,
        lifetime: Option<Lifetime>,
    ) -> Result<FileInfo, ClientError> {
        let (access, lifetime) = (access.map(v1::Access::from), lifetime_to_wire(lifetime));
        let adopt = Op::Adopt(v1::Adopt { name: name.to_owned(), access, lifetime });
        match self.call("Adopt", adopt, &[memfd])? {
            (Reply::Adopted(adopted), None) => info(adopted.file),
            _ => Err(ClientError::Unexpected("reply is not Adopted")),
        }
    }

    /// Fetches the page states of `range`, or of the whole file, as a shared snapshot that is at most `max_age` old.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to inspect; [`ClientError::Layout`]; [`ClientError`] of the connection.
    pub fn snapshot(
        &mut self,
        file: &FileName,
        range: Option<PageRange>,
        layout: BodyLayout,
        max_age: Duration,
    ) -> Result<SharedSnapshot, ClientError> {
        let layout = match layout {
            BodyLayout::Entries => v1::fetch_snapshot::Layout::Entries,
            BodyLayout::States => v1::fetch_snapshot::Layout::States,
        };
        let fetch = Op::FetchSnapshot(v1::FetchSnapshot {
            file: Some(file.clone().into()),
            range: range.map(v1::PageRange::from),
            layout: layout.into(),
            max_age: Some(duration_to_wire(max_age)),
        });
        match self.call("FetchSnapshot", fetch, &[])? {
            (Reply::Snapshot(_), Some(fd)) => SharedSnapshot::map(fd),
            _ => Err(ClientError::Unexpected("reply is not Snapshot with a descriptor")),
        }
    }

    /// Starts to track writes through 1 to 64 mappings of this process. `uffd` is a userfaultfd on which no ioctl was performed
    /// yet; `pagemap` and `maps` are `/proc/self/pagemap` and `/proc/self/maps`. The service opens the files that are not
    /// passed itself, if it has permission. Close all three afterwards and do not use the userfaultfd.
    ///
    /// All writes after the return are observed. Returns one id per mapping, in the order of `mappings`.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub fn track(
        &mut self,
        file: &FileName,
        uffd: BorrowedFd<'_>,
        pagemap: Option<BorrowedFd<'_>>,
        maps: Option<BorrowedFd<'_>>,
        mappings: &[ClientMapping],
    ) -> Result<Vec<MappingId>, ClientError> {
        self.track_process(0, file, uffd, pagemap, maps, mappings)
    }

    /// Tracks mappings of another process; `uffd`, `pagemap` and `maps` belong to that process. Permitted for administrators and
    /// the user that owns its `/proc/PID`.
    ///
    /// # Errors
    /// As [`Self::track`].
    pub fn track_process(
        &mut self,
        pid: u32,
        file: &FileName,
        uffd: BorrowedFd<'_>,
        pagemap: Option<BorrowedFd<'_>>,
        maps: Option<BorrowedFd<'_>>,
        mappings: &[ClientMapping],
    ) -> Result<Vec<MappingId>, ClientError> {
        let track = Op::Track(v1::Track {
            file: Some(file.clone().into()),
            mappings: mappings.iter().copied().map(v1::ClientMapping::from).collect(),
            pagemap: pagemap.is_some(),
            maps: maps.is_some(),
            pid,
        });
        let descriptors: Vec<_> = [Some(uffd), pagemap, maps].into_iter().flatten().collect();
        let (Reply::Tracked(tracked), None) = self.call("Track", track, &descriptors)? else {
            return Err(ClientError::Unexpected("reply is not Tracked"));
        };
        if tracked.mapping_ids.len() != mappings.len() {
            return Err(ClientError::Unexpected("number of mapping ids differs from the number of mappings"));
        }
        let id = |id| MappingId::new(id).ok_or(ConvertError::ZeroId("mapping id"));
        Ok(tracked.mapping_ids.into_iter().map(id).collect::<Result<_, _>>()?)
    }

    /// Harvests mappings of this process one last time and stops tracking them. Call it before munmap(2), and make the mappings
    /// read-only with mprotect(2) first: a mapping that is still writable stays tracked until it is unmapped, which is a coverage
    /// gap.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub fn untrack(&mut self, file: &FileName, mappings: &[MappingId]) -> Result<(), ClientError> {
        let untrack = Op::Untrack(v1::Untrack {
            file: Some(file.clone().into()),
            mapping_ids: mappings.iter().map(|id| id.get()).collect(),
        });
        match self.call("Untrack", untrack, &[])? {
            (Reply::Untracked(_), None) => Ok(()),
            _ => Err(ClientError::Unexpected("reply is not Untracked")),
        }
    }

    /// Harvests mappings of a process (`None`: this process) and stops tracking them from outside. An empty list selects all
    /// tracked mappings that the process has of the file. They become untracked mappings, and another userfaultfd can
    /// register them. Returns their number.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub fn detach(
        &mut self,
        pid: Option<u32>,
        file: &FileName,
        mappings: &[MappingId],
    ) -> Result<u32, ClientError> {
        let detach = Op::Detach(v1::Detach {
            file: Some(file.clone().into()),
            pid: pid.unwrap_or(0),
            mapping_ids: mappings.iter().map(|id| id.get()).collect(),
        });
        match self.call("Detach", detach, &[])? {
            (Reply::Detached(detached), None) => Ok(detached.mappings),
            _ => Err(ClientError::Unexpected("reply is not Detached")),
        }
    }

    /// Creates an empty memfd in the service with the memfd_create(2) arguments `memfd_name` and `flags`, and the file name
    /// `name`. Returns a close-on-exec descriptor. The file has the default lifetime, as in [`Self::adopt`].
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub fn memfd_create(
        &mut self,
        name: &str,
        memfd_name: &str,
        flags: u32,
    ) -> Result<(OwnedFd, FileInfo), ClientError> {
        self.memfd_create_with_lifetime(name, memfd_name, flags, None)
    }

    /// Creates a memfd like [`Self::memfd_create`]. `None`: with the default lifetime. [`Lifetime::Kept`] needs permission of the
    /// service (`fdmapd --allow-keep`).
    ///
    /// # Errors
    /// As [`Self::memfd_create`].
    pub fn memfd_create_with_lifetime(
        &mut self,
        name: &str,
        memfd_name: &str,
        flags: u32,
        lifetime: Option<Lifetime>,
    ) -> Result<(OwnedFd, FileInfo), ClientError> {
        let create = v1::MemfdCreate {
            name: name.to_owned(),
            memfd_name: memfd_name.to_owned(),
            flags,
            lifetime: lifetime_to_wire(lifetime),
        };
        match self.call("MemfdCreate", Op::MemfdCreate(create), &[])? {
            (Reply::Opened(opened), Some(fd)) => Ok((fd, info(opened.file)?)),
            _ => Err(ClientError::Unexpected("reply is not Opened with a descriptor")),
        }
    }

    /// Sets how checkpoints of a file treat unobserved writers.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub fn set_coverage_policy(
        &mut self,
        file: &FileName,
        policy: CoveragePolicy,
    ) -> Result<(), ClientError> {
        let policy = v1::CoveragePolicy::from(policy).into();
        let set =
            Op::SetCoveragePolicy(v1::SetCoveragePolicyRequest { file: Some(file.clone().into()), policy });
        match self.call("SetCoveragePolicy", set, &[])? {
            (Reply::CoveragePolicySet(_), None) => Ok(()),
            _ => Err(ClientError::Unexpected("reply is not CoveragePolicySet")),
        }
    }

    /// Moves the descriptor of the connection to the lowest free number at or above `minimum`, for programs that rely on low
    /// descriptor numbers.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`; the descriptor keeps its number.
    pub fn renumber(&mut self, minimum: i32) -> Result<(), ClientError> {
        self.socket = fd::duplicate_above(self.socket.as_fd(), minimum)?;
        Ok(())
    }

    /// Sends one request and waits for the reply, with at most one descriptor.
    fn call(
        &mut self,
        call: &'static str,
        op: Op,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        let after = self.timeouts.answer;
        let of_connection = |error| ClientError::of_connection(call, after, error);
        let bytes = v1::FdpassRequest { op: Some(op) }.encode_to_vec();
        scm::send(self.socket.as_fd(), &bytes, descriptors).map_err(of_connection)?;
        let packet = scm::receive(self.socket.as_fd(), &mut self.buffer).map_err(of_connection)?;
        let packet = packet.ok_or_else(|| ClientError::Broken("closed by the service".to_owned()))?;
        if packet.truncated || packet.descriptors_lost || packet.descriptors.len() > 1 {
            return Err(ClientError::Unexpected("reply exceeds the maximum message size"));
        }
        let reply = v1::FdpassReply::decode(&self.buffer[..packet.len])
            .map_err(|_| ClientError::Unexpected("packet is not an FdpassReply"))?;
        match reply.result.ok_or(ClientError::Unexpected("reply is empty"))? {
            Reply::Error(v1::Error { code, message, .. }) => {
                Err(ClientError::Refused { code: RefusalCode::from_number(code), message })
            }
            reply => Ok((reply, packet.descriptors.into_iter().next())),
        }
    }
}

impl AsFd for FdpassClient {
    /// The connection; poll it to detect that the service closed it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn info(file: Option<v1::File>) -> Result<FileInfo, ClientError> {
    Ok(file.ok_or(ConvertError::Missing("file"))?.try_into()?)
}
