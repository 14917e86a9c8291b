//! The record of the journal: what changes rarely, so that the next process of the service can continue.
//!
//! It holds the file, its policy, its cursors, and which stored descriptors belong to which mappings. The messages are private to
//! this program and are not part of `proto`.

use fdmap_proto::convert::ConvertError;
use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::{CoveragePolicy, Cursor};
use fdmap_proto::units::{MappingId, PageIndex};
use fdmap_proto::v1;
use fdmap_sys::address::AddressRange;
use fdmap_sys::ownership::Ownership;
use prost::Message;

use super::mapping::{Ending, MappingExtent, RegisteredMapping};

/// A tracked address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressSpaceRecord {
    /// Names the stored descriptors.
    pub(crate) key: u64,
    pub(crate) pid: u32,
    /// Whose holder has its descriptors.
    pub(crate) user: u32,
    pub(crate) charged: u32,
    pub(crate) mappings: Vec<RegisteredMapping>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) file: FileInfo,
    /// Owner and mode of the inode before the file was adopted.
    pub(crate) original_owner: Option<Ownership>,
    pub(crate) policy: CoveragePolicy,
    /// Without their frozen sets.
    pub(crate) cursors: Vec<Cursor>,
    pub(crate) spaces: Vec<AddressSpaceRecord>,
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
    spaces: Vec<AddressSpaceMessage>,
    #[prost(message, optional, tag = "5")]
    original_owner: Option<OwnershipMessage>,
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
struct AddressSpaceMessage {
    #[prost(fixed64, tag = "1")]
    key: u64,
    #[prost(uint32, tag = "2")]
    pid: u32,
    #[prost(message, repeated, tag = "3")]
    mappings: Vec<MappingMessage>,
    #[prost(uint32, tag = "4")]
    user: u32,
    #[prost(uint32, optional, tag = "5")]
    charged: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct MappingMessage {
    #[prost(fixed64, tag = "1")]
    id: u64,
    #[prost(bool, tag = "2")]
    ending: bool,
    /// Start address, end address and first page of each extent.
    #[prost(uint64, repeated, tag = "3")]
    extents: Vec<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("decode of a journal record: {0}")]
    Undecodable(#[from] prost::DecodeError),
    #[error("invalid journal record")]
    Meaning(#[from] ConvertError),
}

impl Record {
    /// Encodes the record for the journal.
    #[must_use]
    pub(crate) fn encode(&self) -> Vec<u8> {
        RecordMessage {
            file: Some(self.file.clone().into()),
            policy: v1::CoveragePolicy::from(self.policy).into(),
            cursors: self.cursors.iter().cloned().map(v1::Cursor::from).collect(),
            spaces: self.spaces.iter().map(AddressSpaceMessage::from).collect(),
            original_owner: self.original_owner.map(|owner| {
                let (uid, gid, mode) = owner.parts();
                OwnershipMessage { uid, gid, mode }
            }),
        }
        .encode_to_vec()
    }

    /// Decodes what [`Self::encode`] returned.
    ///
    /// # Errors
    /// [`RecordError`]
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let message = RecordMessage::decode(bytes)?;
        let file = message.file.ok_or(ConvertError::Missing("file"))?.try_into()?;
        let cursors = message.cursors.into_iter().map(Cursor::try_from).collect::<Result<_, _>>()?;
        let spaces =
            message.spaces.into_iter().map(AddressSpaceRecord::try_from).collect::<Result<_, _>>()?;
        let original_owner =
            message.original_owner.map(|OwnershipMessage { uid, gid, mode }| Ownership::new(uid, gid, mode));
        let policy = CoveragePolicy::from_wire(message.policy)?;
        Ok(Self { file, original_owner, policy, cursors, spaces })
    }
}

impl From<&AddressSpaceRecord> for AddressSpaceMessage {
    fn from(space: &AddressSpaceRecord) -> Self {
        let mapping = |mapping: &RegisteredMapping| MappingMessage {
            id: mapping.id.get(),
            ending: mapping.ending.loses_no_write(),
            extents: mapping
                .extents
                .iter()
                .flat_map(|extent| [extent.range.start, extent.range.end, extent.first_page.0])
                .collect(),
        };
        let AddressSpaceRecord { key, pid, user, charged, ref mappings } = *space;
        let mappings = mappings.iter().map(mapping).collect();
        Self { key, pid, mappings, user, charged: Some(charged) }
    }
}

impl TryFrom<AddressSpaceMessage> for AddressSpaceRecord {
    type Error = ConvertError;

    fn try_from(message: AddressSpaceMessage) -> Result<Self, ConvertError> {
        let mapping = |mapping: MappingMessage| {
            let (triples, _) = mapping.extents.as_chunks::<3>();
            let extent = |[start, end, first_page]: &[u64; 3]| MappingExtent {
                range: AddressRange { start: *start, end: *end.max(start) },
                first_page: PageIndex(*first_page),
            };
            let id = MappingId::new(mapping.id).ok_or(ConvertError::ZeroId("mapping_id"))?;
            Ok(RegisteredMapping {
                id,
                extents: triples.iter().map(extent).collect(),
                ending: if mapping.ending { Ending::Announced } else { Ending::Unannounced },
            })
        };
        let AddressSpaceMessage { key, pid, user, charged, mappings } = message;
        let mappings = mappings.into_iter().map(mapping).collect::<Result<_, ConvertError>>()?;
        // Earlier versions did not record who is charged.
        Ok(Self { key, pid, user, charged: charged.unwrap_or(user), mappings })
    }
}
