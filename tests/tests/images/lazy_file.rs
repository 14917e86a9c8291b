//! Files of the service whose pages are filled while the process that restores them uses them.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use fdmap_client::grpc::ChangesOptions;
use fdmap_client::image::lazy::{LazyEnd, LazyFile};
use fdmap_client::image::restore::{RestoreOptions, RestoreService};
use fdmap_client::image::{ImageChain, ImageError, ImageStore};
use fdmap_client::proto::{Access, ClientMapping, FileName, PageIndex, Right};
use fdmap_client::{Client, ClientError};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::service::{fdmap_as, named};
use fdmap_tests::test;
use tokio::runtime::Handle;

use super::{Bed, PAGE, content_now, random, write_at};

const PAGES: u64 = 24 << 10;
/// A user without privileges.
const USER: u32 = 65534;

/// An image of a file with this content.
fn image(bed: &Bed) -> Vec<u8> {
    let fd = bed.create("ram", PAGES * PAGE - 100);
    write_at(&fd, 3, &random(1, 9000 * 4096));
    write_at(&fd, PAGES - 9000, &random(2, 9000 * 4096 - 100));
    bed.json(&["seal", "ram", "shrink", "grow"]);
    bed.json(&["dump", "ram", "1", "--compress", "lz4"]);
    write_at(&fd, 5000, &random(3, 500 * 4096));
    bed.json(&["dump", "ram", "2", "--parent", "1"]);
    content_now(&fd)
}

/// Creates a file lazily from an image, and passes it to `action`, which blocks.
async fn with_file<T: Send + 'static>(
    bed: &Bed,
    image: &str,
    options: RestoreOptions,
    action: impl FnOnce(Result<LazyFile, ImageError>) -> T + Send + 'static,
) -> T {
    with_file_of(bed, &bed.image(image), options, action).await
}

pub(super) async fn with_file_of<T: Send + 'static>(
    bed: &Bed,
    store: &Arc<dyn ImageStore>,
    options: RestoreOptions,
    action: impl FnOnce(Result<LazyFile, ImageError>) -> T + Send + 'static,
) -> T {
    let client: Client = bed.service.client().await.unwrap();
    let mut fdpass = bed.service.fdpass().unwrap();
    let chain = Arc::new(ImageChain::open(store).unwrap());
    let runtime = Handle::current();
    let task = move || {
        let service = RestoreService { client: &client, fdpass: &mut fdpass, runtime };
        action(LazyFile::create(chain, service, &options))
    };
    tokio::task::spawn_blocking(task).await.unwrap()
}

pub(super) fn options() -> RestoreOptions {
    RestoreOptions { name: Some("copy".to_owned()), ..RestoreOptions::default() }
}

#[track_caller]
pub(super) fn assert_pages(file: &LazyFile, content: &[u8], pages: impl Iterator<Item = u64>) {
    for page in pages {
        let at = usize::try_from(page * PAGE).unwrap();
        let expected = &content[at..(at + 4096).min(content.len())];
        let mut found = vec![0; expected.len()];
        assert!(file.read_at(page * PAGE, &mut found));
        assert!(found == expected, "page {page}");
    }
}

#[test(flavor = "multi_thread")]
async fn lazy_file_has_its_content_at_once_and_is_tracked_once_it_is_complete() {
    let bed = Bed::new();
    let content = image(&bed);
    let mut expected = content.clone();
    expected[10 * 4096] = 77;
    let last = expected.len() - 1;
    expected[last] = 78;
    let (mut mapping, report) = with_file(&bed, "2", options(), move |file| {
        let file = file.unwrap();
        let began = Instant::now();
        assert_pages(&file, &content, std::iter::once(PAGES - 1));
        println!("first access: {:?}", began.elapsed());
        assert!(file.write_at(content.len() as u64 - 1, &[78]) && file.write_at(10 * PAGE, &[77]));
        assert!(!file.write_at(content.len() as u64, &[1]));
        assert_pages(&file, &content, (0..200).map(|number| 100 + (number * 7919) % (PAGES - 200)));
        let (mapping, restored, report) = file.finish().unwrap();
        assert_eq!(restored.info.name, "copy");
        (mapping, report)
    })
    .await;
    assert_eq!(report.end, LazyEnd::Complete);
    println!("{report:?}");
    assert!(report.counts.faults > 0 && report.counts.streamed_pages > 0, "{report:?}");
    let fd = bed.service.fdpass().unwrap().open(&named("copy"), false).unwrap().0;
    assert!(content_now(&fd) == expected);
    assert_eq!(fdmap_sys::memfd::seals(fd.as_fd()).unwrap(), 0x2 | 0x4);
    let client = bed.service.client().await.unwrap();
    mapping.track().unwrap();
    let since = client.checkpoint(&named("copy"), true, None).await.unwrap().generation;
    assert!(mapping.write_at(7 * PAGE, b"tracked"));
    client.checkpoint(&named("copy"), true, None).await.unwrap();
    let options = ChangesOptions { since, ..ChangesOptions::default() };
    let changed = client.changes(&named("copy"), options).await.unwrap().runs().await.unwrap();
    assert!(changed.iter().any(|changed| changed.run.range.contains(PageIndex(7))));
}

#[test(flavor = "multi_thread")]
async fn incomplete_file_is_closed_to_its_owner_and_deleted_if_dropped() {
    let bed = Bed::with(&["--group", "65534"]);
    image(&bed);
    let open = |bed: &Bed| {
        let mut command = fdmap_as(&bed.service, USER).unwrap();
        command.args(["open", "copy", "--", "true"]).output().unwrap().status.code()
    };
    let access = Some(Access::private(USER, USER));
    let file = with_file(&bed, "2", RestoreOptions { access, ..options() }, Result::unwrap).await;
    assert!(!file.info().unwrap().access.owner.has(Right::Read));
    assert_ne!(open(&bed), Some(0), "the owner cannot open it");
    let (mapping, _, _) = tokio::task::spawn_blocking(move || file.finish().unwrap()).await.unwrap();
    assert_eq!(open(&bed), Some(0));
    drop(mapping);
    bed.json(&["delete", &format!("{USER}/copy")]);

    let file = with_file(&bed, "2", options(), Result::unwrap).await;
    tokio::task::spawn_blocking(move || drop(file)).await.unwrap();
    assert_eq!(bed.run(&["stat", "copy"]).status.code(), Some(3));
}

#[test(flavor = "multi_thread")]
async fn damaged_content_fails_the_restore_and_leaves_no_file() {
    let bed = Bed::new();
    image(&bed);
    let path = bed.folder.join("1/pages-1.img.lz4");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 5000;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = with_file(&bed, "1", options(), |file| file.unwrap().finish().unwrap_err()).await;
    let text = error.to_string();
    assert!(text.contains("pages cannot be restored") && text.contains("1/pages-1.img.lz4"), "{text}");
    assert_eq!(bed.run(&["stat", "copy"]).status.code(), Some(3));
}

/// The userfaultfd of write tracking and that of the restore exclude each other.
#[test(flavor = "multi_thread")]
async fn tracking_of_an_incomplete_file_is_refused() {
    let bed = Bed::new();
    image(&bed);
    let mut fdpass = bed.service.fdpass().unwrap();
    let error = with_file(&bed, "2", options(), move |file| {
        let file = file.unwrap();
        let mapping = ClientMapping {
            address: file.as_ptr().addr() as u64,
            length_bytes: PAGES * PAGE,
            first_page: PageIndex(0),
        };
        let uffd = Userfaultfd::create().unwrap();
        let pagemap = fdmap_sys::process::open_own("pagemap").unwrap();
        let maps = fdmap_sys::process::open_own("maps").unwrap();
        let id = FileName::Id(file.info().unwrap().id);
        let opened = [&pagemap, &maps].map(|one| one.as_ref().map(std::fs::File::as_fd));
        // It may be complete before.
        let refused = fdpass.track(&id, uffd.as_fd(), opened[0], opened[1], &[mapping]);
        assert!(refused.is_err() || file.is_filled(), "an incomplete file is tracked");
        refused.err()
    })
    .await;
    if let Some(error) = error {
        assert!(matches!(error, ClientError::Refused { .. }), "{error:?}");
        println!("{error}");
    }
}

#[test(flavor = "multi_thread")]
async fn files_that_cannot_be_filled_are_refused() {
    let bed = Bed::new();
    let fd = bed.create("ram", 10 * PAGE);
    write_at(&fd, 3, &random(1, 4096));
    drop(bed.create("other", PAGE));
    bed.json(&["dump", "ram", "other", "2"]);
    let refused = |file: Result<LazyFile, ImageError>| file.unwrap_err().to_string();
    let text = with_file(&bed, "2", options(), refused).await;
    assert!(text.contains("2 are selected"), "{text}");
    bed.json(&["seal", "ram", "write"]);
    std::fs::remove_dir_all(bed.folder.join("2")).unwrap();
    bed.json(&["dump", "ram", "2"]);
    let text = with_file(&bed, "2", options(), refused).await;
    assert!(text.contains("sealed against writes"), "{text}");
    let files = bed.json(&["ls"]);
    assert_eq!(files.as_array().map(Vec::len), Some(2), "{files}");
}
