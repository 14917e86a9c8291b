//! Tests of tracked mappings against a fake service, which speaks the protocol and records its requests.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fdmap_proto::convert::FileName;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{Access, Backing, FileId, FileInfo, Lifetime, Origin, PageSize, Rights, Seals, v1};
use fdmap_sys::fd::link_target;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::{memfd, scm};
use prost::Message as _;

use super::whole;
use crate::{ClientError, Endpoint, FdpassClient, Timeouts};

const BYTES: u64 = 4096 * 3 + 100;
const IDS: [u64; 1] = [77];

/// A request that the fake service received.
#[derive(Debug, PartialEq)]
enum Received {
    Track { links: Vec<String>, mapping: v1::ClientMapping, pagemap: bool, maps: bool },
    Untrack { ids: Vec<u64>, writable: bool },
}

/// The behaviour of the fake service.
#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    Regular,
    /// Refuses to track.
    Refuses,
    /// Closes the connection instead of answering the first Untrack.
    HangsUp,
}

struct Service {
    folder: tempfile::TempDir,
    received: Receiver<Received>,
}

/// The state that all sessions of the service share.
struct Shared {
    behaviour: Behaviour,
    record: Mutex<Sender<Received>>,
    /// Start address of the tracked mapping.
    address: AtomicU64,
    hung_up: AtomicBool,
}

impl Service {
    fn start(behaviour: Behaviour) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = scm::listen_at(&folder.path().join("fdpass.sock")).unwrap();
        nix::fcntl::fcntl(&listener, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        let (record, received) = channel();
        let (address, hung_up) = (AtomicU64::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { behaviour, record: Mutex::new(record), address, hung_up });
        std::thread::spawn(move || {
            // The type of std only accepts connections here. They are SOCK_SEQPACKET.
            let listener = UnixListener::from(listener);
            while let Ok((socket, _)) = listener.accept() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(&socket.into(), &shared));
            }
        });
        Self { folder, received }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::in_runtime_dir(PathBuf::from(self.folder.path()))
    }

    fn mapped(&self, writable: bool) -> crate::MappedFile {
        let timeouts = Timeouts { connect: Duration::from_secs(5), answer: Duration::from_secs(5) };
        let mut session = FdpassClient::connect(&self.endpoint(), timeouts).unwrap();
        session.map(&FileName::Name("ram".to_owned()), writable).unwrap()
    }

    fn next(&self) -> Received {
        self.received.recv_timeout(Duration::from_secs(5)).unwrap()
    }
}

fn serve(socket: &OwnedFd, shared: &Shared) {
    let record = |received| shared.record.lock().unwrap().send(received).unwrap();
    let mut buffer = vec![0; 65_536];
    while let Ok(Some(packet)) = scm::receive(socket.as_fd(), &mut buffer) {
        let request = v1::FdpassRequest::decode(&buffer[..packet.len]).unwrap();
        let mut sent = Vec::new();
        let reply = match request.op.unwrap() {
            Op::Hello(_) => Reply::Welcome(v1::Welcome { version: 1, page_size: 4096, ..Default::default() }),
            Op::Open(_) => {
                let file = memfd::create("ram", None).unwrap();
                memfd::resize(file.as_fd(), BYTES).unwrap();
                sent.push(file);
                Reply::Opened(v1::Opened { file: Some(info().into()) })
            }
            Op::Track(_) if shared.behaviour == Behaviour::Refuses => {
                Reply::Error(v1::Error { code: 9, message: "not now".to_owned(), fatal: false })
            }
            Op::Track(track) => {
                let links = packet.descriptors.iter().map(|fd| link_target(fd.as_fd()).unwrap()).collect();
                let v1::Track { file, mappings, pagemap, maps, pid } = track;
                assert_eq!(pid, 0, "the calling process");
                assert_eq!(FileName::try_from(file), Ok(FileName::Id(info().id)), "the file is named by id");
                shared.address.store(mappings[0].address, Ordering::SeqCst);
                record(Received::Track { links, mapping: mappings[0], pagemap, maps });
                Reply::Tracked(v1::Tracked { mapping_ids: IDS.to_vec() })
            }
            Op::Untrack(_)
                if shared.behaviour == Behaviour::HangsUp && !shared.hung_up.swap(true, Ordering::SeqCst) =>
            {
                return;
            }
            Op::Untrack(untrack) => {
                let writable = writable_at(shared.address.load(Ordering::SeqCst)).unwrap();
                record(Received::Untrack { ids: untrack.mapping_ids, writable });
                Reply::Untracked(v1::Untracked {})
            }
            other => panic!("{other:?}"),
        };
        let bytes = v1::FdpassReply { result: Some(reply) }.encode_to_vec();
        let sent: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
        if scm::send(socket.as_fd(), &bytes, &sent).is_err() {
            return;
        }
    }
}

/// Whether the mapping at `address` is writable; `None` if no mapping exists there.
fn writable_at(address: u64) -> Option<bool> {
    let all = Maps::open(std::process::id()).unwrap().all().unwrap();
    all.iter().find(|vma| vma.range.start <= address && address < vma.range.end).map(|vma| vma.writable)
}

fn info() -> FileInfo {
    FileInfo {
        id: FileId::new(5).unwrap(),
        name: "ram".to_owned(),
        size_bytes: BYTES,
        pages: 4,
        backing: Backing::Shmem,
        seals: Seals::default(),
        access: Access::private(0, 0),
        device: 1,
        inode: 2,
        origin: Origin::Created,
        created: std::time::UNIX_EPOCH,
        allocated_bytes: 0,
        caller_rights: Rights::ALL,
        owned_by_caller: true,
        lifetime: Lifetime::Ephemeral,
        fence: None,
    }
}

#[test]
fn mapping_is_read_only_before_it_is_untracked() {
    let service = Service::start(Behaviour::Regular);
    let mut mapped = service.mapped(true);
    assert!(!mapped.is_tracked());
    mapped.track().unwrap();
    mapped.track().unwrap();
    let address = mapped.as_ptr().addr() as u64;
    let own = |file: &str| format!("/proc/{}/{file}", std::process::id());
    assert_eq!(
        service.next(),
        Received::Track {
            links: vec!["anon_inode:[userfaultfd]".to_owned(), own("pagemap"), own("maps")],
            mapping: v1::ClientMapping { address, length_bytes: 4 * 4096, first_page: 0 },
            pagemap: true,
            maps: true,
        },
        "one request, for whole pages"
    );
    let tracked = mapped.tracked.as_ref().unwrap();
    assert_eq!(tracked.ids.iter().map(|id| id.get()).collect::<Vec<_>>(), IDS);
    assert!(mapped.write_at(5, b"seen"));

    mapped.untrack().unwrap();
    assert_eq!(service.next(), Received::Untrack { ids: IDS.to_vec(), writable: false });
    assert!(!mapped.is_tracked() && !mapped.write_at(5, b"late"));
    let mut out = [0; 4];
    assert!(mapped.read_at(5, &mut out) && &out == b"seen");
    assert!(matches!(mapped.track(), Err(ClientError::Untrackable { .. })), "the mapping is read-only now");
    mapped.untrack().unwrap();
    drop(mapped);
    assert!(service.received.try_recv().is_err(), "no request is sent twice");
}

#[test]
fn dropped_mapping_is_untracked_before_it_is_unmapped() {
    let service = Service::start(Behaviour::Regular);
    let mut mapped = service.mapped(true);
    mapped.track().unwrap();
    service.next();
    drop(mapped);
    assert_eq!(service.next(), Received::Untrack { ids: IDS.to_vec(), writable: false });
}

#[test]
fn untrack_reconnects_after_a_lost_connection() {
    let service = Service::start(Behaviour::HangsUp);
    let mut mapped = service.mapped(true);
    mapped.track().unwrap();
    service.next();
    mapped.untrack().unwrap();
    assert_eq!(service.next(), Received::Untrack { ids: IDS.to_vec(), writable: false });
}

#[test]
fn mapping_is_unchanged_if_tracking_fails() {
    let service = Service::start(Behaviour::Refuses);
    let error = service.mapped(false).track().unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
    let mut mapped = service.mapped(true);
    assert_eq!(mapped.track().unwrap_err().refusal(), Some(crate::error::RefusalCode::FailedPrecondition));
    assert!(!mapped.is_tracked() && mapped.write_at(0, b"still writable"));
    mapped.untrack().unwrap();
    assert!(mapped.write_at(0, b"still writable"));
}

#[test]
fn forked_child_does_not_untrack_the_mapping_of_its_parent() {
    let service = Service::start(Behaviour::Regular);
    let mut mapped = service.mapped(true);
    mapped.track().unwrap();
    service.next();
    // A forked child finds the pid of its parent in its copy.
    mapped.tracked.as_mut().unwrap().pid += 1;
    assert!(matches!(mapped.untrack(), Err(ClientError::Untrackable { .. })));
    assert!(mapped.write_at(0, b"still writable"));
    drop(mapped);
    assert!(service.received.recv_timeout(Duration::from_millis(50)).is_err());
}

#[test]
fn hugetlb_mapping_is_rounded_up_to_a_huge_page() {
    let file = memfd::create("odd", None).unwrap();
    memfd::resize(file.as_fd(), BYTES).unwrap();
    let mapping = SharedMapping::shared(&file, 0, usize::try_from(BYTES).unwrap(), true).unwrap();
    let page_size = PageSize::new(4096).unwrap();
    let length = |backing| whole(&mapping, &FileInfo { backing, ..info() }, page_size).length_bytes;
    assert_eq!(length(Backing::ShmemThp), 4 * 4096);
    assert_eq!(length(Backing::Hugetlb(2 << 20)), 2 << 20);
}
