//! Files of the service as guest memory of rust-vmm's `vm-memory`.

use std::process::Command;

use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::Seal;
use fdmap_client::proto::units::Generation;
use fdmap_client::vm_memory::{GuestRegion, region};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use vm_memory::bitmap::{Bitmap, BitmapSlice};
use vm_memory::{
    Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    MemoryRegionAddress, VolatileSlice,
};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 256;
const PAGE: u64 = 4096;
const BASE: u64 = 1 << 32;

async fn guest(service: &Service) -> GuestRegion {
    let client = service.client().await.unwrap();
    let seals = [Seal::Shrink].into_iter().collect();
    let file =
        CreateFile { name: "ram".to_owned(), size_bytes: PAGES * PAGE, seals, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    region(mapped, GuestAddress(BASE)).unwrap()
}

fn dirty(region: &GuestRegion) -> Vec<u64> {
    (0..PAGES).filter(|page| region.bitmap().dirty_at((page * PAGE) as usize)).collect()
}

#[test(flavor = "multi_thread")]
async fn dirty_bitmap_matches_the_service() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let memory = GuestMemoryMmap::from_regions(vec![guest(&service).await]).unwrap();
    let region = memory.iter().next().unwrap();
    assert_eq!(region.file_offset().unwrap().start(), 0);
    let mut since = region.bitmap().update(&client, Generation::NONE).await.unwrap().generation;
    assert!(dirty(region).is_empty());

    // Writes through vm-memory's accessors, through a raw pointer as a vCPU does, and by another process.
    memory.write_obj(7_u64, GuestAddress(BASE + 3 * PAGE)).unwrap();
    memory.write_slice(&[1; 2 * PAGE as usize], GuestAddress(BASE + 9 * PAGE + 1)).unwrap();
    let raw = memory.get_host_address(GuestAddress(BASE + 20 * PAGE)).unwrap();
    // SAFETY: the byte belongs to the region, and there are no references to it.
    unsafe { raw.write_volatile(1) };
    assert!(dirty(region).is_empty(), "the bitmap changes on update only");
    since = region.bitmap().update(&client, since).await.unwrap().generation;
    assert_eq!(dirty(region), [3, 9, 10, 11, 20]);
    assert_eq!(region.bitmap().count(), 5);

    let mut device = TestAgent::start(None).unwrap();
    device.map(&service, "ram", true).unwrap();
    region.bitmap().update(&client, since).await.unwrap();
    since = region.bitmap().update(&client, since).await.unwrap().generation;
    device.poke(0, 40, 42).unwrap();
    since = region.bitmap().update(&client, since).await.unwrap().generation;
    assert_eq!(dirty(region), [40, 41]);
    region.bitmap().update(&client, since).await.unwrap();
    assert!(dirty(region).is_empty());
    assert_eq!(memory.read_obj::<u64>(GuestAddress(BASE + 3 * PAGE)).unwrap(), 7);
}

#[test(flavor = "multi_thread")]
async fn bitmap_slices_have_their_offset_and_keep_the_mapping() {
    fn first<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) -> bool {
        slice.bitmap().dirty_at(0)
    }
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let region = guest(&service).await;
    let since = region.bitmap().update(&client, Generation::NONE).await.unwrap().generation;
    region.write_obj(1_u8, MemoryRegionAddress(17 * PAGE)).unwrap();
    region.bitmap().update(&client, since).await.unwrap();
    let slice = |page: u64| region.get_slice(MemoryRegionAddress(page * PAGE), 8).unwrap();
    assert!(first(&slice(17)) && !first(&slice(16)) && !first(&slice(18)));
    let pages = region.bitmap().slice_at(16 * PAGE as usize);
    drop(region);
    assert!(pages.slice_at(PAGE as usize).dirty_at(5) && !pages.dirty_at(5));
    // The slice keeps the tracked mapping; dropping the last one unmaps it.
    assert_eq!(client.coverage(&named("ram")).await.unwrap().coverage.tracked_mappings, 1);
    drop(pages);
    client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert_eq!(client.coverage(&named("ram")).await.unwrap().coverage.tracked_mappings, 0);
}

#[test(flavor = "multi_thread")]
async fn region_beyond_the_address_space_is_refused() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let file = CreateFile { name: "ram".to_owned(), size_bytes: PAGE, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    let refused = region(mapped, GuestAddress(u64::MAX - 10)).unwrap_err();
    assert!(refused.to_string().contains("0xfffffffffffffff5"), "{refused}");
    let mapped = service.fdpass().unwrap().map(&named("ram"), false).unwrap();
    let refused = region(mapped, GuestAddress(0)).unwrap_err();
    assert!(refused.to_string().contains("read-only"), "{refused}");
}

#[test]
fn vmm_example_runs_as_written() {
    let service = Service::start(&[]).unwrap();
    let own = std::env::current_exe().unwrap();
    let example = own.parent().unwrap().parent().unwrap().join("examples/vmm");
    let output = Command::new(example).arg(service.folder()).output().unwrap();
    let (stdout, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(
        stdout.lines().filter(|line| line.contains(" pages to send, the first is Some(")).count(),
        5,
        "{stdout}"
    );
}
