//! The blocking half: descriptors of files. No runtime, no thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use fdmap_proto::convert::{FileName, duration_to_wire};
use fdmap_proto::shared_snapshot::BodyLayout;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{
    Access, ClientMapping, ConvertError, FDPASS_VERSION, FileInfo, MAX_FDPASS_MESSAGE_BYTES, MappingId,
    PageRange, PageSize, v1,
};
use fdmap_sys::{fd, scm};
use prost::Message as _;

use crate::error::RefusalCode;
use crate::{ClientError, Endpoint, MappedFile, SharedSnapshot, Timeouts};

/// A session on the fdpass socket.
#[derive(Debug)]
pub struct FdpassClient {
    socket: OwnedFd,
    place: Endpoint,
    timeouts: Timeouts,
    page_size: PageSize,
    buffer: Vec<u8>,
}

impl FdpassClient {
    /// Connects and says hello.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if nobody is there, [`ClientError::TimedOut`] if nobody answers.
    pub fn connect(place: &Endpoint, timeouts: Timeouts) -> Result<Self, ClientError> {
        let path = &place.fdpass;
        // Connecting and talking have one timeout each: the socket's, which is set anew below.
        let socket =
            scm::connect_to(path, timeouts.connect).map_err(|error| {
                match ClientError::of_connection("a connection", timeouts.connect, error) {
                    ClientError::Syscall(error) => {
                        let place = path.display().to_string();
                        ClientError::Unreachable { place, reason: error.errno.desc().to_owned() }
                    }
                    other => other,
                }
            })?;
        scm::set_timeout(&socket, timeouts.answer)?;
        let page_size = PageSize::new(4096).ok_or(ClientError::Unexpected("a page size"))?;
        let mut session = Self {
            socket,
            place: place.clone(),
            timeouts,
            page_size,
            buffer: vec![0; MAX_FDPASS_MESSAGE_BYTES],
        };
        let client = concat!("fdmap ", env!("CARGO_PKG_VERSION")).to_owned();
        let hello = Op::Hello(v1::Hello { version: FDPASS_VERSION, client });
        let (Reply::Welcome(welcome), _) = session.call("Hello", hello, &[])? else {
            return Err(ClientError::Unexpected("Welcome was expected"));
        };
        if welcome.version != FDPASS_VERSION {
            return Err(ClientError::Unexpected("the service speaks another version of the fdpass protocol"));
        }
        session.page_size =
            PageSize::new(welcome.page_size).ok_or(ClientError::Unexpected("a page size was expected"))?;
        Ok(session)
    }

    /// The host's base page size.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// A descriptor of a file, for this process alone, close-on-exec.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right; [`ClientError`] of the connection.
    pub fn open(&mut self, file: &FileName, writable: bool) -> Result<(OwnedFd, FileInfo), ClientError> {
        let mode = if writable { v1::open::Mode::ReadWrite } else { v1::open::Mode::ReadOnly };
        let open = Op::Open(v1::Open { file: Some(file.clone().into()), mode: mode.into() });
        match self.call("Open", open, &[])? {
            (Reply::Opened(opened), Some(fd)) => Ok((fd, info(opened.file)?)),
            _ => Err(ClientError::Unexpected("Opened and a descriptor were expected")),
        }
    }

    /// A file, mapped into this process whole.
    ///
    /// # Errors
    /// As [`Self::open`], and `mmap`'s.
    pub fn map(&mut self, file: &FileName, writable: bool) -> Result<MappedFile, ClientError> {
        let (fd, info) = self.open(file, writable)?;
        MappedFile::new(fd, info, self.page_size, writable, (self.place.clone(), self.timeouts))
    }

    /// Gives a memfd, open for reading and writing, to the service; this process keeps its own descriptors and mappings.
    /// An empty name means the memfd's own, no access means the caller's alone.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if it cannot be adopted; [`ClientError`] of the connection.
    pub fn adopt(
        &mut self,
        memfd: BorrowedFd<'_>,
        name: &str,
        access: Option<Access>,
    ) -> Result<FileInfo, ClientError> {
        self.give(memfd, name, access, false)
    }

    /// The same until no process but the service has it open or mapped any more, as far as the service can tell.
    ///
    /// # Errors
    /// As [`Self::adopt`].
    pub fn lend(
        &mut self,
        memfd: BorrowedFd<'_>,
        name: &str,
        access: Option<Access>,
    ) -> Result<FileInfo, ClientError> {
        self.give(memfd, name, access, true)
    }

    fn give(
        &mut self,
        memfd: BorrowedFd<'_>,
        name: &str,
        access: Option<Access>,
        ephemeral: bool,
    ) -> Result<FileInfo, ClientError> {
        let access = access.map(v1::Access::from);
        let adopt = Op::Adopt(v1::Adopt { name: name.to_owned(), access, ephemeral });
        match self.call("Adopt", adopt, &[memfd])? {
            (Reply::Adopted(adopted), None) => info(adopted.file),
            _ => Err(ClientError::Unexpected("Adopted was expected")),
        }
    }

    /// The states of a file's pages, in memory that the service shares: of `range`, or of all, at most `max_age` old.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection; [`ClientError::Layout`] if it cannot be read.
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
            _ => Err(ClientError::Unexpected("Snapshot and a descriptor were expected")),
        }
    }

    /// Has the writes through mappings of this process observed, 1 to 64 of them. `uffd` is a userfaultfd of this process
    /// on which nothing was done yet, `pagemap` and `maps` are its `/proc/self/pagemap` and `/proc/self/maps`: what does not
    /// come along the service opens itself, if it may. All can be closed afterwards; nothing must be done with the
    /// userfaultfd.
    ///
    /// From the answer on every write is observed. Gives an id for each mapping, in that order.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection.
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

    /// The same for mappings of another process: `uffd`, `pagemap` and `maps` are that one's. Administrators may, and the user
    /// to whom its `/proc/PID` belongs.
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
            return Err(ClientError::Unexpected("Tracked was expected"));
        };
        if tracked.mapping_ids.len() != mappings.len() {
            return Err(ClientError::Unexpected("there are not as many ids as mappings"));
        }
        let id = |id| MappingId::new(id).ok_or(ConvertError::ZeroId("mapping id"));
        Ok(tracked.mapping_ids.into_iter().map(id).collect::<Result<_, _>>()?)
    }

    /// Has what was written through mappings of this process taken, and observes them no longer. To be asked for before they
    /// are unmapped, and when nothing can write through them any more: `mprotect` them to `PROT_READ` before.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection.
    pub fn untrack(&mut self, file: &FileName, mappings: &[MappingId]) -> Result<(), ClientError> {
        let untrack = Op::Untrack(v1::Untrack {
            file: Some(file.clone().into()),
            mapping_ids: mappings.iter().map(|id| id.get()).collect(),
        });
        match self.call("Untrack", untrack, &[])? {
            (Reply::Untracked(_), None) => Ok(()),
            _ => Err(ClientError::Unexpected("Untracked was expected")),
        }
    }

    /// Has what was written through mappings of a process (`None`: this one) taken, and lets go of them: `mappings`, or all
    /// that it has of the file if none are named. They can be written all the while; from then on they are untracked
    /// mappings, and another userfaultfd may have them. Gives how many there were.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection.
    pub fn detach(
        &mut self,
        pid: Option<u32>,
        file: &FileName,
        mappings: &[MappingId],
    ) -> Result<u32, ClientError> {
        let release = Op::Detach(v1::Detach {
            file: Some(file.clone().into()),
            pid: pid.unwrap_or(0),
            mapping_ids: mappings.iter().map(|id| id.get()).collect(),
        });
        match self.call("Release", release, &[])? {
            (Reply::Detached(released), None) => Ok(released.mappings),
            _ => Err(ClientError::Unexpected("Detached was expected")),
        }
    }

    /// Has the service make an empty memfd, with `memfd_name` and `flags` as for `memfd_create`, and keep it as `name`.
    /// Gives a descriptor of it, close-on-exec.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection.
    pub fn memfd_create(
        &mut self,
        name: &str,
        memfd_name: &str,
        flags: u32,
    ) -> Result<(OwnedFd, FileInfo), ClientError> {
        let make = v1::MemfdCreate { name: name.to_owned(), memfd_name: memfd_name.to_owned(), flags };
        match self.call("Make", Op::MemfdCreate(make), &[])? {
            (Reply::Opened(opened), Some(fd)) => Ok((fd, info(opened.file)?)),
            _ => Err(ClientError::Unexpected("Opened and a descriptor were expected")),
        }
    }

    /// Says what checkpoints of a file do about writers that are not observed.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError`] of the connection.
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
            _ => Err(ClientError::Unexpected("CoveragePolicySet was expected")),
        }
    }

    /// Gives the connection's descriptor another number, `least` or the next free one above, for programs in which low
    /// numbers mean something.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`, as where the process may not have descriptors of such numbers: it is as it was then.
    pub fn renumber(&mut self, least: i32) -> Result<(), ClientError> {
        self.socket = fd::duplicate_above(self.socket.as_fd(), least)?;
        Ok(())
    }

    /// Sends one request and waits for its reply and at most one descriptor.
    fn call(
        &mut self,
        what: &'static str,
        op: Op,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        let after = self.timeouts.answer;
        let of_connection = |error| ClientError::of_connection(what, after, error);
        let bytes = v1::FdpassRequest { op: Some(op) }.encode_to_vec();
        scm::send(self.socket.as_fd(), &bytes, descriptors).map_err(of_connection)?;
        let packet = scm::receive(self.socket.as_fd(), &mut self.buffer).map_err(of_connection)?;
        let packet = packet.ok_or_else(|| ClientError::Broken("it was closed".to_owned()))?;
        if packet.truncated || packet.descriptors_lost || packet.descriptors.len() > 1 {
            return Err(ClientError::Unexpected("it is longer than a message may be"));
        }
        let reply = v1::FdpassReply::decode(&self.buffer[..packet.len])
            .map_err(|_| ClientError::Unexpected("it is no FdpassReply"))?;
        match reply.result.ok_or(ClientError::Unexpected("it is empty"))? {
            Reply::Error(v1::Error { code, message, .. }) => {
                Err(ClientError::Refused { code: RefusalCode::from_number(code), message })
            }
            reply => Ok((reply, packet.descriptors.into_iter().next())),
        }
    }
}

impl AsFd for FdpassClient {
    /// The connection: to see whether it has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn info(file: Option<v1::File>) -> Result<FileInfo, ClientError> {
    Ok(file.ok_or(ConvertError::Missing("file"))?.try_into()?)
}
