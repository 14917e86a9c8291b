//! Each way in each condition by turns with pagemap: the table of docs/performance.md. With `--json` it is printed as JSON;
//! that is left in `target/fdmap-bench.json` in any case. Words choose conditions by their names.

use std::process::ExitCode;

use fdmap_benches::report::{Report, leave};
use fdmap_benches::settings::run;
use fdmap_benches::{Bed, Condition, Measured, Settings, Way, pairs};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> Measured<()> {
    let mut bed = Bed::make(settings)?;
    let mut report = Report::new(settings);
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let chosen = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    for condition in Condition::ALL.into_iter().filter(|condition| chosen(condition.name())) {
        eprintln!("{} ...", condition.name());
        bed.enter(condition)?;
        let mut outcomes = pairs::measure(&bed, Way::PagemapBatched, &Way::WHOLE, settings.rounds)?;
        outcomes.extend(pairs::measure(&bed, Way::PagemapPages, &Way::PAGES, settings.rounds)?);
        report.add(condition, &bed, &outcomes)?;
    }
    drop(bed);
    let json = leave(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        println!("\n{}\n", report.host);
        println!("{}", report.markdown());
    }
    Ok(())
}
