//! Everything that write tracking reads from the kernel: signals of writes, mappings, written bits, forks, pins.
//!
//! One look yields an [`Observation`]. `trace` records system calls, and `forks` reads fork events. This folder decides
//! nothing: `classify` judges what it found.

mod address_space;
mod address_spaces;
mod children;
mod data_pages;
mod event_sources;
mod fork_events;
pub mod forks;
mod loop_devices;
mod mappers;
mod observation;
mod observer;
mod revocable_uffd;
#[cfg(feature = "xarray")]
mod trace;
#[cfg(not(feature = "xarray"))]
#[path = "untraced.rs"]
mod trace;
mod traced_calls;

pub(crate) use address_space::TrackedAddressSpace;
pub(crate) use address_spaces::AddressSpaces;
pub use event_sources::EventSources;
pub(crate) use observation::{
    CallWrites, ChildHarvest, EndedMapping, Harvest, Mapper, MapperAudit, Observation, PinScan, PinnedPages,
    UntracedWriters,
};
pub use observer::REQUIRED_FEATURES;
pub(crate) use observer::{Observer, SignalHistory};
pub(crate) use revocable_uffd::RevocableUffd;
