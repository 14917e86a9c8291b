//! Precision of write tracking: a table of docs/performance.md. Writes `target/fdmap-bench-precision.json`; with `--json` prints the
//! JSON instead of the table. Words select workloads.

use std::process::ExitCode;

use fdmap_benches::precision::{self, report::PrecisionReport};
use fdmap_benches::report::{Host, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::{BenchResult, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let filters: Vec<_> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let workloads = precision::measure(settings, &filters)?;
    let report = PrecisionReport { host: Host::new(settings), workloads };
    let json = write_json(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-precision.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        let Host { kernel, processors, rounds, .. } = &report.host;
        println!("\nLinux {kernel}, {processors} processors, {rounds} generations\n\n{}", report.markdown());
    }
    Ok(())
}
