//! `fdmapd`: owns memfds, and reports which of their pages hold data, where that data is, and which pages were written.
//!
//! The folders are the path of a request. `rpc` and `fdpass` decode it, `query` validates it, `scan` and `probe` read the
//! kernel, `pages` holds the result as an immutable snapshot, `query` divides the answer into messages, and `rpc` sends them.
//! `files` owns the memfds, and `tracking` records writes to them. `status` maps errors to gRPC status codes.

mod blocking;
#[cfg(feature = "xarray")]
mod bpf;
pub mod config;
mod confinement;
pub mod daemon;
mod descriptor_limit;
pub mod fdpass;
pub mod files;
mod incidents;
pub mod log_limit;
mod own_program;
pub mod pages;
mod parent;
mod privileges;
pub mod probe;
pub mod query;
mod random;
pub mod rpc;
pub mod scan;
pub mod service;
mod sockets;
mod status;
pub mod store;
pub mod tracking;
mod turns;
mod watchdog;
