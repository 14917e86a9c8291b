//! Guard regions: pages that no access may touch.

use nix::errno::Errno;
use nix::libc;

use crate::call::{Done, Place, advise, checked};

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of asm-generic/mman-common.h.
const INSTALL: i32 = 102;
const REMOVE: i32 = 103;

/// Installs a guard region over some pages of a mapping, and removes it. `process`: by process_madvise on this process.
pub fn install_and_remove(place: Place, page: u64, pages: u64, process: bool) -> Done {
    if process {
        advise_process(place, page, pages)?;
    } else {
        advise(place, page, pages, INSTALL)?;
    }
    advise(place, page, pages, REMOVE)
}

fn advise_process(place: Place, page: u64, pages: u64) -> Done {
    let vector = libc::iovec { iov_base: place.page(page).cast(), iov_len: pages as usize * 4096 };
    // SAFETY: the call takes integers.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
    checked(pidfd, || "pidfd_open".to_owned())?;
    // SAFETY: the range belongs to a mapping that this program accesses by raw addresses only. The vector outlives the call.
    let advised =
        unsafe { libc::syscall(libc::SYS_process_madvise, pidfd, &raw const vector, 1, INSTALL, 0) };
    let errno = Errno::last();
    // SAFETY: nothing else uses the descriptor.
    unsafe { libc::close(pidfd as i32) };
    if advised == vector.iov_len as i64 {
        Ok(())
    } else {
        Err(format!("process_madvise: {advised}, {errno}"))
    }
}
