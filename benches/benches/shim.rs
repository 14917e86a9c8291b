//! Cost of the shim to programs: a table of docs/performance.md. Writes `target/fdmap-bench-shim.json`; with `--json` prints the JSON
//! instead of the table.

use std::process::ExitCode;

use fdmap_benches::report::{Host, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::shim::{self, ShimReport};
use fdmap_benches::{BenchResult, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let report = ShimReport { host: Host::new(settings), costs: shim::measure(settings)? };
    let json = write_json(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-shim.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        println!("\n{}\n\n{}", report.host, report.markdown());
    }
    Ok(())
}
