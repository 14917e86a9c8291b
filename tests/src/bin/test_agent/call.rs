//! System calls that the other crates do not offer.

use std::os::fd::BorrowedFd;

use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::raw_mapping::RawMapping;
use nix::errno::Errno;
use nix::fcntl::SpliceFFlags;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags};

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

/// The number of bytes of a completed AIO request.
pub fn aio_result(result: i64) -> Done<usize> {
    usize::try_from(result).map_err(|_| format!("AIO returned {result}"))
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

    /// The range, for calls that leave it mapped.
    pub fn mapping(self) -> BorrowedMapping<'static> {
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: this program mapped the range for its tests. It accesses it by raw addresses and atomics only, and not after
        // unmapping it.
        unsafe { BorrowedMapping::from_raw_parts(start, self.len) }
    }

    /// `munmap` of the bytes from `from` up to `end`, without the client library.
    pub fn unmap(self, from: usize, end: usize) -> Done {
        let address = self.address + from;
        // SAFETY: as in mapping().
        let result = unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), end - from) };
        checked(result.into(), || format!("munmap of {} bytes at {address:#x}", end - from)).map(drop)
    }

    /// `mremap`; returns the new mapping.
    pub fn remap(self, old_len: usize, len: usize, flags: i32, to: usize) -> Done<Self> {
        let old = std::ptr::with_exposed_provenance_mut(self.address);
        let new = std::ptr::with_exposed_provenance_mut::<libc::c_void>(to);
        // SAFETY: as in mapping(); a fixed target is a range that was reserved for it.
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

/// `mmap` of a file from an offset on, or of anonymous memory.
pub fn map(file: Option<(BorrowedFd<'_>, u64)>, len: usize, protection: ProtFlags) -> Done<Place> {
    let flags = match file {
        Some(_) => MapFlags::MAP_SHARED,
        None => MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
    };
    let (start, len) = RawMapping::map(file, len, protection, flags).map_err(error_text)?.into_raw();
    Ok(Place { address: start.expose_provenance(), len })
}

pub const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// `splice` from a pipe to `offset` of a file.
pub fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    let mut at = offset as i64;
    nix::fcntl::splice(from, None, to, Some(&mut at), len, SpliceFFlags::empty())
        .map_err(|errno| format!("splice of {len} bytes to {offset}: {errno}"))
}

/// `copy_file_range`.
pub fn copy_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    let (mut source, mut target) = (0, offset as i64);
    nix::fcntl::copy_file_range(from, Some(&mut source), to, Some(&mut target), len)
        .map_err(|errno| format!("copy_file_range of {len} bytes to {offset}: {errno}"))
}

/// `lseek` and `sendfile`.
pub fn sendfile(from: BorrowedFd<'_>, to: BorrowedFd<'_>, offset: u64, len: usize) -> Done<usize> {
    seek(to, offset)?;
    let mut source = 0;
    nix::sys::sendfile::sendfile(to, from, Some(&mut source), len)
        .map_err(|errno| format!("sendfile of {len} bytes to {offset}: {errno}"))
}

/// `lseek` to an offset.
pub fn seek(fd: BorrowedFd<'_>, offset: u64) -> Done {
    nix::unistd::lseek(fd, offset as i64, nix::unistd::Whence::SeekSet).map(drop).map_err(error_text)
}

/// `madvise` of some pages of a mapping: `MADV_REMOVE`, `MADV_PAGEOUT`.
pub fn advise(place: Place, page: u64, pages: u64, advice: i32) -> Done {
    place.mapping().advise(page as usize * 4096, pages as usize * 4096, advice).map_err(error_text)
}
