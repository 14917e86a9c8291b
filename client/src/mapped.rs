//! A file of the service, mapped into this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::units::{PageIndex, to_usize};
use fdmap_proto::{Backing, FileInfo, PageSize};
use fdmap_sys::mapping::{Advice, Mapping};

use crate::ClientError;

/// A file of the service, mapped whole. Unmapped on drop.
///
/// Other processes may write to the memory at any time, and cut the file: touching pages that it has lost raises `SIGBUS`,
/// unless the file is sealed against shrinking.
#[derive(Debug)]
pub struct MappedFile {
    fd: OwnedFd,
    mapping: Mapping,
    info: FileInfo,
    page_size: PageSize,
    writable: bool,
}

impl MappedFile {
    pub(crate) fn new(
        fd: OwnedFd,
        info: FileInfo,
        page_size: PageSize,
        writable: bool,
    ) -> Result<Self, ClientError> {
        let bytes = to_usize(info.size_bytes);
        let mapping = if info.backing == Backing::ShmemThp {
            // A huge page is mapped only where address and offset are both multiples of its size: as many pages as a
            // page table has entries of 8 bytes.
            let huge = to_usize(page_size.bytes() / 8 * page_size.bytes());
            let mapping = Mapping::shared_aligned(&fd, bytes, huge, writable)?;
            // A kernel without huge pages refuses; the file is as good with small ones.
            let _ = mapping.advise(Advice::HugePage);
            mapping
        } else {
            Mapping::shared(&fd, 0, bytes, writable)?
        };
        Ok(Self { fd, mapping, info, page_size, writable })
    }

    /// What the service told of the file when it was opened.
    #[must_use]
    pub const fn info(&self) -> &FileInfo {
        &self.info
    }

    /// The descriptor.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Where the mapping begins, for handing it to a VMM or a device.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Bytes that are mapped.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Never true: files have at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// The page that holds the byte at `offset`.
    #[must_use]
    pub const fn page_at(&self, offset: u64) -> PageIndex {
        self.page_size.page_at(offset)
    }

    /// Copies bytes out. `false`, and nothing copied, if they do not all lie in the mapping.
    #[must_use]
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> bool {
        self.mapping.read_at(to_usize(offset), out)
    }

    /// Copies bytes in. `false`, and nothing copied, if they do not all fit or the mapping is read-only.
    #[must_use]
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> bool {
        self.writable && self.mapping.write_at(to_usize(offset), bytes)
    }
}
