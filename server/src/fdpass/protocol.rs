//! Decoding and validation of fdpass packets. Pure.
//!
//! ```text
//!   waiting for Hello  --Hello-->  open  --any other operation-->  open
//! ```
//!
//! A packet that violates the protocol ends the session, in both states. An operation that is invalid or fails does not.

use std::time::Duration;

use fdmap_proto::convert::{ConvertError, FileName, duration_from_wire, lifetime_from_wire};
use fdmap_proto::file::{Access, Lifetime};
use fdmap_proto::shared_snapshot::BodyLayout;
use fdmap_proto::tracking::{ClientMapping, CoveragePolicy};
use fdmap_proto::units::{MappingId, PageRange, to_u64};
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES, v1};
use fdmap_sys::memfd::MemfdFlags;
use prost::Message as _;

use super::error::{MAX_CLIENT_NAME_BYTES, ProtocolError};
use crate::query::QueryError;

/// Mappings in one request.
const MAX_MAPPINGS: u64 = 64;

/// A received packet, without its descriptors.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The message.
    pub bytes: &'a [u8],
    /// The message was longer than the receive buffer.
    pub truncated: bool,
    /// Number of descriptors that the packet carried.
    pub descriptors: usize,
    /// `MSG_CTRUNC`: the kernel dropped descriptors, because the service has too many open.
    pub descriptors_lost: bool,
    /// A descriptor is of no type that an operation takes. None of the packet's descriptors reach the session.
    pub foreign_descriptors: bool,
}

/// A valid request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opens the session.
    Hello {
        /// The version that both sides speak.
        version: u32,
        /// The client's name, for the log.
        client: String,
    },
    /// Sends a descriptor of a file.
    Open { file: FileName, writable: bool },
    /// Adopts the passed descriptor.
    Adopt {
        /// Empty: the name that the memfd was created with.
        name: String,
        /// `None`: the caller owns the file, and no other user has a right to it.
        access: Option<Access>,
        /// `None`: the default for the caller.
        lifetime: Option<Lifetime>,
    },
    /// Sends page states as a shared snapshot.
    FetchSnapshot(SnapshotRequest),
    /// Tracks writes through mappings.
    Track(TrackRequest),
    /// Harvests mappings of a process a last time and stops tracking them.
    Detach {
        file: FileName,
        /// `None`: the client's process.
        pid: Option<u32>,
        /// Empty: all mappings of the process.
        mappings: Vec<MappingId>,
    },
    /// Creates an empty memfd and sends a descriptor of it.
    MemfdCreate {
        /// Unique in the service.
        name: String,
        /// The name argument of `memfd_create`.
        memfd_name: String,
        flags: MemfdFlags,
        /// `None`: the default for the caller.
        lifetime: Option<Lifetime>,
    },
    /// Sets the reaction of checkpoints to coverage gaps.
    SetCoveragePolicy { file: FileName, policy: CoveragePolicy },
    /// Harvests mappings for the last time, before the client unmaps them.
    Untrack { file: FileName, mappings: Vec<MappingId> },
}

/// A valid `FetchSnapshot`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    pub file: FileName,
    /// `None` selects all pages.
    pub range: Option<PageRange>,
    pub layout: BodyLayout,
    /// Age of an earlier scan that may serve the request; 0 requires a new scan.
    pub max_age: Duration,
}

/// A valid `Track`. The packet carries the userfaultfd, then the pagemap, then the maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackRequest {
    pub file: FileName,
    pub mappings: Vec<ClientMapping>,
    /// The packet carries `/proc/PID/pagemap`.
    pub pagemap: bool,
    /// The packet carries `/proc/PID/maps`.
    pub maps: bool,
    /// The process that has the mappings. `None`: the client's process.
    pub pid: Option<u32>,
}

/// Decodes one packet. `open`: the session has received Hello.
///
/// # Errors
/// [`ProtocolError`]
pub fn decode_packet(packet: Packet<'_>, open: bool) -> Result<Operation, ProtocolError> {
    if packet.descriptors_lost {
        return Err(ProtocolError::DescriptorsLost);
    }
    if packet.truncated || packet.bytes.len() > MAX_FDPASS_MESSAGE_BYTES {
        return Err(ProtocolError::TooLong);
    }
    let request = v1::FdpassRequest::decode(packet.bytes)
        .map_err(|error| ProtocolError::Undecodable(error.to_string()))?;
    let op = request.op.ok_or(ProtocolError::NoOperation)?;
    let (operation, expected) = match &op {
        Op::Hello(_) => ("Hello", 0),
        Op::Open(_) => ("Open", 0),
        Op::Adopt(_) => ("Adopt", 1),
        Op::FetchSnapshot(_) => ("FetchSnapshot", 0),
        Op::Track(track) => ("Track", 1 + usize::from(track.pagemap) + usize::from(track.maps)),
        Op::Untrack(_) => ("Untrack", 0),
        Op::Detach(_) => ("Detach", 0),
        Op::MemfdCreate(_) => ("MemfdCreate", 0),
        Op::SetCoveragePolicy(_) => ("SetCoveragePolicy", 0),
    };
    let got = packet.descriptors;
    if got != expected {
        return Err(ProtocolError::Descriptors { operation, expected, got });
    }
    match (matches!(op, Op::Hello(_)), open) {
        (true, true) => return Err(ProtocolError::SecondHello),
        (false, false) => return Err(ProtocolError::NoHello),
        _ => {}
    }
    validate(op)
}

fn validate(op: Op) -> Result<Operation, ProtocolError> {
    Ok(match op {
        Op::Hello(v1::Hello { version: 0, .. }) => return Err(ProtocolError::Version(0)),
        Op::Hello(hello) if hello.client.len() > MAX_CLIENT_NAME_BYTES => {
            return Err(ProtocolError::ClientName(hello.client.len()));
        }
        // A newer client falls back to this version.
        Op::Hello(v1::Hello { version, client }) => {
            Operation::Hello { version: version.min(FDPASS_VERSION), client }
        }
        Op::Open(open) => {
            let unknown = ConvertError::UnknownEnum { field: "Open.Mode", value: open.mode };
            let writable = match v1::open::Mode::try_from(open.mode) {
                Ok(v1::open::Mode::ReadOnly) => false,
                Ok(v1::open::Mode::ReadWrite) => true,
                Ok(v1::open::Mode::Unspecified) | Err(_) => return Err(unknown.into()),
            };
            Operation::Open { file: open.file.try_into()?, writable }
        }
        Op::Adopt(v1::Adopt { name, access, lifetime }) => Operation::Adopt {
            name,
            access: access.map(Access::try_from).transpose()?,
            lifetime: lifetime_from_wire(lifetime)?,
        },
        Op::Track(v1::Track { file, mappings, pagemap, maps, pid }) => {
            check_count(mappings.len())?;
            let mappings = mappings.into_iter().map(ClientMapping::try_from).collect::<Result<_, _>>()?;
            let pid = (pid != 0).then_some(pid);
            Operation::Track(TrackRequest { file: file.try_into()?, mappings, pagemap, maps, pid })
        }
        Op::Untrack(v1::Untrack { file, mapping_ids }) => {
            check_count(mapping_ids.len())?;
            Operation::Untrack { file: file.try_into()?, mappings: ids(mapping_ids)? }
        }
        Op::Detach(v1::Detach { file, pid, mapping_ids }) => {
            if !mapping_ids.is_empty() {
                check_count(mapping_ids.len())?;
            }
            let pid = (pid != 0).then_some(pid);
            Operation::Detach { file: file.try_into()?, pid, mappings: ids(mapping_ids)? }
        }
        Op::MemfdCreate(v1::MemfdCreate { name, memfd_name, flags, lifetime }) => {
            let unknown = QueryError::MemfdFlags(flags);
            let flags = MemfdFlags::from_bits(flags).ok_or(unknown)?;
            Operation::MemfdCreate { name, memfd_name, flags, lifetime: lifetime_from_wire(lifetime)? }
        }
        Op::SetCoveragePolicy(v1::SetCoveragePolicyRequest { file, policy }) => {
            Operation::SetCoveragePolicy {
                file: file.try_into()?,
                policy: CoveragePolicy::from_wire(policy)?,
            }
        }
        Op::FetchSnapshot(fetch) => {
            let unknown = ConvertError::UnknownEnum { field: "FetchSnapshot.Layout", value: fetch.layout };
            let layout = match v1::fetch_snapshot::Layout::try_from(fetch.layout) {
                Ok(v1::fetch_snapshot::Layout::Entries) => BodyLayout::Entries,
                Ok(v1::fetch_snapshot::Layout::States) => BodyLayout::States,
                Ok(v1::fetch_snapshot::Layout::Unspecified) | Err(_) => return Err(unknown.into()),
            };
            Operation::FetchSnapshot(SnapshotRequest {
                file: fetch.file.try_into()?,
                range: fetch.range.map(PageRange::try_from).transpose()?,
                layout,
                max_age: duration_from_wire("max_age", fetch.max_age)?,
            })
        }
    })
}

fn ids(ids: Vec<u64>) -> Result<Vec<MappingId>, ConvertError> {
    let id = |id| MappingId::new(id).ok_or(ConvertError::ZeroId("mapping_ids"));
    ids.into_iter().map(id).collect()
}

/// A request names at least one mapping and at most [`MAX_MAPPINGS`].
fn check_count(count: usize) -> Result<(), ProtocolError> {
    match to_u64(count) {
        0 => Err(ConvertError::Missing("mappings").into()),
        requested if requested > MAX_MAPPINGS => {
            let resource = "mappings in one request";
            Err(QueryError::TooMany { resource, requested, limit: MAX_MAPPINGS }.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(op: Op) -> Vec<u8> {
        v1::FdpassRequest { op: Some(op) }.encode_to_vec()
    }

    fn packet(bytes: &[u8], descriptors: usize) -> Packet<'_> {
        Packet { bytes, truncated: false, descriptors, descriptors_lost: false, foreign_descriptors: false }
    }

    fn hello(version: u32) -> Vec<u8> {
        encode(Op::Hello(v1::Hello { version, client: "test".to_owned() }))
    }

    fn open(mode: v1::open::Mode) -> Vec<u8> {
        let file = Some(FileName::Name("ram".to_owned()).into());
        encode(Op::Open(v1::Open { file, mode: mode.into() }))
    }

    #[test]
    fn session_opens_with_exactly_one_hello() {
        assert!(matches!(
            decode_packet(packet(&hello(1), 0), false),
            Ok(Operation::Hello { version: 1, .. })
        ));
        assert_eq!(decode_packet(packet(&hello(1), 0), true), Err(ProtocolError::SecondHello));
        let open = open(v1::open::Mode::ReadOnly);
        assert_eq!(decode_packet(packet(&open, 0), false), Err(ProtocolError::NoHello));
        assert!(matches!(decode_packet(packet(&open, 0), true), Ok(Operation::Open { writable: false, .. })));
    }

    #[test]
    fn newer_client_falls_back_to_this_version() {
        assert!(matches!(
            decode_packet(packet(&hello(99), 0), false),
            Ok(Operation::Hello { version: 1, .. })
        ));
        assert_eq!(decode_packet(packet(&hello(0), 0), false), Err(ProtocolError::Version(0)));
    }

    #[test]
    fn wrong_number_of_descriptors_is_fatal() {
        let adopt = encode(Op::Adopt(v1::Adopt::default()));
        for got in [0, 2, 253] {
            let error = decode_packet(packet(&adopt, got), true).unwrap_err();
            assert_eq!(error, ProtocolError::Descriptors { operation: "Adopt", expected: 1, got });
            assert!(error.is_fatal());
        }
        assert!(decode_packet(packet(&adopt, 1), true).is_ok());
        assert!(decode_packet(packet(&hello(1), 1), false).is_err());
        let lost = Packet { descriptors_lost: true, ..packet(&adopt, 1) };
        assert_eq!(decode_packet(lost, true), Err(ProtocolError::DescriptorsLost));
    }

    #[test]
    fn undecodable_packet_is_fatal() {
        let truncated = Packet { truncated: true, ..packet(&[], 0) };
        let hello = hello(1);
        for bad in [truncated, packet(&[0xff; 40], 0), packet(&[], 0), packet(&hello[..3], 0)] {
            assert!(decode_packet(bad, false).unwrap_err().is_fatal(), "{bad:?}");
        }
    }

    #[test]
    fn invalid_operation_is_not_fatal() {
        let error = decode_packet(packet(&open(v1::open::Mode::Unspecified), 0), true).unwrap_err();
        assert!(matches!(error, ProtocolError::Invalid(_)) && !error.is_fatal());
        assert_eq!(
            fdmap_proto::error_chain(&error),
            "invalid request: unknown value 0 of enum Open.Mode",
            "the chain names each cause once"
        );
    }
}
