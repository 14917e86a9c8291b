//! A shared snapshot: the states of a file's pages in memory that the service shares. Asking it for a page costs no call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header, entry_at, state_at};
use fdmap_proto::units::to_u64;
use fdmap_proto::{PageIndex, PageState, PagemapEntry};
use fdmap_sys::mapping::SealedMapping;

use crate::ClientError;

/// A shared snapshot, mapped. It never changes.
#[derive(Debug)]
pub struct SharedSnapshot {
    fd: OwnedFd,
    bytes: SealedMapping,
    header: Header,
}

impl SharedSnapshot {
    /// Maps the memfd of a snapshot.
    ///
    /// # Errors
    /// [`ClientError::Syscall`] if it is not sealed, [`ClientError::Layout`] if it is no snapshot.
    pub fn map(fd: OwnedFd) -> Result<Self, ClientError> {
        let bytes = SealedMapping::map(fd.as_fd())?;
        let header = Header::decode(&bytes, to_u64(bytes.len()))?;
        Ok(Self { fd, bytes, header })
    }

    /// What it tells of, and what that rests on.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// All of it, as docs/wire-formats.md describes it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The descriptor, to pass on or to map elsewhere.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The state of one page; `None` if the snapshot does not tell of it.
    #[must_use]
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        match self.header.layout {
            BodyLayout::Entries => self.entry(page).map(PagemapEntry::state),
            BodyLayout::States => state_at(&self.bytes[HEADER_BYTES..], self.nth(page)?),
        }
    }

    /// The entry of one page, in the layout of `/proc/PID/pagemap`; `None` if the snapshot has none.
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
