//! API of `fdmapd`: the protobuf messages of `fdmap.v1`, the domain types that service and clients share, and the
//! conversions between them ([`convert`]).
//!
//! Each concept has one domain type. All domain types implement `Serialize`; the command line prints them as JSON. The crate
//! performs no I/O and makes no policy decisions.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod attributes;
pub mod checkpoint;
pub mod columns;
pub mod convert;
pub mod error_chain;
pub mod file;
mod file_name;
mod flag_set;
pub mod host;
mod json;
pub mod pagemap_entry;
pub mod provenance;
pub mod runs;
pub mod shared_snapshot;
pub mod state;
pub mod summary;
pub mod swap;
pub mod tracking;
pub mod units;

pub use attributes::{AttributeSet, KnownFlags, Mappers, PageAttributes, PageFlags};
pub use checkpoint::{BegunCursor, Checkpoint, CheckpointEvent, DirtyRate};
pub use convert::ConvertError;
pub use error_chain::error_chain;
pub use file::{
    Access, Backing, FileInfo, FileName, Lifetime, Origin, OwnedName, Right, Rights, Seal, Seals,
};
pub use host::{Availability, Capability, HelperIncident, HostInfo, HostLimits};
pub use pagemap_entry::PagemapEntry;
pub use provenance::{Moment, ProbeKind, Provenance, Uncertainty};
pub use runs::{Change, ChangedPages, ChangedRun, Run};
pub use state::{PageState, StateSet, SwapSlot};
/// `VARIANTS` of the enums of this crate: all variants in declaration order.
pub use strum::VariantArray;
pub use summary::{PageInfo, PageSummary};
pub use swap::{SlotContent, SlotContents, SwapArea, SwapAreaKind};
pub use tracking::{
    ClientMapping, Coverage, CoverageGap, CoveragePolicy, Cursor, Effect, FileCoverage, GapKind,
    TrackedMapping,
};
pub use units::{FileId, Generation, MappingId, PageIndex, PageRange, PageSize, SnapshotId};

/// Messages generated from `fdmap/v1/*.proto`. The .proto files document them.
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::nursery, elided_lifetimes_in_paths)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/fdmap.v1.rs"));
}

/// Encoded `FileDescriptorSet` of `fdmap.v1`, for gRPC server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fdmap_descriptor.bin"));

/// Version of the fdpass protocol that this crate implements.
pub const FDPASS_VERSION: u32 = 1;

/// Maximum size of a message on the fdpass socket, bytes.
pub const MAX_FDPASS_MESSAGE_BYTES: usize = 65_536;

/// Maximum length of a file name, bytes. The limit is that of `memfd_create(2)`.
pub const MAX_NAME_BYTES: usize = 249;

/// Maximum length of a cursor name, bytes.
pub const MAX_CURSOR_NAME_BYTES: usize = 64;

/// Maximum number of mappings in one Track, Untrack or Detach request.
pub const MAX_MAPPINGS_PER_REQUEST: usize = 64;
