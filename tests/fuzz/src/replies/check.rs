//! The replies that the library must accept or refuse.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use fdmap_client::{ClientError, FdpassClient, SharedSnapshot};
use fdmap_proto::ClientMapping;
use fdmap_proto::convert::FileName;
use fdmap_proto::file::FileInfo;
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header};
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::{MappingId, PageIndex, to_u64};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_sys::fd;
use fdmap_sys::mapping::IMMUTABLE_SEALS;
use fdmap_sys::memfd;

use super::drafts::{CallDraft, Packet};

pub(super) fn welcome(packet: &Packet, client: &FdpassClient) {
    assert!(packet.is_valid_welcome(), "{packet:?} was accepted");
    let Some(Reply::Welcome(welcome)) = packet.reply() else { unreachable!() };
    assert_eq!(client.page_size().bytes(), welcome.page_size);
}

/// Makes the call, which receives `packet`.
pub(super) fn call(client: &mut FdpassClient, draft: &CallDraft, packet: &Packet) {
    let (name, reply) = (FileName::Name("file".to_owned()), packet.reply());
    let descriptor = packet.descriptors.first().map(|fd| fd.as_fd());
    match draft {
        CallDraft::Open => opened(client.open(&name, true), reply, descriptor),
        CallDraft::MemfdCreate => opened(client.memfd_create("file", "memfd", 0), reply, descriptor),
        CallDraft::Adopt => {
            let memfd = memfd::create("adopted", None).unwrap();
            let info = client.adopt(memfd.as_fd(), "file", None);
            let Some(info) = accepted(info, &reply, |reply| match reply {
                Reply::Adopted(v1::Adopted { file }) => descriptor.is_none() && is_file(file.as_ref()),
                _ => false,
            }) else {
                return;
            };
            let Some(Reply::Adopted(v1::Adopted { file: Some(file) })) = reply else { unreachable!() };
            same_file(&info, &file);
        }
        CallDraft::Snapshot => {
            let snapshot = client.snapshot(&name, None, BodyLayout::Entries, Duration::ZERO);
            let is_snapshot = |reply: &Reply| {
                matches!(reply, Reply::Snapshot(_)) && descriptor.is_some_and(is_shared_snapshot)
            };
            if let Some(snapshot) = accepted(snapshot, &reply, is_snapshot) {
                shared_snapshot(&snapshot);
            }
        }
        CallDraft::Track(more) => {
            let mappings: Vec<_> = (0..=u64::from(more % 64)).map(mapping).collect();
            let uffd = memfd::create("uffd", None).unwrap();
            let ids = client.track(&name, uffd.as_fd(), None, None, &mappings);
            let is_tracked = |reply: &Reply| match reply {
                Reply::Tracked(v1::Tracked { mapping_ids }) => {
                    descriptor.is_none() && mapping_ids.len() == mappings.len() && !mapping_ids.contains(&0)
                }
                _ => false,
            };
            if let Some(ids) = accepted(ids, &reply, is_tracked) {
                let Some(Reply::Tracked(tracked)) = reply else { unreachable!() };
                assert_eq!(ids.into_iter().map(MappingId::get).collect::<Vec<_>>(), tracked.mapping_ids);
            }
        }
        CallDraft::Untrack => {
            let is_reply = |reply: &Reply| descriptor.is_none() && matches!(reply, Reply::Untracked(_));
            accepted(client.untrack(&name, &[]), &reply, is_reply);
        }
        CallDraft::Detach => {
            let is_reply = |reply: &Reply| descriptor.is_none() && matches!(reply, Reply::Detached(_));
            if let Some(mappings) = accepted(client.detach(None, &name, &[]), &reply, is_reply) {
                assert_eq!(reply, Some(Reply::Detached(v1::Detached { mappings })));
            }
        }
        CallDraft::SetCoveragePolicy => {
            let is_reply =
                |reply: &Reply| descriptor.is_none() && matches!(reply, Reply::CoveragePolicySet(_));
            accepted(client.set_coverage_policy(&name, CoveragePolicy::Ignore), &reply, is_reply);
        }
    }
}

fn mapping(nth: u64) -> ClientMapping {
    ClientMapping { address: nth * 8192, length_bytes: 4096, first_page: PageIndex(nth) }
}

/// Asserts that the library accepts exactly the replies that `is_valid` accepts, and passes on the errors of the service.
fn accepted<T>(
    result: Result<T, ClientError>,
    reply: &Option<Reply>,
    is_valid: impl Fn(&Reply) -> bool,
) -> Option<T> {
    let valid = reply.as_ref().is_some_and(is_valid);
    match result {
        Ok(value) => {
            assert!(valid, "{reply:?} was accepted");
            Some(value)
        }
        Err(error) => {
            assert!(!valid, "{reply:?}: {error}");
            let refused = match &error {
                ClientError::Refused { message, .. } => Some(message),
                _ => None,
            };
            let sent = match reply {
                Some(Reply::Error(v1::Error { message, .. })) => Some(message),
                _ => None,
            };
            assert_eq!(refused, sent, "{error}");
            None
        }
    }
}

fn opened(
    result: Result<(std::os::fd::OwnedFd, FileInfo), ClientError>,
    reply: Option<Reply>,
    descriptor: Option<BorrowedFd<'_>>,
) {
    let is_opened = |reply: &Reply| match reply {
        Reply::Opened(v1::Opened { file }) => descriptor.is_some() && is_file(file.as_ref()),
        _ => false,
    };
    let Some((fd, info)) = accepted(result, &reply, is_opened) else { return };
    let Some(Reply::Opened(v1::Opened { file: Some(file) })) = reply else { unreachable!() };
    same_file(&info, &file);
    let inode = |fd: BorrowedFd<'_>| fd::stat(fd).map(|stat| (stat.st_dev, stat.st_ino)).unwrap();
    assert_eq!(Some(inode(fd.as_fd())), descriptor.map(inode));
}

fn is_file(file: Option<&v1::File>) -> bool {
    file.is_some_and(|file| FileInfo::try_from(file.clone()).is_ok())
}

fn same_file(info: &FileInfo, file: &v1::File) {
    assert_eq!((info.id.get(), &info.name, info.size_bytes), (file.id, &file.name, file.size_bytes));
}

/// The header of a memfd that can no longer change.
fn header_of(memfd: BorrowedFd<'_>) -> Option<Header> {
    let seals = memfd::seals(memfd).ok()?;
    let size = u64::try_from(fd::stat(memfd).ok()?.st_size).ok()?;
    let mut bytes = [0; HEADER_BYTES];
    let read = nix::sys::uio::pread(memfd, &mut bytes, 0).ok()?;
    let header = Header::decode(&bytes[..read], size).ok()?;
    // Every bit of the header is decoded.
    assert_eq!(header.encode(), bytes);
    (seals & IMMUTABLE_SEALS == IMMUTABLE_SEALS).then_some(header)
}

fn is_shared_snapshot(memfd: BorrowedFd<'_>) -> bool {
    header_of(memfd).is_some()
}

/// An accepted snapshot has as many bytes as its header requires, and the state of exactly the pages in its range.
fn shared_snapshot(snapshot: &SharedSnapshot) {
    let header = snapshot.header();
    assert_eq!(Some(header), header_of(snapshot.as_fd()).as_ref());
    let (range, entries) = (header.range, header.layout == BodyLayout::Entries);
    assert_eq!(header.total_bytes(), Some(to_u64(snapshot.bytes().len())));
    for page in range.start().0..range.end().0 {
        let (state, entry) = (snapshot.state(PageIndex(page)), snapshot.entry(PageIndex(page)));
        assert!(state.is_some() && entry.is_some() == entries, "page {page} of {range}");
    }
    // The last byte of packed states may have room for three more.
    let outside = [range.start().0.checked_sub(1), range.end().0.checked_add(4), Some(u64::MAX)];
    for page in outside.into_iter().flatten().filter(|page| !range.contains(PageIndex(*page))) {
        assert_eq!(
            (snapshot.state(PageIndex(page)), snapshot.entry(PageIndex(page))),
            (None, None),
            "page {page}"
        );
    }
}
