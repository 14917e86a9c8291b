//! What tracking of writes costs: tables of docs/performance.md. With `--json` they are printed as JSON; that is left in
//! `target/fdmap-bench-writes.json` in any case.

use std::process::ExitCode;

use fdmap_benches::report::{Host, leave};
use fdmap_benches::settings::run;
use fdmap_benches::writes::report::WritesReport;
use fdmap_benches::writes::{Stage, checkpoints, first, swapped};
use fdmap_benches::{Measured, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> Measured<()> {
    let stage = Stage::make(settings)?;
    eprintln!("first writes ...");
    let first = first::measure(&stage)?;
    eprintln!("checkpoints ...");
    let checkpoints = checkpoints::measure(&stage)?;
    eprintln!("swapped pages ...");
    let swapped = swapped::measure(&stage)?;
    drop(stage);
    let report = WritesReport { host: Host::new(settings), first, checkpoints, swapped };
    let json = leave(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-writes.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        let size = report.checkpoints.file_bytes >> 20;
        println!("\n{}, sparse file of {size} MiB\n\n{}", report.host, report.markdown());
    }
    Ok(())
}
