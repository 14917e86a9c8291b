//! Prints the state of every page of a file, as runs of equal state.
//!
//! `cargo run -p fdmap-client --example scan -- [USER/]FILE`

use std::error::Error;

use fdmap_client::grpc::ScanRequest;
use fdmap_client::{Client, Endpoint, Timeouts, file_name};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = file_name::parse(&std::env::args().nth(1).ok_or("usage: scan FILE")?)?;
    // FDMAP_RUNTIME_DIR names another directory than /run/fdmap.
    let client = Client::connect(&Endpoint::from_env(), Timeouts::default()).await?;

    let scan = client.scan(&file, &ScanRequest::default()).await?;
    let exact = scan.header().provenance.exact();
    for run in scan.runs().await? {
        let (start, end) = (run.range.start().0, run.range.end().0);
        match run.slot {
            // Slots within a run are consecutive.
            Some(slot) => println!("{start}..{end} {} at slot {slot}", run.state),
            None => println!("{start}..{end} {}", run.state),
        }
    }
    println!("exact: {exact}");
    Ok(())
}
