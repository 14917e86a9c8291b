//! Unmodified programs under the shim.

mod compatibility;
mod fixture;
mod guard_regions;
mod pagemap;
mod secure_execution;
mod service_restart;
mod tracking;

fn main() -> std::process::ExitCode {
    fdmap_tests::victim::main().unwrap_or_else(fdmap_tests::harness::main)
}
