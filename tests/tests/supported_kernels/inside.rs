//! Tests for guests only.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_client::proto::{Backing, GapKind, PageState};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{memfd, scm};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, vmstat};
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{ProbePair, in_state};
use fdmap_tests::raw::read_to_close;
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::{Run, TestAgent};
use serde_json::Value;

const PAGES: u64 = 1 << 12;

/// The service ends a connection whose client does not complete the HTTP/2 preface in this time.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// The message to users of kernels without write tracking.
const NEEDED: &str = "Linux 6.7";

/// Runs `fdmap` with words as arguments. Returns its exit code and all of its output.
fn fdmap(service: &Service, words: &str) -> (Option<i32>, String) {
    let mut command = Command::new(program("fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).args(words.split(' '));
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code(), text.concat())
}

/// True if this kernel can track writes.
fn tracks_writes() -> bool {
    Userfaultfd::supports_wp_async().unwrap()
}

#[test]
fn doctor_reports_what_the_kernel_lacks() {
    let version = std::env::var("FDMAP_GUEST_KERNEL").unwrap();
    assert_eq!(tracks_writes(), version != "6.1", "the kernel is not that of the test");
    let service = Service::start(&[]).unwrap();
    println!("{}", fdmap(&service, "doctor").1);
    let (code, text) = fdmap(&service, "doctor --json");
    let json: Value = serde_json::from_str(&text).unwrap();
    assert!(json["kernel_release"].as_str().unwrap().starts_with(&format!("{version}.")), "{json}");
    assert_eq!(json["probe"], "xarray");
    let capability = |name: &str| {
        let all = json["capabilities"].as_array().unwrap();
        let found = all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name}")).clone();
        (found["availability"] == "available", found["detail"].as_str().unwrap().to_owned())
    };
    let everywhere = [
        "xarray-walk",
        "mincore-and-seek",
        "page-attributes",
        "writable-mappings",
        "page-pins",
        "file-users",
        "call-trace",
    ];
    for name in everywhere.into_iter().chain(["modify-events", "seal-future-write", "fdpass"]) {
        let (available, detail) = capability(name);
        assert!(available, "{name}: {detail}");
    }
    for name in ["write-tracking", "fork-events"] {
        let (available, detail) = capability(name);
        assert_eq!(available, tracks_writes(), "{name}: {detail}");
        assert!(available || detail.contains(NEEDED), "{name}: {detail}");
    }
    // Kernels of Debian have no huge pages in shmem, which has an impact.
    assert_eq!(code, Some(1));
}

/// The kernel passes descriptors on any unix socket. The service finds them without receiving them, and ends the connection.
#[test]
fn descriptors_on_the_grpc_socket_are_not_received() {
    let service = Service::start(&[]).unwrap();
    let memfd = memfd::create("passed", None).unwrap();
    let begun = Instant::now();
    for _ in 0..4 {
        let mut stream = UnixStream::connect(service.endpoint().socket).unwrap();
        stream.set_read_timeout(Some(PREFACE_TIMEOUT)).unwrap();
        let beginning: &[u8] = b"PRI * HTTP/2.0\r\n";
        stream.write_all(&beginning[..8]).unwrap();
        scm::send(stream.as_fd(), &beginning[8..], &[memfd.as_fd()]).unwrap();
        read_to_close(&stream).unwrap();
    }
    assert!(begun.elapsed() < PREFACE_TIMEOUT, "the rest of the preface was not waited for");
    assert_eq!(fdmap(&service, "ls").0, Some(0));
}

#[test(flavor = "multi_thread")]
async fn tracking_is_refused_before_anything_is_stopped() {
    let service = Service::start(&[]).unwrap();
    let log = Log::create(1, 1 << 10).unwrap();
    let scenario = Scenario::new(&service, "refused", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    let error = fdmap_proto::error_chain(&scenario.map(&mut writer, true).unwrap_err());
    assert!(error.contains(NEEDED), "{error}");
    scenario.map(&mut writer, false).unwrap();

    let other = Service::start(&[]).unwrap();
    let (code, text) = fdmap(&other, &format!("adopt --pid {} --all --track", writer.pid()));
    println!("{text}");
    assert_eq!(code, Some(7), "{text}");
    assert!(text.contains(NEEDED), "{text}");
    assert!(text.contains("refused"), "the adopted file is listed: {text}");
    assert!(!text.contains("stopped"), "no thread is stopped: {text}");
    let (code, text) = fdmap(&other, "ls");
    assert!(code == Some(0) && text.contains("refused"), "the file stays adopted: {text}");

    let (code, text) = fdmap(&other, &format!("doctor --pid {}", writer.pid()));
    println!("{text}");
    assert!(code == Some(1) && text.contains(NEEDED), "{text}");
}

/// Until Linux 6.6 the XArray of a hugetlb file is indexed by huge pages.
#[test]
async fn hugetlb_file_indexed_by_huge_pages_is_unknown() {
    const MIB: u64 = 1 << 20;
    let host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _pages = require(hugetlb_2m(&host, 4));
    both.create("huge", 8 * MIB, Backing::Hugetlb(2 * MIB)).await.unwrap();
    let mapped = both.xarray.fdpass().unwrap().map(&named("huge"), true).unwrap();
    assert!(mapped.write_at(0, b"x") && mapped.write_at(5 * MIB, b"x"));
    for pages in both.pages("huge").await.unwrap() {
        assert_eq!(in_state(&pages, PageState::Unknown).len(), 2048, "never a hole, never misplaced");
    }
}

#[test(flavor = "multi_thread")]
async fn untracked_stores_are_conservative() {
    let service = Service::start(&[]).unwrap();
    let log = Log::create(1, 1 << 16).unwrap();
    let mut scenario = Scenario::new(&service, "untracked", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, false).unwrap();
    scenario.consumer(1, true).await.unwrap();
    for seed in 0..4 {
        let pattern = Pattern { seed, percent: 20 };
        writer.write_pattern(0, pattern, 0..PAGES, 0).unwrap();
        let mut written = PageSet::of(PAGES);
        written.extend((0..PAGES).filter(|page| pattern.has(*page)));
        let reported = scenario.first().step(false).await.unwrap();
        assert_eq!(written.without(&reported.changed).count(), 0, "round {seed}");
        assert_eq!(reported.changed.without(&reported.conservative).count(), 0, "no write was observed");
        assert!(!reported.coverage_exact && reported.gaps.contains(&GapKind::UntrackedMapping));
    }
    for outcome in scenario.finish().await.unwrap() {
        assert_eq!((outcome.verdict.lost, outcome.verdict.wrong), (0, 0), "{}", outcome.verdict);
        assert_eq!(outcome.stale.unwrap_or_default().count(), 0, "the mirror differs");
    }
}

#[test(flavor = "multi_thread")]
async fn stores_under_swap_are_not_lost() {
    const METHODS: [&str; 3] = ["store", "pwrite", "page-out"];
    const TIME: Duration = Duration::from_secs(6);
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    let before = vmstat("pswpout").unwrap();
    let service = Service::start(&[]).unwrap();
    let log = Log::create(METHODS.len() + 1, 400_000).unwrap();
    let mut scenario = Scenario::new(&service, "swapped", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer: TestAgent = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.write_all(0, 1, 0..PAGES, METHODS.len()).unwrap();
    scenario.consumer(1, false).await.unwrap();
    let millis = u64::try_from(TIME.as_millis()).unwrap();
    writer.start_run(Run::new(&METHODS.join(" "), millis, 1, 0..PAGES, 0)).unwrap();
    scenario.watch(vec![writer], TIME * 10).await.unwrap();
    for outcome in scenario.finish().await.unwrap() {
        println!("{}", outcome.verdict);
        assert_eq!((outcome.verdict.lost, outcome.verdict.unchecked, outcome.verdict.wrong), (0, 0, 0));
        assert!(outcome.verdict.count() > 0, "nothing was written");
    }
    let swapped = vmstat("pswpout").unwrap() - before;
    assert!(swapped > 0, "nothing was swapped out");
    println!("{swapped} pages swapped out");
}
