//! What the shim costs programs: a table of docs/performance.md. With `--json` it is printed as JSON; that is left in
//! `target/fdmap-bench-shim.json` in any case.

use std::process::ExitCode;

use fdmap_benches::report::{Host, leave};
use fdmap_benches::settings::run;
use fdmap_benches::shim::{self, ShimReport};
use fdmap_benches::{Measured, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> Measured<()> {
    let report = ShimReport { host: Host::new(settings), costs: shim::measure(settings)? };
    let json = leave(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench-shim.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        println!("\n{}\n\n{}", report.host, report.markdown());
    }
    Ok(())
}
