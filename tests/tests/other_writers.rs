//! Writers that do not write through a tracked mapping or by a system call that names the file, hidden by the signals of another
//! writer: each signal needs an explanation of its own.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, MappedFile};
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::testing::uring;
use fdmap_sys::{fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::{output, root, temp_dir};
use fdmap_tests::reported::{Reported, create_file};
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

/// A file with a tracked mapping of this process and a consumer.
struct Watched {
    client: Client,
    name: FileName,
    mapped: MappedFile,
    since: Generation,
}

impl Watched {
    /// Creates a file, writes all of it, and closes the generations of these writes.
    async fn create(service: &Service, name: &str) -> Self {
        create_file(&service.client().await.unwrap(), name, PAGES * PAGE).await.unwrap();
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
        let reported = Reported::since(&self.client, &self.name, self.since).await.unwrap();
        self.since = made.generation;
        reported
    }

    fn store(&self, page: u64) {
        assert!(self.mapped.write_at(page * PAGE, b"store"));
    }

    /// A descriptor that was opened by path, as the service passes it.
    fn file(&self) -> File {
        fd::reopen(self.mapped.as_fd(), true).unwrap().into()
    }
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
    watched.next().await.assert_contains(20, "loop device");
    watched.next().await;
    watched.store(5);
    watched.next().await.assert_exact(&[5], "after the device");
}

/// `FS_IOC_UNRESVSP64`
fn punch_by_ioctl(file: &File, page: u64) {
    space::change(file.as_fd(), SpaceCall::Unreserve, page * PAGE, PAGE).unwrap();
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
            watched.next().await.assert_contains(20 + round, "FS_IOC_UNRESVSP64");
        }
        watched.next().await;
    }
    // The descriptor of memfd_create raises no event.
    let mut watched = Watched::of(&service, "adopted").await;
    watched.store(3);
    punch_by_ioctl(&adopted.try_clone().unwrap().into(), 30);
    watched.next().await.assert_contains(30, "FS_IOC_UNRESVSP64 by the descriptor of memfd_create");
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
        watched.next().await.assert_contains(page, "overlayfs");
    }
}

/// The writes raise an event on the file of overlayfs, and none on that of its upper layer.
#[test(flavor = "multi_thread")]
async fn splice_and_sendfile_through_overlayfs_are_not_hidden_by_other_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let (real, layered) = std::thread::spawn(move || layered_file(&folder)).join().unwrap();
    let mut watched = Watched::adopt(&service, "layered", &real.into()).await;
    let (read, fill) = nix::unistd::pipe().unwrap();
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(b"source").unwrap();
    for page in [20, 21] {
        watched.store(3);
        assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
        let mut at = (page * PAGE).cast_signed();
        let flags = nix::fcntl::SpliceFFlags::empty();
        assert_eq!(nix::fcntl::splice(&read, None, &layered, Some(&mut at), 7, flags), Ok(7));
        watched.next().await.assert_contains(page, "splice through overlayfs");
        watched.store(3);
        (&layered).seek(SeekFrom::Start((page + 10) * PAGE)).unwrap();
        assert_eq!(nix::sys::sendfile::sendfile(&layered, &source, Some(&mut 0), 6), Ok(6));
        watched.next().await.assert_contains(page + 10, "sendfile through overlayfs");
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
    watched.next().await.assert_contains(40, "truncate to less and back");
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
        for file in [&other, &file] {
            assert_eq!(uring::write(file.as_fd(), b"abc", 0), Ok(3));
        }
        watched.next().await.assert_exact(&[page, page + 20], "io_uring and truncate of other files");
        neighbour.next().await.assert_contains(0, "io_uring");
    }
}

#[test(flavor = "multi_thread")]
async fn preallocation_is_not_a_write() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "allocated").await;
    let file = watched.file();
    watched.store(9);
    fallocate(&file, FallocateFlags::empty(), 0, (PAGES * PAGE).cast_signed()).unwrap();
    watched.next().await.assert_exact(&[9], "fallocate(0)");
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, PAGE.cast_signed()).unwrap();
    watched.next().await.assert_exact(&[], "fallocate(FALLOC_FL_KEEP_SIZE)");
}

#[test(flavor = "multi_thread")]
async fn new_file_is_exact_from_its_second_generation() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "new", PAGES * PAGE).await.unwrap();
    let name = named("new");
    let file: File = service.fdpass().unwrap().open(&name, true).unwrap().0.into();
    file.write_all_at(b"first", 2 * PAGE).unwrap();
    client.checkpoint(&name, false, None).await.unwrap();
    file.write_all_at(b"second", 4 * PAGE).unwrap();
    let made = client.checkpoint(&name, false, None).await.unwrap();
    assert_eq!((made.observed_pages, made.conservative_pages), (1, 0), "{:?}", made.coverage);
    assert!(made.coverage.exact, "{:?}", made.coverage);
}
