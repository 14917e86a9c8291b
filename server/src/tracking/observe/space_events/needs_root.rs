//! Counts events of real processes.

use std::time::{Duration, Instant};

use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use fdmap_sys::pagemap::{PageRegion, ScanFlags};
use fdmap_sys::testing::calls::{self, NumberBits};
use fdmap_sys::testing::calls32::ZeroArguments;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::UffdFeatures;
use nix::fcntl::{OFlag, open};
use nix::sys::mman::ProtFlags;
use nix::sys::stat::Mode;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe, read};

use super::*;

fn start() -> Arc<SpaceTracer> {
    let started = SpaceTracer::start();
    started.unwrap_or_else(|error| panic!("no space events: {}", fdmap_proto::error_chain(&error)))
}

/// A forked process, which is not the service of these tests. It waits until it is killed.
struct Other(Pid);

impl Other {
    /// `work` runs in the child before this returns. It must not allocate: another thread may hold a lock of the allocator.
    fn start(work: impl FnOnce()) -> Self {
        let (ready, done) = pipe().unwrap();
        // SAFETY: the child calls only `work`, write and pause.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                work();
                let _ = nix::unistd::write(&done, b"x");
                loop {
                    nix::unistd::pause();
                }
            }
            ForkResult::Parent { child } => {
                assert_eq!(read(&ready, &mut [0]).unwrap(), 1);
                Self(child)
            }
        }
    }

    fn pagemap(&self) -> Pagemap {
        Pagemap::open(Some(self.0.as_raw().unsigned_abs())).unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(self.0, nix::sys::signal::Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

fn scan(pagemap: &Pagemap, mapping: &SharedMapping) {
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap_or(0);
    let range = fdmap_sys::address::AddressRange { start, end: start + 4096 };
    let _ = pagemap.scan(range, ScanFlags::empty(), &mut [PageRegion::default()]);
}

/// A mapping of one page, which children inherit.
fn mapping() -> SharedMapping {
    let file = memfd::create("spaces", None).unwrap();
    memfd::resize(file.as_fd(), 4096).unwrap();
    SharedMapping::shared(&file, 0, 4096, true).unwrap()
}

#[test]
fn calls_of_other_processes_count_twice_and_those_of_the_service_never() {
    let tracer = start();
    let mapping = mapping();
    let target = Other::start(|| ());
    let pagemap = target.pagemap();
    let followed = tracer.follow(pagemap.as_fd()).unwrap();
    let before = followed.counts();
    assert_eq!(before.begun, before.ended);
    scan(&pagemap, &mapping);
    assert_eq!(followed.counts(), before, "the service scanned");
    let _foreign = Other::start(|| scan(&pagemap, &mapping));
    let after = followed.counts();
    assert_eq!((after.begun, after.ended), (before.begun + 1, before.ended + 1));
    // Another address space.
    let own = Pagemap::open(None).unwrap();
    let _foreign = Other::start(|| scan(&own, &mapping));
    assert_eq!(followed.counts(), after);
}

#[test]
fn subscriptions_of_one_address_space_share_its_counters() {
    let tracer = start();
    let mapping = mapping();
    let target = Other::start(|| ());
    let (one, two) = (target.pagemap(), target.pagemap());
    let first = tracer.follow(one.as_fd()).unwrap();
    let second = tracer.follow(two.as_fd()).unwrap();
    assert_eq!(first.slot, second.slot);
    drop(first);
    let before = second.counts();
    let _foreign = Other::start(|| scan(&one, &mapping));
    assert_eq!(second.counts().ended, before.ended + 1);
    drop(second);
    assert!(tracer.lock().links.is_empty(), "nothing is followed");
    assert_eq!(tracer.lock().free.iter().count(), MAX_SPACES);
}

/// A forked process that works on request.
struct Worker {
    process: Other,
    requests: OwnedFd,
    answers: OwnedFd,
}

impl Worker {
    /// `work` must not allocate: another thread may hold a lock of the allocator.
    fn start(work: impl Fn(u8)) -> Self {
        let (requested, requests) = pipe().unwrap();
        let (answers, answered) = pipe().unwrap();
        // SAFETY: the child calls only read, `work`, write and _exit.
        let process = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => Other(child),
            ForkResult::Child => loop {
                let mut request = [0];
                if read(&requested, &mut request) != Ok(1) {
                    calls::exit_now(0)
                }
                work(request[0]);
                let _ = nix::unistd::write(&answered, b"x");
            },
        };
        Self { process, requests, answers }
    }

    fn request(&self, request: u8) {
        assert_eq!(nix::unistd::write(&self.requests, &[request]), Ok(1));
        assert_eq!(read(&self.answers, &mut [0]), Ok(1));
    }
}

#[test]
fn each_child_with_a_copy_of_the_address_space_counts() {
    let tracer = start();
    let worker = Worker::start(|_| {
        // SAFETY: the child calls only _exit.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => calls::exit_now(0),
            Ok(ForkResult::Parent { child }) => drop(waitpid(child, None)),
            Err(_) => {}
        }
    });
    let followed = tracer.follow(worker.process.pagemap().as_fd()).unwrap();
    let before = followed.counts();
    for forked in 1..4 {
        worker.request(0);
        assert_eq!(followed.counts(), SpaceCounts { copies: before.copies + forked, ..before });
    }
    let _other = Other::start(|| ());
    assert_eq!(followed.counts().copies, before.copies + 3, "another process forked");
}

#[test]
fn page_tables_that_a_process_moves_away_count_as_taken() {
    const DUPLICATE: u8 = 0;
    const MOVE_AWAY: u8 = 1;
    let tracer = start();
    let file = memfd::create("moved", None).unwrap();
    memfd::resize(file.as_fd(), 4096).unwrap();
    let mapping = RawMapping::shared(file.as_fd(), 0, 4096).unwrap();
    let worker = Worker::start(|request| match request {
        DUPLICATE => drop(mapping.duplicate(0, 4096)),
        _ => drop(mapping.move_away()),
    });
    let followed = tracer.follow(worker.process.pagemap().as_fd()).unwrap();
    let before = followed.counts();
    worker.request(DUPLICATE);
    assert_eq!(followed.counts(), before, "the page tables stay in place");
    worker.request(MOVE_AWAY);
    let moved = SpaceCounts { begun: before.begun + 1, ended: before.ended + 1, ..before };
    assert_eq!(followed.counts(), moved);
}

#[test]
fn descriptors_of_other_kinds_are_refused() {
    let tracer = start();
    let file = memfd::create("spaces", None).unwrap();
    assert!(matches!(tracer.follow(file.as_fd()), Err(TraceError::Refused { .. })));
    assert!(tracer.lock().links.is_empty(), "nothing is followed");
}

#[test]
fn calls_that_make_a_shared_mapping_writable_count() {
    let tracer = start();
    let file = memfd::create("protected", None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    let shared = RawMapping::shared(file.as_fd(), 0, 8192).unwrap();
    let private = RawMapping::anonymous(8192).unwrap();
    let (read, all) = (ProtFlags::PROT_READ, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
    let cases = [(&private, all, 0), (&shared, read, 0), (&shared, all, 1), (&private, read, 0)];
    let worker = Worker::start(|request| {
        let (mapping, protection, _) = cases[usize::from(request)];
        let _ = mapping.protect(4096, 4096, protection);
    });
    let followed = tracer.follow(worker.process.pagemap().as_fd()).unwrap();
    for (request, (_, protection, counted)) in (0_u8..).zip(cases) {
        let before = followed.counts();
        worker.request(request);
        let (protect_begun, protect_ended) = (before.protect_begun + counted, before.protect_ended + counted);
        assert_eq!(
            followed.counts(),
            SpaceCounts { protect_begun, protect_ended, ..before },
            "{request}: {protection:?}"
        );
    }
}

/// Waits until the process sleeps in a scan.
fn until_scanning(scanning: &Other) {
    // Begins with the number of the system call in which the process sleeps, and its first two arguments: proc_pid_syscall(5).
    let path = format!("/proc/{}/syscall", scanning.0);
    let is_scanning = |text: &str| {
        (text.starts_with("16 ") || text.starts_with("4294967312 ")) && text.contains(" 0xc0606610 ")
    };
    until(|| is_scanning(&std::fs::read_to_string(&path).unwrap()), "the scan never began");
}

/// A forked process in a scan whose argument it can never read.
fn blocked_scan(bits: NumberBits, pagemap: &Pagemap) -> Other {
    let argument = ZeroArguments::new().unwrap();
    let begin = || {
        let uffd = Userfaultfd::create()?;
        uffd.api(UffdFeatures::empty())?;
        calls::block_access(&uffd, argument.memory())?;
        let _ = calls::scan_with_zero_argument(bits, pagemap.as_fd(), &argument);
        Ok::<(), fdmap_sys::SyscallError>(())
    };
    // SAFETY: the child makes system calls, and allocates nothing unless one fails.
    let scanning = match unsafe { fork() }.unwrap() {
        ForkResult::Child => calls::exit_now(i32::from(begin().is_ok())),
        ForkResult::Parent { child } => Other(child),
    };
    until_scanning(&scanning);
    scanning
}

fn until(done: impl Fn() -> bool, failure: &str) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn slot_is_given_out_again_when_its_calls_have_ended() {
    let tracer = start();
    let (target, other) = (Other::start(|| ()), Other::start(|| ()));
    let (pagemap, other) = (target.pagemap(), other.pagemap());
    let host =
        || [offset_of!(SpaceControl, begun), offset_of!(SpaceControl, ended)].map(|word| tracer.word(word));
    let _keeps_attached = tracer.follow(other.as_fd()).unwrap();
    let followed = tracer.follow(pagemap.as_fd()).unwrap();
    let slot = followed.slot;
    let scanning = blocked_scan(NumberBits::None, &pagemap);
    let counts = followed.counts();
    assert_eq!(counts.begun, counts.ended + 1);
    drop(followed);
    assert!(!tracer.has_no_calls(slot), "the scan is in progress");
    drop(scanning);
    until(|| tracer.has_no_calls(slot), "the end of the scan is not counted");
    assert_eq!(host(), [1, 1]);
    assert_ne!(tracer.follow(pagemap.as_fd()).unwrap().slot, slot, "the slot was free for the shortest time");
}

#[test]
fn calls_whose_end_no_program_observed_end_when_programs_are_attached() {
    let tracer = start();
    let target = Other::start(|| ());
    let pagemap = target.pagemap();
    let slot = tracer.follow(pagemap.as_fd()).unwrap().slot;
    // As the programs do it when a call begins.
    let entry = u32::try_from(slot).unwrap().to_ne_bytes();
    tracer.in_flight.update(&7_u64.to_ne_bytes(), &entry, libbpf_rs::MapFlags::ANY).unwrap();
    tracer.counter(slot, offset_of!(SpaceSlot, begun)).fetch_add(1, Ordering::SeqCst);
    tracer.control.atomic_u64s(offset_of!(SpaceControl, begun), 1)[0].fetch_add(1, Ordering::SeqCst);
    assert!(!tracer.has_no_calls(slot));
    let _followed = tracer.follow(pagemap.as_fd()).unwrap();
    assert!(tracer.has_no_calls(slot));
    assert_eq!(tracer.in_flight.keys().count(), 0);
    assert_eq!(tracer.word(offset_of!(SpaceControl, begun)), tracer.word(offset_of!(SpaceControl, ended)));
}

#[test]
fn call_that_began_before_its_address_space_was_followed_is_noticed() {
    let tracer = start();
    for bits in [NumberBits::None, NumberBits::UpperHalf] {
        let target = Other::start(|| ());
        let pagemap = target.pagemap();
        let scanning = blocked_scan(bits, &pagemap);
        let followed = tracer.follow(pagemap.as_fd()).unwrap();
        for _ in 0..3 {
            assert!(followed.complete_counts().is_none(), "the scan is in progress");
        }
        drop(scanning);
        until(|| followed.complete_counts().is_some(), "a task seems to be in a call");
    }
}

#[test]
fn calls_without_room_are_in_progress_until_a_search_finds_none() {
    // More than the calls in progress in one address space that have room.
    const CALLS: usize = 66;
    let tracer = start();
    let target = Other::start(|| ());
    let pagemap = target.pagemap();
    let followed = tracer.follow(pagemap.as_fd()).unwrap();
    until(|| followed.complete_counts().is_some(), "a task seems to be in a call");
    let scanning: Vec<_> = (0..CALLS).map(|_| blocked_scan(NumberBits::None, &pagemap)).collect();
    assert_eq!(tracer.slot_word(followed.slot, offset_of!(SpaceSlot, uncounted)), 2);
    assert_eq!(followed.complete_counts(), None);
    drop(scanning);
    until(|| followed.complete_counts().is_some(), "a task seems to be in a call");
    let counts = followed.complete_counts().unwrap();
    assert_eq!(counts.begun, counts.ended);
}

#[test]
fn scan_whose_descriptor_was_closed_before_its_address_space_was_followed_is_noticed() {
    let tracer = start();
    let target = Other::start(|| ());
    let path = std::ffi::CString::new(format!("/proc/{}/pagemap", target.0)).unwrap();
    let argument = ZeroArguments::new().unwrap();
    let (begin, closes) = pipe().unwrap();
    let (closed, done) = pipe().unwrap();
    let scan = || {
        let uffd = Userfaultfd::create()?;
        uffd.api(UffdFeatures::empty())?;
        calls::block_access(&uffd, argument.memory())?;
        let own = open(path.as_c_str(), OFlag::O_RDONLY, Mode::empty()).unwrap();
        // SAFETY: the child makes system calls only.
        if unsafe { calls::fork_with_common_descriptors() } == Ok(0) {
            let _ = read(&begin, &mut [0]);
            let _ = nix::unistd::close(own);
            let _ = nix::unistd::write(&done, b"x");
            calls::exit_now(0);
        }
        let _ = calls::scan_with_zero_argument(NumberBits::None, own.as_fd(), &argument);
        Ok::<(), fdmap_sys::SyscallError>(())
    };
    // SAFETY: the child makes system calls, and allocates nothing unless one fails.
    let scanning = match unsafe { fork() }.unwrap() {
        ForkResult::Child => calls::exit_now(i32::from(scan().is_ok())),
        ForkResult::Parent { child } => Other(child),
    };
    until_scanning(&scanning);
    assert_eq!(nix::unistd::write(&closes, b"x"), Ok(1));
    assert_eq!(read(&closed, &mut [0]), Ok(1));
    let followed = tracer.follow(target.pagemap().as_fd()).unwrap();
    assert_eq!(followed.complete_counts(), None, "the scan is in progress");
}
