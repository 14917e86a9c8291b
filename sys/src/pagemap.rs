//! `/proc/PID/pagemap`: page table entries of a process, and `PAGEMAP_SCAN`, which reports written pages.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use bitflags::bitflags;
use bytemuck::{Pod, Zeroable};

use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};

/// The pagemap of one address space: the one that the process had when the file was opened. After a fork it still describes
/// the parent; after exec or exit it is empty.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    path: String,
}

impl Pagemap {
    /// Opens the pagemap of process `pid`; `None` is the calling process.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not inspect the process.
    pub fn open(pid: Option<u32>) -> Result<Self, SyscallError> {
        let path = pid.map_or_else(|| "/proc/self/pagemap".to_owned(), |pid| format!("/proc/{pid}/pagemap"));
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// Wraps a pagemap descriptor opened by another process. The kernel checks access rights only in `open`.
    ///
    /// # Errors
    /// `EINVAL` if `fd` is not a pagemap, `EBADF` if it is not readable; else `fcntl`, `fstatfs` or `readlink`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        crate::procfile::check(fd.as_fd(), "pagemap")?;
        let path = format!("pagemap descriptor {}", fd.as_raw_fd());
        Ok(Self { file: fd.into(), path })
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let file = self.file.try_clone().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of {}", self.path))?;
        Ok(Self { file, path: self.path.clone() })
    }

    /// Fills `out` with the entries of the pages starting at virtual address `page * page size`. Returns the number of entries
    /// read, which is smaller than `out` only at the end of the address space.
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

    /// Runs one `PAGEMAP_SCAN` that reports the pages of `range` written since they were last write-protected. The scan fills
    /// `regions` from the front and stops when they are full; continue at [`ScanProgress::walk_end`]. With an empty `regions`
    /// it reports nothing and walks the whole range; with [`ScanFlags::WP_MATCHING`] this write-protects all pages that are not
    /// yet protected.
    ///
    /// The category mask contains `PAGE_IS_WRITTEN` alone: with other categories in the mask, kernels before July 2026 treat
    /// empty entries of protected ranges as clean and leave them unprotected.
    ///
    /// A result without regions does not prove that nothing was written: the kernel returns *no* error for an unmapped range,
    /// nor, without [`ScanFlags::CHECK_WPASYNC`], for a range that is not registered with a userfaultfd. Pages that were
    /// neither touched nor protected are reported as written on shmem and as clean on hugetlb.
    ///
    /// # Errors
    /// `ESRCH` if the address space ended by exit or exec (some builds of Linux 6.18 return no regions instead); `EPERM`, with
    /// `CHECK_WPASYNC`, if a mapping in the range is not registered for asynchronous write protection; `EINVAL` if the range is
    /// not page-aligned; `ENOTTY` if this kernel lacks the call; `ENOMEM`; `EFAULT` if the range exceeds the user address space.
    pub fn scan(
        &self,
        range: AddressRange,
        flags: ScanFlags,
        regions: &mut [PageRegion],
    ) -> Result<ScanProgress, SyscallError> {
        let categories = PmScanArg {
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..PmScanArg::default()
        };
        self.scan_categories(range, flags, categories, regions)
    }

    /// Like [`Self::scan`], for the pages whose page table entry is empty: neither present, nor swapped, nor a marker. An armed
    /// page without content has a marker. In an armed hugetlb mapping an empty entry belongs to a page that was written, which
    /// removed the protection, and that `MADV_DONTNEED` then unmapped; a truncation empties entries too. Protects nothing.
    ///
    /// On shmem such pages are reported as written by [`Self::scan`].
    ///
    /// # Errors
    /// As [`Self::scan`] with [`ScanFlags::CHECK_WPASYNC`].
    pub fn scan_empty_entries(
        &self,
        range: AddressRange,
        regions: &mut [PageRegion],
    ) -> Result<ScanProgress, SyscallError> {
        const ANY_CONTENT: u64 = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let categories = PmScanArg {
            category_inverted: ANY_CONTENT,
            category_mask: ANY_CONTENT,
            return_mask: ANY_CONTENT,
            ..PmScanArg::default()
        };
        self.scan_categories(range, ScanFlags::CHECK_WPASYNC, categories, regions)
    }

    /// One `PAGEMAP_SCAN` for the pages that match the category masks of `categories`.
    fn scan_categories(
        &self,
        range: AddressRange,
        flags: ScanFlags,
        categories: PmScanArg,
        regions: &mut [PageRegion],
    ) -> Result<ScanProgress, SyscallError> {
        let mut argument = PmScanArg {
            size: PM_SCAN_ARG_BYTES,
            flags: flags.bits(),
            start: range.start,
            end: range.end,
            vec: if regions.is_empty() { 0 } else { address_of(regions) },
            vec_len: u64::try_from(regions.len()).unwrap_or(u64::MAX),
            ..categories
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: `argument` has the layout of struct pm_scan_arg and holds its size; the kernel writes at most vec_len regions
        // at vec, the length of the exclusively borrowed slice.
        let count = unsafe { ioctls::pagemap_scan(fd, &raw mut argument) }
            .call(|| format!("PAGEMAP_SCAN of {range} with {flags} in {}", self.path))?;
        Ok(ScanProgress { count: usize::try_from(count).unwrap_or(0), walk_end: argument.walk_end })
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

bitflags! {
    /// Flags of `PAGEMAP_SCAN` (`linux/fs.h`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ScanFlags: u64 {
        /// `PM_SCAN_WP_MATCHING`: atomically write-protects each reported page.
        const WP_MATCHING = 1 << 0;
        /// `PM_SCAN_CHECK_WPASYNC`: fails if a mapping in the range is not registered for asynchronous write protection.
        const CHECK_WPASYNC = 1 << 1;
    }
}

impl fmt::Display for ScanFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.contains(Self::WP_MATCHING), self.contains(Self::CHECK_WPASYNC)) {
            (false, false) => "no flags",
            (true, false) => "PM_SCAN_WP_MATCHING",
            (false, true) => "PM_SCAN_CHECK_WPASYNC",
            (true, true) => "PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC",
        })
    }
}

/// Result of one [`Pagemap::scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanProgress {
    /// Number of regions filled.
    pub count: usize,
    /// Address at which the scan stopped: the end of the range, or an earlier one if the regions were full. Pages up to it were
    /// scanned, and protected with [`ScanFlags::WP_MATCHING`].
    pub walk_end: u64,
}

/// Consecutive pages with equal categories: `struct page_region` of `linux/fs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PageRegion {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// A set of `PAGE_IS_*` bits.
    pub categories: u64,
}

impl PageRegion {
    #[must_use]
    pub const fn range(self) -> AddressRange {
        AddressRange { start: self.start, end: self.end }
    }
}

// linux/fs.h
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PM_SCAN_ARG_BYTES: u64 = 96;

/// Request number of the `PAGEMAP_SCAN` ioctl.
pub const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// `struct pm_scan_arg` of `linux/fs.h`, for callers that issue or emulate `PAGEMAP_SCAN` themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PmScanArg {
    /// Size of the struct in bytes.
    pub size: u64,
    /// [`ScanFlags`] bits.
    pub flags: u64,
    /// Address of the first page.
    pub start: u64,
    /// Address after the last page.
    pub end: u64,
    /// Written by the kernel: the address at which the scan stopped.
    pub walk_end: u64,
    /// Address of an array of [`PageRegion`].
    pub vec: u64,
    /// Number of elements in `vec`.
    pub vec_len: u64,
    /// Maximum number of pages to report; 0 means no limit.
    pub max_pages: u64,
    /// Categories to invert before matching.
    pub category_inverted: u64,
    /// A page matches if it has all of these categories.
    pub category_mask: u64,
    /// A page matches if it has one of these categories; 0 disables the test.
    pub category_anyof_mask: u64,
    /// Categories to report.
    pub return_mask: u64,
}

const _: () = assert!(size_of::<PmScanArg>() == 96);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(nix::request_code_readwrite!(b'f', 16, size_of::<PmScanArg>()) == PAGEMAP_SCAN);

mod ioctls {
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, super::PmScanArg);
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn only_a_pagemap_descriptor_is_accepted() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let pagemap = Pagemap::from_fd(pagemap.into()).unwrap();
        pagemap.try_clone().unwrap();
        for other in ["/proc/self/maps", "/proc/self/status", "/dev/null", "/proc/self/fd"] {
            let other_file = File::open(other).unwrap();
            assert_eq!(Pagemap::from_fd(other_file.into()).unwrap_err().errno, Errno::EINVAL, "{other}");
        }
        let directory = tempfile::tempdir().unwrap();
        let lookalike = File::create(directory.path().join("pagemap")).unwrap();
        assert_eq!(Pagemap::from_fd(lookalike.into()).unwrap_err().errno, Errno::EBADF, "write-only");
        let lookalike = File::open(directory.path().join("pagemap")).unwrap();
        assert_eq!(Pagemap::from_fd(lookalike.into()).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn failed_scan_names_range_and_flags() {
        let flags = ScanFlags::WP_MATCHING | ScanFlags::CHECK_WPASYNC;
        let range = AddressRange { start: 1, end: 4096 };
        let error = Pagemap::open(None).unwrap().scan(range, flags, &mut []).unwrap_err();
        assert_eq!(error.errno, Errno::EINVAL);
        let text = "PAGEMAP_SCAN of 0x1..0x1000 with PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC \
                    in /proc/self/pagemap";
        assert_eq!(error.to_string(), text);
    }
}
