//! [`MappedFile`]: a file of the service, mapped into this process.

mod tracked;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::units::{PageIndex, to_usize};
use fdmap_proto::{Backing, FileInfo, PageSize};
use fdmap_sys::mapping::{Advice, SharedMapping};

use crate::{ClientError, Endpoint, Timeouts};
use tracked::Tracked;

/// Mapping of a whole file. Unmapped on drop.
///
/// Other processes may write to the memory at any time. They may also truncate the file: access to a truncated page raises
/// `SIGBUS`. Seal the file against shrinking to prevent this.
///
/// # Write tracking
/// After [`Self::track`] the service observes all writes through the mapping, by any thread and by the kernel. Costs: one
/// page fault for the first write to a page after each checkpoint; huge mappings of shmem are split into page tables.
///
/// A child created by fork(2) inherits the mapping, and the service continues to track it there. The child cannot untrack the
/// mapping. Unmapping it, on drop or at exit, is a coverage gap: the service reports all data pages of the mapping
/// conservatively. A child should exec before it uses the mapping.
#[derive(Debug)]
pub struct MappedFile {
    fd: OwnedFd,
    mapping: SharedMapping,
    info: FileInfo,
    page_size: PageSize,
    writable: bool,
    /// Service that owns the file.
    from: (Endpoint, Timeouts),
    tracked: Option<Tracked>,
}

impl MappedFile {
    pub(crate) fn new(
        fd: OwnedFd,
        info: FileInfo,
        page_size: PageSize,
        writable: bool,
        from: (Endpoint, Timeouts),
    ) -> Result<Self, ClientError> {
        let bytes = to_usize(info.size_bytes);
        let mapping = if info.backing == Backing::ShmemThp {
            // A huge page requires address and offset to be multiples of its size: one page table of 8-byte entries.
            let huge = to_usize(page_size.bytes() / 8 * page_size.bytes());
            let mapping = SharedMapping::shared_aligned(&fd, bytes, huge, writable)?;
            // Fails on kernels without huge pages. Base pages work as well.
            let _ = mapping.advise(Advice::HugePage);
            mapping
        } else {
            SharedMapping::shared(&fd, 0, bytes, writable)?
        };
        Ok(Self { fd, mapping, info, page_size, writable, from, tracked: None })
    }

    /// Decides whether children that are forked from now on inherit the mapping. Else they have nothing at its addresses.
    #[cfg(feature = "image")]
    pub(crate) fn inherit(&self, inherited: bool) -> Result<(), ClientError> {
        let advice = if inherited { Advice::DoFork } else { Advice::DontFork };
        Ok(self.mapping.advise(advice)?)
    }

    /// Metadata of the file when it was opened.
    #[must_use]
    pub const fn info(&self) -> &FileInfo {
        &self.info
    }

    /// Descriptor of the file.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Base page size of the host.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Returns true if the mapping is writable.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.writable
    }

    /// Start address of the mapping.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Length of the mapping in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Always returns false: a file has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// Page that contains the byte at `offset`.
    #[must_use]
    pub const fn page_at(&self, offset: u64) -> PageIndex {
        self.page_size.page_at(offset)
    }

    /// Copies bytes from the mapping. Returns false and copies nothing if the range exceeds the mapping.
    #[must_use]
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> bool {
        self.mapping.read_at(to_usize(offset), out)
    }

    /// Copies bytes to the mapping. Returns false and copies nothing if the range exceeds the mapping or the mapping is
    /// read-only.
    #[must_use]
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> bool {
        self.writable && self.mapping.write_at(to_usize(offset), bytes)
    }

    /// Starts to track writes through this mapping, over a session that stays open. Earlier writes are not observed; call this
    /// before the first write. Does nothing if the mapping is already tracked.
    ///
    /// Before installing guard regions (`madvise(MADV_GUARD_INSTALL)`) in a tracked mapping, see `docs/clients.md`.
    ///
    /// # Errors
    /// [`ClientError::Untrackable`] if the mapping is read-only; [`ClientError::Syscall`] if userfaultfd(2) fails;
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection. The mapping is unchanged.
    pub fn track(&mut self) -> Result<(), ClientError> {
        if self.tracked.is_some() {
            return Ok(());
        }
        if !self.writable {
            let reason = "the mapping is read-only";
            return Err(ClientError::Untrackable { file: self.info.caller_name(), reason });
        }
        let (place, timeouts) = &self.from;
        let mapping = tracked::whole(&self.mapping, &self.info, self.page_size);
        self.tracked = Some(Tracked::begin(place, *timeouts, self.info.id, mapping)?);
        Ok(())
    }

    /// Harvests the mapping one last time and stops tracking it. Does nothing if the mapping is not tracked.
    ///
    /// Makes the mapping read-only first, permanently: a thread that still writes to it raises `SIGSEGV`. Stop the writers (vCPU
    /// threads, devices) before.
    ///
    /// # Errors
    /// [`ClientError::Untrackable`] in a child that was forked while the mapping was tracked; [`ClientError::Syscall`] of
    /// mprotect(2); [`ClientError::Refused`] by the service; [`ClientError`] of the connection. The call can be repeated.
    pub fn untrack(&mut self) -> Result<(), ClientError> {
        let Some(tracked) = &mut self.tracked else { return Ok(()) };
        if tracked.is_inherited() {
            let reason = "it is tracked by the parent of this process";
            return Err(ClientError::Untrackable { file: self.info.caller_name(), reason });
        }
        self.mapping.protect_read_only()?;
        self.writable = false;
        let (place, timeouts) = &self.from;
        tracked.end(place, *timeouts)?;
        self.tracked = None;
        Ok(())
    }

    /// Returns true if the mapping is tracked.
    #[must_use]
    pub const fn is_tracked(&self) -> bool {
        self.tracked.is_some()
    }
}

impl Drop for MappedFile {
    /// Untracks the mapping; may block for the answer timeout. If it fails, the service reports the data pages of the mapping
    /// conservatively.
    fn drop(&mut self) {
        let _ = self.untrack();
    }
}
