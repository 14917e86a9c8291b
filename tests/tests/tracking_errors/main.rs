//! Errors of write tracking: each error names its operands, and no write is lost after it. Stopped clients delay no checkpoint,
//! and a stopped service delays no client.

mod blocked_processes;
mod fixture;
mod invalid_requests;
mod other_processes;
mod refused_mappings;
mod slow_operations;
mod stopped_processes;
mod unprivileged;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}
