//! Probes: ways to read the page states of a file from the kernel. This folder owns everything that depends on the
//! kernel: the capabilities of the host, the BPF programs, the system calls, and decoding. It keeps no states (`pages`
//! does) and does not know its callers.
//!
//! `interface` defines trait [`Probe`], `registry` lists the probes, [`capabilities`] tries them on this host, and
//! [`select`] picks one. `syscalls` is a complete probe. The `xarray` probe consists of the BPF glue (`xarray`,
//! `scanner`, `block_walker`, `walker`, `references`, `mappers`, `users`, `swap_slots`) and of pure parts (`block_decode`, `decode`,
//! `xarray_entry`, `leaf`, `attributes`, `pins`, `swap_cache`).

pub mod capabilities;
mod dentry;
mod file_vma;
mod interface;
mod registry;
pub mod select;
mod syscalls;
mod xarray_registration;

#[cfg(feature = "xarray")]
mod attributes;
#[cfg(feature = "xarray")]
mod block_decode;
#[cfg(feature = "xarray")]
mod block_walker;
#[cfg(feature = "xarray")]
mod decode;
#[cfg(feature = "xarray")]
mod leaf;
#[cfg(feature = "xarray")]
mod mappers;
#[cfg(feature = "xarray")]
mod pins;
#[cfg(feature = "xarray")]
mod pool;
#[cfg(feature = "xarray")]
mod references;
#[cfg(feature = "xarray")]
mod scanner;
#[cfg(feature = "xarray")]
mod swap_cache;
#[cfg(feature = "xarray")]
mod swap_slots;
#[cfg(feature = "xarray")]
mod users;
#[cfg(feature = "xarray")]
mod walker;
#[cfg(feature = "xarray")]
mod xarray;
#[cfg(feature = "xarray")]
mod xarray_entry;

#[cfg(feature = "xarray")]
pub use crate::bpf::LoadError;
pub use dentry::DentryReferences;
pub use file_vma::{FileVma, KernelAddress, MapperWalk, PageTables};
pub use interface::{
    PinKind, PinnedRange, Probe, ProbeEntry, ScanError, ScanOutput, ScanTarget, SlotReading,
};
pub use registry::PROBES;
pub use syscalls::SyscallsProbe;
#[cfg(feature = "xarray")]
pub use xarray::XarrayProbe;
