//! Packets of one client, handled by a session of a service. The target passes packets and descriptors to the session directly,
//! without a socket.

mod check;
mod descriptors;
mod packets;

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Backing, OwnedName, Seals};
use fdmap_proto::units::{FileId, PageSize};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_server::fdpass::{Packet, Peer, Session};
use fdmap_server::files::{Caller, FileSpec, KeepPolicy, Limits, ServiceFile};
use fdmap_server::probe::SyscallsProbe;
use fdmap_server::probe::capabilities::HostCapabilities;
use fdmap_server::service::Service;
use fdmap_server::tracking::EventSources;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use nix::unistd::{SysconfVar, sysconf};
use prost::Message as _;

use check::Unchanged;
use descriptors::Descriptors;
pub(crate) use descriptors::{check_open_files, open_descriptors, open_files};
use packets::{Known, PacketDraft};

/// Limits that inputs can reach, and that keep every run small.
fn limits() -> Limits {
    let page = page_size().bytes();
    Limits {
        file_bytes: 16_384 * page,
        bytes_per_user: 20_480 * page,
        files_per_user: 3,
        shared_bytes_per_user: 25 * page,
        shared_per_user: 4,
        ..Limits::default()
    }
}

/// The owner of one of the files.
const USER: u32 = 1000;
/// Length of the client's mapping of the first file, in bytes. The file is shorter.
const MAPPED_BYTES: usize = 16 * 4096;
/// Steps in one run.
const MAX_STEPS: usize = 24;

/// A session: its caller and its steps.
#[derive(Arbitrary, Debug)]
pub struct Input {
    caller: CallerDraft,
    /// Send Hello first, so that the session handles the other packets.
    hello: bool,
    /// Send packets about tracking. Such a run takes a hundred times as long.
    #[arbitrary(with = |u: &mut Unstructured<'_>| u.ratio(1_u8, 8))]
    tracks: bool,
    #[arbitrary(with = steps)]
    steps: Vec<Step>,
}

fn steps(u: &mut Unstructured<'_>) -> Result<Vec<Step>> {
    u.arbitrary_iter()?.take(MAX_STEPS).collect()
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum CallerDraft {
    Admin,
    /// [`USER`].
    Owner,
    Stranger,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Packet(PacketDraft),
    /// Another process sets the size of the first file, to this number of pages and bytes.
    Truncate(u8, u8),
    /// The client closes all descriptors that it received.
    Close,
}

/// A service with a few files, and one client.
struct Fixture {
    service: Arc<Service>,
    admin: Caller,
    caller: Caller,
    /// The files that exist from the start. Only the first one changes.
    files: Vec<Arc<ServiceFile>>,
}

impl Fixture {
    fn new(caller_draft: CallerDraft) -> Self {
        let host = HostCapabilities {
            capabilities: Vec::new(),
            page_size: page_size(),
            hugetlb_page_sizes: Vec::new(),
            probes: Vec::new(),
        };
        let event_sources = Arc::new(EventSources::new(None, false, false).unwrap());
        // Trackers open descriptors at first use: start them before the first count.
        let service = Service::new(host, Arc::new(SyscallsProbe), event_sources, limits(), KeepPolicy::default(), PathBuf::new());
        let caller = |uid| Caller::new(uid, uid, Vec::new(), service.uid);
        let admin = caller(service.uid);
        let page = page_size().bytes();
        // One file has two blocks and a partial last page.
        let files = [
            ("ram", 10 * page, Access::from_mode(service.uid, 0, 0o644)),
            ("user", 8192 * page + 100, Access::from_mode(USER, USER, 0o640)),
            ("private", 3 * page, Access::private(service.uid, 0)),
        ];
        let files = files.map(|(name, size_bytes, access)| {
            let (name, access) = (name.to_owned(), Some(access));
            let spec =
                FileSpec { name, size_bytes, backing: Backing::Shmem, seals: Seals::default(), access, lifetime: None };
            let file = service.registry.create(&admin, spec).unwrap();
            let fd = file.open_for(&admin, true).unwrap();
            for page in [0, 2, 3, 4100] {
                let offset = i64::try_from(page * page_size().bytes()).unwrap();
                if page * page_size().bytes() < size_bytes {
                    nix::sys::uio::pwrite(&fd, b"x", offset).unwrap();
                }
            }
            file.tracker().unwrap();
            file
        });
        let caller = match caller_draft {
            CallerDraft::Admin => admin.clone(),
            CallerDraft::Owner => caller(USER),
            CallerDraft::Stranger => caller(USER + 1),
        };
        Self { service, admin, caller, files: files.into() }
    }

    /// Names and ids of all files: first the ones from the start, then the adopted ones by name.
    fn names(&self) -> Vec<(OwnedName, u64)> {
        let adopted = self.service.registry.all();
        let initial: HashSet<FileId> = self.files.iter().map(|file| file.id()).collect();
        let mut adopted: Vec<_> = adopted.into_iter().filter(|file| !initial.contains(&file.id())).collect();
        adopted.sort_unstable_by_key(|file| file.owned_name());
        let all = self.files.iter().chain(&adopted);
        all.map(|file| (file.owned_name(), file.id().get())).collect()
    }

    fn truncate(&self, bytes: u64) {
        let fd = self.files[0].open_for(&self.admin, true).unwrap();
        memfd::resize(fd.as_fd(), bytes).unwrap();
    }
}

fn is_about_tracking(bytes: &[u8]) -> bool {
    let op = v1::FdpassRequest::decode(bytes).ok().and_then(|request| request.op);
    matches!(op, Some(Op::Track(_) | Op::Untrack(_) | Op::Detach(_) | Op::SetCoveragePolicy(_)))
}

fn page_size() -> PageSize {
    let bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| u64::try_from(bytes).ok());
    bytes.and_then(PageSize::new).unwrap()
}

/// Runs the session, and checks its replies and that it leaves no resources behind.
///
/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    // With one blocking thread, a task that is queued last runs when all others are done.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(1).build().unwrap();
    let initial = open_files();
    runtime.block_on(run_session(input));
    check_open_files(initial, "the dropped service");
}

async fn run_session(input: Input) {
    let fixture = Fixture::new(input.caller);
    let unchanged: Vec<_> = fixture.files[1..].iter().map(|file| Unchanged::new(&fixture, file)).collect();
    let mapped = SharedMapping::shared(
        fixture.files[0].open_for(&fixture.admin, true).unwrap(),
        0,
        MAPPED_BYTES,
        true,
    )
    .unwrap();
    let with_files = open_files();
    let mut descriptors = Descriptors::default();
    let pid = std::process::id();
    let peer = Peer::new(pid, fdmap_sys::pidfd::open(pid).ok());
    let mut session = Session::new(Arc::clone(&fixture.service), fixture.caller.clone(), peer);
    let mut received: Vec<OwnedFd> = Vec::new();
    let mut tracked = Vec::new();
    let hello = input.hello.then(|| Step::Packet(PacketDraft::hello()));
    for step in hello.into_iter().chain(input.steps) {
        match step {
            Step::Close => received.clear(),
            Step::Truncate(pages, bytes) => {
                fixture.truncate(u64::from(pages % 16) * page_size().bytes() + u64::from(bytes));
            }
            Step::Packet(draft) => {
                let mapped_at = u64::try_from(mapped.as_ptr().expose_provenance()).unwrap();
                let known = Known { files: fixture.names(), mapped_at, tracked: tracked.clone() };
                let bytes = draft.bytes(&known);
                if !input.tracks && is_about_tracking(&bytes) {
                    continue;
                }
                let passed = draft.descriptors(&mut descriptors);
                let kinds: Vec<_> = passed.iter().map(|(kind, _)| *kind).collect();
                let passed: Vec<_> = passed.into_iter().map(|(_, fd)| fd).collect();
                let packet = Packet {
                    bytes: &bytes,
                    truncated: draft.truncated,
                    descriptors: passed.len(),
                    descriptors_lost: draft.descriptors_lost,
                    foreign_descriptors: false,
                };
                let open = session.is_open();
                let reply = session.handle(packet, passed).await;
                check::reply(&fixture, packet, &kinds, open, &reply);
                if let Some(Reply::Tracked(more)) = &reply.message.result {
                    tracked.extend(&more.mapping_ids);
                }
                assert!(session.is_open() >= open);
                if reply.last {
                    break;
                }
                received.extend(reply.descriptors);
            }
        }
    }
    for file in unchanged {
        file.check(&fixture);
    }
    drop((session, received, descriptors, mapped));
    if !tracked.is_empty() {
        // The mapping was unmapped. The next checkpoint detects that.
        for file in fixture.service.registry.all() {
            file.tracker().unwrap().checkpoint(true, None).unwrap();
        }
    }
    check::no_leaks(&fixture, with_files).await;
    let names: Vec<_> = fixture.files.iter().map(|file| FileName::Id(file.id())).collect();
    for name in &names {
        fixture.service.registry.delete(&fixture.admin, name).unwrap();
    }
    assert!(fixture.service.registry.all().is_empty());
}
