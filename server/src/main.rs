//! The program `fdmapd`.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use fdmap_proto::error_chain;
use fdmap_server::config::Config;
use fdmap_server::daemon;
use fdmap_server::fdpass::receiver;
use fdmap_server::files::{inode_helper, user_search};
use fdmap_server::log_limit::Limited;
use fdmap_server::probe::capabilities::{Availability, HostCapabilities, guard_trial};
use fdmap_server::tracking::forks::companion;
use fdmap_server::tracking::{EventSources, holder, loop_search, mapper_search};
use fdmap_sys::capabilities;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // First of all: the other processes have no threads, and no descriptors except the one that they inherit.
    let first = std::env::args_os().nth(1).unwrap_or_default();
    if first == companion::ARGUMENT {
        return companion::main();
    }
    if first == receiver::ARGUMENT {
        return receiver::main();
    }
    if first == holder::process::ARGUMENT {
        return holder::process::main();
    }
    if first == inode_helper::ARGUMENT {
        return inode_helper::main();
    }
    if first == user_search::ARGUMENT {
        return user_search::main();
    }
    if first == loop_search::ARGUMENT {
        return loop_search::main();
    }
    if first == mapper_search::ARGUMENT {
        return mapper_search::main();
    }
    if first == guard_trial::ARGUMENT {
        return guard_trial::main();
    }
    let config = Config::parse();
    // No program that this one starts gets more privileges than it has. Each Linux that fdmapd supports has the option.
    if let Err(error) = capabilities::forbid_new_privileges() {
        eprintln!("fdmapd: {}", error_chain(&error));
        return ExitCode::FAILURE;
    }
    let filter = EnvFilter::builder()
        .with_env_var("FDMAPD_LOG")
        .with_default_directive(tracing_subscriber::filter::LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .map_event_format(Limited::new)
        .init();
    if config.check {
        return check(&config);
    }
    match daemon::run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// `--check`: prints the capabilities of the host.
fn check(config: &Config) -> ExitCode {
    let detected = EventSources::new(None, !config.no_call_trace, false)
        .and_then(|event_sources| HostCapabilities::detect(&event_sources));
    let host = match detected {
        Ok(host) => host,
        Err(error) => {
            eprintln!("fdmapd: detecting the capabilities of this host: {}", error_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    for capability in &host.capabilities {
        let availability = match capability.availability {
            Availability::Available => "yes",
            Availability::Unavailable => "no",
            Availability::Unknown => "unknown",
        };
        println!("{:18} {availability:8} {}", capability.name, capability.detail);
        if capability.availability != Availability::Available && !capability.impact.is_empty() {
            println!("{:27} impact: {}", "", capability.impact);
        }
    }
    if host.probes.iter().any(|tried| tried.outcome.is_ok()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
