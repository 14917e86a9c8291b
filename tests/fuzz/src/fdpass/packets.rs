//! Drafts of packets.

use std::os::fd::OwnedFd;

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::file::OwnedName;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use prost::Message as _;

use super::descriptors::{Descriptors, Kind};
use crate::draft::{DurationDraft, FileDraft, RangeDraft, enum_value, enum_values, lifetime, rarely};

/// The objects that packets can name.
pub(super) struct Known {
    /// Names and ids of files.
    pub(super) files: Vec<(OwnedName, u64)>,
    /// The address where the first file is mapped.
    pub(super) mapped_at: u64,
    /// Ids of tracked mappings.
    pub(super) tracked: Vec<u64>,
}

#[derive(Arbitrary, Debug)]
pub(super) struct PacketDraft {
    #[arbitrary(with = rarely)]
    pub(super) truncated: bool,
    #[arbitrary(with = rarely)]
    pub(super) descriptors_lost: bool,
    descriptors: DescriptorsDraft,
    payload: Payload,
}

/// The descriptors of a packet.
#[derive(Debug)]
enum DescriptorsDraft {
    /// As many as the request takes.
    Expected(Kind),
    Any(Vec<Kind>),
}

impl<'a> Arbitrary<'a> for DescriptorsDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(if rarely(u)? {
            Self::Any(u.arbitrary_iter()?.take(4).collect::<Result<_>>()?)
        } else {
            Self::Expected(u.arbitrary()?)
        })
    }
}

#[derive(Debug)]
enum Payload {
    Request(Request),
    /// A request with flipped bits, truncated.
    Corrupt(Request, Vec<(u16, u8)>, u16),
    Bytes(Vec<u8>),
}

impl<'a> Arbitrary<'a> for Payload {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=31)? {
            13 => Self::Corrupt(u.arbitrary()?, u.arbitrary()?, u.arbitrary()?),
            21 => Self::Bytes(u.arbitrary()?),
            _ => Self::Request(u.arbitrary()?),
        })
    }
}

#[derive(Debug)]
enum Request {
    Open {
        file: FileDraft,
        mode: i32,
    },
    Adopt {
        name: NameDraft,
        access: Option<AccessDraft>,
        lifetime: i32,
    },
    FetchSnapshot {
        file: FileDraft,
        range: RangeDraft,
        layout: i32,
        max_age: DurationDraft,
    },
    Hello {
        version: u32,
        client: ClientDraft,
    },
    Track {
        file: FileDraft,
        mappings: Vec<MappingDraft>,
        pagemap: bool,
        maps: bool,
        pid: PidDraft,
        used: bool,
    },
    Untrack {
        file: FileDraft,
        ids: Vec<IdDraft>,
    },
    Detach {
        file: FileDraft,
        pid: PidDraft,
        ids: Vec<IdDraft>,
    },
    MemfdCreate {
        name: NameDraft,
        memfd_name: String,
        flags: u32,
        lifetime: i32,
    },
    NoOperation,
}

/// A mapping of a Track request.
#[derive(Debug)]
enum MappingDraft {
    /// A part of the existing mapping: its first page, its number of pages, and an error added to the file's page.
    Existing(u8, u8, u8),
    Any(u64, u64, u64),
}

impl<'a> Arbitrary<'a> for MappingDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(if rarely(u)? {
            Self::Any(u.arbitrary()?, u.arbitrary()?, u.arbitrary()?)
        } else {
            Self::Existing(u.int_in_range(0..=15)?, u.int_in_range(0..=16)?, u8::from(rarely(u)?))
        })
    }
}

/// Mostly one to three, sometimes more than a request may name.
fn list<'a, T: Arbitrary<'a>>(u: &mut Unstructured<'a>) -> Result<Vec<T>> {
    let count = if rarely(u)? { u.int_in_range(0..=70)? } else { u.int_in_range(1..=3)? };
    (0..count).map(|_| u.arbitrary()).collect()
}

/// The process of a request.
#[derive(Debug)]
enum PidDraft {
    Own,
    /// Any pid: init, or one that does not exist, by chance.
    Any(u32),
}

impl<'a> Arbitrary<'a> for PidDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(if rarely(u)? { Self::Any(u.arbitrary()?) } else { Self::Own })
    }
}

impl PidDraft {
    fn field(&self) -> u32 {
        match self {
            Self::Own => 0,
            // The own pid would mean `Own`.
            Self::Any(pid) if *pid == std::process::id() => 1,
            Self::Any(pid) => *pid,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum IdDraft {
    /// A mapping that is or was tracked.
    Known(u8),
    Any(u64),
}

impl<'a> Arbitrary<'a> for Request {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=31)? {
            13 => Self::NoOperation,
            21 => Self::Hello { version: u.arbitrary()?, client: u.arbitrary()? },
            0..=5 => Self::Open { file: u.arbitrary()?, mode: enum_value(u, 2)? },
            6..=10 => Self::Track {
                file: u.arbitrary()?,
                mappings: list(u)?,
                pagemap: u.arbitrary()?,
                maps: u.arbitrary()?,
                pid: u.arbitrary()?,
                used: rarely(u)?,
            },
            11..=12 => Self::Untrack { file: u.arbitrary()?, ids: list(u)? },
            14 => Self::Detach { file: u.arbitrary()?, pid: u.arbitrary()?, ids: u.arbitrary()? },
            15 => Self::MemfdCreate {
                name: u.arbitrary()?,
                memfd_name: u.arbitrary()?,
                flags: if rarely(u)? { u.arbitrary()? } else { u.int_in_range(0..=3)? & 2 },
                lifetime: lifetime(u)?,
            },
            16..=20 => {
                Self::Adopt { name: u.arbitrary()?, access: u.arbitrary()?, lifetime: lifetime(u)? }
            }
            _ => Self::FetchSnapshot {
                file: u.arbitrary()?,
                range: u.arbitrary()?,
                layout: enum_value(u, 2)?,
                max_age: u.arbitrary()?,
            },
        })
    }
}

#[derive(Arbitrary, Debug)]
enum ClientDraft {
    Any(String),
    /// A name of this length, also longer than a message may be.
    Long(u32),
}

#[derive(Arbitrary, Debug)]
enum NameDraft {
    /// Empty: selects the name of the memfd.
    Own,
    New(u8),
    Taken,
    Long(u8),
    Any(String),
}

#[derive(Arbitrary, Debug)]
struct AccessDraft {
    #[arbitrary(with = user)]
    uid: u32,
    #[arbitrary(with = user)]
    gid: u32,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    owner: Vec<i32>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    group: Vec<i32>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    other: Vec<i32>,
}

fn user(u: &mut Unstructured<'_>) -> Result<u32> {
    if rarely(u)? { u.arbitrary() } else { Ok(*u.choose(&[0, super::USER, super::USER + 1])?) }
}

impl PacketDraft {
    pub(super) fn hello() -> Self {
        let hello = Request::Hello { version: 1, client: ClientDraft::Any("fuzz".to_owned()) };
        let descriptors = DescriptorsDraft::Any(Vec::new());
        Self { payload: Payload::Request(hello), descriptors, truncated: false, descriptors_lost: false }
    }

    /// Encodes the message.
    pub(super) fn bytes(&self, known: &Known) -> Vec<u8> {
        match &self.payload {
            Payload::Request(request) => request.message(known).encode_to_vec(),
            Payload::Corrupt(request, flipped, len) => {
                let mut bytes = request.message(known).encode_to_vec();
                let modulus = bytes.len().max(1);
                for (at, bits) in flipped {
                    if let Some(byte) = bytes.get_mut(usize::from(*at) % modulus) {
                        *byte ^= bits;
                    }
                }
                bytes.truncate(usize::from(*len));
                bytes
            }
            Payload::Bytes(bytes) => bytes.clone(),
        }
    }

    pub(super) fn descriptors(&self, descriptors: &mut Descriptors) -> Vec<(Kind, OwnedFd)> {
        let request = match &self.payload {
            Payload::Request(request) | Payload::Corrupt(request, ..) => Some(request),
            Payload::Bytes(_) => None,
        };
        let kinds = match (&self.descriptors, request) {
            (DescriptorsDraft::Expected(kind), Some(Request::Adopt { .. })) => vec![*kind],
            (DescriptorsDraft::Expected(_), Some(Request::Track { pagemap, maps, used, .. })) => {
                let userfaultfd = if *used { Kind::Userfaultfd } else { Kind::NewUserfaultfd };
                let kinds = [Some(userfaultfd), pagemap.then_some(Kind::Pagemap), maps.then_some(Kind::Maps)];
                kinds.into_iter().flatten().collect()
            }
            (DescriptorsDraft::Expected(_), _) => Vec::new(),
            (DescriptorsDraft::Any(kinds), _) => kinds.clone(),
        };
        kinds.into_iter().map(|kind| (kind, descriptors.get(kind))).collect()
    }
}

impl Request {
    fn message(&self, known: &Known) -> v1::FdpassRequest {
        let files = &known.files;
        let op = match self {
            Self::Hello { version, client } => {
                let client = match client {
                    ClientDraft::Any(client) => client.clone(),
                    ClientDraft::Long(bytes) => "x".repeat(usize::try_from(bytes % 70_000).unwrap_or(0)),
                };
                Some(Op::Hello(v1::Hello { version: *version, client }))
            }
            Self::Open { file, mode } => Some(Op::Open(v1::Open { file: file.field(files), mode: *mode })),
            Self::Adopt { name, access, lifetime } => Some(Op::Adopt(v1::Adopt {
                name: name.field(),
                access: access.as_ref().map(AccessDraft::field),
                lifetime: *lifetime,
            })),
            Self::MemfdCreate { name, memfd_name, flags, lifetime } => {
                let (name, memfd_name) = (name.field(), memfd_name.clone());
                Some(Op::MemfdCreate(v1::MemfdCreate {
                    name,
                    memfd_name,
                    flags: *flags,
                    lifetime: *lifetime,
                }))
            }
            Self::FetchSnapshot { file, range, layout, max_age } => {
                Some(Op::FetchSnapshot(v1::FetchSnapshot {
                    file: file.field(files),
                    range: range.field(0, 10),
                    layout: *layout,
                    max_age: max_age.field(),
                }))
            }
            Self::Track { file, mappings, pagemap, maps, pid, .. } => Some(Op::Track(v1::Track {
                file: file.field(files),
                mappings: mappings.iter().map(|mapping| mapping.field(known)).collect(),
                pagemap: *pagemap,
                maps: *maps,
                pid: pid.field(),
            })),
            Self::Untrack { file, ids } => {
                let mapping_ids = ids.iter().map(|id| id.field(known)).collect();
                Some(Op::Untrack(v1::Untrack { file: file.field(files), mapping_ids }))
            }
            Self::Detach { file, pid, ids } => {
                let mapping_ids = ids.iter().map(|id| id.field(known)).collect();
                Some(Op::Detach(v1::Detach { file: file.field(files), pid: pid.field(), mapping_ids }))
            }
            Self::NoOperation => None,
        };
        v1::FdpassRequest { op }
    }
}

impl IdDraft {
    fn field(&self, known: &Known) -> u64 {
        match self {
            Self::Known(nth) if !known.tracked.is_empty() => {
                known.tracked[usize::from(*nth) % known.tracked.len()]
            }
            Self::Known(nth) => u64::from(*nth),
            Self::Any(id) => *id,
        }
    }
}

impl NameDraft {
    fn field(&self) -> String {
        match self {
            Self::Own => String::new(),
            Self::New(nth) => format!("new {}", nth % 4),
            Self::Taken => "user".to_owned(),
            Self::Long(bytes) => "x".repeat(200 + usize::from(*bytes)),
            Self::Any(name) => name.clone(),
        }
    }
}

impl MappingDraft {
    fn field(&self, known: &Known) -> v1::ClientMapping {
        match *self {
            Self::Existing(first, pages, shift) => {
                let (first, pages) = (u64::from(first), u64::from(pages));
                let page = super::page_size().bytes();
                let first_page = first + u64::from(shift);
                v1::ClientMapping {
                    address: known.mapped_at + first * page,
                    length_bytes: pages * page,
                    first_page,
                }
            }
            Self::Any(address, length_bytes, first_page) => {
                v1::ClientMapping { address, length_bytes, first_page }
            }
        }
    }
}

impl AccessDraft {
    fn field(&self) -> v1::Access {
        let Self { uid, gid, owner, group, other } = self;
        let (owner, group, other) = (owner.clone(), group.clone(), other.clone());
        v1::Access { uid: *uid, gid: *gid, owner, group, other }
    }
}
