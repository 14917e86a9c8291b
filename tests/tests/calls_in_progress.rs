//! Checkpoints while a call is in progress that has written already, or may write: each reports it, and no other signal hides it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;

use fdmap_sys::testing::aio::Aio;
use fdmap_sys::testing::blocked::wait_for_call;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::{UffdEvent, UffdFeatures, Userfaultfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::layered_file::layered_file;
use fdmap_tests::service::Service;
use fdmap_tests::test;
use fdmap_tests::watched::{PAGE, PAGES, Watched, sized_memfd};
use nix::fcntl::{FcntlArg, SpliceFFlags, fcntl, splice};
use nix::libc::{MADV_REMOVE, SYS_io_submit, SYS_process_madvise, SYS_splice};
use nix::sys::mman::ProtFlags;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// Makes a system call in a thread, and waits until it sleeps there.
fn blocked<T: Send + 'static>(number: i64, call: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let (sender, thread) = mpsc::channel();
    let caller = std::thread::spawn(move || {
        sender.send(nix::unistd::gettid()).unwrap();
        call()
    });
    assert!(wait_for_call(thread.recv().unwrap(), number), "the thread is in no system call {number}");
    caller
}

/// A pipe that is full.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (read, fill) = nix::unistd::pipe().unwrap();
    let size = fcntl(&fill, FcntlArg::F_GETPIPE_SZ).unwrap();
    File::from(fill.try_clone().unwrap()).write_all(&vec![0; usize::try_from(size).unwrap()]).unwrap();
    (read, fill)
}

/// Writes to page 20 of a file, then to other files, and last to a full pipe, by one io_submit that returns when the pipe has room.
async fn submission_in_progress_is_reported(service: &Service, other_files: usize) {
    let name = format!("submitted-{other_files}");
    let memfd = sized_memfd(&name).unwrap();
    let mut watched = Watched::adopt(service, &name, &memfd).await.unwrap();
    let (read, fill) = full_pipe();
    let other = sized_memfd("other").unwrap();
    let caller = blocked(SYS_io_submit, move || {
        let page_20: (BorrowedFd<'_>, &[u8], u64) = (memfd.as_fd(), b"submitted", 20 * PAGE);
        let others = std::iter::repeat_n((other.as_fd(), &b"other"[..], 0), other_files);
        let last = (fill.as_fd(), &b"last"[..], 0);
        let writes: Vec<_> = [page_20].into_iter().chain(others).chain([last]).collect();
        let aio = Aio::new(writes.len()).unwrap();
        aio.submit_writes(&writes).unwrap();
        aio.wait(writes.len(), writes.len()).unwrap()
    });
    let mut written = [0; 9];
    assert!(watched.mapped.read_at(20 * PAGE, &mut written));
    assert_eq!(&written, b"submitted", "the call waits for the pipe");
    for round in 0..3 {
        watched.store(3);
        let reported = watched.next().await.unwrap();
        reported.assert_contains(20, &format!("io_submit in progress, round {round}"));
    }
    watched.store(3);
    // The pipe stays open until the call has returned.
    let mut read = File::from(read);
    read.read_exact(&mut [0; PAGE as usize]).unwrap();
    let results = caller.join().unwrap();
    assert!(results.iter().all(|(_, result)| *result > 0), "{results:?}");
    watched.next().await.unwrap().assert_contains(20, "io_submit has ended");
}

#[test(flavor = "multi_thread")]
async fn submission_of_native_aio_is_reported_while_it_is_in_progress() {
    require(root());
    let service = Service::start(&[]).unwrap();
    submission_in_progress_is_reported(&service, 0).await;
    // More requests than are examined: any file may be written.
    submission_in_progress_is_reported(&service, 70).await;
}

/// The call removes page 20 of the file, and then a page of other memory, for which it waits until an event of a userfaultfd is read.
#[test(flavor = "multi_thread")]
async fn removal_by_process_madvise_is_reported_while_it_is_in_progress() {
    let service = Service::start(&[]).unwrap();
    let memfd = sized_memfd("removed").unwrap();
    let mut watched = Watched::adopt(&service, "removed", &memfd).await.unwrap();
    let size = usize::try_from(PAGES * PAGE).unwrap();
    let page = PAGE as usize;
    let memory = RawMapping::shared(memfd.as_fd(), 0, size).unwrap();
    let other = sized_memfd("other").unwrap();
    memory.replace(size - page, page, Some((other.as_fd(), 0)), ProtFlags::all()).unwrap();
    let events = Userfaultfd::create().unwrap();
    events.api(UffdFeatures::EVENT_REMOVE).unwrap();
    let last = memory.range(size - page, page);
    events.register_wp(last).unwrap();
    let caller = blocked(SYS_process_madvise, move || {
        memory.process_advise(&[(20 * page, page), (size - page, page)], MADV_REMOVE)
    });
    let mut in_progress = Vec::new();
    for _ in 0..3 {
        watched.store(3);
        in_progress.push(watched.next().await.unwrap());
    }
    let event = events.read_event().unwrap();
    assert!(matches!(event, Some(UffdEvent::Remove(range)) if range == last), "{event:?}");
    watched.store(3);
    assert_eq!(caller.join().unwrap().unwrap(), 2 * page);
    let mut removed = [1; 8];
    assert!(watched.mapped.read_at(20 * PAGE, &mut removed));
    assert_eq!(removed, [0; 8]);
    for reported in in_progress {
        reported.assert_contains(20, "process_madvise in progress");
    }
    watched.next().await.unwrap().assert_contains(20, "process_madvise has ended");
}

#[test(flavor = "multi_thread")]
async fn call_on_a_stacked_file_system_is_a_gap_while_it_is_in_progress() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let (folder, _guard) = temp_dir("fdmap-layers-").unwrap();
    let layers = move |folder: PathBuf| layered_file(&folder, PAGES * PAGE).unwrap();
    let (real, layered) = std::thread::spawn(move || layers(folder)).join().unwrap();
    let mut watched = Watched::adopt(&service, "layered", &real.into()).await.unwrap();
    watched.store(3);
    watched.next().await.unwrap();
    let (read, fill) = nix::unistd::pipe().unwrap();
    let caller = blocked(SYS_splice, move || {
        let mut at = (20 * PAGE).cast_signed();
        splice(&read, None, &layered, Some(&mut at), 7, SpliceFFlags::empty())
    });
    let mut in_progress = Vec::new();
    for _ in 0..3 {
        watched.store(3);
        in_progress.push(watched.next().await.unwrap());
    }
    watched.store(3);
    assert_eq!(nix::unistd::write(&fill, b"spliced"), Ok(7));
    assert_eq!(caller.join().unwrap(), Ok(7));
    for reported in in_progress {
        reported.assert_contains(20, "splice through overlayfs in progress");
    }
    watched.next().await.unwrap().assert_contains(20, "splice through overlayfs has ended");
}
