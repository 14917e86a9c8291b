//! The test agent itself: it writes the pages that it logs, and no others.

use std::os::fd::AsRawFd as _;
use std::time::Duration;

use fdmap_client::MappedFile;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::Backing;
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::{output, root};
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::WriterCommand;
use fdmap_tests::test_agent::{Run, TestAgent};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 11;

/// The pages with any non-zero byte.
fn written(file: &MappedFile) -> PageSet {
    let mut set = PageSet::of(PAGES);
    set.extend((0..PAGES).filter(|page| {
        let mut bytes = [0; 4096];
        assert!(file.read_at(page * 4096, &mut bytes));
        bytes != [0; 4096]
    }));
    set
}

struct Fixture {
    service: Service,
    source: tempfile::NamedTempFile,
}

impl Fixture {
    fn new() -> Self {
        let service = Service::start(&[]).unwrap();
        let source = tempfile::NamedTempFile::new_in(std::env::temp_dir()).unwrap();
        std::fs::write(source.path(), vec![0x77; 1 << 20]).unwrap();
        source.as_file().sync_all().unwrap();
        Self { service, source }
    }

    /// A writer with a new file, which is mapped and not tracked.
    async fn writer(&self, name: &str, log: &Log) -> (TestAgent, MappedFile) {
        let file = CreateFile {
            name: name.to_owned(),
            size_bytes: PAGES * 4096,
            backing: Backing::Shmem,
            ..CreateFile::default()
        };
        self.service.client().await.unwrap().create(file).await.unwrap();
        let mut writer = TestAgent::start(None).unwrap();
        writer.use_log(log).unwrap();
        let mapping = writer.map(&self.service, name, false).unwrap();
        writer.set_remote(writer.pid(), mapping).unwrap();
        writer.writer(WriterCommand::Source(self.source.path().to_owned())).unwrap();
        let mapped = self.service.fdpass().unwrap().map(&named(name), false).unwrap();
        (writer, mapped)
    }
}

fn logged(log: &Log, lane: usize, method: Method) -> PageSet {
    let mut set = PageSet::of(PAGES);
    let mut before = 0;
    for write in log.writes(lane).iter().filter(|write| Method::of_number(write.method) == Some(method)) {
        assert!(write.begin <= write.end && before <= write.end, "{write:?}");
        before = write.end;
        set.insert(u64::from(write.page));
    }
    set
}

#[test(flavor = "multi_thread")]
async fn each_method_writes_what_it_logs() {
    use Method::{
        Aio, AioWrite, Copy, Fork, Mem, Passing, Pwrite, Read, Sendfile, Splice, Store, Uring, UringFixed,
        UringRead, UringWrite, Vm, Write, Writev,
    };
    let fixture = Fixture::new();
    for method in [
        Store, Fork, Passing, Pwrite, Write, Writev, Splice, Copy, Sendfile, UringWrite, AioWrite, Vm, Mem,
        Read, UringRead, Aio, Uring, UringFixed,
    ] {
        let log = Log::create(1, 1 << 20).unwrap();
        let (mut writer, mapped) = fixture.writer(&method.to_string(), &log).await;
        writer.run(Run::new(&method.to_string(), 100, 7, 100..1900, 0)).unwrap();
        let logged = logged(&log, 0, method);
        assert!(log.writes(0).iter().all(|write| write.method == method.number()));
        assert!(logged.count() > 10, "{method} wrote {logged:?}");
        assert_eq!(logged, written(&mapped), "{method}");
        assert!(logged.iter().all(|page| (100..1900).contains(&page)), "{method} wrote elsewhere");
        eprintln!("{method}: {} writes", log.count());
    }
}

#[test(flavor = "multi_thread")]
async fn holes_are_where_they_were_logged() {
    let fixture = Fixture::new();
    for method in [Method::Punch, Method::Remove] {
        let log = Log::create(2, 1 << 16).unwrap();
        let (mut writer, mapped) = fixture.writer(&method.to_string(), &log).await;
        writer.write_all(0, 1, 0..PAGES, 1).unwrap();
        writer.run(Run::new(&method.to_string(), 100, 7, 0..PAGES, 0)).unwrap();
        let filled = logged(&log, 1, Method::Store);
        assert_eq!(filled.count(), PAGES);
        assert_eq!(filled.without(&logged(&log, 0, method)), written(&mapped), "{method}");
    }
}

#[test(flavor = "multi_thread")]
async fn loop_device_writes_what_it_logs() {
    require(root());
    let fixture = Fixture::new();
    let log = Log::create(1, 1 << 16).unwrap();
    let (mut writer, mapped) = fixture.writer("device", &log).await;
    let (fd, _) = fixture.service.fdpass().unwrap().open(&named("device"), true).unwrap();
    let file = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let device = output("losetup", &["--find", "--show", &file]).unwrap();
    let _attached = CleanupGuard::new(Cleanup::DetachLoop(device.trim().into())).unwrap();
    writer.writer(WriterCommand::Device(device.trim().into())).unwrap();
    writer.run(Run::new("device", 200, 7, 0..PAGES, 0)).unwrap();
    let logged = logged(&log, 0, Method::Device);
    assert!(logged.count() > 10);
    assert_eq!(logged, written(&mapped));
}

#[test(flavor = "multi_thread")]
async fn writer_stops_on_request_and_when_its_lane_is_full() {
    let fixture = Fixture::new();
    let log = Log::create(2, 20_000).unwrap();
    let (mut writer, _) = fixture.writer("stopped", &log).await;
    writer.run(Run::new("store", 60_000, 7, 0..PAGES, 0)).unwrap();
    assert!(log.writes(0).len() > 15_000, "the lane was nearly full");
    writer.start_run(Run::new("passing", 60_000, 7, 0..PAGES, 1)).unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    log.stop();
    writer.reply().unwrap();
}
