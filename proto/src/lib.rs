//! The contract between `fdmapd` and its clients: the messages of `fdmap.v1`, the words that both sides use
//! ([`PageIndex`], [`PageState`], [`SwapSlot`], ...) and the plain conversions between the two.
//!
//! It owns no I/O and no policy. Messages stop here: beyond [`convert`] both programs speak in words.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod changed;
pub mod convert;
pub mod error_chain;
pub mod file;
pub mod pagemap_entry;
pub mod provenance;
pub mod runs;
pub mod shared_snapshot;
pub mod state;
pub mod tracking;
pub mod units;

pub use changed::{ChangedPages, ChangedRun};
pub use convert::ConvertError;
pub use error_chain::error_chain;
pub use file::{Access, Backing, FileInfo, Origin, Right, Rights, Seal, Seals};
pub use pagemap_entry::PagemapEntry;
pub use provenance::{Moment, ProbeKind, Provenance, Uncertainty};
pub use runs::{Change, Run};
pub use state::{Mappers, PageAttributes, PageFlags, PageState, StateSet, SwapSlot};
pub use tracking::{
    ClientMapping, Coverage, CoverageGap, CoveragePolicy, Cursor, Effect, GapKind, TrackedMapping,
};
pub use units::{FileId, Generation, MappingId, PageIndex, PageRange, PageSize, SnapshotId};

/// Generated from `fdmap/v1/*.proto`, which document every message.
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::nursery, elided_lifetimes_in_paths)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/fdmap.v1.rs"));
}

/// The encoded `FileDescriptorSet` of `fdmap.v1`, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fdmap_descriptor.bin"));

/// The version of the fdpass protocol that this crate speaks.
pub const FDPASS_VERSION: u32 = 1;

/// The longest message on the fdpass socket, bytes.
pub const MAX_FDPASS_MESSAGE_BYTES: usize = 65_536;

/// The longest name of a file, bytes: `memfd_create(2)` allows 249 besides its prefix.
pub const MAX_NAME_BYTES: usize = 249;

/// The longest name of a cursor, bytes.
pub const MAX_CURSOR_NAME_BYTES: usize = 64;

/// The most mappings that one request may have observed.
pub const MAX_MAPPINGS_A_REQUEST: usize = 64;
