//! The arguments of `fdmap exec`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::PolicyArg;
use crate::cli::parse::size;

/// A command to run under the shim
#[derive(Args, Debug)]
pub struct ExecArgs {
    /// What checkpoints of its files do about writers that are not observed
    #[arg(long, value_enum)]
    pub policy: Option<PolicyArg>,
    /// Take memfds of such names over, with * and ?; all if none is said
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    pub take: Vec<String>,
    /// Have the service itself make memfds of such names, with * and ?
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    pub make: Vec<String>,
    /// Leave memfds alone that are smaller when they are mapped [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub min_size: Option<u64>,
    /// Do not have the writes observed
    #[arg(long)]
    pub no_track: bool,
    /// Have the service keep the files when nobody uses them any more
    #[arg(long)]
    pub keep: bool,
    /// End the command where the service cannot be had, with exit code 125, instead of going on without
    #[arg(long)]
    pub strict: bool,
    /// The shim [default: libfdmap_shim.so beside this program, or in ../lib]
    #[arg(long, value_name = "FILE", env = "FDMAP_SHIM_LIBRARY", value_hint = ValueHint::FilePath)]
    pub library: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}
