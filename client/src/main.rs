//! `fdmap`, the command line.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;
use fdmap_client::proto::error_chain;

use cli::{Cli, CliError};

fn main() -> ExitCode {
    // Threads that dump and migrate files would make them conservative.
    fdmap_sys::process::allocate_without_mremap();
    match cli::run(Cli::parse()) {
        Ok(code) => code,
        Err(CliError::Closed) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fdmap: {}", error_chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}
