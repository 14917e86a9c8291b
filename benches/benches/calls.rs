//! Latency of calls beside another version of the service, which `FDMAP_OTHER_PROGRAMS` names: a table of docs/performance.md. Writes
//! `target/fdmap-bench-calls.json`; with `--json` prints the JSON instead of the table.

use std::process::ExitCode;

use fdmap_benches::calls::{markdown, measure};
use fdmap_benches::report::{Host, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::{BenchResult, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let times = measure(settings)?;
    let json = write_json(&times, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-calls.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        let size = settings.file_bytes >> 20;
        println!("\n{}, large file of {size} MiB\n\n{}", Host::new(settings), markdown(&times));
    }
    Ok(())
}
