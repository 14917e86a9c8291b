//! `splice(2)` from a file to a pipe: the pipe then references the file's pages instead of copies.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext as _, SyscallError};

/// Splices up to `len` bytes at `offset` of `file` into `pipe` and returns their number. The pipe references the pages until they
/// are read from it or it is closed.
///
/// # Errors
/// `splice`; `EOVERFLOW` if `offset` exceeds 63 bits.
pub fn into_pipe(
    file: BorrowedFd<'_>,
    offset: u64,
    pipe: BorrowedFd<'_>,
    len: usize,
) -> Result<usize, SyscallError> {
    let call = || {
        format!(
            "splice of {len} bytes at {offset} of descriptor {} to {}",
            file.as_raw_fd(),
            pipe.as_raw_fd()
        )
    };
    let mut offset = libc::loff_t::try_from(offset).map_err(|_| Errno::EOVERFLOW).call(call)?;
    // SAFETY: `offset` outlives the call; the other offset may be null because a pipe has none.
    let moved =
        unsafe { libc::splice(file.as_raw_fd(), &raw mut offset, pipe.as_raw_fd(), ptr::null_mut(), len, 0) };
    Errno::result(moved).and_then(|moved| usize::try_from(moved).map_err(|_| Errno::EOVERFLOW)).call(call)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::memfd;

    #[test]
    fn pipe_references_the_page_of_the_file_instead_of_a_copy() {
        let file = memfd::create("spliced", None).unwrap();
        nix::sys::uio::pwrite(&file, b"before", 0).unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        assert_eq!(into_pipe(file.as_fd(), 0, write.as_fd(), 6).unwrap(), 6);
        nix::sys::uio::pwrite(&file, b"after!", 0).unwrap();
        let mut content = [0; 6];
        nix::unistd::read(&read, &mut content).unwrap();
        assert_eq!(&content, b"after!");
    }
}
