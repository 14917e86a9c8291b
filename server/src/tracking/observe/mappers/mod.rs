//! The writable mappings of a file in all processes.
//!
//! They are read from the file itself: a walk over its VMAs asks no process, and is exact. Only where the kernel does not permit
//! the walk, or its VMAs change during every walk, a process of its own reads the maps of all processes: [`search`]. That takes long,
//! and misses processes of other pid namespaces, and those that hold their mmap_lock.
//!
//! All this is needed only if the kernel's count of writable mappings is unknown, or differs from the number of tracked ones.

mod audit;
pub mod search;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_proto::units::PageRange;
use fdmap_sys::pidfd::is_in_initial_pid_namespace;

use self::audit::Audited;
use self::search::WritableMapping;
use super::holder::Worker;
use super::observation::{Completeness, Mapper, MapperAudit};
use crate::own_program::search_process::SearchProcesses;
use crate::own_program::search_turns::SearchLimits;
use crate::probe::{FileVma, MapperWalk, Probe};
use crate::tracking::mapping::MappedFile;

/// Time for a search, from when it waits for others.
const SEARCH_TIMEOUT: Duration = Duration::from_millis(500);

/// Searches at the same time, and those of them for files of one owner.
const LIMITS: SearchLimits = SearchLimits { all: 16, per_owner: 8 };

/// Finds the writable mappings of `file`; `fd` is a descriptor of it, and `owner` the user who is charged for it.
pub(super) fn find(
    probe: &dyn Probe,
    fd: BorrowedFd<'_>,
    file: MappedFile,
    owner: u32,
    search: &MapperSearch,
) -> MapperAudit {
    let audit = |file| search.audit(file, owner);
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

/// Finds the mappers of a file in the maps of all processes.
#[derive(Debug)]
pub(super) struct MapperSearch {
    worker: Worker,
    search: SearchProcesses,
}

impl MapperSearch {
    pub(super) fn new(worker: Worker) -> Self {
        Self {
            worker,
            search: SearchProcesses::new("the mappers of a file", search::KEPT, LIMITS, Duration::ZERO),
        }
    }

    fn audit(&self, file: MappedFile, owner: u32) -> MapperAudit {
        let Audited { found, incomplete } = self.read_all(file, owner);
        // Outside the initial pid namespace, further processes may exist.
        let incomplete = incomplete || !is_in_initial_pid_namespace();
        let mapper = |found: WritableMapping| {
            let pages = found.range.len() / file.page_size.bytes();
            let pages = PageRange::at(file.page_size.page_at(found.offset), pages);
            Mapper { pid: Some(found.pid), range: found.range, pages, mm: None, userfaultfd: None }
        };
        let mappers = found.into_iter().map(mapper).collect();
        MapperAudit { mappers, completeness: Completeness::Counted { incomplete } }
    }

    fn read_all(&self, MappedFile { device, inode, .. }: MappedFile, owner: u32) -> Audited<WritableMapping> {
        if self.worker == Worker::Thread {
            return search::read_all((device, inode));
        }
        let numbers = [u64::from(std::process::id()), device, inode].map(|number| number.to_string());
        let arguments = [search::ARGUMENT, &numbers[0], &numbers[1], &numbers[2]];
        let nothing = || Audited { found: Vec::new(), incomplete: true };
        self.search.search(owner, arguments, SEARCH_TIMEOUT, search::parse).unwrap_or_else(nothing)
    }
}
