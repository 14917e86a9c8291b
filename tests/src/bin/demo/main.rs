//! `make demo`: a memfd of which much is swapped out, as pagemap and as fdmap tell it.
//!
//! All of it is real: a service, a client process in a memory cgroup that is too small for what it writes, swap. All that
//! is made for it is removed at the end, on ^C and on failure.

mod fixture;
mod measure;

use fdmap_proto::error_chain;
use std::process::{Command, ExitCode};

use clap::Parser;
use fdmap_client::heatmap::HeatMap;
use fdmap_client::proto::units::to_u64;
use fdmap_client::proto::{PageRange, PageState};
use fdmap_tests::service::program;
use fdmap_tests::{HarnessError, HarnessResult, cleanup};

use fixture::{FILE, Fixture};
use measure::{Checked, Timing};

/// Shows what /proc/PID/pagemap and what fdmap say of a file much of which is swapped out.
#[derive(Parser)]
#[command(name = "fdmap-demo")]
struct Args {
    /// Size of the file, MiB. The client may have a quarter of it in memory.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=65536))]
    mib: u64,
    /// Stay until ^C, so that you can ask for yourself.
    #[arg(long)]
    stay: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let shown = cleanup::on_interrupt().and_then(|()| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let failed = |error: std::io::Error| HarnessError::Program {
            program: "tokio".to_owned(),
            said: error.to_string(),
        };
        runtime.map_err(failed)?.block_on(show(&args))
    });
    match shown {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fdmap-demo: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Shows all of it. `false` if fdmap was wrong about a page.
async fn show(args: &Args) -> HarnessResult<bool> {
    println!("fdmap: the pagemap that belongs to the file\n");
    let mut fixture = Fixture::set(args.mib)?;
    fixture.act()?;
    let pages = fixture.pages();

    heading(&format!("What /proc/{}/pagemap says of it, which is all that other tools have", fixture.pid()));
    let entries = fixture.pagemap()?;
    let told: Vec<_> = entries.iter().map(|entry| entry.state()).collect();
    let mut map = HeatMap::new(PageRange::first(pages), 66);
    measure::runs(&told).iter().for_each(|run| map.add(run));
    map.rows(false).for_each(|(page, row)| println!("{page:>12}  {row}"));
    let none = entries.iter().filter(|entry| entry.state() == PageState::Hole).count();
    let lost = to_u64(none).saturating_sub(pages - fixture.written());
    println!("R present  S swapped  . none");
    println!("{none} of {pages} pages are told as none, and {lost} of those hold data");

    heading("What fdmap says of it to another process, over gRPC");
    fixture.fdmap(&["pages", FILE, "--map"])?;
    println!();
    fixture.fdmap(&["stat", FILE])?;

    heading("Page by page: pagemap down, the file across");
    fixture.fdmap(&["compare", "--pid", &fixture.pid().to_string(), "--first", "3", FILE])?;

    heading("Is fdmap right? The client knows what it wrote");
    let checked = fixture.check().await?;
    print_checked(&checked);

    heading("How long it takes to read all of it, medians of pairs");
    for Timing { what, millis, ns_a_page } in fixture.timings().await? {
        println!("{what:<66} {millis:>8.2} ms  {ns_a_page:>6.1} ns a page");
    }

    if args.stay {
        heading("Ask for yourself; ^C ends it");
        let fdmap = program("fdmap")?;
        println!("export FDMAP_RUNTIME_DIR={}", fixture.folder().display());
        println!("{} lookup {FILE} 0 1 2 3", fdmap.display());
        println!("{} doctor", fdmap.display());
        std::future::pending::<()>().await;
    }
    println!();
    Ok(checked.wrong == 0)
}

fn heading(text: &str) {
    println!("\n== {text}\n");
}

fn print_checked(checked: &Checked) {
    let Checked { written, wrong, swapped, slots, area } = checked;
    println!("{written} pages were written: {wrong} are told wrongly");
    println!("{swapped} are swapped out: they have {slots} different slots, all of them inside {area}");
}

/// Runs `fdmap` and lets its output through, under the line that was typed for it.
fn typed(command: &mut Command, arguments: &[&str]) -> HarnessResult<()> {
    println!("$ fdmap {}", arguments.join(" "));
    let failed =
        |said: String| HarnessError::Program { program: format!("fdmap {}", arguments.join(" ")), said };
    let status = command.args(arguments).status().map_err(|error| failed(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}
