//! Drafts of calls, replies and shared snapshots.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, UNIX_EPOCH};

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::provenance::{Moment, ProbeKind, Provenance, Uncertainty};
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header};
use fdmap_proto::units::{FileId, PageIndex, PageRange, PageSize, to_u64};
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::{FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES, v1};
use fdmap_sys::mapping::IMMUTABLE_SEALS;
use fdmap_sys::memfd;
use prost::Message as _;

use crate::draft::{enum_value, enum_values, rarely, up_to};

/// A call of the library.
#[derive(Arbitrary, Debug)]
pub(super) enum CallDraft {
    Open,
    Adopt,
    Snapshot,
    /// The number of mappings, less one.
    Track(u8),
    Untrack,
    Detach,
    MemfdCreate,
    SetCoveragePolicy,
}

/// A packet of the service.
#[derive(Arbitrary, Debug)]
pub(super) struct PacketDraft {
    body: Body,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 3))]
    descriptors: Vec<DescriptorDraft>,
    /// Longer than the protocol allows.
    #[arbitrary(with = rarely)]
    long: bool,
    /// Close the connection instead.
    #[arbitrary(with = rarely)]
    closes: bool,
}

#[derive(Arbitrary, Debug)]
enum Body {
    Opened(Option<FileDraft>),
    Adopted(Option<FileDraft>),
    Snapshot,
    Tracked(Vec<u64>),
    Untracked,
    Detached(u32),
    CoveragePolicySet,
    Welcome {
        version: Option<u32>,
        page_size: u64,
    },
    Error(i32, String, bool),
    /// A reply without a result.
    Empty,
    Bytes(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
struct FileDraft {
    id: u8,
    name: String,
    size_bytes: u64,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_value(u, 3))]
    backing: i32,
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(0) })]
    hugetlb_page_size: u64,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    seals: Vec<i32>,
    access: bool,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_value(u, 2))]
    origin: i32,
    created: Option<(i64, i32)>,
}

#[derive(Arbitrary, Debug)]
enum DescriptorDraft {
    Snapshot(SnapshotDraft),
    Null,
}

/// A memfd with the header of a shared snapshot.
#[derive(Arbitrary, Debug)]
struct SnapshotDraft {
    states: bool,
    slots: bool,
    first: u64,
    pages: u16,
    /// The byte of the body, everywhere.
    body: u8,
    /// A byte of the header that is replaced: position and value.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if u.ratio(1_u8, 3)? { u.arbitrary() } else { Ok(None) })]
    changed: Option<(u8, u8)>,
    /// Bytes that are missing at the end.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(0) })]
    missing: u16,
    /// Without the seals that make it immutable.
    #[arbitrary(with = rarely)]
    unsealed: bool,
}

/// A packet to send.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
    pub(super) closes: bool,
}

impl Packet {
    pub(super) fn of(reply: Reply) -> Self {
        let bytes = v1::FdpassReply { result: Some(reply) }.encode_to_vec();
        Self { bytes, descriptors: Vec::new(), closes: false }
    }

    /// The reply, if the protocol allows the packet.
    pub(super) fn reply(&self) -> Option<Reply> {
        let allowed = !self.closes
            && !self.bytes.is_empty()
            && self.bytes.len() <= MAX_FDPASS_MESSAGE_BYTES
            && self.descriptors.len() <= 1;
        v1::FdpassReply::decode(&self.bytes[..]).ok().filter(|_| allowed)?.result
    }

    pub(super) fn is_valid_welcome(&self) -> bool {
        let valid = |welcome: &v1::Welcome| {
            welcome.version == FDPASS_VERSION && PageSize::new(welcome.page_size).is_some()
        };
        matches!(self.reply(), Some(Reply::Welcome(welcome)) if valid(&welcome))
    }
}

impl PacketDraft {
    pub(super) fn packet(&self) -> Packet {
        let file = |draft: &Option<FileDraft>| draft.as_ref().map(FileDraft::message);
        let reply = match &self.body {
            Body::Opened(draft) => Reply::Opened(v1::Opened { file: file(draft) }),
            Body::Adopted(draft) => Reply::Adopted(v1::Adopted { file: file(draft) }),
            Body::Snapshot => Reply::Snapshot(v1::Snapshot::default()),
            Body::Tracked(ids) => Reply::Tracked(v1::Tracked { mapping_ids: ids.clone() }),
            Body::Untracked => Reply::Untracked(v1::Untracked {}),
            Body::Detached(mappings) => Reply::Detached(v1::Detached { mappings: *mappings }),
            Body::CoveragePolicySet => Reply::CoveragePolicySet(v1::SetCoveragePolicyResponse::default()),
            Body::Welcome { version, page_size } => Reply::Welcome(v1::Welcome {
                version: version.unwrap_or(FDPASS_VERSION),
                page_size: *page_size,
                ..v1::Welcome::default()
            }),
            Body::Error(code, message, fatal) => {
                Reply::Error(v1::Error { code: *code, message: message.clone(), fatal: *fatal })
            }
            Body::Empty | Body::Bytes(_) => Reply::Untracked(v1::Untracked {}),
        };
        let mut packet = Packet::of(reply);
        match &self.body {
            Body::Bytes(bytes) => packet.bytes.clone_from(bytes),
            // An unknown field.
            Body::Empty => packet.bytes = vec![0x78, 1],
            _ => {}
        }
        if self.long {
            packet.bytes.resize(MAX_FDPASS_MESSAGE_BYTES + 1, 0);
        }
        packet.closes = self.closes;
        packet.descriptors = self.descriptors.iter().map(DescriptorDraft::open).collect();
        packet
    }
}

impl FileDraft {
    fn message(&self) -> v1::File {
        let created = self.created.map(|(seconds, nanos)| prost_types::Timestamp { seconds, nanos });
        v1::File {
            id: u64::from(self.id),
            name: self.name.clone(),
            size_bytes: self.size_bytes,
            pages: self.size_bytes.div_ceil(4096),
            backing: self.backing,
            hugetlb_page_size: self.hugetlb_page_size,
            seals: self.seals.clone(),
            access: self.access.then(v1::Access::default),
            origin: self.origin,
            created,
            ..v1::File::default()
        }
    }
}

impl DescriptorDraft {
    fn open(&self) -> OwnedFd {
        match self {
            Self::Null => File::open("/dev/null").unwrap().into(),
            Self::Snapshot(draft) => draft.memfd(),
        }
    }
}

impl SnapshotDraft {
    fn memfd(&self) -> OwnedFd {
        let layout = if self.states { BodyLayout::States } else { BodyLayout::Entries };
        let pages = u64::from(self.pages % 600);
        let at = |ns| Moment { monotonic_ns: ns, wall: UNIX_EPOCH + Duration::from_nanos(ns) };
        let header = Header {
            layout,
            slots: self.slots,
            page_size: PageSize::new(4096).unwrap(),
            range: PageRange::at(PageIndex(self.first % (u64::MAX - 600)), pages),
            file: FileId::new(1).unwrap(),
            file_pages: self.first,
            provenance: Provenance {
                probe: if self.states { ProbeKind::Syscalls } else { ProbeKind::Xarray },
                begin: at(1),
                end: at(2),
                uncertainty: Uncertainty::default(),
                swap_cached_distinguished: self.slots,
                instance: 3,
            },
        };
        let mut bytes = header.encode().to_vec();
        if let Some((position, value)) = self.changed {
            bytes[usize::from(position) % HEADER_BYTES] = value;
        }
        bytes.resize(usize::try_from(header.total_bytes().unwrap()).unwrap(), self.body);
        bytes.truncate(bytes.len().saturating_sub(usize::from(self.missing)));
        let fd = memfd::create("snapshot", None).unwrap();
        memfd::resize(fd.as_fd(), to_u64(bytes.len())).unwrap();
        let file = File::from(fd);
        file.write_all_at(&bytes, 0).unwrap();
        if !self.unsealed {
            memfd::add_seals(file.as_fd(), IMMUTABLE_SEALS).unwrap();
        }
        file.into()
    }
}
