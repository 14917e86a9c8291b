//! Lazy restores from a store that is slow.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_client::image::ImageStore;
use fdmap_tests::test;

use super::lazy_file::{assert_pages, options, with_file_of};
use super::slow_store::{Faults, SlowStore};
use super::{Bed, PAGE, content_now, random, write_at};

/// Pages of a chunk.
const CHUNK: u64 = 256;
const CHUNKS: u64 = 64;

/// An image of random pages without holes, in a store with faults.
fn image(bed: &Bed) -> (Vec<u8>, Arc<dyn ImageStore>, Arc<Faults>) {
    let fd = bed.create("ram", CHUNKS * CHUNK * PAGE);
    write_at(&fd, 0, &random(1, usize::try_from(CHUNKS << 20).unwrap()));
    bed.json(&["dump", "ram", "1"]);
    let faults = Arc::new(Faults::default());
    let store = SlowStore { inner: bed.image("1"), faults: Arc::clone(&faults) };
    (content_now(&fd), Arc::new(store), faults)
}

/// The reads of the stream and of some page faults wait.
#[test(flavor = "multi_thread")]
async fn slow_reads_delay_no_other_page_fault() {
    let bed = Bed::new();
    let (content, store, faults) = image(&bed);
    faults.set_slow((0..CHUNKS / 2).chain([40, 41, 42]));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        std::thread::scope(|scope| {
            // Several threads wait for each page.
            for chunk in [40, 41, 42, 40, 41, 42] {
                let (file, content) = (&file, &content);
                scope.spawn(move || {
                    assert_pages(file, content, [chunk * CHUNK + 5, chunk * CHUNK + 200].into_iter());
                });
            }
            faults.wait_for(40);
            faults.wait_for(42);
            let began = Instant::now();
            for chunk in (50..CHUNKS).rev() {
                assert_pages(&file, &content, [chunk * CHUNK + 9, chunk * CHUNK + 255].into_iter());
            }
            println!("{} pages while reads wait: {:?}", 2 * (CHUNKS - 50), began.elapsed());
            assert!(!file.is_filled() && began.elapsed() < Duration::from_secs(10));
            assert_eq!([40, 41, 42].map(|chunk| faults.reads(chunk)), [1; 3], "reads are shared");
            faults.set_slow(std::iter::empty());
        });
        assert_pages(&file, &content, 0..CHUNKS * CHUNK);
        let (_, _, report) = file.finish().unwrap();
        assert_eq!(report.counts.fault_pages + report.counts.streamed_pages, CHUNKS * CHUNK);
    })
    .await;
}
