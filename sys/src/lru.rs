//! The per-CPU batches through which pages reach the LRU lists (`mm/swap.c`).

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};

// linux/mempolicy.h
const MPOL_MF_MOVE: libc::c_int = 1 << 1;

/// Empties the batches of all processors. Each page in a batch has an extra reference until the batch is full or drained.
///
/// `move_pages` drains them before it looks at its pages, of which there are none here: no page is moved, and no other process
/// is involved. It takes some 30 us on two processors. `POSIX_FADV_DONTNEED` drains them only if it fails on a page of a file on
/// a disk, `F_SEAL_WRITE` only if the sealed file has a page in the batch of another processor.
///
/// # Errors
/// `move_pages`: `ENOSYS` if this kernel lacks NUMA or page migration, `EPERM` if a seccomp filter forbids the call.
pub fn drain_batches() -> Result<(), SyscallError> {
    let (pages, nodes, mut status) = ([std::ptr::null::<libc::c_void>()], [0], [0]);
    // SAFETY: with a count of 0, the kernel reads no element of the first two arrays and writes none of the third.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            0_u64,
            pages.as_ptr(),
            nodes.as_ptr(),
            status.as_mut_ptr(),
            MPOL_MF_MOVE,
        )
    };
    Errno::result(result).call(|| "move_pages of 0 pages".to_owned())?;
    Ok(())
}
