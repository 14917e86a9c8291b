//! `fdmap`, the command line.

mod cli;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser as _;

use cli::{Cli, CliError};

fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(code) => code,
        Err(CliError::Closed) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = error.to_string();
            let mut cause = error.source();
            while let Some(error) = cause {
                text = format!("{text}: {error}");
                cause = error.source();
            }
            eprintln!("fdmap: {text}");
            ExitCode::from(error.exit_code())
        }
    }
}
