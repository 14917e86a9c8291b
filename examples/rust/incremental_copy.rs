//! Copies the pages that changed since the last run. The service remembers the position as a cursor.
//! `cargo run -p fdmap-client --example incremental_copy -- FILE TARGET`

use std::{error::Error, os::unix::fs::FileExt as _};

use fdmap_client::grpc::ChangesOptions;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts};

const CURSOR: &str = "incremental-copy";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let argument = |n| std::env::args().nth(n).ok_or("usage: incremental_copy FILE TARGET");
    let (file, endpoint) = (FileName::Name(argument(1)?), Endpoint::from_env());
    let client = Client::connect(&endpoint, Timeouts::default()).await?;
    // Read by descriptor: a new mapping is a possible writer, which makes all data pages conservative.
    let (source, info) = FdpassClient::connect(&endpoint, Timeouts::default())?.open(&file, false)?;
    let (source, bytes) = (std::fs::File::from(source), client.host_info().await?.page_size.bytes());
    let target = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(argument(2)?)?;

    if client.cursors(&file).await?.iter().all(|cursor| cursor.name != CURSOR) {
        client.create_cursor(&file, CURSOR, Generation::NONE).await?;
    }
    // begin takes a checkpoint and freezes the set; an interrupted run gets the same set again.
    let begun = client.begin_cursor(&file, CURSOR, false).await?;
    let options = ChangesOptions { cursor: Some(CURSOR.to_owned()), ..ChangesOptions::default() };
    for changed in client.changes(&file, options).await?.runs().await? {
        for page in changed.run.range.start().0..changed.run.range.end().0 {
            let mut content = vec![0; usize::try_from(bytes.min(info.size_bytes - page * bytes))?];
            source.read_exact_at(&mut content, page * bytes)?;
            target.write_all_at(&content, page * bytes)?;
        }
    }
    target.sync_all()?;
    client.commit_cursor(&file, CURSOR, begun.cursor.until_generation.ok_or("no frozen set")?).await?;
    Ok(())
}
