//! `fdmapd`, the program.

use fdmap_proto::error_chain;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use fdmap_server::config::Config;
use fdmap_server::daemon;
use fdmap_server::probe::capabilities::{Answer, Support};
use fdmap_server::tracking::forks::companion;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // Before all else: the companion keeps no descriptors but the one that it was started with, and no threads.
    if std::env::args_os().nth(1).is_some_and(|first| first == companion::ARGUMENT) {
        return companion::main();
    }
    let config = Config::parse();
    let filter = EnvFilter::builder()
        .with_env_var("FDMAPD_LOG")
        .with_default_directive(tracing_subscriber::filter::LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    if config.check {
        return check();
    }
    match daemon::run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn check() -> ExitCode {
    let support = match Support::try_out() {
        Ok(support) => support,
        Err(error) => {
            eprintln!("fdmapd: trying out this kernel: {}", error_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    for fact in &support.facts {
        let answer = match fact.answer {
            Answer::Yes => "yes",
            Answer::No => "no",
            Answer::Unknown => "unknown",
        };
        println!("{:18} {answer:8} {}", fact.name, fact.detail);
        if fact.answer != Answer::Yes && !fact.impact.is_empty() {
            println!("{:27} without it: {}", "", fact.impact);
        }
    }
    if support.xarray.is_ok() || support.syscalls.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
