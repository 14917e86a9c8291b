//! The writable mappings of a file in all processes.
//!
//! They are read from the file itself: a walk over its VMAs asks no process, and is exact. Only where the kernel does not permit
//! the walk, or its VMAs change during every walk, the maps of all processes are read. That takes long, may wait for a process
//! that holds its mmap_lock, and misses processes of other pid namespaces.
//!
//! All this is needed only if the kernel's count of writable mappings is unknown, or differs from the number of tracked ones.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_proto::units::PageRange;
use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd::{all_processes, is_in_initial_pid_namespace};

use super::observation::{Completeness, Mapper, MapperAudit};
use crate::probe::{FileVma, MapperWalk, Probe};
use crate::tracking::mapping::MappedFile;

/// Time in which the maps of all processes must be read. A process that holds its mmap_lock delays that.
const AUDIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Audits that wait for a process, although their deadline has passed. With more of them, no audit is started.
const MAX_LATE_AUDITS: usize = 8;

/// The number of threads that read the maps of processes.
static AUDITS: AtomicUsize = AtomicUsize::new(0);

/// Finds the writable mappings of `file`; `fd` is a descriptor of it.
pub(crate) fn find(probe: &dyn Probe, fd: BorrowedFd<'_>, file: MappedFile) -> MapperAudit {
    match probe.mappers(fd) {
        Ok(MapperWalk::Found(vmas)) => {
            let writable = vmas.iter().filter(|vma| vma.writable);
            let mappers = writable.map(|vma| mapper(vma, file)).collect();
            MapperAudit { mappers, completeness: Completeness::Complete }
        }
        // The audit names mappers. Since they change all the while, it may miss some, although the counts agree.
        Ok(MapperWalk::Unknown) => MapperAudit { completeness: Completeness::Unknown, ..audit(file) },
        Ok(MapperWalk::Unavailable(_)) => audit(file),
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "walk of the mappers of a file failed");
            MapperAudit { completeness: Completeness::Unknown, ..audit(file) }
        }
    }
}

fn mapper(vma: &FileVma, file: MappedFile) -> Mapper {
    let pages = PageRange::at(vma.first_page, vma.range.len() / file.page_size.bytes());
    Mapper { pid: vma.pid, range: vma.range, pages, mm: Some(vma.mm), userfaultfd: vma.userfaultfd }
}

/// Reads the maps of every process of this pid namespace, until the deadline.
fn audit(file: MappedFile) -> MapperAudit {
    let deadline = Instant::now() + AUDIT_TIMEOUT;
    let (sender, receiver) = mpsc::channel();
    // Outside the initial pid namespace, further processes may exist.
    let mut incomplete = !is_in_initial_pid_namespace() || !start_audit(file, sender);
    let mut mappers = Vec::new();
    loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(found)) => mappers.extend(found),
            Ok(Err(Unreadable)) => incomplete = true,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                incomplete = true;
                break;
            }
        }
    }
    MapperAudit { mappers, completeness: Completeness::Counted { incomplete } }
}

/// The maps of a process, or the list of processes, could not be read.
struct Unreadable;

/// Reads the maps on a thread of its own, which ends when the deadline has passed and no process blocks it. Returns false if too
/// many audits are blocked, or no thread can be started.
fn start_audit(file: MappedFile, sender: Sender<Result<Vec<Mapper>, Unreadable>>) -> bool {
    if AUDITS.fetch_add(1, Ordering::SeqCst) >= MAX_LATE_AUDITS {
        AUDITS.fetch_sub(1, Ordering::SeqCst);
        return false;
    }
    let read = move || {
        read_all(file, &sender);
        AUDITS.fetch_sub(1, Ordering::SeqCst);
    };
    let started = std::thread::Builder::new().name("mapper-audit".to_owned()).spawn(read).is_ok();
    if !started {
        AUDITS.fetch_sub(1, Ordering::SeqCst);
    }
    started
}

fn read_all(file: MappedFile, sender: &Sender<Result<Vec<Mapper>, Unreadable>>) {
    let Ok(processes) = all_processes() else {
        // Fails if the deadline has passed.
        let _ = sender.send(Err(Unreadable));
        return;
    };
    for pid in processes {
        if sender.send(mappers_in(pid, file)).is_err() {
            return;
        }
    }
}

/// The writable mappings of one process. A process that has exited has none.
fn mappers_in(pid: u32, file: MappedFile) -> Result<Vec<Mapper>, Unreadable> {
    let vmas = match Maps::open(pid).and_then(|maps| maps.shared_of(file.device, file.inode)) {
        Ok(vmas) => vmas,
        // The process has exited, or is a kernel thread.
        Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH) => return Ok(Vec::new()),
        Err(_) => return Err(Unreadable),
    };
    // A mapping without proof that it cannot be written counts as writable.
    let writable = vmas.iter().filter(|vma| vma.writable || may_write(pid, vma).unwrap_or(true));
    let mapper = |range: AddressRange, offset| {
        let pages = PageRange::at(file.page_size.page_at(offset), range.len() / file.page_size.bytes());
        Mapper { pid: Some(pid), range, pages, mm: None, userfaultfd: None }
    };
    Ok(writable.map(|vma| mapper(vma.range, vma.offset)).collect())
}
