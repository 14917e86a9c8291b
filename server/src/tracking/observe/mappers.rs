//! The writable mappings of a file in all processes.
//!
//! The walk reads the maps of every process. It is needed only if the kernel's count of writable mappings is unknown, or
//! differs from the number of tracked ones.

use fdmap_proto::units::PageRange;
use fdmap_sys::Errno;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd::{all_processes, last_pid};

use super::observation::{Mapper, MapperAudit};
use crate::tracking::mapping::MappedFile;

/// Reads the maps of every process of this pid namespace. Processes that exit meanwhile have no mappings.
pub(crate) fn audit(file: MappedFile) -> MapperAudit {
    // Outside the initial pid namespace, further processes may exist.
    let mut audit = MapperAudit { mappers: Vec::new(), incomplete: last_pid().is_err() };
    let Ok(processes) = all_processes() else {
        return MapperAudit { incomplete: true, ..audit };
    };
    for pid in processes {
        let vmas = match Maps::open(pid).and_then(|maps| maps.shared_of(file.device, file.inode)) {
            Ok(vmas) => vmas,
            // The process has exited, or is a kernel thread.
            Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH) => continue,
            Err(_) => {
                audit.incomplete = true;
                continue;
            }
        };
        for vma in vmas {
            // A mapping without proof that it cannot be written counts as writable.
            if vma.writable || may_write(pid, &vma).unwrap_or(true) {
                let first = file.page_size.page_at(vma.offset);
                let pages = (vma.range.end - vma.range.start) / file.page_size.bytes();
                audit.mappers.push(Mapper { pid, range: vma.range, pages: PageRange::at(first, pages) });
            }
        }
    }
    audit
}
