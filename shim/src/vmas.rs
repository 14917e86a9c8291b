//! Shared file mappings of a process, from `/proc/PID/maps`.

use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::{Errno, SyscallError};

/// Returns the VMAs of process `pid` that overlap `range` and may map shmem or hugetlb files: shared mappings of files whose
/// device has major number 0. Empty if the maps cannot be read.
pub fn shared_vmas(pid: i32, range: AddressRange) -> Vec<Vma> {
    let may_be_shmem = |vma: &Vma| vma.shared && vma.inode != 0 && nix::sys::stat::major(vma.device) == 0;
    let Ok(pid) = u32::try_from(pid) else { return Vec::new() };
    let Ok(maps) = Maps::open(pid) else { return Vec::new() };
    let (mut vmas, mut address) = (Vec::new(), range.start);
    while address < range.end {
        match maps.vma_at_or_after(address, true) {
            Ok(Some(vma)) if vma.range.start < range.end => {
                address = vma.range.end;
                vmas.extend(Some(vma).filter(may_be_shmem));
            }
            // Kernels before 6.11 lack PROCMAP_QUERY.
            Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                let all = maps.all().unwrap_or_default();
                return all
                    .into_iter()
                    .filter(|vma| may_be_shmem(vma) && !vma.range.intersect(range).is_empty())
                    .collect();
            }
            Ok(_) | Err(_) => break,
        }
    }
    vmas
}
