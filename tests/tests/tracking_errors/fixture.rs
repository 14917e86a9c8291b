//! A service with a file, and this process as its client.

use std::os::fd::AsFd as _;

use fdmap_client::error::RefusalCode;
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{ClientMapping, MappingId, PageIndex};
use fdmap_client::{Client, ClientError, FdpassClient};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::reported::{Reported, create_file};
use fdmap_tests::service::{Service, named};

pub const PAGES: u64 = 64;
pub const PAGE: u64 = 4096;

/// A service with the file "ram".
pub async fn service() -> (Service, Client) {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    (service, client)
}

pub async fn create(client: &Client, name: &str) {
    create_file(client, name, PAGES * PAGE).await.unwrap();
}

/// Asserts that a request was refused with this code, and that the message contains all of `words`.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>, expected: RefusalCode, words: &[&str]) {
    match result {
        Err(ClientError::Refused { code, message }) => {
            assert_eq!(code, expected, "{message}");
            for word in words {
                assert!(message.contains(word), "{word:?} is not in {message:?}");
            }
        }
        other => panic!("expected {expected}: {other:?}"),
    }
}

/// Maps a file of the service in this process.
pub fn map(session: &mut FdpassClient, name: &str) -> SharedMapping {
    let (fd, _) = session.open(&named(name), true).unwrap();
    SharedMapping::shared(&fd, 0, (PAGES * PAGE) as usize, true).unwrap()
}

/// The whole mapping.
pub fn whole(mapping: &SharedMapping) -> ClientMapping {
    let address = mapping.as_ptr().addr() as u64;
    ClientMapping { address, length_bytes: mapping.len() as u64, first_page: PageIndex(0) }
}

/// Tracks mappings of this process, with its own pagemap and maps.
pub fn track(
    session: &mut FdpassClient,
    name: &str,
    uffd: &Userfaultfd,
    mappings: &[ClientMapping],
) -> Result<Vec<MappingId>, ClientError> {
    let pagemap = Pagemap::open(None).unwrap();
    let maps = Maps::open(std::process::id()).unwrap();
    session.track(&named(name), uffd.as_fd(), Some(pagemap.as_fd()), Some(maps.as_fd()), mappings)
}

/// The pages that changed after a generation.
pub async fn changed(client: &Client, name: &str, since: Generation) -> Vec<u64> {
    Reported::since(client, &named(name), since).await.unwrap().pages
}

/// Asserts that the service still observes the writes of a new client.
pub async fn assert_service_works(service: &Service, client: &Client) {
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    // In the generation in which tracking begins, all pages with data are reported.
    for _ in 0..2 {
        client.checkpoint(&named("ram"), true, None).await.unwrap();
    }
    let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
    for page in [3, 30, 63] {
        assert!(mapped.write_at(page * PAGE + 5, b"x"));
    }
    let after = client.checkpoint(&named("ram"), false, None).await.unwrap();
    assert!(!after.unchanged);
    let reported = changed(client, "ram", before.generation).await;
    assert!([3, 30, 63].iter().all(|page| reported.contains(page)), "{reported:?}");
    mapped.untrack().unwrap();
}
