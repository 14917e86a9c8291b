//! `fdmapd`: owns memfds and tells which of their pages hold data, where these are, and what the answer rests on.
//!
//! The data's way is the folder list: the kernel is read by `probe`, published in `pages`, asked by `query`, and sent by
//! `rpc` and `fdpass`. `files` are the memfds that all of it is about.

#[cfg(feature = "xarray")]
mod bpf;
pub mod config;
pub mod daemon;
pub mod fdpass;
pub mod files;
pub mod pages;
pub mod probe;
pub mod query;
mod random;
pub mod rpc;
pub mod scan;
pub mod service;
pub mod store;
pub mod tracking;
