//! Everything that write tracking reads from the kernel: signals of writes, mappings, written bits, forks, pins.
//!
//! One look yields an [`Observation`]. `trace` records system calls, and `forks` reads fork events. This folder decides
//! nothing: `classify` judges what it found.

mod address_space;
mod address_spaces;
#[cfg_attr(not(feature = "xarray"), allow(dead_code, reason = "only traced calls use it"))]
mod byte_range;
mod charge;
mod children;
mod data_pages;
mod devices;
mod ending;
mod event_sources;
mod fork_events;
pub mod forks;
#[cfg(feature = "xarray")]
mod free_slots;
#[cfg_attr(not(feature = "xarray"), allow(dead_code, reason = "only traced calls use it"))]
mod guarded_ranges;
pub mod holder;
mod intact;
mod kernel_objects;
mod kernel_writers;
pub(super) mod loop_devices;
pub(super) mod mappers;
mod modify_events;
mod observation;
mod observer;
mod own_calls;
mod remaps;
mod space_counts;
#[cfg(feature = "xarray")]
mod space_events;
#[cfg(not(feature = "xarray"))]
#[path = "untraced_spaces.rs"]
mod space_events;
mod space_history;
#[cfg(feature = "xarray")]
mod task_search;
#[cfg(feature = "xarray")]
mod trace;
#[cfg(not(feature = "xarray"))]
#[path = "untraced.rs"]
mod trace;
mod traced_calls;
mod traced_writes;

pub(crate) use address_space::{SpaceIdentity, TrackedAddressSpace};
pub(crate) use address_spaces::{AddressSpaces, remove_descriptors};
pub use charge::{Charge, Charged};
pub use event_sources::EventSources;
pub use fork_events::ChildCharges;
pub(crate) use kernel_writers::KernelWriters;
pub use modify_events::try_writer_threads;
#[cfg(test)]
pub(crate) use observation::OtherCalls;
pub(crate) use observation::{
    AddressSpacePages, CallWrites, ChildHarvest, Completeness, EndedMapping, Harvest, Mapper, MapperAudit,
    Modifiers, Observation, PinScan, PinnedPages,
};
pub use observer::REQUIRED_FEATURES;
pub(crate) use observer::{Observer, SignalHistory};
pub(crate) use space_history::SpaceHistory;
