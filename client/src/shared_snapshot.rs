//! [`SharedSnapshot`]: page states in shared memory. Lookups need no system call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header, entry_at, state_at};
use fdmap_proto::units::to_u64;
use fdmap_proto::{PageIndex, PageState, PagemapEntry};
use fdmap_sys::mapping::SealedMapping;

use crate::ClientError;

/// A mapped shared snapshot. Its content is constant.
#[derive(Debug)]
pub struct SharedSnapshot {
    fd: OwnedFd,
    bytes: SealedMapping,
    header: Header,
}

impl SharedSnapshot {
    /// Maps a shared snapshot.
    ///
    /// # Errors
    /// [`ClientError::Syscall`] if the memfd is not sealed or mmap(2) fails; [`ClientError::Layout`] if the content is invalid.
    pub fn map(fd: OwnedFd) -> Result<Self, ClientError> {
        let bytes = SealedMapping::map(fd.as_fd())?;
        let header = Header::decode(&bytes, to_u64(bytes.len()))?;
        Ok(Self { fd, bytes, header })
    }

    /// Header: layout, range and provenance.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Header and body; docs/wire-formats.md specifies the layout.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Descriptor of the memfd.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// State of a page; `None` if the page is outside the range.
    #[must_use]
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        match self.header.layout {
            BodyLayout::Entries => self.entry(page).map(PagemapEntry::state),
            BodyLayout::States => state_at(&self.bytes[HEADER_BYTES..], self.nth(page)?),
        }
    }

    /// Pagemap entry of a page; `None` if the page is outside the range or the layout has no entries.
    #[must_use]
    pub fn entry(&self, page: PageIndex) -> Option<PagemapEntry> {
        if self.header.layout == BodyLayout::States {
            return None;
        }
        entry_at(&self.bytes[HEADER_BYTES..], self.nth(page)?)
    }

    fn nth(&self, page: PageIndex) -> Option<u64> {
        page.0.checked_sub(self.header.range.start().0)
    }
}
