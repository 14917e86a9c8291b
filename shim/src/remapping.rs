//! Remapping of pages at their address. A new mapping is not registered with a userfaultfd and not write-protected: the service
//! finds the old one ended, and reports the new one as untracked.

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use nix::libc;

use crate::descriptor::own_pid;
use crate::mapping_table;
use crate::memory;
use crate::vmas::shared_vmas;

/// Remaps the parts of `range` that the mapping table lists, which unregisters them. Removes guard regions in them.
///
/// # Errors
/// `mremap`: `ENOMEM` at the limit of mappings, `EPERM` if a mapping is sealed by `mseal`. After an error, some parts may
/// have been remapped.
pub fn unregister(range: AddressRange) -> Result<(), Errno> {
    for mapping in mapping_table::overlapping(range) {
        let part = mapping.range.intersect(range);
        for vma in shared_vmas(own_pid(), part) {
            if (vma.device, vma.inode) == (mapping.device, mapping.inode) {
                map_again(vma.range.intersect(part))?;
            }
        }
    }
    Ok(())
}

/// No thread sees the range unmapped: the second mremap replaces it under mmap_lock.
fn map_again(range: AddressRange) -> Result<(), Errno> {
    let start = memory::pointer_to(range.start).ok_or(Errno::ENOMEM)?;
    let len = usize::try_from(range.len()).map_err(|_| Errno::ENOMEM)?;
    // SAFETY: an old length of 0 maps the pages of a shared mapping a second time, where nothing is mapped.
    let copy = unsafe { libc::mremap(start, 0, len, libc::MREMAP_MAYMOVE) };
    if copy == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    // SAFETY: the range maps the same pages before and after, with the same protection.
    let moved = unsafe { libc::mremap(copy, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, start) };
    if moved == libc::MAP_FAILED {
        let errno = Errno::last();
        // SAFETY: no other code has the address of the copy.
        unsafe { libc::munmap(copy, len) };
        return Err(errno);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::atomic::{AtomicBool, Ordering};

    use fdmap_sys::mapping::SharedMapping;
    use fdmap_sys::memfd;

    use super::*;

    /// Four pages of 4 KiB, of which the two in the middle are mapped again.
    #[test]
    fn other_threads_use_the_range_while_it_is_mapped_again() {
        let file = memfd::create("fdmap-test", None).unwrap();
        memfd::resize(file.as_fd(), 4 << 12).unwrap();
        let mapping = SharedMapping::shared(&file, 0, 4 << 12, true).unwrap();
        let start = memory::address_of(mapping.as_ptr()) + (1 << 12);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let counting = scope.spawn(|| {
                let counter = &mapping.atomic_u64s(2 << 12, 1)[0];
                let mut count = 0;
                while !done.load(Ordering::Relaxed) {
                    count += 1;
                    assert_eq!(counter.fetch_add(1, Ordering::Relaxed) + 1, count);
                }
                count
            });
            for _ in 0..2000 {
                map_again(AddressRange { start, end: start + (2 << 12) }).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            let count = counting.join().unwrap();
            assert_eq!(mapping.atomic_u64s(2 << 12, 1)[0].load(Ordering::Relaxed), count);
            assert!(count > 0);
        });
    }
}
