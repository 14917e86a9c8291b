//! Writers that do not write through a tracked mapping or by a system call that names the file, hidden by the signals of another
//! writer: each signal needs an explanation of its own.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fdmap_client::grpc::{ChangesOptions, CreateFile};
use fdmap_client::proto::Coverage;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, MappedFile};
use fdmap_sys::{fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::{output, root, temp_dir};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const PAGES: u64 = 64;
/// `FS_IOC_UNRESVSP64` of linux/falloc.h.
const FS_IOC_UNRESVSP64: u64 = 0x4030_582B;

/// A file with a tracked mapping of this process and a consumer.
struct Watched {
    client: Client,
    name: FileName,
    mapped: MappedFile,
    since: Generation,
}

/// Changed pages and the coverage of their generation.
struct Reported {
    pages: Vec<u64>,
    coverage: Coverage,
}

impl Watched {
    /// Creates a file, writes all of it, and closes the generations of these writes.
    async fn create(service: &Service, name: &str) -> Self {
        let file = CreateFile { name: name.to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
        service.client().await.unwrap().create(file).await.unwrap();
        Self::of(service, name).await
    }

    /// Transfers a file of [`PAGES`] pages to the service.
    async fn adopt(service: &Service, name: &str, file: &OwnedFd) -> Self {
        service.fdpass().unwrap().adopt(file.as_fd(), name, None).unwrap();
        Self::of(service, name).await
    }

    async fn of(service: &Service, name: &str) -> Self {
        let client = service.client().await.unwrap();
        let mut mapped = service.fdpass().unwrap().map(&named(name), true).unwrap();
        mapped.track().unwrap();
        for page in 0..PAGES {
            assert!(mapped.write_at(page * PAGE, b"first"));
        }
        let mut watched = Self { client, name: named(name), mapped, since: Generation::NONE };
        for _ in 0..3 {
            watched.next().await;
        }
        watched
    }

    /// Closes a generation.
    async fn next(&mut self) -> Reported {
        let made = self.client.checkpoint(&self.name, true, None).await.unwrap();
        let options = ChangesOptions { since: self.since, ..ChangesOptions::default() };
        let changes = self.client.changes(&self.name, options).await.unwrap();
        let coverage = changes.header().coverage.clone();
        let pages = changes.runs().await.unwrap();
        let pages = pages.iter().flat_map(|run| run.run.range.start().0..run.run.range.end().0);
        self.since = made.generation;
        Reported { pages: pages.collect(), coverage }
    }

    fn store(&self, page: u64) {
        assert!(self.mapped.write_at(page * PAGE, b"store"));
    }

    /// A descriptor that was opened by path, as the service passes it.
    fn file(&self) -> File {
        fd::reopen(self.mapped.as_fd(), true).unwrap().into()
    }
}

fn assert_reports(reported: &Reported, page: u64, what: &str) {
    assert!(reported.pages.contains(&page), "{what}: page {page} is missing in {:?}", reported.pages);
}

fn assert_exact(reported: &Reported, pages: &[u64], what: &str) {
    assert_eq!(reported.pages, pages, "{what}: {:?}", reported.coverage);
    assert!(reported.coverage.exact, "{what}: {:?}", reported.coverage);
}

fn sized_memfd(name: &str) -> OwnedFd {
    let fd = memfd::create(name, None).unwrap();
    memfd::resize(fd.as_fd(), PAGES * PAGE).unwrap();
    fd
}

/// A page is written through a loop device that is attached and detached between two checkpoints.
fn write_through_loop_device(file: &File, page: u64) {
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let device = output("losetup", &["--find", "--show", &path]).unwrap();
    let device = device.trim();
    let written = File::options().write(true).open(device).and_then(|device| {
        device.write_all_at(&[7; PAGE as usize], page * PAGE)?;
        device.sync_all()
    });
    output("losetup", &["--detach", device]).unwrap();
    written.unwrap();
    // The kernel detaches the device when its last descriptor is closed, which may take a moment.
    let attached = PathBuf::from(device.replace("/dev/", "/sys/block/")).join("loop/backing_file");
    while attached.exists() {
        std::thread::yield_now();
    }
}

#[test(flavor = "multi_thread")]
async fn loop_device_is_not_hidden_by_a_mapped_write() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "loop").await;
    watched.store(3);
    write_through_loop_device(&watched.file(), 20);
    assert_reports(&watched.next().await, 20, "loop device");
    watched.next().await;
    watched.store(5);
    assert_exact(&watched.next().await, &[5], "after the device");
}

fn punch_by_ioctl(file: &File, page: u64) {
    // struct space_resv: type i16, whence i16, start i64, length i64, and 24 bytes.
    let space = [0, page * PAGE, PAGE, 0, 0, 0_u64];
    // SAFETY: the argument is a struct space_resv.
    let punched = unsafe { nix::libc::ioctl(file.as_raw_fd(), FS_IOC_UNRESVSP64, space.as_ptr()) };
    assert_eq!(punched, 0, "{}", std::io::Error::last_os_error());
}

#[test(flavor = "multi_thread")]
async fn hole_punched_by_ioctl_is_not_hidden_by_a_mapped_write() {
    let service = Service::start(&[]).unwrap();
    let adopted = sized_memfd("adopted");
    for mut watched in
        [Watched::create(&service, "created").await, Watched::adopt(&service, "adopted", &adopted).await]
    {
        for round in 0..3 {
            watched.store(3);
            punch_by_ioctl(&watched.file(), 20 + round);
            assert_reports(&watched.next().await, 20 + round, "FS_IOC_UNRESVSP64");
        }
        watched.next().await;
    }
    // The descriptor of memfd_create raises no event.
    let mut watched = Watched::of(&service, "adopted").await;
    watched.store(3);
    punch_by_ioctl(&adopted.try_clone().unwrap().into(), 30);
    assert_reports(&watched.next().await, 30, "FS_IOC_UNRESVSP64 by the descriptor of memfd_create");
}

/// A tmpfs with an overlayfs whose upper layer is in it, in a mount namespace of the calling thread, which ends with the thread.
/// Returns the same file in the tmpfs and through overlayfs.
fn layered_file(folder: &Path) -> (File, File) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some("none"), folder, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    for layer in ["lower", "upper", "work", "merged"] {
        fs::create_dir(folder.join(layer)).unwrap();
    }
    let open = |path: PathBuf| File::options().read(true).write(true).create(true).truncate(false).open(path);
    let real = open(folder.join("upper/file")).unwrap();
    real.set_len(PAGES * PAGE).unwrap();
    let at = |layer: &str| folder.join(layer).to_string_lossy().into_owned();
    let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
    let merged = folder.join("merged");
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
    let layered = open(merged.join("file")).unwrap();
    umount2(&merged, MntFlags::MNT_DETACH).unwrap();
    umount2(folder, MntFlags::MNT_DETACH).unwrap();
    (real, layered)
}

#[test(flavor = "multi_thread")]
async fn write_through_overlayfs_is_not_hidden_by_other_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let (real, layered) = std::thread::spawn(move || layered_file(&folder)).join().unwrap();
    let mut watched = Watched::adopt(&service, "layered", &real.into()).await;
    for page in [20, 21] {
        watched.store(3);
        // The same thread makes a traced write.
        watched.file().write_all_at(b"traced", 5 * PAGE).unwrap();
        layered.write_all_at(b"layered", page * PAGE).unwrap();
        assert_reports(&watched.next().await, page, "overlayfs");
    }
}

#[test(flavor = "multi_thread")]
async fn truncation_by_path_is_not_hidden_by_other_writes() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "truncated").await;
    let path = |bytes: &File| CString::new(format!("/proc/self/fd/{}", bytes.as_raw_fd())).unwrap();
    let file = watched.file();
    watched.store(3);
    file.write_all_at(b"traced", 5 * PAGE).unwrap();
    nix::unistd::truncate(path(&file).as_c_str(), (30 * PAGE).cast_signed()).unwrap();
    nix::unistd::truncate(path(&file).as_c_str(), (PAGES * PAGE).cast_signed()).unwrap();
    assert_reports(&watched.next().await, 40, "truncate to less and back");
}

#[test(flavor = "multi_thread")]
async fn writers_of_other_files_cost_no_exactness() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "precise").await;
    let mut neighbour = Watched::create(&service, "neighbour").await;
    let other: File = sized_memfd("other").into();
    let path = CString::new(format!("/proc/self/fd/{}", other.as_raw_fd())).unwrap();
    for round in 0..3 {
        let page = 10 + round;
        watched.store(page);
        watched.file().write_all_at(b"traced", (page + 20) * PAGE).unwrap();
        // By the thread of the writer, and by others.
        std::thread::spawn({
            let path = path.clone();
            move || nix::unistd::truncate(path.as_c_str(), (PAGE * 9).cast_signed()).unwrap()
        })
        .join()
        .unwrap();
        let file = neighbour.file();
        for fd in [other.as_raw_fd(), file.as_raw_fd()] {
            write_by_io_uring(fd);
        }
        assert_exact(&watched.next().await, &[page, page + 20], "io_uring and truncate of other files");
        assert_reports(&neighbour.next().await, 0, "io_uring");
    }
}

fn write_by_io_uring(fd: i32) {
    let mut ring = io_uring::IoUring::new(4).unwrap();
    let entry = io_uring::opcode::Write::new(io_uring::types::Fd(fd), b"abc".as_ptr(), 3).build();
    // SAFETY: the bytes are static and only read.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 3);
}

#[test(flavor = "multi_thread")]
async fn preallocation_is_not_a_write() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "allocated").await;
    let file = watched.file();
    watched.store(9);
    fallocate(&file, FallocateFlags::empty(), 0, (PAGES * PAGE).cast_signed()).unwrap();
    assert_exact(&watched.next().await, &[9], "fallocate(0)");
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, PAGE.cast_signed()).unwrap();
    assert_exact(&watched.next().await, &[], "fallocate(FALLOC_FL_KEEP_SIZE)");
}

#[test(flavor = "multi_thread")]
async fn new_file_is_exact_from_its_second_generation() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let file = CreateFile { name: "new".to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let name = named("new");
    let file: File = service.fdpass().unwrap().open(&name, true).unwrap().0.into();
    file.write_all_at(b"first", 2 * PAGE).unwrap();
    client.checkpoint(&name, false, None).await.unwrap();
    file.write_all_at(b"second", 4 * PAGE).unwrap();
    let made = client.checkpoint(&name, false, None).await.unwrap();
    assert_eq!((made.observed_pages, made.conservative_pages), (1, 0), "{:?}", made.coverage);
    assert!(made.coverage.exact, "{:?}", made.coverage);
}
