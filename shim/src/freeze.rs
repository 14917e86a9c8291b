//! Freezing a mapping before it is unmapped: no thread can write to it while its written pages are harvested.

use fdmap_sys::address::AddressRange;
use nix::libc;

use crate::mapping_table::ShimMapping;
use crate::memory;
use crate::vmas::shared_vmas;

/// A mapping without `PROT_WRITE`, with the remaining protection of each of its parts.
#[derive(Debug)]
pub struct FrozenMapping(Vec<(AddressRange, libc::c_int)>);

impl FrozenMapping {
    /// Removes `PROT_WRITE` from all of a mapping of this process. Returns `None` and changes nothing if that fails: part of it is
    /// unmapped or maps something else, or it is sealed by `mseal`.
    pub fn freeze(mapping: &ShimMapping) -> Option<Self> {
        let (mut at, mut parts) = (mapping.range.start, Vec::new());
        for vma in shared_vmas(mapping.pid, mapping.range) {
            if vma.range.start > at || (vma.device, vma.inode) != (mapping.device, mapping.inode) {
                return None;
            }
            at = vma.range.end;
            if vma.writable {
                let others = [(vma.readable, libc::PROT_READ), (vma.executable, libc::PROT_EXEC)];
                let others =
                    others.into_iter().filter(|(is_set, _)| *is_set).fold(0, |bits, (_, bit)| bits | bit);
                parts.push((vma.range.intersect(mapping.range), others));
            }
        }
        if at < mapping.range.end {
            return None;
        }
        let mut frozen = Self(Vec::new());
        for (range, others) in parts {
            if !protect(range, others) {
                frozen.thaw();
                return None;
            }
            frozen.0.push((range, others));
        }
        Some(frozen)
    }

    /// Restores `PROT_WRITE`, for a mapping that was not unmapped.
    pub fn thaw(&self) {
        for (range, others) in &self.0 {
            protect(*range, others | libc::PROT_WRITE);
        }
    }
}

fn protect(range: AddressRange, protection: libc::c_int) -> bool {
    let (Some(start), Ok(len)) = (memory::pointer_to(range.start), usize::try_from(range.len())) else {
        return false;
    };
    // SAFETY: the program is unmapping this range and no longer uses it; if munmap fails, thaw() restores the protection.
    unsafe { libc::mprotect(start, len, protection) == 0 }
}
