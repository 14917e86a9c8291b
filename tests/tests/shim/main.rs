//! Unmodified programs under the shim.

mod compatibility;
mod fixture;
mod guard_regions;
mod pagemap;
mod service_restart;
mod tracking;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}
