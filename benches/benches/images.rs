//! Dumps beside plain copies, and lazy restores beside complete ones: tables of docs/performance.md. Writes
//! `target/fdmap-bench-images.json`; with `--json` prints the JSON instead of the tables.

use std::process::ExitCode;

use fdmap_benches::images::{markdown, measure};
use fdmap_benches::report::{Host, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::{BenchResult, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let times = measure(settings)?;
    let json = write_json(&times, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-images.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        println!("\n{}\n\n{}", Host::new(settings), markdown(&times));
    }
    Ok(())
}
