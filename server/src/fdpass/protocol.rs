//! Requests of the fdpass socket, checked. Pure.
//!
//! A session begins in `Greeting`, where only Hello is right; Hello brings it to `Open`, where everything else is. What
//! breaks the protocol ends the session; what merely cannot be done does not.

use std::time::Duration;

use fdmap_proto::convert::{ConvertError, FileName, duration_from_wire};
use fdmap_proto::file::Access;
use fdmap_proto::shared_snapshot::BodyLayout;
use fdmap_proto::tracking::{ClientMapping, CoveragePolicy};
use fdmap_proto::units::{MappingId, PageRange, to_u64};
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::{FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES, v1};
use fdmap_sys::memfd::MemfdFlags;
use prost::Message as _;

use crate::query::QueryError;

/// The longest name of a client, bytes.
const MAX_CLIENT: usize = 64;

/// Mappings that one request can name.
const MAX_MAPPINGS: u64 = 64;

/// What came in one packet, besides its descriptors.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// The message.
    pub bytes: &'a [u8],
    /// It was longer than a message may be.
    pub truncated: bool,
    /// How many descriptors came along.
    pub descriptors: usize,
    /// Some were lost, since the service has too many open.
    pub descriptors_lost: bool,
}

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Begins the session.
    Hello {
        /// The version to speak.
        version: u32,
        /// The client's name.
        client: String,
    },
    /// A descriptor of a file.
    Open {
        /// Which.
        file: FileName,
        /// For reading and writing.
        writable: bool,
    },
    /// The one descriptor that came along is to be the service's.
    Adopt {
        /// Empty: the memfd's own.
        name: String,
        /// `None`: the caller's alone.
        access: Option<Access>,
        /// Only as long as another process has it.
        ephemeral: bool,
    },
    /// The states of a file's pages in a memfd.
    Snapshot {
        /// Of which file.
        file: FileName,
        /// Of which pages; `None` is all.
        range: Option<PageRange>,
        /// How to tell them.
        layout: BodyLayout,
        /// How old they may be.
        max_age: Duration,
    },
    /// Mappings are to be tracked.
    Track {
        /// Of which file.
        file: FileName,
        /// Which.
        mappings: Vec<ClientMapping>,
        /// The client's pagemap came along.
        pagemap: bool,
        /// The process's maps came along.
        maps: bool,
        /// Whose mappings; `None` is the client's.
        pid: Option<u32>,
    },
    /// Mappings are to be let go of.
    Detach {
        /// Of which file.
        file: FileName,
        /// Whose; `None` is the client's.
        pid: Option<u32>,
        /// Which; none is all.
        mappings: Vec<MappingId>,
    },
    /// An empty memfd is to be made.
    MemfdCreate {
        /// Unique in the service.
        name: String,
        /// For `memfd_create`.
        memfd_name: String,
        /// For `memfd_create`.
        flags: MemfdFlags,
    },
    /// What checkpoints do about writers that are not observed.
    SetCoveragePolicy {
        /// Of which file.
        file: FileName,
        /// What.
        policy: CoveragePolicy,
    },
    /// Mappings are about to end.
    Untrack {
        /// Of which file.
        file: FileName,
        /// Which.
        mappings: Vec<MappingId>,
    },
}

/// What is wrong with a packet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Too long.
    #[error("the message has more than {MAX_FDPASS_MESSAGE_BYTES} bytes")]
    TooLong,
    /// Not protobuf, or not a FdpassRequest.
    #[error("the message is no FdpassRequest: {0}")]
    Undecodable(String),
    /// No operation, or one that this version does not know.
    #[error("the request has no operation that version {FDPASS_VERSION} knows")]
    NoOperation,
    /// Too many or too few descriptors.
    #[error("{operation} takes {expected} descriptors, and {got} came along")]
    Descriptors {
        /// The operation.
        operation: &'static str,
        /// It takes so many.
        expected: usize,
        /// So many came.
        got: usize,
    },
    /// Descriptors were lost.
    #[error("descriptors that came along were lost: the service has too many open")]
    DescriptorsLost,
    /// Something else before Hello.
    #[error("a session begins with Hello")]
    NoHello,
    /// Hello again.
    #[error("Hello came a second time")]
    SecondHello,
    /// A version that was never spoken.
    #[error("version {0} of the fdpass protocol was never spoken")]
    Version(u32),
    /// The client's name is too long.
    #[error("the client's name has {0} bytes, more than {MAX_CLIENT}")]
    Client(usize),
    /// The operation has no meaning, and the error says so itself. The session goes on.
    #[error(transparent)]
    Meaning(#[from] QueryError),
}

impl ProtocolError {
    /// True if the session is to end.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        !matches!(self, Self::Meaning(_))
    }
}

impl From<ConvertError> for ProtocolError {
    fn from(error: ConvertError) -> Self {
        Self::Meaning(error.into())
    }
}

/// Reads one packet. `greeted`: Hello was before.
///
/// # Errors
/// [`ProtocolError`]
pub fn operation(arrived: Arrived<'_>, greeted: bool) -> Result<Operation, ProtocolError> {
    if arrived.descriptors_lost {
        return Err(ProtocolError::DescriptorsLost);
    }
    if arrived.truncated || arrived.bytes.len() > MAX_FDPASS_MESSAGE_BYTES {
        return Err(ProtocolError::TooLong);
    }
    let request = v1::FdpassRequest::decode(arrived.bytes)
        .map_err(|error| ProtocolError::Undecodable(error.to_string()))?;
    let op = request.op.ok_or(ProtocolError::NoOperation)?;
    let (name, expected) = match &op {
        Op::Hello(_) => ("Hello", 0),
        Op::Open(_) => ("Open", 0),
        Op::Adopt(_) => ("Adopt", 1),
        Op::FetchSnapshot(_) => ("FetchSnapshot", 0),
        Op::Track(track) => ("Track", 1 + usize::from(track.pagemap) + usize::from(track.maps)),
        Op::Untrack(_) => ("Untrack", 0),
        Op::Detach(_) => ("Release", 0),
        Op::MemfdCreate(_) => ("Make", 0),
        Op::SetCoveragePolicy(_) => ("SetCoveragePolicy", 0),
    };
    let got = arrived.descriptors;
    if got != expected {
        return Err(ProtocolError::Descriptors { operation: name, expected, got });
    }
    match (matches!(op, Op::Hello(_)), greeted) {
        (true, true) => return Err(ProtocolError::SecondHello),
        (false, false) => return Err(ProtocolError::NoHello),
        _ => {}
    }
    checked(op)
}

fn checked(op: Op) -> Result<Operation, ProtocolError> {
    Ok(match op {
        Op::Hello(v1::Hello { version: 0, .. }) => return Err(ProtocolError::Version(0)),
        Op::Hello(hello) if hello.client.len() > MAX_CLIENT => {
            return Err(ProtocolError::Client(hello.client.len()));
        }
        // A newer client comes down to our version.
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
        Op::Adopt(v1::Adopt { name, access, ephemeral }) => {
            Operation::Adopt { name, access: access.map(Access::try_from).transpose()?, ephemeral }
        }
        Op::Track(v1::Track { file, mappings, pagemap, maps, pid }) => {
            check_count(mappings.len())?;
            let mappings = mappings.into_iter().map(ClientMapping::try_from).collect::<Result<_, _>>()?;
            let pid = (pid != 0).then_some(pid);
            Operation::Track { file: file.try_into()?, mappings, pagemap, maps, pid }
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
        Op::MemfdCreate(v1::MemfdCreate { name, memfd_name, flags }) => {
            let unknown = QueryError::MemfdFlags(flags);
            Operation::MemfdCreate { name, memfd_name, flags: MemfdFlags::from_bits(flags).ok_or(unknown)? }
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
            Operation::Snapshot {
                file: fetch.file.try_into()?,
                range: fetch.range.map(PageRange::try_from).transpose()?,
                layout,
                max_age: duration_from_wire("max_age", fetch.max_age)?,
            }
        }
    })
}

fn ids(ids: Vec<u64>) -> Result<Vec<MappingId>, ConvertError> {
    let id = |id| MappingId::new(id).ok_or(ConvertError::ZeroId("mapping_ids"));
    ids.into_iter().map(id).collect()
}

/// A request names at least one mapping, and not too many.
fn check_count(count: usize) -> Result<(), ProtocolError> {
    match to_u64(count) {
        0 => Err(ConvertError::Missing("mappings").into()),
        asked if asked > MAX_MAPPINGS => {
            Err(QueryError::TooMany { what: "mappings in one request", asked, most: MAX_MAPPINGS }.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(op: Op) -> Vec<u8> {
        v1::FdpassRequest { op: Some(op) }.encode_to_vec()
    }

    fn arrived(bytes: &[u8], descriptors: usize) -> Arrived<'_> {
        Arrived { bytes, truncated: false, descriptors, descriptors_lost: false }
    }

    fn hello(version: u32) -> Vec<u8> {
        packet(Op::Hello(v1::Hello { version, client: "test".to_owned() }))
    }

    fn open(mode: v1::open::Mode) -> Vec<u8> {
        let file = Some(FileName::Name("ram".to_owned()).into());
        packet(Op::Open(v1::Open { file, mode: mode.into() }))
    }

    #[test]
    fn session_begins_with_one_hello() {
        assert!(matches!(operation(arrived(&hello(1), 0), false), Ok(Operation::Hello { version: 1, .. })));
        assert_eq!(operation(arrived(&hello(1), 0), true), Err(ProtocolError::SecondHello));
        let open = open(v1::open::Mode::ReadOnly);
        assert_eq!(operation(arrived(&open, 0), false), Err(ProtocolError::NoHello));
        assert!(matches!(operation(arrived(&open, 0), true), Ok(Operation::Open { writable: false, .. })));
    }

    #[test]
    fn newer_client_comes_down_to_our_version() {
        assert!(matches!(operation(arrived(&hello(99), 0), false), Ok(Operation::Hello { version: 1, .. })));
        assert_eq!(operation(arrived(&hello(0), 0), false), Err(ProtocolError::Version(0)));
    }

    #[test]
    fn descriptors_must_be_as_many_as_the_operation_takes() {
        let adopt = packet(Op::Adopt(v1::Adopt::default()));
        for got in [0, 2, 253] {
            let error = operation(arrived(&adopt, got), true).unwrap_err();
            assert_eq!(error, ProtocolError::Descriptors { operation: "Adopt", expected: 1, got });
            assert!(error.is_fatal());
        }
        assert!(operation(arrived(&adopt, 1), true).is_ok());
        assert!(operation(arrived(&hello(1), 1), false).is_err());
        let lost = Arrived { descriptors_lost: true, ..arrived(&adopt, 1) };
        assert_eq!(operation(lost, true), Err(ProtocolError::DescriptorsLost));
    }

    #[test]
    fn packets_that_are_no_requests_are_fatal() {
        let truncated = Arrived { truncated: true, ..arrived(&[], 0) };
        for packet in [truncated, arrived(&[0xff; 40], 0), arrived(&[], 0), arrived(&hello(1)[..3], 0)] {
            assert!(operation(packet, false).unwrap_err().is_fatal(), "{packet:?}");
        }
    }

    #[test]
    fn request_without_meaning_is_not_fatal() {
        let error = operation(arrived(&open(v1::open::Mode::Unspecified), 0), true).unwrap_err();
        assert!(matches!(error, ProtocolError::Meaning(_)) && !error.is_fatal());
        assert_eq!(
            fdmap_proto::error_chain(&error),
            "the request has no meaning: Open.Mode has the unknown value 0",
            "each cause is named once"
        );
    }
}
