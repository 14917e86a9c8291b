//! `fdmapd`: owns memfds and tells which of their pages hold data, where these are, and what the answer rests on.
//!
//! The data's way is the folder list: the kernel is read by `probe`, published in `pages`, asked by `query`, and sent by
//! `rpc` and `fdpass`. `files` are the memfds that all of it is about.

pub mod config;
pub mod daemon;
pub mod fdpass;
pub mod files;
pub mod pages;
pub mod probe;
pub mod query;
mod random;
pub mod rpc;
pub mod service;
pub mod store;
pub mod tracking;

use std::error::Error;

/// An error with its causes, on one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
