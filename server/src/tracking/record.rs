//! What the journal of a file keeps besides stamps, so that another process can go on: the file itself, its policy, its
//! cursors, and which of the descriptors that are kept for it is what. Messages of this program alone, not of the contract.

use fdmap_proto::convert::ConvertError;
use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::{CoveragePolicy, Cursor};
use fdmap_proto::units::{MappingId, PageIndex};
use fdmap_proto::v1;
use fdmap_sys::address::AddressRange;
use fdmap_sys::ownership::Ownership;
use prost::Message;

use super::observed::{Mapping, MappingExtent};

/// One address space whose mappings are tracked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedRecord {
    /// Names its descriptors.
    pub key: u64,
    /// Its process.
    pub pid: u32,
    /// The mappings, with what stood of them.
    pub mappings: Vec<Mapping>,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The file, as it was told last.
    pub file: FileInfo,
    /// Whose its inode was before it was adopted.
    pub before: Option<Ownership>,
    /// What checkpoints do about writers that are not observed.
    pub policy: CoveragePolicy,
    /// Cursors, without their frozen sets.
    pub cursors: Vec<Cursor>,
    /// Tracked mappings.
    pub observed: Vec<ObservedRecord>,
}

#[derive(Clone, PartialEq, Message)]
struct RecordMessage {
    #[prost(message, optional, tag = "1")]
    file: Option<v1::File>,
    #[prost(int32, tag = "2")]
    policy: i32,
    #[prost(message, repeated, tag = "3")]
    cursors: Vec<v1::Cursor>,
    #[prost(message, repeated, tag = "4")]
    observed: Vec<ObservedMessage>,
    #[prost(message, optional, tag = "5")]
    before: Option<OwnershipMessage>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct OwnershipMessage {
    #[prost(uint32, tag = "1")]
    uid: u32,
    #[prost(uint32, tag = "2")]
    gid: u32,
    #[prost(uint32, tag = "3")]
    mode: u32,
}

#[derive(Clone, PartialEq, Message)]
struct ObservedMessage {
    #[prost(fixed64, tag = "1")]
    key: u64,
    #[prost(uint32, tag = "2")]
    pid: u32,
    #[prost(message, repeated, tag = "3")]
    mappings: Vec<MappingMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct MappingMessage {
    #[prost(fixed64, tag = "1")]
    id: u64,
    #[prost(bool, tag = "2")]
    leaving: bool,
    /// Start, end and first page of one piece after the other.
    #[prost(uint64, repeated, tag = "3")]
    pieces: Vec<u64>,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Not protobuf.
    #[error("the record of a journal: {0}")]
    Undecodable(#[from] prost::DecodeError),
    /// It has no meaning.
    #[error("the record of a journal")]
    Meaning(#[from] ConvertError),
}

impl Record {
    /// The bytes that the journal keeps.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        RecordMessage {
            file: Some(self.file.clone().into()),
            policy: v1::CoveragePolicy::from(self.policy).into(),
            cursors: self.cursors.iter().cloned().map(v1::Cursor::from).collect(),
            observed: self.observed.iter().map(ObservedMessage::from).collect(),
            before: self.before.map(|before| {
                let (uid, gid, mode) = before.parts();
                OwnershipMessage { uid, gid, mode }
            }),
        }
        .encode_to_vec()
    }

    /// Reads what [`Self::encode`] gave.
    ///
    /// # Errors
    /// [`RecordError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let message = RecordMessage::decode(bytes)?;
        let file = message.file.ok_or(ConvertError::Missing("file"))?.try_into()?;
        let cursors = message.cursors.into_iter().map(Cursor::try_from).collect::<Result<_, _>>()?;
        let observed =
            message.observed.into_iter().map(ObservedRecord::try_from).collect::<Result<_, _>>()?;
        let before = message.before.map(|OwnershipMessage { uid, gid, mode }| Ownership::new(uid, gid, mode));
        Ok(Self { file, before, policy: CoveragePolicy::from_wire(message.policy)?, cursors, observed })
    }
}

impl From<&ObservedRecord> for ObservedMessage {
    fn from(observed: &ObservedRecord) -> Self {
        let mapping = |mapping: &Mapping| MappingMessage {
            id: mapping.id.get(),
            leaving: mapping.leaving,
            pieces: mapping
                .pieces
                .iter()
                .flat_map(|piece| [piece.range.start, piece.range.end, piece.first_page.0])
                .collect(),
        };
        Self {
            key: observed.key,
            pid: observed.pid,
            mappings: observed.mappings.iter().map(mapping).collect(),
        }
    }
}

impl TryFrom<ObservedMessage> for ObservedRecord {
    type Error = ConvertError;

    fn try_from(message: ObservedMessage) -> Result<Self, ConvertError> {
        let mapping = |mapping: MappingMessage| {
            let (triples, _) = mapping.pieces.as_chunks::<3>();
            let piece = |[start, end, first_page]: &[u64; 3]| MappingExtent {
                range: AddressRange { start: *start, end: *end.max(start) },
                first_page: PageIndex(*first_page),
            };
            let id = MappingId::new(mapping.id).ok_or(ConvertError::ZeroId("mapping_id"))?;
            Ok(Mapping { id, pieces: triples.iter().map(piece).collect(), leaving: mapping.leaving })
        };
        let mappings = message.mappings.into_iter().map(mapping).collect::<Result<_, ConvertError>>()?;
        Ok(Self { key: message.key, pid: message.pid, mappings })
    }
}
