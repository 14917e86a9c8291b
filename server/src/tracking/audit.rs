//! Who maps a file for writing: every process is looked at. It is asked only when the kernel's own count of writable mappings
//! is not that of the tracked ones, or is not known.

use fdmap_proto::units::PageRange;
use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd::all_processes;

use super::observed::Mapped;

/// A shared mapping of the file that may be written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapper {
    /// Whose.
    pub pid: u32,
    /// Where.
    pub range: AddressRange,
    /// Of which pages.
    pub pages: PageRange,
}

/// What an audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// One for each VMA.
    pub mappers: Vec<Mapper>,
    /// Processes that could not be looked into.
    pub closed_to_us: u64,
}

/// Looks at every process of this pid namespace. Those that end meanwhile have no mappings.
#[must_use]
pub fn audit(file: Mapped) -> Audit {
    let mut found = Audit::default();
    let Ok(processes) = all_processes() else {
        return Audit { closed_to_us: 1, ..found };
    };
    for pid in processes {
        let vmas = match Maps::open(pid).and_then(|maps| maps.shared_of(file.device, file.inode)) {
            Ok(vmas) => vmas,
            // It has ended, or is a kernel thread.
            Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH) => continue,
            Err(_) => {
                found.closed_to_us += 1;
                continue;
            }
        };
        for vma in vmas {
            // A mapping that cannot be told to be harmless is not.
            if vma.writable || may_write(pid, &vma).unwrap_or(true) {
                let first = file.page_size.page_at(vma.offset);
                let pages = (vma.range.end - vma.range.start) / file.page_size.bytes();
                found.mappers.push(Mapper { pid, range: vma.range, pages: PageRange::at(first, pages) });
            }
        }
    }
    found
}
