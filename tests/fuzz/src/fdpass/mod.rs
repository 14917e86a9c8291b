//! Packets of one client on the fdpass socket, answered by a real session of a real service. Only the socket is left out: the
//! descriptors that "come along" are made here.

mod check;
mod descriptors;
mod packets;

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Backing, Seals};
use fdmap_proto::units::{FileId, PageSize};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_server::tracking::EventSources;
use fdmap_server::files::{Caller, Creation, Limits, ServiceFile};
use fdmap_server::fdpass::{Arrived, Session};
use fdmap_server::probe::SyscallsProbe;
use fdmap_server::probe::capabilities::HostCapabilities;
use fdmap_server::service::Service;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use nix::unistd::{SysconfVar, sysconf};
use prost::Message as _;

use check::Undisturbed;
use descriptors::{Descriptors, open_descriptors};
use packets::{Packet, There};

/// Bounds that inputs can reach, and that keep every run small.
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
/// Owns one of the files, and may be the one who asks.
const USER: u32 = 1000;
/// Bytes of the client's mapping of the first file, which has fewer.
const MAPPED: usize = 16 * 4096;
/// Steps of one run.
const MAX_STEPS: usize = 24;

/// Who asks, and what happens.
#[derive(Arbitrary, Debug)]
pub struct Input {
    asking: Asking,
    /// Hello first, so that what follows is not in vain.
    greet: bool,
    /// Mappings may be tracked, which takes a hundred times as long. Else such packets are left out.
    #[arbitrary(with = |u: &mut Unstructured<'_>| u.ratio(1_u8, 8))]
    tracks: bool,
    #[arbitrary(with = steps)]
    steps: Vec<Step>,
}

fn steps(u: &mut Unstructured<'_>) -> Result<Vec<Step>> {
    u.arbitrary_iter()?.take(MAX_STEPS).collect()
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Asking {
    Admin,
    /// [`USER`].
    Owner,
    Stranger,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// The client sends something.
    Packet(Packet),
    /// Somebody who has it open cuts or lengthens the first file, to so many pages and bytes.
    Truncate(u8, u8),
    /// The client closes what it was given.
    Close,
}

/// A service with a few files, and one client.
struct Bed {
    service: Arc<Service>,
    admin: Caller,
    caller: Caller,
    /// Those that were there from the start. Only the first one ever changes.
    files: Vec<Arc<ServiceFile>>,
}

/// Has the service believe that somebody keeps its descriptors: then every file has its generations from the beginning, and no
/// process is started that reads forks, which would be this very program.
fn be_kept(kept: bool) {
    let nobody = std::env::temp_dir().join("fdmap-fuzz-nobody");
    for (name, value) in [("FDSTORE", "4096".as_ref()), ("NOTIFY_SOCKET", nobody.as_os_str())] {
        if kept {
            // SAFETY: between runs no other thread uses the environment: libFuzzer's own watch memory and time.
            unsafe { std::env::set_var(name, value) };
        } else {
            // SAFETY: as above.
            unsafe { std::env::remove_var(name) };
        }
    }
}

impl Bed {
    fn new(asking: Asking) -> Self {
        let host = HostCapabilities {
            capabilities: Vec::new(),
            page_size: page_size(),
            hugetlb_page_sizes: Vec::new(),
            probes: Vec::new(),
        };
        let hub = Arc::new(EventSources::new(None, false, false).unwrap());
        // What is begun when it is needed first is begun before descriptors are counted.
        let service = Service::new(host, Arc::new(SyscallsProbe), hub, limits(), PathBuf::new());
        let caller = |uid| Caller::new(uid, uid, Vec::new(), service.uid);
        let admin = caller(service.uid);
        let page = page_size().bytes();
        // One of two blocks and a bit, so that the last page is cut.
        let files = [
            ("ram", 10 * page, Access::from_mode(service.uid, 0, 0o644)),
            ("theirs", 8192 * page + 100, Access::from_mode(USER, USER, 0o640)),
            ("private", 3 * page, Access::private(service.uid, 0)),
        ];
        let files = files.map(|(name, size_bytes, access)| {
            let (name, access) = (name.to_owned(), Some(access));
            let creation =
                Creation { name, size_bytes, backing: Backing::Shmem, seals: Seals::default(), access };
            let file = service.registry.create(&admin, creation).unwrap();
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
        let caller = match asking {
            Asking::Admin => admin.clone(),
            Asking::Owner => caller(USER),
            Asking::Stranger => caller(USER + 1),
        };
        Self { service, admin, caller, files: files.into() }
    }

    /// Names and ids of all files, for the packets.
    fn names(&self) -> Vec<(String, u64)> {
        let adopted = self.service.registry.all();
        let known: HashSet<FileId> = self.files.iter().map(|file| file.id()).collect();
        let mut adopted: Vec<_> = adopted.into_iter().filter(|file| !known.contains(&file.id())).collect();
        adopted.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        let all = self.files.iter().chain(&adopted);
        all.map(|file| (file.name().to_owned(), file.id().get())).collect()
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

/// Sends the packets and checks the answers, and what is left behind.
///
/// # Panics
/// If something is wrong.
pub fn run(input: Input) {
    // One thread for what blocks, so that a task put behind all others tells when these are done.
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
    be_kept(input.tracks);
    let at_first = open_descriptors();
    runtime.block_on(converse(input));
    assert_eq!(open_descriptors(), at_first, "a service that is gone has descriptors open");
}

async fn converse(input: Input) {
    let bed = Bed::new(input.asking);
    let undisturbed: Vec<_> = bed.files[1..].iter().map(|file| Undisturbed::new(&bed, file)).collect();
    let mapped = SharedMapping::shared(bed.files[0].open_for(&bed.admin, true).unwrap(), 0, MAPPED, true).unwrap();
    let with_files = open_descriptors();
    let mut descriptors = Descriptors::default();
    let mut session = Session::new(Arc::clone(&bed.service), bed.caller.clone(), std::process::id());
    let mut given: Vec<OwnedFd> = Vec::new();
    let mut tracked = Vec::new();
    let hello = input.greet.then(|| Step::Packet(Packet::hello()));
    for step in hello.into_iter().chain(input.steps) {
        match step {
            Step::Close => given.clear(),
            Step::Truncate(pages, bytes) => {
                bed.truncate(u64::from(pages % 16) * page_size().bytes() + u64::from(bytes));
            }
            Step::Packet(packet) => {
                let mapped_at = u64::try_from(mapped.as_ptr().expose_provenance()).unwrap();
                let there = There { files: bed.names(), mapped_at, tracked: tracked.clone() };
                let bytes = packet.bytes(&there);
                if !input.tracks && is_about_tracking(&bytes) {
                    continue;
                }
                let along = packet.descriptors(&mut descriptors);
                let kinds: Vec<_> = along.iter().map(|(kind, _)| *kind).collect();
                let along: Vec<_> = along.into_iter().map(|(_, fd)| fd).collect();
                let arrived = Arrived {
                    bytes: &bytes,
                    truncated: packet.truncated,
                    descriptors: along.len(),
                    descriptors_lost: packet.descriptors_lost,
                };
                let greeted = session.greeted();
                let answer = session.answer(arrived, along).await;
                check::answer(&bed, arrived, &kinds, greeted, &answer);
                if let Some(Reply::Tracked(more)) = &answer.reply.result {
                    tracked.extend(&more.mapping_ids);
                }
                assert!(session.greeted() >= greeted);
                if answer.last {
                    break;
                }
                given.extend(answer.descriptors);
            }
        }
    }
    for file in undisturbed {
        file.check(&bed);
    }
    drop((session, given, descriptors, mapped));
    if !tracked.is_empty() {
        // It has ended now, as a checkpoint finds.
        for file in bed.service.registry.all() {
            file.tracker().unwrap().checkpoint(true, None).unwrap();
        }
    }
    check::nothing_is_left(&bed, with_files).await;
    let names: Vec<_> = bed.files.iter().map(|file| FileName::Id(file.id())).collect();
    for name in &names {
        bed.service.registry.delete(&bed.admin, name).unwrap();
    }
    assert!(bed.service.registry.all().is_empty());
}
