//! Mappings that cannot be tracked, and unknown mapping ids.

use std::os::fd::AsFd as _;
use std::process::Command;

use fdmap_client::error::RefusalCode::{FailedPrecondition, InvalidArgument, NotFound};
use fdmap_client::proto::{ClientMapping, MappingId, PageIndex};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::memfd;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::pidfd;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::service::named;
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::tracked::{asynchronous, range_of};
use nix::libc::SYS_userfaultfd;
use nix::sys::mman::{MapFlags, ProtFlags};

use crate::fixture::{
    PAGE, PAGES, assert_service_works, changed, create, map, refused, service, track, whole,
};

#[test(flavor = "multi_thread")]
async fn mapping_of_another_userfaultfd_is_refused() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mapping = map(&mut session, "ram");
    let theirs = Userfaultfd::create().unwrap();
    theirs.api(asynchronous()).unwrap();
    theirs.register_wp(range_of(&mapping)).unwrap();
    let uffd = Userfaultfd::create().unwrap();
    let range = range_of(&mapping).to_string();
    let busy = track(&mut session, "ram", &uffd, &[whole(&mapping)]);
    refused(busy, FailedPrecondition, &["another userfaultfd", &range, "UFFDIO_REGISTER", "EBUSY"]);
    assert_service_works(&service, &client).await;
    // The mapping can be tracked after the other userfaultfd is closed.
    drop(theirs);
    let uffd = Userfaultfd::create().unwrap();
    track(&mut session, "ram", &uffd, &[whole(&mapping)]).unwrap();
    // Two userfaultfds cannot track it at the same time.
    let second = Userfaultfd::create().unwrap();
    let busy = track(&mut session, "ram", &second, &[whole(&mapping)]);
    refused(busy, FailedPrecondition, &["another userfaultfd", &range]);
    let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert!(mapping.write_at(5 * PAGE as usize, b"x"));
    client.checkpoint(&named("ram"), false, None).await.unwrap();
    assert!(
        changed(&client, "ram", before.generation).await.contains(&5),
        "the first userfaultfd still tracks the mapping"
    );
    assert_service_works(&service, &client).await;
}

/// It would protect the memory of that process, whose page tables would count for no user.
#[test(flavor = "multi_thread")]
async fn userfaultfd_of_another_process_is_refused() {
    /// Prints the number of a userfaultfd.
    const PROGRAM: &str = "import ctypes, os, sys
print(ctypes.CDLL(None).syscall(int(sys.argv[1]), os.O_CLOEXEC | os.O_NONBLOCK), flush=True)
sys.stdin.read()";
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mapping = map(&mut session, "ram");
    let mut python = Command::new("python3");
    python.args(["-c", PROGRAM, &SYS_userfaultfd.to_string()]);
    let mut other = LineProcess::start(python, None).unwrap();
    let number = other.receive().unwrap().parse().unwrap();
    let theirs = pidfd::open(other.pid()).unwrap().descriptor(number).unwrap();
    let theirs = Userfaultfd::from_fd(theirs).unwrap();
    let error = track(&mut session, "ram", &theirs, &[whole(&mapping)]);
    refused(error, FailedPrecondition, &["the userfaultfd is not of the address space of process"]);
    let own = Userfaultfd::create().unwrap();
    track(&mut session, "ram", &own, &[whole(&mapping)]).unwrap();
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn initialized_userfaultfd_is_refused() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mapping = map(&mut session, "ram");
    for features in [asynchronous(), UffdFeatures::empty()] {
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(features).unwrap();
        let used = track(&mut session, "ram", &uffd, &[whole(&mapping)]);
        refused(used, FailedPrecondition, &["cannot be tracked", "UFFDIO_API", "EINVAL"]);
    }
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn descriptors_of_the_wrong_kind_are_refused() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mapping = map(&mut session, "ram");
    let uffd = Userfaultfd::create().unwrap();
    let (pagemap, maps) = (Pagemap::open(None).unwrap(), Maps::open(std::process::id()).unwrap());
    let memfd = memfd::create("nothing", None).unwrap();
    let ram = named("ram");
    let mut ask =
        |uffd, pagemap, maps| session.track(&ram, uffd, Some(pagemap), Some(maps), &[whole(&mapping)]);
    refused(
        ask(memfd.as_fd(), pagemap.as_fd(), maps.as_fd()),
        InvalidArgument,
        &["descriptor", "userfaultfd"],
    );
    refused(ask(uffd.as_fd(), memfd.as_fd(), maps.as_fd()), InvalidArgument, &["descriptor", "pagemap"]);
    refused(ask(uffd.as_fd(), maps.as_fd(), maps.as_fd()), InvalidArgument, &["descriptor", "pagemap"]);
    refused(ask(uffd.as_fd(), pagemap.as_fd(), memfd.as_fd()), InvalidArgument, &["descriptor", "maps"]);
    refused(ask(uffd.as_fd(), pagemap.as_fd(), pagemap.as_fd()), InvalidArgument, &["descriptor", "maps"]);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn pagemap_of_another_process_is_not_trusted() {
    require(root());
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mut other = TestAgent::start(None).unwrap();
    other.map(&service, "ram", true).unwrap();
    let (pagemap, maps) = (Pagemap::open(Some(other.pid())).unwrap(), Maps::open(other.pid()).unwrap());
    let own = Maps::open(std::process::id()).unwrap();
    for (page, maps) in [(8, &maps), (9, &own)] {
        let mapping = map(&mut session, "ram");
        let uffd = Userfaultfd::create().unwrap();
        let (tables, vmas) = (Some(pagemap.as_fd()), Some(maps.as_fd()));
        let ids = session.track(&named("ram"), uffd.as_fd(), tables, vmas, &[whole(&mapping)]).unwrap();
        let mut exact = 0;
        for _ in 0..3 {
            let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
            assert!(mapping.write_at((page * PAGE) as usize, b"x"));
            exact = client.checkpoint(&named("ram"), true, None).await.unwrap().observed_pages;
            let reported = changed(&client, "ram", before.generation).await;
            assert!(reported.contains(&page), "{reported:?}");
        }
        assert_eq!(exact, 1, "the write was observed");
        session.untrack(&named("ram"), &ids).unwrap();
    }
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn mappings_of_other_files_are_refused() {
    let (service, client) = service().await;
    create(&client, "other").await;
    let mut session = service.fdpass().unwrap();
    let (mapping, other) = (map(&mut session, "ram"), map(&mut session, "other"));
    let pid = std::process::id().to_string();
    let mut ask = |mapping: ClientMapping, words: &[&str]| {
        let uffd = Userfaultfd::create().unwrap();
        let range = format!("{:#x}", mapping.address);
        let mut words = words.to_vec();
        words.extend([range.as_str(), pid.as_str()]);
        refused(track(&mut session, "ram", &uffd, &[mapping]), FailedPrecondition, &words);
    };
    let all = whole(&mapping);
    ask(whole(&other), &["has no shared mapping", "0..64"]);
    ask(ClientMapping { first_page: PageIndex(1), ..all }, &["has no shared mapping", "1..65"]);
    ask(ClientMapping { first_page: PageIndex(1 << 30), ..all }, &["has no shared mapping"]);
    ask(ClientMapping { address: PAGE, ..all }, &["has no shared mapping"]);
    // Beyond the mapping there is nothing, or another mapping.
    ask(ClientMapping { length_bytes: 1 << 40, ..all }, &["has no shared mapping"]);
    let (fd, _) = service.fdpass().unwrap().open(&named("ram"), true).unwrap();
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let private =
        RawMapping::map(Some((fd.as_fd(), 0)), mapping.len(), access, MapFlags::MAP_PRIVATE).unwrap();
    ask(ClientMapping { address: private.address() as u64, ..all }, &["shared"]);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn malformed_mappings_are_refused() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mapping = map(&mut session, "ram");
    let all = whole(&mapping);
    let part = |first: u64, pages: u64| ClientMapping {
        address: all.address + first * PAGE,
        length_bytes: pages * PAGE,
        first_page: PageIndex(first),
    };
    let mut ask = |mappings: &[ClientMapping], words: &[&str]| {
        let uffd = Userfaultfd::create().unwrap();
        refused(track(&mut session, "ram", &uffd, mappings), InvalidArgument, words);
    };
    ask(&[ClientMapping { address: all.address + 1, ..all }], &["mapping 0", "whole pages"]);
    ask(&[ClientMapping { length_bytes: PAGE + 512, ..all }], &["mapping 0", "whole pages"]);
    ask(
        &[part(0, 1), ClientMapping { length_bytes: 0, ..all }],
        &["0 bytes", &format!("{:#x}", all.address)],
    );
    ask(&[part(0, 4), part(8, 4), part(3, 2)], &["mapping 2", "overlaps"]);
    ask(&[all, all], &["mapping 1", "overlaps"]);
    ask(&[ClientMapping { address: u64::MAX - PAGE + 1, ..all }], &["invalid mapping", "0xfffffffffffff000"]);
    ask(&[ClientMapping { length_bytes: u64::MAX - PAGE + 1, ..all }], &["invalid mapping"]);
    ask(
        &[ClientMapping { first_page: PageIndex(u64::MAX), ..all }],
        &["mapping 0", "exceeds the largest file size"],
    );
    ask(&[], &["mappings"]);
    let many: Vec<_> = (0..PAGES).map(|page| part(page, 1)).chain([part(0, 1)]).collect();
    ask(&many, &["mappings", "65", "64"]);
    // The largest permitted number of mappings, adjacent to each other.
    let uffd = Userfaultfd::create().unwrap();
    let ids = track(&mut session, "ram", &uffd, &many[..64]).unwrap();
    assert_eq!(ids.len(), 64);
    session.untrack(&named("ram"), &ids).unwrap();
    drop(mapping);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn mapping_past_the_end_is_tracked_before_the_file_grows() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let (fd, _) = session.open(&named("ram"), true).unwrap();
    let mapping = SharedMapping::shared(&fd, 0, (2 * PAGES * PAGE) as usize, true).unwrap();
    let uffd = Userfaultfd::create().unwrap();
    let ids = track(&mut session, "ram", &uffd, &[whole(&mapping)]).unwrap();
    client.resize(&named("ram"), 2 * PAGES * PAGE).await.unwrap();
    let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert!(mapping.write_at((PAGES + 7) as usize * PAGE as usize, b"x"));
    client.checkpoint(&named("ram"), false, None).await.unwrap();
    assert!(changed(&client, "ram", before.generation).await.contains(&(PAGES + 7)));
    session.untrack(&named("ram"), &ids).unwrap();
    drop(mapping);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn unknown_and_foreign_mapping_ids_are_refused() {
    let (service, client) = service().await;
    let mut session = service.fdpass().unwrap();
    let mut other = TestAgent::start(None).unwrap();
    other.map(&service, "ram", true).unwrap();
    let theirs = client.coverage(&named("ram")).await.unwrap().mappings;
    assert_eq!(theirs.iter().map(|mapping| mapping.pid).collect::<Vec<_>>(), [other.pid()]);
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    let tracked = client.coverage(&named("ram")).await.unwrap().mappings;
    let own = tracked.iter().find(|mapping| mapping.pid == std::process::id()).unwrap().id;
    let pid = std::process::id().to_string();
    for ids in [vec![theirs[0].id], vec![own, theirs[0].id], vec![own, MappingId::new(7).unwrap()]] {
        let unknown = ids.last().unwrap().to_string();
        let untracked = session.untrack(&named("ram"), &ids);
        refused(untracked, NotFound, &["no tracked mapping", &unknown, &pid]);
    }
    refused(session.untrack(&named("ram"), &[]), InvalidArgument, &["mappings"]);
    refused(session.untrack(&named("ram"), &[own; 65]), InvalidArgument, &["65"]);
    refused(session.untrack(&named("absent"), &[own]), NotFound, &["absent"]);
    create(&client, "other").await;
    refused(session.untrack(&named("other"), &[own]), NotFound, &["no tracked mapping"]);
    // All mappings are still tracked.
    let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert_eq!(before.coverage.tracked_mappings, 2);
    other.poke(0, 8, 9).unwrap();
    assert!(mapped.write_at(9 * PAGE, b"x"));
    client.checkpoint(&named("ram"), false, None).await.unwrap();
    let reported = changed(&client, "ram", before.generation).await;
    assert!(reported.contains(&8) && reported.contains(&9), "{reported:?}");
    assert_service_works(&service, &client).await;
}
