//! A program shaped like a VMM: guest memory is a file of the service, two vCPU threads write to it, and each round of a
//! pre-copy migration asks which pages to send. Needs a running service.
//!
//! `cargo run -p fdmap-client --example vmm --features vm-memory [-- RUNTIME_DIR]`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::Seal;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::vm_memory::region;
use fdmap_client::{Client, Endpoint, FdpassClient, Timeouts};
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

const PAGES: u64 = 4096;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1);
    let place = folder.map_or_else(Endpoint::from_env, Endpoint::in_runtime_dir);
    let client = Client::connect(&place, Timeouts::default()).await?;
    let file = CreateFile {
        name: format!("vmm-{}", std::process::id()),
        size_bytes: PAGES * 4096,
        seals: [Seal::Shrink, Seal::Grow].into_iter().collect(),
        ..CreateFile::default()
    };
    let name = FileName::Id(client.create(file).await?.id);
    let shown = run(&client, &place, &name).await;
    // The memory is freed with its last mapping.
    client.delete(&name).await?;
    shown
}

async fn run(client: &Client, place: &Endpoint, name: &FileName) -> Result<(), Box<dyn std::error::Error>> {
    let mut mapped = FdpassClient::connect(place, Timeouts::default())?.map(name, true)?;
    mapped.track()?;
    let memory = Arc::new(GuestMemoryMmap::from_regions(vec![region(mapped, GuestAddress(0))?])?);

    let stop = Arc::new(AtomicBool::new(false));
    let vcpus: Vec<_> = (0..2_u64)
        .map(|vcpu| {
            let (memory, stop) = (Arc::clone(&memory), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut at = vcpu;
                while !stop.load(Ordering::Relaxed) {
                    at = (at * 1109 + 12345) % PAGES;
                    memory.write_obj(at, GuestAddress(at * 4096))?;
                    std::thread::sleep(Duration::from_micros(200));
                }
                Ok::<_, vm_memory::GuestMemoryError>(())
            })
        })
        .collect();

    let region = memory.iter().next().ok_or("there is one region")?;
    let dirty = region.bitmap();
    let mut since = Generation::NONE;
    for round in 1..=5 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let made = dirty.update(client, since).await?;
        let first =
            (0..PAGES).find(|page| dirty.dirty_at(usize::try_from(page * 4096).unwrap_or(usize::MAX)));
        println!("round {round}: {} pages to send, the first is {first:?}", dirty.count());
        since = made.generation;
    }
    stop.store(true, Ordering::Relaxed);
    for vcpu in vcpus {
        vcpu.join().map_err(|_| "a vCPU panicked")??;
    }
    Ok(())
}
