//! Lazy restores from a store that is slow, or fails.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_client::image::lazy::LazyFile;
use fdmap_client::image::{ImageError, ImageStore};
use fdmap_tests::harness::require;
use fdmap_tests::service::named;
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
    let (store, faults) = slow(bed);
    (content_now(&fd), store, faults)
}

/// The store of the image `1`, with faults.
fn slow(bed: &Bed) -> (Arc<dyn ImageStore>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let store = SlowStore { inner: bed.image("1"), faults: Arc::clone(&faults) };
    (Arc::new(store), faults)
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

/// Asserts that pages have their content, or that the kernel refuses to read them. Returns how many it refuses.
#[track_caller]
fn refused_pages(file: &LazyFile, content: &[u8]) -> usize {
    // In place of accesses, which raise SIGBUS.
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let start = file.as_ptr().addr() as u64;
    let mut refused = 0;
    for (page, expected) in content.chunks(4096).enumerate() {
        let mut found = [0; 4096];
        match memory.read_exact_at(&mut found, start + page as u64 * PAGE) {
            Ok(()) => assert!(found == expected, "page {page}"),
            Err(_) => refused += 1,
        }
    }
    refused
}

#[test(flavor = "multi_thread")]
async fn file_is_dropped_while_all_reads_wait() {
    let bed = Bed::new();
    let (_, store, faults) = image(&bed);
    faults.set(0..CHUNKS, Some(Fault::Wait));
    let waiting = Arc::clone(&faults);
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        waiting.wait_for(0);
        let began = Instant::now();
        drop(file);
        println!("dropped in {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    })
    .await;
    assert_eq!(bed.run(&["stat", "copy"]).status.code(), Some(3));
    faults.set(0..CHUNKS, None);
}

#[test(flavor = "multi_thread")]
async fn pages_without_content_are_never_zero_after_a_cancellation() {
    let bed = Bed::new();
    let (content, store, faults) = image(&bed);
    faults.set(10..CHUNKS, Some(Fault::Wait));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        let cancellation = file.cancellation();
        assert_pages(&file, &content, 0..10 * CHUNK);
        cancellation.cancel();
        let began = Instant::now();
        while !file.is_filled() {
            assert!(began.elapsed() < Duration::from_secs(2), "the thread waits for reads");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(refused_pages(&file, &content), content.len() / 4096 - 10 * 256);
        // Reads that were in progress change nothing.
        faults.set(0..CHUNKS, None);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(refused_pages(&file, &content), content.len() / 4096 - 10 * 256);
        assert!(matches!(file.finish(), Err(ImageError::Cancelled)));
    })
    .await;
    assert_eq!(bed.run(&["stat", "copy"]).status.code(), Some(3));
}

/// A huge page has the content of two chunks, and fails with each.
#[test(flavor = "multi_thread")]
async fn hugetlb_file_is_filled_in_huge_pages() {
    const HUGE: usize = 2 << 20;
    let bed = Bed::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let _pages = require(fdmap_tests::hugepages::hugetlb_2m(&host, 16));
    bed.json(&["create", "ram", "--size", "16M", "--huge", "2M"]);
    let mut content = random(1, 8 * HUGE);
    // A hole, and a page with a hole.
    content[3 * HUGE..4 * HUGE + 9 * 4096].fill(0);
    let mapped = bed.service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    for page in [0, 1, 2, 4, 5, 6, 7] {
        assert!(mapped.write_at((page * HUGE) as u64, &content[page * HUGE..(page + 1) * HUGE]));
    }
    drop(mapped);
    bed.json(&["dump", "ram", "1"]);
    let (store, faults) = slow(&bed);
    let expected = content.clone();
    faults.set([1].into_iter(), Some(Fault::Fail(ErrorKind::TimedOut, 2)));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        assert_pages(&file, &expected, [7 * 512 + 3, 3 * 512, 4 * 512, 0, 300].into_iter());
        assert_pages(&file, &expected, 0..8 * 512);
        let (_, _, report) = file.finish().unwrap();
        assert_eq!(report.counts.fault_pages + report.counts.streamed_pages, 7, "{report:?}");
    })
    .await;
    bed.json(&["delete", "copy"]);

    let (store, faults) = slow(&bed);
    faults.set([1].into_iter(), Some(Fault::Fail(ErrorKind::InvalidData, 1)));
    with_file_of(&bed, &store, options(), move |file| {
        let file = file.unwrap();
        assert_pages(&file, &content, 512..8 * 512);
        let error = file.finish().unwrap_err();
        assert!(matches!(error, ImageError::Damaged { pages: 1, .. }), "{error}");
    })
    .await;
}
