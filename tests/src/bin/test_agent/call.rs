//! System calls that the other crates do not offer.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

/// The result of a command or a write.
pub type Done<T = ()> = Result<T, String>;

/// An error with its causes.
pub fn error_text(error: impl std::error::Error) -> String {
    fdmap_proto::error_chain(&error)
}

/// The result of a raw system call.
pub fn checked(result: i64, call: impl FnOnce() -> String) -> Done<usize> {
    usize::try_from(result).map_err(|_| format!("{}: {}", call(), Errno::last()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Start address.
    pub address: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Place {
    /// The address of a page of the file, if the mapping begins at page 0.
    pub const fn page(self, page: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address + page as usize * 4096)
    }

    /// Number of pages.
    pub const fn pages(self) -> u64 {
        self.len as u64 / 4096
    }

    /// `munmap` of the bytes from `from` up to `end`, without the client library.
    pub fn unmap(self, from: usize, end: usize) -> Done {
        let address = self.address + from;
        // SAFETY: this program mapped the range for its tests. They write to it by raw addresses only, and not after
        // unmapping it.
        let result = unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), end - from) };
        checked(result.into(), || format!("munmap of {} bytes at {address:#x}", end - from)).map(drop)
    }

    /// `mremap`; returns the new mapping.
    pub fn remap(self, old_len: usize, len: usize, flags: i32, to: usize) -> Done<Self> {
        let old = std::ptr::with_exposed_provenance_mut(self.address);
        let new = std::ptr::with_exposed_provenance_mut::<libc::c_void>(to);
        // SAFETY: as in unmap; a fixed target is a range that was reserved for it.
        let result = unsafe { libc::mremap(old, old_len, len, flags, new) };
        if result == libc::MAP_FAILED {
            let from = self.address;
            return Err(format!(
                "mremap({from:#x}, {old_len}, {len}, {flags:#x}, {to:#x}): {}",
                Errno::last()
            ));
        }
        Ok(Self { address: result.expose_provenance(), len })
    }
}

/// `mmap` of a file from `offset` on, or of anonymous memory. If `at` is not 0, MAP_FIXED at `at`.
pub fn map(file: Option<(BorrowedFd<'_>, u64)>, len: usize, at: usize, protection: i32) -> Done<Place> {
    let (fd, offset, kind) = match file {
        Some((fd, offset)) => (fd.as_raw_fd(), offset as i64, libc::MAP_SHARED),
        None => (-1, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
    };
    let flags = if at == 0 { kind } else { kind | libc::MAP_FIXED };
    let hint = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: a fixed mapping replaces only memory that this program mapped for its tests, as in Place::unmap.
    let result = unsafe { libc::mmap(hint, len, protection, flags, fd, offset) };
    if result == libc::MAP_FAILED {
        return Err(format!("mmap of {len} bytes of descriptor {fd} at {at:#x}: {}", Errno::last()));
    }
    Ok(Place { address: result.expose_provenance(), len })
}

pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// `splice` from a pipe to `offset` of a file.
pub fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    let mut at = offset as i64;
    // SAFETY: each offset pointer is null or refers to a live variable.
    let moved =
        unsafe { libc::splice(from.as_raw_fd(), std::ptr::null_mut(), to.as_raw_fd(), &raw mut at, len, 0) };
    checked(moved as i64, || format!("splice of {len} bytes to {offset}"))
}

/// `copy_file_range`.
pub fn copy_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    let (mut source, mut target) = (0_i64, offset as i64);
    // SAFETY: both offset pointers refer to live variables.
    let moved = unsafe {
        libc::copy_file_range(from.as_raw_fd(), &raw mut source, to.as_raw_fd(), &raw mut target, len, 0)
    };
    checked(moved as i64, || format!("copy_file_range of {len} bytes to {offset}"))
}

/// `lseek` and `sendfile`.
pub fn sendfile(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    seek(to, offset)?;
    let mut source = 0_i64;
    // SAFETY: the offset pointer refers to a live variable.
    let moved = unsafe { libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), &raw mut source, len) };
    checked(moved as i64, || format!("sendfile of {len} bytes to {offset}"))
}

/// `lseek` to an offset.
pub fn seek(fd: BorrowedFd<'_>, offset: u64) -> Done {
    nix::unistd::lseek(fd, offset as i64, nix::unistd::Whence::SeekSet).map(drop).map_err(error_text)
}

/// `madvise` of some pages of a mapping: `MADV_REMOVE`, `MADV_PAGEOUT`.
pub fn advise(place: Place, page: u64, pages: u64, advice: i32) -> Done {
    // SAFETY: the range belongs to a mapping that this program accesses by raw addresses only.
    let result = unsafe { libc::madvise(place.page(page).cast(), pages as usize * 4096, advice) };
    checked(result.into(), || format!("madvise({advice}) of {pages} pages at {page}")).map(drop)
}

/// `pread` to memory of a mapping.
pub fn pread(fd: BorrowedFd<'_>, to: *mut u8, len: usize, offset: u64) -> Done<usize> {
    // SAFETY: the target belongs to a mapping that this program accesses by raw addresses only. For any other
    // address, the call fails with EFAULT.
    let read = unsafe { libc::pread(fd.as_raw_fd(), to.cast(), len, offset as i64) };
    checked(read as i64, || format!("pread of {len} bytes at {offset}"))
}
