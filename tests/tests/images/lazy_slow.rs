//! Lazy restores from a store that is slow, or fails.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_client::image::{ImageError, ImageStore};
use fdmap_tests::test;

use super::lazy_file::{assert_pages, options, with_file_of};
use super::slow_store::{Fault, Faults, SlowStore};
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
    faults.set((0..CHUNKS / 2).chain([40, 41, 42]), Some(Fault::Wait));
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
            faults.set(0..CHUNKS, None);
        });
        assert_pages(&file, &content, 0..CHUNKS * CHUNK);
        let (_, _, report) = file.finish().unwrap();
        assert_eq!(report.counts.fault_pages + report.counts.streamed_pages, CHUNKS * CHUNK);
    })
    .await;
}

#[test(flavor = "multi_thread")]
async fn reads_are_repeated_after_transient_errors_and_no_page_is_lost() {
    let bed = Bed::new();
    let (content, store, faults) = image(&bed);
    faults.set([3, 50].into_iter(), Some(Fault::Fail(ErrorKind::ConnectionReset, 3)));
    faults.set([51].into_iter(), Some(Fault::Fail(ErrorKind::TimedOut, 2)));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        assert_pages(&file, &content, [50 * CHUNK, 51 * CHUNK + 7, 3 * CHUNK, 60 * CHUNK].into_iter());
        assert_pages(&file, &content, 0..CHUNKS * CHUNK);
        let (mapping, _, report) = file.finish().unwrap();
        assert!(report.counts.repeated_reads >= 8 && report.counts.damaged_pages == 0, "{report:?}");
        let mut found = vec![0; content.len()];
        assert!(mapping.read_at(0, &mut found) && found == content);
    })
    .await;
}

#[test(flavor = "multi_thread")]
async fn chunks_that_cannot_be_read_are_read_once() {
    let bed = Bed::new();
    let (content, store, faults) = image(&bed);
    // Later reads would succeed.
    faults.set([3].into_iter(), Some(Fault::Fail(ErrorKind::NotFound, 1)));
    faults.set([50].into_iter(), Some(Fault::Fail(ErrorKind::InvalidData, 1)));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        assert_pages(
            &file,
            &content,
            (0..CHUNKS).filter(|chunk| ![3, 50].contains(chunk)).map(|chunk| chunk * CHUNK),
        );
        let error = file.finish().unwrap_err();
        assert!(matches!(error, ImageError::Damaged { pages, .. } if pages == 2 * CHUNK), "{error}");
        assert_eq!((faults.reads(3), faults.reads(50)), (1, 1));
    })
    .await;
    assert_eq!(bed.run(&["stat", "copy"]).status.code(), Some(3));
}
