//! Writers that do not write through a tracked mapping or by a system call that names the file, hidden by the signals of another
//! writer: each signal needs an explanation of its own.

use std::ffi::CString;
use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fdmap_sys::testing::fuse::{self, Fuse};
use fdmap_sys::testing::mounts;
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::testing::uring;
use fdmap_tests::harness::require;
use fdmap_tests::host::{output, root, temp_dir};
use fdmap_tests::incidents;
use fdmap_tests::layered_file::{layered_file, twice_layered_file};
use fdmap_tests::reported::{Reported, create_file};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::watched::{PAGE, PAGES, Watched, sized_memfd};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::NamedTempFile;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// A loop device that has a file, until it is dropped.
struct LoopDevice(String);

impl LoopDevice {
    fn attach(file: &impl AsRawFd) -> Self {
        Self::of(Path::new(&format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())))
    }

    /// The device of the file at `path`, in the mount namespace of the calling thread.
    fn of(path: &Path) -> Self {
        let path = path.to_str().unwrap();
        Self(output("losetup", &["--find", "--show", path]).unwrap().trim().to_owned())
    }

    fn write(&self, page: u64) {
        let device = File::options().write(true).open(&self.0).unwrap();
        device.write_all_at(&[7; PAGE as usize], page * PAGE).unwrap();
        device.sync_all().unwrap();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        output("losetup", &["--detach", &self.0]).unwrap();
        // The kernel detaches the device when its last descriptor is closed, which may take a moment.
        let attached = PathBuf::from(self.0.replace("/dev/", "/sys/block/")).join("loop/backing_file");
        while attached.exists() {
            std::thread::yield_now();
        }
    }
}

#[test(flavor = "multi_thread")]
async fn loop_device_is_not_hidden_by_a_mapped_write() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "loop").await.unwrap();
    watched.store(3);
    LoopDevice::attach(&watched.file().unwrap()).write(20);
    watched.next().await.unwrap().assert_contains(20, "loop device");
    watched.next().await.unwrap();
    watched.store(5);
    watched.next().await.unwrap().assert_exact(&[5], "after the device");
}

/// Calls `work` with the path of a bind mount of `file`. Descriptors that it opens have another name.
fn with_bound<T: Send + 'static>(file: &Path, work: impl FnOnce(&Path) -> T + Send + 'static) -> T {
    let file = file.to_owned();
    let worked = std::thread::spawn(move || {
        mounts::make_private().unwrap();
        let place = NamedTempFile::new().unwrap();
        let none = None::<&str>;
        mount(Some(&file), place.path(), none, MsFlags::MS_BIND, none).unwrap();
        let result = work(place.path());
        umount2(place.path(), MntFlags::MNT_DETACH).unwrap();
        result
    });
    worked.join().unwrap()
}

/// The device is attached before the file is tracked, so that call is not traced.
#[test(flavor = "multi_thread")]
async fn earlier_loop_device_is_not_hidden_by_mapped_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let memfd = sized_memfd("earlier").unwrap();
    let shm = NamedTempFile::new_in("/dev/shm").unwrap();
    shm.as_file().set_len(PAGES * PAGE).unwrap();
    let by_path = OwnedFd::from(shm.reopen().unwrap());
    let open = |place: &Path| File::options().read(true).write(true).open(place).unwrap();
    let by_mount = OwnedFd::from(with_bound(shm.path(), open));
    let attach_mount = || with_bound(shm.path(), LoopDevice::of);
    let cases: [(&str, &OwnedFd, &dyn Fn() -> LoopDevice); 3] = [
        ("memfd", &memfd, &|| LoopDevice::attach(&memfd)),
        ("path", &by_path, &attach_mount),
        ("mount", &by_mount, &|| LoopDevice::of(shm.path())),
    ];
    for (name, adopted, attach) in cases {
        let device = attach();
        let mut watched = Watched::adopt(&service, name, adopted).await.unwrap();
        for page in [20, 21] {
            watched.store(3);
            device.write(page);
            watched.next().await.unwrap().assert_contains(page, name);
        }
        drop(device);
        watched.next().await.unwrap();
        watched.next().await.unwrap();
        watched.store(5);
        watched.next().await.unwrap().assert_exact(&[5], name);
        service.client().await.unwrap().delete(&named(name)).await.unwrap();
    }
}

/// The device is attached before the file is tracked, and after it.
#[test(flavor = "multi_thread")]
async fn loop_device_on_a_file_of_overlayfs_is_not_hidden_by_other_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    for attached_before in [true, false] {
        let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
        let (real, layered) = layers(folder);
        let before = attached_before.then(|| LoopDevice::attach(&layered));
        let mut watched = Watched::adopt(&service, "layered", &real.into()).await.unwrap();
        watched.next().await.unwrap();
        let device = before.unwrap_or_else(|| LoopDevice::attach(&layered));
        for page in [20, 21, 22] {
            watched.store(3);
            // The same thread makes a traced write.
            watched.file().unwrap().write_all_at(b"traced", 5 * PAGE).unwrap();
            device.write(page);
            watched.next().await.unwrap().assert_contains(page, "loop device");
        }
        service.client().await.unwrap().delete(&named("layered")).await.unwrap();
    }
}

/// A loop device on another file, even one of the same name, does not make a file conservative.
#[test(flavor = "multi_thread")]
async fn loop_devices_of_other_files_cost_no_exactness() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let [memfd, same_name] = ["memfd", "memfd"].map(|name| sized_memfd(name).unwrap());
    let [shm, other] = [(); 2].map(|()| {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(PAGES * PAGE).unwrap();
        OwnedFd::from(file)
    });
    let _devices = [&same_name, &other].map(LoopDevice::attach);
    for (name, file) in [("memfd", &memfd), ("shm", &shm)] {
        let mut watched = Watched::adopt(&service, name, file).await.unwrap();
        watched.store(5);
        watched.next().await.unwrap().assert_exact(&[5], name);
    }
}

/// A loop device on a FUSE file whose attributes are not answered while `silent` is true.
struct SilentLoop {
    _device: LoopDevice,
    silent: Arc<AtomicBool>,
}

impl Drop for SilentLoop {
    fn drop(&mut self) {
        self.silent.store(false, Ordering::SeqCst);
    }
}

/// The kernel asks the file system of a loop device for the inode of its file, and a FUSE daemon need not answer.
#[test(flavor = "multi_thread")]
async fn loop_device_whose_file_system_does_not_answer_delays_no_tracking() {
    const LONG: Duration = Duration::from_secs(5);
    const MAX_DELAY: Duration = Duration::from_secs(1);
    require(root());
    let (folder, _guard) = temp_dir("fdmap-fuse-").unwrap();
    let (backing, silent) = (sized_memfd("behind-fuse").unwrap(), Arc::new(AtomicBool::new(false)));
    let is_silent = Arc::clone(&silent);
    let wait = move || {
        while is_silent.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let opened = std::thread::spawn(move || passthrough_file(&folder, backing, wait));
    let Some(fuse) = opened.join().unwrap() else {
        return;
    };
    let attached = SilentLoop { _device: LoopDevice::attach(&fuse), silent: Arc::clone(&silent) };
    silent.store(true, Ordering::SeqCst);
    let (known, attributes) = std::sync::mpsc::channel();
    std::thread::spawn(move || known.send(fuse.metadata().map(drop)));
    assert!(attributes.recv_timeout(Duration::from_millis(100)).is_err(), "the file system answers");
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "memfd", PAGES * PAGE).await.unwrap();
    let shm = tempfile::tempfile_in("/dev/shm").unwrap();
    shm.set_len(PAGES * PAGE).unwrap();
    service.fdpass().unwrap().adopt(shm.as_fd(), "shm", None).unwrap();
    let mut checkpoints = Vec::new();
    // The search that waits for the file system is not repeated.
    for name in ["memfd", "shm", "shm"] {
        let file = named(name);
        let checkpoint = client.checkpoint(&file, true, None);
        checkpoints.push((name, tokio::time::timeout(MAX_DELAY, checkpoint).await));
    }
    let late = incidents::count(&service, "search-late");
    assert!(attributes.try_recv().is_err(), "the file system answers");
    drop(attached);
    for (name, checkpoint) in checkpoints {
        checkpoint.unwrap_or_else(|_| panic!("{name} waits for the file system")).unwrap();
    }
    assert_eq!(late, 1, "one search waits for the file system, and is not repeated");
    attributes.recv_timeout(LONG).unwrap().unwrap();
}

/// `FS_IOC_UNRESVSP64`
fn punch_by_ioctl(file: &File, page: u64) {
    space::change(file.as_fd(), SpaceCall::Unreserve, page * PAGE, PAGE).unwrap();
}

#[test(flavor = "multi_thread")]
async fn hole_punched_by_ioctl_is_not_hidden_by_a_mapped_write() {
    let service = Service::start(&[]).unwrap();
    let adopted = sized_memfd("adopted").unwrap();
    for mut watched in [
        Watched::create(&service, "created").await.unwrap(),
        Watched::adopt(&service, "adopted", &adopted).await.unwrap(),
    ] {
        for round in 0..3 {
            watched.store(3);
            punch_by_ioctl(&watched.file().unwrap(), 20 + round);
            watched.next().await.unwrap().assert_contains(20 + round, "FS_IOC_UNRESVSP64");
        }
        watched.next().await.unwrap();
    }
    // The descriptor of memfd_create raises no event.
    let mut watched = Watched::of(&service, "adopted").await.unwrap();
    watched.store(3);
    punch_by_ioctl(&adopted.try_clone().unwrap().into(), 30);
    watched.next().await.unwrap().assert_contains(30, "FS_IOC_UNRESVSP64 by the descriptor of memfd_create");
}

/// In a thread of its own, in whose mount namespace they are.
fn layers(folder: PathBuf) -> (File, File) {
    std::thread::spawn(move || layered_file(&folder, PAGES * PAGE)).join().unwrap().unwrap()
}

#[test(flavor = "multi_thread")]
async fn write_through_overlayfs_is_not_hidden_by_other_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let (real, layered) = layers(folder);
    let mut watched = Watched::adopt(&service, "layered", &real.into()).await.unwrap();
    for page in [20, 21] {
        watched.store(3);
        // The same thread makes a traced write.
        watched.file().unwrap().write_all_at(b"traced", 5 * PAGE).unwrap();
        layered.write_all_at(b"layered", page * PAGE).unwrap();
        watched.next().await.unwrap().assert_contains(page, "overlayfs");
    }
}

/// The writes raise an event on the file of overlayfs, and none on that of its upper layer.
#[test(flavor = "multi_thread")]
async fn splice_and_sendfile_through_overlayfs_are_not_hidden_by_other_writes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let (real, layered) = layers(folder);
    let mut watched = Watched::adopt(&service, "layered", &real.into()).await.unwrap();
    let (read, fill) = nix::unistd::pipe().unwrap();
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(b"source").unwrap();
    for page in [20, 21] {
        watched.store(3);
        assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
        let mut at = (page * PAGE).cast_signed();
        let flags = nix::fcntl::SpliceFFlags::empty();
        assert_eq!(nix::fcntl::splice(&read, None, &layered, Some(&mut at), 7, flags), Ok(7));
        watched.next().await.unwrap().assert_contains(page, "splice through overlayfs");
        watched.store(3);
        (&layered).seek(SeekFrom::Start((page + 10) * PAGE)).unwrap();
        assert_eq!(nix::sys::sendfile::sendfile(&layered, &source, Some(&mut 0), 6), Ok(6));
        watched.next().await.unwrap().assert_contains(page + 10, "sendfile through overlayfs");
    }
}

/// What is reported after a store, and a splice to another file.
async fn splice_to(other: &File, watched: &mut Watched) -> Reported {
    let (read, fill) = nix::unistd::pipe().unwrap();
    watched.store(3);
    assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
    let flags = nix::fcntl::SpliceFFlags::empty();
    assert_eq!(nix::fcntl::splice(&read, None, other, Some(&mut 0), 7, flags), Ok(7));
    watched.next().await.unwrap()
}

/// FUSE may be the file system below, and its daemon may have opened any file before that was tracked.
#[test(flavor = "multi_thread")]
async fn splice_to_a_twice_stacked_file_system_is_a_gap_of_all_files() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let (once, twice) = std::thread::spawn(move || twice_layered_file(&folder)).join().unwrap().unwrap();
    let mut watched = Watched::create(&service, "unrelated").await.unwrap();
    for _ in 0..2 {
        let reported = splice_to(&twice, &mut watched).await;
        assert!(!reported.coverage.exact && reported.pages.contains(&20), "{:?}", reported.coverage);
        // Other programs of the host may make such calls, too.
        let mut attempts = 0;
        let exact = loop {
            let reported = splice_to(&once, &mut watched).await;
            attempts += 1;
            if reported.coverage.exact || attempts == 20 {
                break reported;
            }
        };
        exact.assert_exact(&[3], "splice to a file of one stacked file system");
    }
}

/// A file of FUSE whose writes go to `backing`, opened before anything is tracked. `None`: the kernel has no FUSE passthrough.
/// `wait`: called before each answer of attributes.
fn passthrough_file(folder: &Path, backing: OwnedFd, wait: impl Fn() + Send + 'static) -> Option<File> {
    mounts::make_private().unwrap();
    let fuse =
        Fuse::mount(folder).inspect_err(|error| eprintln!("not run: {error}: {}", error.errno)).ok()?;
    let server = std::thread::spawn(move || fuse.serve(backing.as_fd(), PAGES * PAGE, wait));
    // Without passthrough the server ends, and with it the file system.
    let opened = File::options().read(true).write(true).open(folder.join(fuse::NAME));
    umount2(folder, MntFlags::MNT_DETACH).unwrap();
    match opened {
        Ok(file) => Some(file),
        Err(error) => {
            eprintln!("not run: {error}: {:?}", server.join().unwrap());
            None
        }
    }
}

/// The daemon opened its file before calls were traced, so that no call shows that it has it.
#[test(flavor = "multi_thread")]
async fn writes_through_earlier_fuse_passthrough_are_not_hidden_by_other_writes() {
    require(root());
    let memfd = sized_memfd("behind-fuse").unwrap();
    let (folder, _guard) = temp_dir("fdmap-fuse-").unwrap();
    let backing = memfd.try_clone().unwrap();
    let opened = std::thread::spawn(move || passthrough_file(&folder, backing, || ()));
    let Some(fuse) = opened.join().unwrap() else {
        return;
    };
    fuse.write_all_at(b"passed", PAGE).unwrap();
    let mut bytes = [0; 6];
    File::from(memfd.try_clone().unwrap()).read_exact_at(&mut bytes, PAGE).unwrap();
    assert_eq!(&bytes, b"passed", "the write was not passed through");
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::adopt(&service, "behind-fuse", &memfd).await.unwrap();
    // First those that raise no event: after an event without an explanation, all pages are conservative for a while.
    let (read, fill) = nix::unistd::pipe().unwrap();
    for page in [20, 21, 22] {
        watched.store(3);
        assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
        let mut at = (page * PAGE).cast_signed();
        let flags = nix::fcntl::SpliceFFlags::empty();
        assert_eq!(nix::fcntl::splice(&read, None, &fuse, Some(&mut at), 7, flags), Ok(7));
        watched.next().await.unwrap().assert_contains(page, "splice through FUSE");
    }
    // The end of a call is noticed, also if its thread makes no further call.
    let (done, spliced) = std::sync::mpsc::channel();
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let other = fuse.try_clone().unwrap();
    assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
    let writer = std::thread::spawn(move || {
        let mut at = (25 * PAGE).cast_signed();
        let flags = nix::fcntl::SpliceFFlags::empty();
        done.send(nix::fcntl::splice(&read, None, &other, Some(&mut at), 7, flags)).unwrap();
        let _ = wait.recv();
    });
    assert_eq!(spliced.recv().unwrap(), Ok(7));
    watched.next().await.unwrap().assert_contains(25, "splice by another thread");
    watched.next().await.unwrap();
    watched.store(3);
    let reported = watched.next().await.unwrap();
    drop(end);
    writer.join().unwrap();
    assert_eq!(reported.pages, [3], "no call is in progress: {:?}", reported.coverage);
    for page in [30, 31] {
        watched.store(3);
        watched.file().unwrap().write_all_at(b"traced", 5 * PAGE).unwrap();
        fuse.write_all_at(b"passed", page * PAGE).unwrap();
        watched.next().await.unwrap().assert_contains(page, "write through FUSE");
    }
}

#[test(flavor = "multi_thread")]
async fn truncation_by_path_is_not_hidden_by_other_writes() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "truncated").await.unwrap();
    let path = |bytes: &File| CString::new(format!("/proc/self/fd/{}", bytes.as_raw_fd())).unwrap();
    let file = watched.file().unwrap();
    watched.store(3);
    file.write_all_at(b"traced", 5 * PAGE).unwrap();
    nix::unistd::truncate(path(&file).as_c_str(), (30 * PAGE).cast_signed()).unwrap();
    nix::unistd::truncate(path(&file).as_c_str(), (PAGES * PAGE).cast_signed()).unwrap();
    watched.next().await.unwrap().assert_contains(40, "truncate to less and back");
}

#[test(flavor = "multi_thread")]
async fn writers_of_other_files_cost_no_exactness() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "precise").await.unwrap();
    let mut neighbour = Watched::create(&service, "neighbour").await.unwrap();
    let other: File = sized_memfd("other").unwrap().into();
    let path = CString::new(format!("/proc/self/fd/{}", other.as_raw_fd())).unwrap();
    for round in 0..3 {
        let page = 10 + round;
        watched.store(page);
        watched.file().unwrap().write_all_at(b"traced", (page + 20) * PAGE).unwrap();
        // By the thread of the writer, and by others.
        std::thread::spawn({
            let path = path.clone();
            move || nix::unistd::truncate(path.as_c_str(), (PAGE * 9).cast_signed()).unwrap()
        })
        .join()
        .unwrap();
        let file = neighbour.file().unwrap();
        for file in [&other, &file] {
            assert_eq!(uring::write(file.as_fd(), b"abc", 0), Ok(3));
        }
        watched
            .next()
            .await
            .unwrap()
            .assert_exact(&[page, page + 20], "io_uring and truncate of other files");
        neighbour.next().await.unwrap().assert_contains(0, "io_uring");
    }
}

#[test(flavor = "multi_thread")]
async fn preallocation_is_not_a_write() {
    let service = Service::start(&[]).unwrap();
    let mut watched = Watched::create(&service, "allocated").await.unwrap();
    let file = watched.file().unwrap();
    watched.store(9);
    fallocate(&file, FallocateFlags::empty(), 0, (PAGES * PAGE).cast_signed()).unwrap();
    watched.next().await.unwrap().assert_exact(&[9], "fallocate(0)");
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, PAGE.cast_signed()).unwrap();
    watched.next().await.unwrap().assert_exact(&[], "fallocate(FALLOC_FL_KEEP_SIZE)");
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
