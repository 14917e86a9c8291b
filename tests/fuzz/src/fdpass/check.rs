//! Checks of replies against the rules of the protocol, and of resources after the session.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{FileInfo, OwnedName, Right};
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header, entry_at, state_at};
use fdmap_proto::state::PageState;
use fdmap_proto::units::{FileId, PageIndex, to_u64};
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{Backing, FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES, v1};
use fdmap_server::fdpass::{Packet, SessionReply};
use fdmap_server::files::{FileSpec, ServiceFile};
use fdmap_sys::fd;
use fdmap_sys::fd::OpenMode;
use fdmap_sys::mapping::SealedMapping;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use prost::Message as _;

use super::descriptors::{Kind, check_open_files, data_pages};
use super::{Fixture, USER, limits, page_size};

/// Status codes that mean a bug in the service: CANCELLED while the client waits, UNKNOWN, INTERNAL, DATA_LOSS.
const BUG_CODES: [i32; 4] = [1, 2, 13, 15];

/// The operation of a packet that follows the protocol, by fdpass.proto.
fn valid_operation(packet: Packet<'_>, open: bool) -> Option<Op> {
    if packet.descriptors_lost || packet.truncated || packet.bytes.len() > MAX_FDPASS_MESSAGE_BYTES {
        return None;
    }
    let op = v1::FdpassRequest::decode(packet.bytes).ok()?.op?;
    let expected = match &op {
        Op::Adopt(_) => 1,
        Op::Track(track) => 1 + usize::from(track.pagemap) + usize::from(track.maps),
        _ => 0,
    };
    let in_order = match &op {
        Op::Hello(hello) => !open && hello.version > 0 && hello.client.len() <= 64,
        _ => open,
    };
    (in_order && packet.descriptors == expected).then_some(op)
}

/// Checks the reply to one packet. `kinds`: the descriptors of the packet.
pub(super) fn reply(fixture: &Fixture, packet: Packet<'_>, kinds: &[Kind], open: bool, reply: &SessionReply) {
    let op = valid_operation(packet, open);
    let Some(result) = &reply.message.result else { panic!("empty reply") };
    assert!(
        reply.message.encoded_len() <= MAX_FDPASS_MESSAGE_BYTES,
        "the reply is longer than a message may be"
    );
    assert_eq!(reply.last, op.is_none(), "{result:?} to {op:?}");
    let expected = usize::from(matches!(result, Reply::Opened(_) | Reply::Snapshot(_)));
    assert_eq!(reply.descriptors.len(), expected, "descriptors with {result:?}");
    for descriptor in &reply.descriptors {
        let flags = FdFlag::from_bits_retain(fcntl(descriptor, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }
    match (result, op) {
        (Reply::Error(error), _) => {
            assert_eq!(error.fatal, reply.last);
            assert!(!error.message.is_empty(), "{error:?}");
            assert!((1..=16).contains(&error.code) && !BUG_CODES.contains(&error.code), "{error:?}");
        }
        (Reply::Welcome(welcome), Some(Op::Hello(hello))) => {
            assert_eq!(welcome.version, hello.version.min(FDPASS_VERSION));
            assert_eq!(welcome.page_size, page_size().bytes());
        }
        (Reply::Opened(opened), Some(Op::Open(open))) => {
            check_opened(fixture, &open, opened, &reply.descriptors[0]);
        }
        (Reply::Opened(opened), Some(Op::MemfdCreate(create))) => {
            let info = info(opened.file.as_ref());
            assert_eq!((info.size_bytes, &info.name), (0, &create.name));
            assert_eq!(in_registry(fixture, info.id).name(), create.name);
        }
        (Reply::Adopted(adopted), Some(Op::Adopt(adopt))) => {
            check_adopted(fixture, &adopt, adopted, kinds[0])
        }
        (Reply::Snapshot(snapshot), Some(Op::FetchSnapshot(fetch))) => {
            check_snapshot(fixture, &fetch, snapshot, &reply.descriptors[0]);
        }
        (Reply::Tracked(tracked), Some(Op::Track(track))) => {
            let ids: HashSet<_> = tracked.mapping_ids.iter().filter(|id| **id != 0).collect();
            assert_eq!(ids.len(), track.mappings.len(), "each mapping has its own id");
            let file = FileName::try_from(track.file).unwrap();
            fixture
                .service
                .registry
                .find(&fixture.caller, &file, Right::Write)
                .expect("the caller has the write right");
        }
        (Reply::CoveragePolicySet(_), Some(Op::SetCoveragePolicy(_))) => {}
        (Reply::Detached(detached), Some(Op::Detach(detach))) => {
            let named = detach.mapping_ids.len();
            assert!(named == 0 || detached.mappings as usize <= named, "{detached:?} of {named}");
        }
        (Reply::Untracked(_), Some(Op::Untrack(untrack))) => assert!(!untrack.mapping_ids.is_empty()),
        (result, op) => panic!("{result:?} to {op:?}"),
    }
}

fn info(file: Option<&v1::File>) -> FileInfo {
    file.cloned().unwrap().try_into().unwrap()
}

/// Finds a file without regard to the caller's rights.
fn in_registry(fixture: &Fixture, id: FileId) -> Arc<ServiceFile> {
    fixture.service.registry.find(&fixture.admin, &FileName::Id(id), Right::Inspect).unwrap()
}

/// True if the request of user `caller` names this file.
fn names(caller: u32, requested: Option<v1::FileRef>, file: &ServiceFile) -> bool {
    match FileName::try_from(requested).unwrap() {
        FileName::Id(id) => id == file.id(),
        FileName::Name(name) => OwnedName { name, uid: caller } == file.owned_name(),
        FileName::Owned(name) => name == file.owned_name(),
        FileName::Inode { device, number } => (device, number) == file.inode(),
    }
}

fn check_opened(fixture: &Fixture, open: &v1::Open, opened: &v1::Opened, descriptor: &OwnedFd) {
    let info = info(opened.file.as_ref());
    let file = in_registry(fixture, info.id);
    assert!(names(fixture.caller.uid, open.file.clone(), &file));
    let rights = fixture.caller.rights(&file.access());
    assert!(rights.has(Right::Read), "the caller lacks the read right");
    let mode = fd::open_mode(descriptor.as_fd()).unwrap();
    match open.mode() {
        v1::open::Mode::ReadOnly => assert_eq!(mode, OpenMode::ReadOnly),
        v1::open::Mode::ReadWrite => {
            assert_eq!(mode, OpenMode::ReadWrite);
            assert!(rights.has(Right::Write), "the caller lacks the write right");
        }
        v1::open::Mode::Unspecified => panic!("opened without a mode"),
    }
    let stat = fd::stat(descriptor).unwrap();
    assert_eq!((stat.st_dev, stat.st_ino), file.inode());
    assert_eq!(u64::try_from(stat.st_size).ok(), Some(info.size_bytes));
}

fn check_adopted(fixture: &Fixture, adopt: &v1::Adopt, adopted: &v1::Adopted, kind: Kind) {
    assert!(kind.is_adoptable(), "{kind:?} was adopted");
    let info = info(adopted.file.as_ref());
    let file = in_registry(fixture, info.id);
    let name = if adopt.name.is_empty() { kind.own_name() } else { &adopt.name };
    // On a host without huge pages, the client sent another memfd.
    assert!(info.name == name || kind == Kind::Huge, "{name:?} was adopted as {:?}", info.name);
    assert_eq!(info.access, file.access());
    match &adopt.access {
        None => assert_eq!(info.access.uid, fixture.caller.uid),
        Some(access) => {
            assert!(
                access.uid == info.access.uid && (fixture.caller.admin || access.uid == fixture.caller.uid)
            )
        }
    }
}

fn check_snapshot(fixture: &Fixture, fetch: &v1::FetchSnapshot, reply: &v1::Snapshot, descriptor: &OwnedFd) {
    assert_eq!(fd::open_mode(descriptor.as_fd()).unwrap(), OpenMode::ReadOnly);
    let bytes = SealedMapping::map(descriptor.as_fd()).unwrap();
    let header = Header::decode(&bytes, to_u64(bytes.len())).unwrap();
    assert_eq!(header.total_bytes(), Some(to_u64(bytes.len())));
    assert_eq!(reply.size_bytes, to_u64(bytes.len()));
    assert_eq!(reply.range, Some(header.range.into()));
    assert_eq!(reply.provenance.map(|p| p.instance), Some(fixture.service.instance));

    let file = in_registry(fixture, header.file);
    assert!(names(fixture.caller.uid, fetch.file.clone(), &file));
    assert!(fixture.caller.has(Right::Inspect, &file.access()), "the caller lacks the inspect right");
    let now = file.open_for(&fixture.admin, false).unwrap();
    let file_pages = page_size().pages_in(u64::try_from(fd::stat(&now).unwrap().st_size).unwrap());
    let whole = v1::PageRange { start: 0, end: file_pages };
    assert_eq!(reply.range, Some(fetch.range.unwrap_or(whole)));
    if fetch.max_age.is_some() || matches!(file.info(&fixture.admin).unwrap().backing, Backing::Hugetlb(_)) {
        // The snapshot may be older than the file, or `lseek` does not report the states.
        return;
    }
    assert_eq!(header.file_pages, file_pages);
    let body = &bytes[HEADER_BYTES..];
    let data = data_pages(&now);
    for nth in 0..header.range.len() {
        let state = match header.layout {
            BodyLayout::Entries => entry_at(body, nth).unwrap().state(),
            BodyLayout::States => state_at(body, nth).unwrap(),
        };
        let PageIndex(page) = header.range.start().plus(nth);
        let has_data = data.binary_search(&page).is_ok();
        // The host may have swapped the page.
        let correct = if has_data { state.is_data() } else { state == PageState::Hole };
        assert!(correct, "page {page} is reported as {state}, and has data: {has_data}");
    }
}

/// A file that no step changes.
pub(super) struct Unchanged {
    file: Arc<ServiceFile>,
    data: Vec<u64>,
    size: u64,
}

impl Unchanged {
    pub(super) fn new(fixture: &Fixture, file: &Arc<ServiceFile>) -> Self {
        let data = data_pages(&file.open_for(&fixture.admin, false).unwrap());
        Self { file: Arc::clone(file), data, size: file.size_bytes().unwrap() }
    }

    /// Checks that the file did not change.
    pub(super) fn check(&self, fixture: &Fixture) {
        let name = FileName::Owned(self.file.owned_name());
        let found = fixture.service.registry.find(&fixture.admin, &name, Right::Inspect).unwrap();
        assert_eq!((found.id(), found.inode()), (self.file.id(), self.file.inode()));
        assert_eq!(found.size_bytes().unwrap(), self.size);
        assert_eq!(data_pages(&found.open_for(&fixture.admin, false).unwrap()), self.data);
    }
}

/// Deletes the files that the client added, and checks that the service has `files` open and all quotas are free.
pub(super) async fn no_leaks(fixture: &Fixture, files: usize) {
    let known: Vec<_> = fixture.files.iter().map(|file| file.id()).collect();
    for file in fixture.service.registry.all() {
        if !known.contains(&file.id()) {
            fixture.service.registry.delete(&fixture.admin, &FileName::Id(file.id())).unwrap();
        }
    }
    // A scan may still run after its reply.
    tokio::task::spawn_blocking(|| ()).await.unwrap();
    fixture.service.sweep();
    check_open_files(files, "the session");

    let user = fdmap_server::files::Caller::new(USER, USER, Vec::new(), fixture.service.uid);
    if user.admin {
        return;
    }
    drop(
        fixture.service.shared_snapshots.reserve(&user, limits().shared_bytes_per_user, page_size()).unwrap(),
    );
    // The user owns one of the files.
    let free = limits().bytes_per_user - fixture.files[1].size_bytes().unwrap();
    let sizes = [page_size().bytes(), free - page_size().bytes()];
    for (nth, size_bytes) in sizes.into_iter().enumerate() {
        let name = format!("left {nth}");
        let spec = FileSpec {
            name: name.clone(),
            size_bytes,
            backing: Backing::Shmem,
            seals: fdmap_proto::Seals::default(),
            access: None,
            lifetime: None,
        };
        fixture.service.registry.create(&user, spec).unwrap();
    }
    for nth in 0..sizes.len() {
        fixture.service.registry.delete(&user, &FileName::Name(format!("left {nth}"))).unwrap();
    }
}
