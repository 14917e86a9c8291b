//! `/proc/PID/pagemap`: what a process's page tables say, and `PAGEMAP_SCAN`: which pages were written.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use bytemuck::{Pod, Zeroable};

use crate::address::AddressRange;
use crate::error::{Call, SyscallError};

/// The pagemap of one address space. It stays with the address space that the process had when it was opened: after a
/// fork the child's is another one, after exec or exit it is empty.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    path: String,
}

impl Pagemap {
    /// Of process `pid`, or of the caller itself.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not look into that process.
    pub fn open(pid: Option<u32>) -> Result<Self, SyscallError> {
        let path = pid.map_or_else(|| "/proc/self/pagemap".to_owned(), |pid| format!("/proc/{pid}/pagemap"));
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// Of the process that somebody opened it of. The kernel checked the rights of who opened it and asks nobody else.
    ///
    /// # Errors
    /// `EINVAL` if it is no pagemap, `EBADF` if it cannot be read; else `fcntl`, `fstatfs` or `readlink`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        crate::procfile::check(fd.as_fd(), "pagemap")?;
        let path = format!("the pagemap in descriptor {}", fd.as_raw_fd());
        Ok(Self { file: fd.into(), path })
    }

    /// A second descriptor of the same.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let file = self.file.try_clone().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of {}", self.path))?;
        Ok(Self { file, path: self.path.clone() })
    }

    /// Fills `out` with the entries of the pages from virtual address `page * page size` on. Gives how many there
    /// were: fewer than asked at the end of the address space.
    ///
    /// # Errors
    /// `pread`.
    pub fn read(&self, page: u64, out: &mut [u64]) -> Result<usize, SyscallError> {
        let wanted = out.len();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let mut done = 0;
        while done < bytes.len() {
            let offset = page * 8 + u64::try_from(done).unwrap_or(u64::MAX);
            let got = self
                .file
                .read_at(&mut bytes[done..], offset)
                .call(|| format!("pread of {wanted} entries from page {page:#x} of {}", self.path))?;
            if got == 0 {
                break;
            }
            done += got;
        }
        Ok(done / 8)
    }

    /// One `PAGEMAP_SCAN` for the pages of `range` that were written since they were last write-protected. It fills
    /// `regions` from the front and stops where they are full: go on from [`Scanned::walked_to`]. With no regions at all
    /// it reports nothing and runs to the end, which is a way to protect what is not protected yet.
    ///
    /// The category `WRITTEN` alone is asked for: with others in the mask kernels before July 2026 took the empty entries
    /// of protected ranges for clean and left them unprotected.
    ///
    /// A range with nothing mapped, or mapped without userfaultfd unless [`ScanFlags::check_async`] is set, gives *no*
    /// error: that nothing was found does not say that nothing was written. And it says nothing of pages that were never
    /// touched and never protected: on shmem they are told as written, on hugetlb they are not.
    ///
    /// # Errors
    /// `ESRCH` if the address space is gone, by exit or by exec. With `check_async`, `EPERM` if a mapping in the range is
    /// not write-protected asynchronously. `EINVAL` if the range does not begin at a page, `ENOTTY` if this kernel does not
    /// have the call, `ENOMEM`, `EFAULT` if the range lies outside of what processes can map.
    pub fn scan(
        &self,
        range: AddressRange,
        flags: ScanFlags,
        regions: &mut [PageRegion],
    ) -> Result<Scanned, SyscallError> {
        let mut argument = ScanArgument {
            size: SCAN_ARGUMENT_BYTES,
            flags: flags.bits(),
            start: range.start,
            end: range.end,
            walk_end: 0,
            vec: if regions.is_empty() { 0 } else { address_of(regions) },
            vec_len: u64::try_from(regions.len()).unwrap_or(u64::MAX),
            max_pages: 0,
            category_inverted: 0,
            category_mask: PAGE_IS_WRITTEN,
            category_anyof_mask: 0,
            return_mask: PAGE_IS_WRITTEN,
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: argument is laid out as the kernel's struct pm_scan_arg and says its size; the kernel writes at most
        // vec_len regions at vec, which is what the exclusive slice holds.
        let count = unsafe { ioctls::pagemap_scan(fd, &raw mut argument) }
            .call(|| format!("PAGEMAP_SCAN of {range} with {flags} in {}", self.path))?;
        Ok(Scanned { count: usize::try_from(count).unwrap_or(0), walked_to: argument.walk_end })
    }
}

fn address_of(regions: &mut [PageRegion]) -> u64 {
    u64::try_from(regions.as_mut_ptr().expose_provenance()).unwrap_or(0)
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// How to scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanFlags {
    /// `PM_SCAN_WP_MATCHING`: write-protect what is reported, in the same step.
    pub write_protect: bool,
    /// `PM_SCAN_CHECK_WPASYNC`: fail if the range holds a mapping that is not registered for asynchronous write-protection.
    pub check_async: bool,
}

impl ScanFlags {
    const fn bits(self) -> u64 {
        (if self.write_protect { PM_SCAN_WP_MATCHING } else { 0 })
            | (if self.check_async { PM_SCAN_CHECK_WPASYNC } else { 0 })
    }
}

impl fmt::Display for ScanFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.write_protect, self.check_async) {
            (false, false) => "no flags",
            (true, false) => "PM_SCAN_WP_MATCHING",
            (false, true) => "PM_SCAN_CHECK_WPASYNC",
            (true, true) => "PM_SCAN_WP_MATCHING and PM_SCAN_CHECK_WPASYNC",
        })
    }
}

/// What a scan found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// How many regions were filled.
    pub count: usize,
    /// Address up to which the range was looked at (and protected, if that was asked for). Before the range's end if the
    /// regions were full.
    pub walked_to: u64,
}

/// Pages next to one another that a scan tells alike: `struct page_region` of `linux/fs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PageRegion {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// `PAGE_IS_*` of `linux/fs.h`.
    pub categories: u64,
}

impl PageRegion {
    /// Where it lies.
    #[must_use]
    pub const fn range(self) -> AddressRange {
        AddressRange { start: self.start, end: self.end }
    }
}

// linux/fs.h
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const SCAN_ARGUMENT_BYTES: u64 = 96;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArgument>() == 96);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(nix::request_code_readwrite!(b'f', 16, size_of::<ScanArgument>()) == 0xc060_6610);

#[allow(missing_docs)] // the macro leaves no room for it
mod ioctls {
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, super::ScanArgument);
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn pagemap_is_taken_and_other_files_are_not() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let pagemap = Pagemap::from_fd(pagemap.into()).unwrap();
        pagemap.try_clone().unwrap();
        for other in ["/proc/self/maps", "/proc/self/status", "/dev/null", "/proc/self/fd"] {
            let other_file = File::open(other).unwrap();
            assert_eq!(Pagemap::from_fd(other_file.into()).unwrap_err().errno, Errno::EINVAL, "{other}");
        }
        let folder = tempfile::tempdir().unwrap();
        let lookalike = File::create(folder.path().join("pagemap")).unwrap();
        assert_eq!(Pagemap::from_fd(lookalike.into()).unwrap_err().errno, Errno::EBADF, "write-only");
        let lookalike = File::open(folder.path().join("pagemap")).unwrap();
        assert_eq!(Pagemap::from_fd(lookalike.into()).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn failed_scan_names_range_and_flags() {
        let flags = ScanFlags { write_protect: true, check_async: true };
        let range = AddressRange { start: 1, end: 4096 };
        let error = Pagemap::open(None).unwrap().scan(range, flags, &mut []).unwrap_err();
        assert_eq!(error.errno, Errno::EINVAL);
        let said = "PAGEMAP_SCAN of 0x1..0x1000 with PM_SCAN_WP_MATCHING and PM_SCAN_CHECK_WPASYNC \
                    in /proc/self/pagemap";
        assert_eq!(error.to_string(), said);
    }
}
