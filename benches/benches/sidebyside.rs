//! Each method in each condition, interleaved with pagemap: the table of docs/performance.md. Writes `target/fdmap-bench.json`; with
//! `--json` prints the JSON instead of the table. Arguments select conditions by parts of their names.

use std::process::ExitCode;

use fdmap_benches::report::{Report, write_json};
use fdmap_benches::settings::run;
use fdmap_benches::{BenchResult, Condition, Fixture, Method, Settings, pairs};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let mut fixture = Fixture::make(settings)?;
    let mut report = Report::new(settings);
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let chosen = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    for condition in Condition::ALL.into_iter().filter(|condition| chosen(condition.name())) {
        eprintln!("{} ...", condition.name());
        fixture.enter(condition)?;
        let mut outcomes = pairs::measure(&fixture, Method::PagemapBatched, &Method::WHOLE, settings.rounds)?;
        outcomes.extend(pairs::measure(&fixture, Method::PagemapPages, &Method::PAGES, settings.rounds)?);
        report.add(condition, &fixture, &outcomes)?;
    }
    drop(fixture);
    let json = write_json(&report, env!("CARGO_TARGET_TMPDIR"), "fdmap-bench.json")?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{json}");
    } else {
        println!("\n{}\n", report.host);
        println!("{}", report.markdown());
    }
    Ok(())
}
