//! Arguments of `fdmap exec`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::PolicyArg;
use crate::cli::parse::size;

/// Arguments of `fdmap exec`
#[derive(Args, Debug)]
pub struct ExecArgs {
    /// How checkpoints of its files treat unobserved writers
    #[arg(long, value_enum)]
    pub policy: Option<PolicyArg>,
    /// Adopt only memfds whose name matches a pattern with * and ? [default: all]
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    pub take: Vec<String>,
    /// Create in the service the memfds whose name matches a pattern with * and ?
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    pub make: Vec<String>,
    /// Do not adopt memfds that are smaller than SIZE when they are mapped [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub min_size: Option<u64>,
    /// Do not track writes
    #[arg(long)]
    pub no_track: bool,
    /// Keep the files when no process uses them any more
    #[arg(long)]
    pub keep_files: bool,
    /// Exit with code 125 if the service is unavailable, instead of running the command without it
    #[arg(long)]
    pub strict: bool,
    /// Path of the shim [default: libfdmap_shim.so beside this program or in ../lib]
    #[arg(long, value_name = "FILE", env = "FDMAP_SHIM_LIBRARY", value_hint = ValueHint::FilePath)]
    pub library: Option<PathBuf>,
    /// Command and its arguments
    #[arg(required = true, last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}
