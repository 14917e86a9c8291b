//! Mappings that are about to end: nobody is to write to them while what was written is taken.

use fdmap_sys::address::AddressRange;
use nix::libc;

use crate::mapping_table::Entry;
use crate::{file_states, memory};

/// A mapping that cannot be written for now.
#[derive(Debug)]
pub struct Still(Vec<(AddressRange, libc::c_int)>);

impl Still {
    /// Takes away the right to write to all of a mapping of this process. `None`, with nothing changed, where that cannot be
    /// done: part of it is gone or is something else by now, or it is sealed.
    pub fn hold(entry: &Entry) -> Option<Self> {
        let (mut at, mut parts) = (entry.range.start, Vec::new());
        for vma in file_states::candidates(entry.pid, entry.range) {
            if vma.range.start > at || (vma.device, vma.inode) != (entry.device, entry.inode) {
                return None;
            }
            at = vma.range.end;
            if vma.writable {
                let others = [(vma.readable, libc::PROT_READ), (vma.executable, libc::PROT_EXEC)];
                let others = others.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, one)| all | one);
                parts.push((vma.range.intersect(entry.range), others));
            }
        }
        if at < entry.range.end {
            return None;
        }
        let mut still = Self(Vec::new());
        for (range, others) in parts {
            if !protect(range, others) {
                still.undo();
                return None;
            }
            still.0.push((range, others));
        }
        Some(still)
    }

    /// Gives the right back, for a mapping that goes on to be.
    pub fn undo(&self) {
        for (range, others) in &self.0 {
            protect(*range, others | libc::PROT_WRITE);
        }
    }
}

fn protect(range: AddressRange, protection: libc::c_int) -> bool {
    let (Some(start), Ok(len)) = (memory::at(range.start), usize::try_from(range.len())) else {
        return false;
    };
    // SAFETY: the program is unmapping this very range, so nothing of it is used any more; where that has failed it gets back
    // what it had.
    unsafe { libc::mprotect(start, len, protection) == 0 }
}
