//! Cost of write tracking: tables of docs/performance.md. Writes `target/fdmap-bench-writes.json`; with `--json` prints the JSON
//! instead of the tables.

use std::process::ExitCode;

use fdmap_benches::report::{Host, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::writes::report::WritesReport;
use fdmap_benches::writes::{WritesFixture, checkpoints, first, swapped};
use fdmap_benches::{BenchResult, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let fixture = WritesFixture::make(settings)?;
    eprintln!("first writes ...");
    let first = first::measure(&fixture)?;
    eprintln!("checkpoints ...");
    let checkpoints = checkpoints::measure(&fixture)?;
    eprintln!("swapped pages ...");
    let swapped = swapped::measure(&fixture)?;
    drop(fixture);
    let report = WritesReport { host: Host::new(settings), first, checkpoints, swapped };
    let json = write_json(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-writes.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        let size = report.checkpoints.file_bytes >> 20;
        println!("\n{}, sparse file of {size} MiB\n\n{}", report.host, report.markdown());
    }
    Ok(())
}
