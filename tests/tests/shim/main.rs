//! Programs that know nothing of fdmap, under the shim.

mod bed;
mod life;
mod pagemap;
mod tracking;
mod unharmed;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}
