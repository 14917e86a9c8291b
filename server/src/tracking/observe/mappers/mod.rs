//! The writable mappings of a file in all processes.
//!
//! They are read from the file itself: a walk over its VMAs asks no process, and is exact. Only where the kernel does not permit
//! the walk, or its VMAs change during every walk, the maps of all processes are read. That takes long, may wait for a process
//! that holds its mmap_lock, and misses processes of other pid namespaces.
//!
//! All this is needed only if the kernel's count of writable mappings is unknown, or differs from the number of tracked ones.

mod audit;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_proto::units::PageRange;
use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd::{all_processes, is_in_initial_pid_namespace};

use self::audit::{Audited, Unreadable};
use super::observation::{Completeness, Mapper, MapperAudit};
use crate::probe::{FileVma, MapperWalk, Probe};
use crate::tracking::mapping::MappedFile;

/// Time in which the maps of all processes must be read. A process that holds its mmap_lock delays that.
const AUDIT_TIMEOUT: Duration = Duration::from_millis(500);

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
    let processes = all_processes();
    // Outside the initial pid namespace, further processes may exist.
    let unlisted = !is_in_initial_pid_namespace() || processes.is_err();
    let read = move |pid| mappers_in(pid, file);
    let Audited { found, incomplete } = audit::all(processes.unwrap_or_default(), deadline, read);
    MapperAudit { mappers: found, completeness: Completeness::Counted { incomplete: incomplete || unlisted } }
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
