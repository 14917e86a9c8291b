//! `fdmap`, the command line.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;
use fdmap_client::proto::error_chain;

use cli::{Cli, CliError};

fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(code) => code,
        Err(CliError::Closed) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fdmap: {}", error_chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}
