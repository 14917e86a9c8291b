//! Cleans up after a test process that was killed. See `fdmap_tests::cleanup`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let errors = fdmap_tests::cleanup::clean_up_after(std::io::stdin().lock());
    for error in &errors {
        eprintln!("not cleaned up: {error}");
    }
    if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
