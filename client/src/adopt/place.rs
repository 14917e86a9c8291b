//! Where in a process the instruction `syscall` stands. Nothing of its text is ever written.

use std::fs;

use fdmap_sys::SyscallError;
use fdmap_sys::maps::Maps;
use fdmap_sys::ptrace::Memory;

/// `syscall`
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// How much of a mapping is looked at.
const MOST: u64 = 1 << 22;

/// Whether it stands there.
pub(super) fn is_syscall(memory: &Memory, address: u64) -> bool {
    memory.read(address) == Ok(SYSCALL)
}

/// The address of one that may be executed: in the vdso, else anywhere. `None`: there is none.
pub(super) fn find(pid: u32, memory: &Memory) -> Result<Option<u64>, SyscallError> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let vdso = text.lines().find(|line| line.ends_with("[vdso]")).and_then(|line| line.split_once('-'));
    let vdso = vdso.and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
    let mut all: Vec<_> = Maps::open(pid)?.all()?.into_iter().filter(|vma| vma.executable).collect();
    all.sort_by_key(|vma| Some(vma.range.start) != vdso);
    for vma in all {
        let mut bytes = vec![0; usize::try_from(vma.range.len().min(MOST)).unwrap_or(0)];
        // Mappings of devices and the like cannot be read.
        if memory.read_into(vma.range.start, &mut bytes).is_ok()
            && let Some(at) = bytes.windows(2).position(|window| window == SYSCALL)
        {
            return Ok(Some(vma.range.start + u64::try_from(at).unwrap_or(0)));
        }
    }
    Ok(None)
}
