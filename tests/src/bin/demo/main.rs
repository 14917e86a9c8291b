//! `make demo`: compares pagemap and fdmap on a memfd that is mostly swapped out.
//!
//! The demo starts a service and a client process in a memory cgroup that is smaller than the file, and adds swap if the host
//! has too little. It removes all of this at the end, on ^C and on failure.

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

/// Compares /proc/PID/pagemap and fdmap on a file that is mostly swapped out.
#[derive(Parser)]
#[command(name = "fdmap-demo")]
struct Args {
    /// Size of the file in MiB. The memory limit of the client is a quarter of it.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=65536))]
    mib: u64,
    /// Keep the service running until ^C.
    #[arg(long)]
    stay: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let shown = cleanup::on_interrupt().and_then(|()| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let failed = |error: std::io::Error| HarnessError::Program {
            program: "tokio".to_owned(),
            message: error.to_string(),
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

/// Returns false if fdmap misreports a page.
async fn show(args: &Args) -> HarnessResult<bool> {
    println!("fdmap: the pagemap that belongs to the file\n");
    let mut fixture = Fixture::set(args.mib)?;
    fixture.act()?;
    let pages = fixture.pages();

    heading(&format!("What /proc/{}/pagemap reports to other tools", fixture.pid()));
    let entries = fixture.pagemap()?;
    let states: Vec<_> = entries.iter().map(|entry| entry.state()).collect();
    let mut map = HeatMap::new(PageRange::first(pages), 66);
    measure::runs(&states).iter().for_each(|run| map.add(run));
    map.rows(false).for_each(|(page, row)| println!("{page:>12}  {row}"));
    let none = entries.iter().filter(|entry| entry.state() == PageState::Hole).count();
    let lost = to_u64(none).saturating_sub(pages - fixture.written());
    println!("R present  S swapped  . none");
    println!("pagemap reports none for {none} of {pages} pages, and {lost} of those hold data");

    heading("What fdmap reports to another process over gRPC");
    fixture.fdmap(&["pages", FILE, "--map"])?;
    println!();
    fixture.fdmap(&["stat", FILE])?;

    heading("Page by page: rows pagemap, columns fdmap");
    fixture.fdmap(&["compare", "--pid", &fixture.pid().to_string(), "--first", "3", FILE])?;

    heading("Comparison with what the client wrote");
    let checked = fixture.check().await?;
    print_checked(&checked);

    heading("Time to read the whole file, medians");
    for Timing { what, millis, ns_a_page } in fixture.timings().await? {
        println!("{what:<66} {millis:>8.2} ms  {ns_a_page:>6.1} ns/page");
    }

    if args.stay {
        heading("Commands to try; ^C ends the demo");
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
    println!("the client wrote {written} pages; fdmap misreports {wrong}");
    println!("{swapped} pages are swapped out, in {slots} different slots of {area}");
}

/// Prints the command line of `fdmap` and runs it. Its output is passed through.
fn typed(command: &mut Command, arguments: &[&str]) -> HarnessResult<()> {
    println!("$ fdmap {}", arguments.join(" "));
    let failed = |message: String| HarnessError::Program {
        program: format!("fdmap {}", arguments.join(" ")),
        message,
    };
    let status = command.args(arguments).status().map_err(|error| failed(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}
