//! What can go wrong with writes that are observed: each is told in words that name what it was done to, and nothing is lost after
//! it. Clients and the service that stand still hold nobody up for long.

mod fixture;
mod invalid_requests;
mod other_processes;
mod refused_mappings;
mod stopped_processes;
mod unprivileged;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}
