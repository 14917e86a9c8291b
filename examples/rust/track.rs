//! Tracks a mapping: writes three pages and asks which pages were written.
//!
//! `cargo run -p fdmap-client --example track -- [USER/]FILE`

use std::error::Error;

use fdmap_client::grpc::ChangesOptions;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts, file_name};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = file_name::parse(&std::env::args().nth(1).ok_or("usage: track FILE")?)?;
    let (endpoint, timeouts) = (Endpoint::from_env(), Timeouts::default());
    let client = Client::connect(&endpoint, timeouts).await?;

    // The fdpass socket passes the descriptor; this half of the library needs no async runtime.
    let mut mapped = FdpassClient::connect(&endpoint, timeouts)?.map(&file, true)?;
    mapped.track()?;
    // Whatever the file held before counts as written in the first generation.
    let before = client.checkpoint(&file, false, None).await?.generation;

    for page in [3, 4, 9] {
        assert!(
            mapped.write_at(page * mapped.page_size().bytes(), b"hello"),
            "the file has 10 pages or more"
        );
    }
    let checkpoint = client.checkpoint(&file, false, None).await?;
    let options = ChangesOptions { since: before, ..ChangesOptions::default() };
    for changed in client.changes(&file, options).await?.runs().await? {
        let (range, conservative) = (changed.run.range, changed.run.conservative);
        println!("{}..{} written, conservative: {conservative}", range.start().0, range.end().0);
    }
    println!("generation {}, exact: {}", checkpoint.generation, checkpoint.coverage.exact);
    Ok(())
}
