//! What the protocol promises of every answer, and what must be left when a client is gone.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{FileInfo, Right};
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header, entry_at, state_at};
use fdmap_proto::state::PageState;
use fdmap_proto::units::{FileId, PageIndex, to_u64};
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{Backing, FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES, v1};
use fdmap_server::fdpass::{Answer, Arrived};
use fdmap_server::files::{Creation, ServiceFile};
use fdmap_sys::fd;
use fdmap_sys::fd::OpenMode;
use fdmap_sys::mapping::SealedMapping;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use prost::Message as _;

use super::descriptors::{Kind, data_pages, open_descriptors};
use super::{Bed, USER, limits, page_size};

/// Codes of gRPC that would be the service's fault here: cancelled, though the client waits; unknown; internal; data loss.
const FAULTS: [i32; 4] = [1, 2, 13, 15];

/// The operation of a packet that does not break the protocol, by fdpass.proto.
fn sound(arrived: Arrived<'_>, greeted: bool) -> Option<Op> {
    if arrived.descriptors_lost || arrived.truncated || arrived.bytes.len() > MAX_FDPASS_MESSAGE_BYTES {
        return None;
    }
    let op = v1::FdpassRequest::decode(arrived.bytes).ok()?.op?;
    let takes = match &op {
        Op::Adopt(_) => 1,
        Op::Track(track) => 1 + usize::from(track.pagemap) + usize::from(track.maps),
        _ => 0,
    };
    let in_turn = match &op {
        Op::Hello(hello) => !greeted && hello.version > 0 && hello.client.len() <= 64,
        _ => greeted,
    };
    (in_turn && arrived.descriptors == takes).then_some(op)
}

/// Checks the answer to one packet, which came with descriptors of these kinds.
pub(super) fn answer(bed: &Bed, arrived: Arrived<'_>, kinds: &[Kind], greeted: bool, answer: &Answer) {
    let op = sound(arrived, greeted);
    let Some(reply) = &answer.reply.result else { panic!("an empty reply") };
    assert!(answer.reply.encoded_len() <= MAX_FDPASS_MESSAGE_BYTES, "the reply is too long for a packet");
    assert_eq!(answer.last, op.is_none(), "{reply:?} to {op:?}");
    let takes = usize::from(matches!(reply, Reply::Opened(_) | Reply::Snapshot(_)));
    assert_eq!(answer.descriptors.len(), takes, "descriptors with {reply:?}");
    for descriptor in &answer.descriptors {
        let flags = FdFlag::from_bits_retain(fcntl(descriptor, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }
    match (reply, op) {
        (Reply::Error(error), _) => {
            assert_eq!(error.fatal, answer.last);
            assert!(!error.message.is_empty(), "{error:?}");
            assert!((1..=16).contains(&error.code) && !FAULTS.contains(&error.code), "{error:?}");
        }
        (Reply::Welcome(welcome), Some(Op::Hello(hello))) => {
            assert_eq!(welcome.version, hello.version.min(FDPASS_VERSION));
            assert_eq!(welcome.page_size, page_size().bytes());
        }
        (Reply::Opened(opened), Some(Op::Open(open))) => {
            check_opened(bed, &open, opened, &answer.descriptors[0]);
        }
        (Reply::Opened(made), Some(Op::MemfdCreate(make))) => {
            let info = info(made.file.as_ref());
            assert_eq!((info.size_bytes, &info.name), (0, &make.name));
            assert_eq!(in_registry(bed, info.id).name(), make.name);
        }
        (Reply::Adopted(adopted), Some(Op::Adopt(adopt))) => check_adopted(bed, &adopt, adopted, kinds[0]),
        (Reply::Snapshot(snapshot), Some(Op::FetchSnapshot(fetch))) => {
            check_snapshot(bed, &fetch, snapshot, &answer.descriptors[0]);
        }
        (Reply::Tracked(tracked), Some(Op::Track(track))) => {
            let ids: HashSet<_> = tracked.mapping_ids.iter().filter(|id| **id != 0).collect();
            assert_eq!(ids.len(), track.mappings.len(), "each has an id of its own");
            let file = FileName::try_from(track.file).unwrap();
            bed.service
                .registry
                .find(&bed.caller, &file, Right::Write)
                .expect("tracked by one who may write");
        }
        (Reply::CoveragePolicySet(_), Some(Op::SetCoveragePolicy(_))) => {}
        (Reply::Detached(released), Some(Op::Detach(release))) => {
            let named = release.mapping_ids.len();
            assert!(named == 0 || released.mappings as usize <= named, "{released:?} of {named}");
        }
        (Reply::Untracked(_), Some(Op::Untrack(untrack))) => assert!(!untrack.mapping_ids.is_empty()),
        (reply, op) => panic!("{reply:?} to {op:?}"),
    }
}

fn info(file: Option<&v1::File>) -> FileInfo {
    file.cloned().unwrap().try_into().unwrap()
}

/// The file as the registry has it, whoever asks.
fn in_registry(bed: &Bed, id: FileId) -> Arc<ServiceFile> {
    bed.service.registry.find(&bed.admin, &FileName::Id(id), Right::Inspect).unwrap()
}

/// True if the request named this file.
fn names(asked: Option<v1::FileRef>, file: &ServiceFile) -> bool {
    match FileName::try_from(asked).unwrap() {
        FileName::Id(id) => id == file.id(),
        FileName::Name(name) => name == file.name(),
        FileName::Inode { device, number } => (device, number) == file.inode(),
    }
}

fn check_opened(bed: &Bed, open: &v1::Open, opened: &v1::Opened, descriptor: &OwnedFd) {
    let info = info(opened.file.as_ref());
    let file = in_registry(bed, info.id);
    assert!(names(open.file.clone(), &file));
    let rights = bed.caller.rights(&file.access());
    assert!(rights.contains(Right::Read), "opened by one who may not read");
    let mode = fd::open_mode(descriptor.as_fd()).unwrap();
    match open.mode() {
        v1::open::Mode::ReadOnly => assert_eq!(mode, OpenMode::ReadOnly),
        v1::open::Mode::ReadWrite => {
            assert_eq!(mode, OpenMode::ReadWrite);
            assert!(rights.contains(Right::Write), "opened by one who may not write");
        }
        v1::open::Mode::Unspecified => panic!("opened in no mode"),
    }
    let stat = fd::stat(descriptor).unwrap();
    assert_eq!((stat.st_dev, stat.st_ino), file.inode());
    assert_eq!(u64::try_from(stat.st_size).ok(), Some(info.size_bytes));
}

fn check_adopted(bed: &Bed, adopt: &v1::Adopt, adopted: &v1::Adopted, kind: Kind) {
    assert!(kind.is_adoptable(), "{kind:?} was adopted");
    let info = info(adopted.file.as_ref());
    let file = in_registry(bed, info.id);
    let named = if adopt.name.is_empty() { kind.own_name() } else { &adopt.name };
    // Where there are no huge pages something else was sent.
    assert!(info.name == named || kind == Kind::Huge, "{named:?} was adopted as {:?}", info.name);
    assert_eq!(info.access, file.access());
    match &adopt.access {
        None => assert_eq!(info.access.uid, bed.caller.uid),
        Some(access) => {
            assert!(access.uid == info.access.uid && (bed.caller.admin || access.uid == bed.caller.uid))
        }
    }
}

fn check_snapshot(bed: &Bed, fetch: &v1::FetchSnapshot, reply: &v1::Snapshot, descriptor: &OwnedFd) {
    assert_eq!(fd::open_mode(descriptor.as_fd()).unwrap(), OpenMode::ReadOnly);
    let bytes = SealedMapping::map(descriptor.as_fd()).unwrap();
    let header = Header::decode(&bytes, to_u64(bytes.len())).unwrap();
    assert_eq!(header.total_bytes(), Some(to_u64(bytes.len())));
    assert_eq!(reply.size_bytes, to_u64(bytes.len()));
    assert_eq!(reply.range, Some(header.range.into()));
    assert_eq!(reply.provenance.map(|p| p.instance), Some(bed.service.instance));

    let file = in_registry(bed, header.file);
    assert!(names(fetch.file.clone(), &file));
    assert!(bed.caller.may(Right::Inspect, &file.access()), "told one who may not see");
    let now = file.open_for(&bed.admin, false).unwrap();
    let file_pages = page_size().pages_in(u64::try_from(fd::stat(&now).unwrap().st_size).unwrap());
    let whole = v1::PageRange { start: 0, end: file_pages };
    assert_eq!(reply.range, Some(fetch.range.unwrap_or(whole)));
    if fetch.max_age.is_some() || matches!(file.info(&bed.admin).unwrap().backing, Backing::Hugetlb(_)) {
        // It may tell how the file was before, or it cannot be seen.
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
        // Under pressure the host may have swapped it.
        let fits = if has_data { state.is_data() } else { state == PageState::Hole };
        assert!(fits, "page {page} is told as {state}, and has data: {has_data}");
    }
}

/// A file that nobody touched, as it was.
pub(super) struct Undisturbed {
    file: Arc<ServiceFile>,
    data: Vec<u64>,
    size: u64,
}

impl Undisturbed {
    pub(super) fn new(bed: &Bed, file: &Arc<ServiceFile>) -> Self {
        let data = data_pages(&file.open_for(&bed.admin, false).unwrap());
        Self { file: Arc::clone(file), data, size: file.size_bytes().unwrap() }
    }

    /// It is as it was.
    pub(super) fn check(&self, bed: &Bed) {
        let name = FileName::Name(self.file.name().to_owned());
        let found = bed.service.registry.find(&bed.admin, &name, Right::Inspect).unwrap();
        assert_eq!((found.id(), found.inode()), (self.file.id(), self.file.inode()));
        assert_eq!(found.size_bytes().unwrap(), self.size);
        assert_eq!(data_pages(&found.open_for(&bed.admin, false).unwrap()), self.data);
    }
}

/// The client is gone: once what it gave is deleted, the service has as many descriptors as before and everybody's quotas back.
pub(super) async fn nothing_is_left(bed: &Bed, descriptors: usize) {
    let known: Vec<_> = bed.files.iter().map(|file| file.id()).collect();
    for file in bed.service.registry.all() {
        if !known.contains(&file.id()) {
            bed.service.registry.delete(&bed.admin, &FileName::Id(file.id())).unwrap();
        }
    }
    // A scan may be answered and not yet be done.
    tokio::task::spawn_blocking(|| ()).await.unwrap();
    bed.service.sweep();
    assert_eq!(open_descriptors(), descriptors, "descriptors are left open");

    let user = fdmap_server::files::Caller::new(USER, USER, Vec::new(), bed.service.uid);
    if user.admin {
        return;
    }
    drop(bed.service.shared.reserve(&user, limits().shared_bytes_per_user, page_size()).unwrap());
    // One of the files is this user's.
    let free = limits().bytes_per_user - bed.files[1].size_bytes().unwrap();
    let sizes = [page_size().bytes(), free - page_size().bytes()];
    for (nth, size_bytes) in sizes.into_iter().enumerate() {
        let name = format!("left {nth}");
        let creation = Creation {
            name: name.clone(),
            size_bytes,
            backing: Backing::Shmem,
            seals: fdmap_proto::Seals::default(),
            access: None,
        };
        bed.service.registry.create(&user, creation).unwrap();
    }
    for nth in 0..sizes.len() {
        bed.service.registry.delete(&user, &FileName::Name(format!("left {nth}"))).unwrap();
    }
}
