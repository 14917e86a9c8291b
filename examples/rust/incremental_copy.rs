//! Copies the pages that changed since the last run. The service remembers the position as a cursor.
//! `cargo run -p fdmap-client --example incremental_copy -- [USER/]FILE TARGET`

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::{error::Error, fs::File, time::UNIX_EPOCH};

use fdmap_client::grpc::ChangesOptions;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts, file_name};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let argument = |n| std::env::args().nth(n).ok_or("usage: incremental_copy FILE TARGET");
    let (file, endpoint) = (file_name::parse(&argument(1)?)?, Endpoint::from_env());
    let client = Client::connect(&endpoint, Timeouts::default()).await?;
    // Read by descriptor: a new mapping is a possible writer, which makes all data pages conservative.
    let mut session = FdpassClient::connect(&endpoint, Timeouts::default())?;
    let (source, bytes) = (File::from(session.open(&file, false)?.0), session.page_size().bytes());
    let target = File::options().create(true).truncate(false).write(true).open(argument(2)?)?;

    let inode = target.metadata()?;
    // The cursor belongs to the target: another target gets a cursor of its own, also one that has the inode number of a deleted one.
    let born = inode.created()?.duration_since(UNIX_EPOCH)?.as_nanos();
    let cursor = format!("incremental-copy-{:x}-{:x}-{born:x}", inode.dev(), inode.ino());
    let exists = client.cursors(&file).await?.iter().any(|one| one.name == cursor);
    // After a crash in one of these steps the target is empty or has no cursor: the next run repeats them.
    if !exists || inode.len() == 0 {
        if exists {
            client.delete_cursor(&file, &cursor).await?;
        }
        target.set_len(0)?;
        client.create_cursor(&file, &cursor, Generation::NONE).await?;
    }
    // begin takes a checkpoint and freezes the set; an interrupted run gets the same set again.
    let begun = client.begin_cursor(&file, &cursor, false).await?;
    let size = source.metadata()?.len();
    target.set_len(size)?;
    let options = ChangesOptions { cursor: Some(cursor.clone()), ..ChangesOptions::default() };
    for changed in client.changes(&file, options).await?.runs().await? {
        for page in changed.run.range.start().0..changed.run.range.end().0.min(size.div_ceil(bytes)) {
            let mut content = vec![0; usize::try_from(bytes.min(size - page * bytes))?];
            let read = source.read_at(&mut content, page * bytes)?; // fewer bytes if the file shrank
            target.write_all_at(&content[..read], page * bytes)?;
        }
    }
    target.sync_all()?;
    client.commit_cursor(&file, &cursor, begun.cursor.until_generation.ok_or("no frozen set")?).await?;
    Ok(())
}
