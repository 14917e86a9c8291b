//! What a client sends.

use std::os::fd::OwnedFd;

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::v1;
use fdmap_proto::v1::handover_request::Op;
use prost::Message as _;

use super::descriptors::{Descriptors, Kind};
use crate::draft::{DurationDraft, FileDraft, RangeDraft, enum_value, enum_values, rarely};

/// One packet.
#[derive(Arbitrary, Debug)]
pub(super) struct Packet {
    #[arbitrary(with = rarely)]
    pub(super) truncated: bool,
    #[arbitrary(with = rarely)]
    pub(super) descriptors_lost: bool,
    along: Along,
    payload: Payload,
}

/// The descriptors that come along.
#[derive(Debug)]
enum Along {
    /// As many as the request takes.
    Fitting(Kind),
    Any(Vec<Kind>),
}

impl<'a> Arbitrary<'a> for Along {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(if rarely(u)? {
            Self::Any(u.arbitrary_iter()?.take(4).collect::<Result<_>>()?)
        } else {
            Self::Fitting(u.arbitrary()?)
        })
    }
}

#[derive(Debug)]
enum Payload {
    Request(Request),
    /// One with some bits turned over, or cut.
    Spoiled(Request, Vec<(u16, u8)>, u16),
    Bytes(Vec<u8>),
}

impl<'a> Arbitrary<'a> for Payload {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=31)? {
            13 => Self::Spoiled(u.arbitrary()?, u.arbitrary()?, u.arbitrary()?),
            21 => Self::Bytes(u.arbitrary()?),
            _ => Self::Request(u.arbitrary()?),
        })
    }
}

#[derive(Debug)]
enum Request {
    Open { file: FileDraft, mode: i32 },
    Adopt { name: NameDraft, access: Option<AccessDraft> },
    Fetch { file: FileDraft, range: RangeDraft, layout: i32, max_age: DurationDraft },
    Hello { version: u32, client: ClientDraft },
    Nothing,
}

impl<'a> Arbitrary<'a> for Request {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=31)? {
            13 => Self::Nothing,
            21 => Self::Hello { version: u.arbitrary()?, client: u.arbitrary()? },
            0..=7 => Self::Open { file: u.arbitrary()?, mode: enum_value(u, 2)? },
            8..=20 => Self::Adopt { name: u.arbitrary()?, access: u.arbitrary()? },
            _ => Self::Fetch {
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
    /// So many bytes, also more than a message may have.
    Long(u32),
}

#[derive(Arbitrary, Debug)]
enum NameDraft {
    /// The memfd's own.
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

impl Packet {
    pub(super) fn hello() -> Self {
        let hello = Request::Hello { version: 1, client: ClientDraft::Any("fuzz".to_owned()) };
        let along = Along::Any(Vec::new());
        Self { payload: Payload::Request(hello), along, truncated: false, descriptors_lost: false }
    }

    /// The message, where `files` are there.
    pub(super) fn bytes(&self, files: &[(String, u64)]) -> Vec<u8> {
        match &self.payload {
            Payload::Request(request) => request.message(files).encode_to_vec(),
            Payload::Spoiled(request, turned, cut) => {
                let mut bytes = request.message(files).encode_to_vec();
                let len = bytes.len().max(1);
                for (at, bits) in turned {
                    if let Some(byte) = bytes.get_mut(usize::from(*at) % len) {
                        *byte ^= bits;
                    }
                }
                bytes.truncate(usize::from(*cut));
                bytes
            }
            Payload::Bytes(bytes) => bytes.clone(),
        }
    }

    pub(super) fn descriptors(&self, descriptors: &mut Descriptors) -> Vec<(Kind, OwnedFd)> {
        let adopts = match &self.payload {
            Payload::Request(request) | Payload::Spoiled(request, ..) => {
                matches!(request, Request::Adopt { .. })
            }
            Payload::Bytes(_) => false,
        };
        let kinds = match &self.along {
            Along::Fitting(kind) if adopts => vec![*kind],
            Along::Fitting(_) => Vec::new(),
            Along::Any(kinds) => kinds.clone(),
        };
        kinds.into_iter().map(|kind| (kind, descriptors.get(kind))).collect()
    }
}

impl Request {
    fn message(&self, files: &[(String, u64)]) -> v1::HandoverRequest {
        let op = match self {
            Self::Hello { version, client } => {
                let client = match client {
                    ClientDraft::Any(client) => client.clone(),
                    ClientDraft::Long(bytes) => "x".repeat(usize::try_from(bytes % 70_000).unwrap_or(0)),
                };
                Some(Op::Hello(v1::Hello { version: *version, client }))
            }
            Self::Open { file, mode } => Some(Op::Open(v1::Open { file: file.field(files), mode: *mode })),
            Self::Adopt { name, access } => {
                let name = match name {
                    NameDraft::Own => String::new(),
                    NameDraft::New(nth) => format!("new {}", nth % 4),
                    NameDraft::Taken => "theirs".to_owned(),
                    NameDraft::Long(bytes) => "x".repeat(200 + usize::from(*bytes)),
                    NameDraft::Any(name) => name.clone(),
                };
                Some(Op::Adopt(v1::Adopt { name, access: access.as_ref().map(AccessDraft::field) }))
            }
            Self::Fetch { file, range, layout, max_age } => Some(Op::FetchSnapshot(v1::FetchSnapshot {
                file: file.field(files),
                range: range.field(0, 10),
                layout: *layout,
                max_age: max_age.field(),
            })),
            Self::Nothing => None,
        };
        v1::HandoverRequest { op }
    }
}

impl AccessDraft {
    fn field(&self) -> v1::Access {
        let Self { uid, gid, owner, group, other } = self;
        let (owner, group, other) = (owner.clone(), group.clone(), other.clone());
        v1::Access { uid: *uid, gid: *gid, owner, group, other }
    }
}
