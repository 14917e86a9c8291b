//! A file of the service, mapped into this process.

mod tracked;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::units::{PageIndex, to_usize};
use fdmap_proto::{Backing, FileInfo, MappingId, PageSize};
use fdmap_sys::mapping::{Advice, SharedMapping};

use crate::{ClientError, Endpoint, Timeouts};
use tracked::Tracked;

/// A file of the service, mapped whole. Unmapped on drop.
///
/// Other processes may write to the memory at any time, and cut the file: touching pages that it has lost raises `SIGBUS`,
/// unless the file is sealed against shrinking.
///
/// # Observed writes
/// After [`Self::track`] the service sees which pages are written through the mapping, by whatever thread and by the kernel
/// on its behalf. It costs a fault for the first write to a page after each checkpoint, and in huge mappings of shmem the
/// huge page tables.
///
/// A process that is forked has the mapping too, and the service goes on to observe it there, as far as the coverage tells.
/// There the mapping is nobody's to untrack: dropping it only unmaps it, which the service takes for an end that it did not
/// see coming, and tells all its data pages as written. So a child does best to exec or to leave the mapping alone until it
/// exits, which is told the same way.
#[derive(Debug)]
pub struct MappedFile {
    fd: OwnedFd,
    mapping: SharedMapping,
    info: FileInfo,
    page_size: PageSize,
    writable: bool,
    /// The service that it came from.
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
            // A huge page is mapped only where address and offset are both multiples of its size: as many pages as a
            // page table has entries of 8 bytes.
            let huge = to_usize(page_size.bytes() / 8 * page_size.bytes());
            let mapping = SharedMapping::shared_aligned(&fd, bytes, huge, writable)?;
            // A kernel without huge pages refuses; the file is as good with small ones.
            let _ = mapping.advise(Advice::HugePage);
            mapping
        } else {
            SharedMapping::shared(&fd, 0, bytes, writable)?
        };
        Ok(Self { fd, mapping, info, page_size, writable, from, tracked: None })
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

    /// The host's base page size.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// True if it can be written through.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.writable
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

    /// Has the service observe the writes through this mapping, over a session of its own that is kept. What was written
    /// before is not observed; so this comes best before anything is. Does nothing if they are observed already.
    ///
    /// # Errors
    /// [`ClientError::Untrackable`] if the mapping is read-only; [`ClientError::Syscall`] if this process gets no
    /// userfaultfd; [`ClientError::Refused`]; [`ClientError`] of the connection. The mapping is as it was then.
    pub fn track(&mut self) -> Result<(), ClientError> {
        if self.tracked.is_some() {
            return Ok(());
        }
        if !self.writable {
            let reason = "it is read-only, and writes nothing";
            return Err(ClientError::Untrackable { file: self.info.name.clone(), reason });
        }
        let (place, timeouts) = &self.from;
        let mapping = tracked::whole(&self.mapping, &self.info, self.page_size);
        self.tracked = Some(Tracked::begin(place, *timeouts, self.info.id, mapping)?);
        Ok(())
    }

    /// Has the service take what was written through this mapping, and observe it no longer. Does nothing if it does not.
    ///
    /// The mapping is made read-only first, and stays so: a thread that still writes to it raises `SIGSEGV`, so the writers
    /// (a VMM's threads, devices) must be stopped before.
    ///
    /// # Errors
    /// [`ClientError::Untrackable`] in a process that was forked while the mapping was tracked; [`ClientError::Syscall`] of
    /// `mprotect`; [`ClientError::Refused`]; [`ClientError`] of the connection. It can be called again then.
    pub fn untrack(&mut self) -> Result<(), ClientError> {
        let Some(tracked) = &mut self.tracked else { return Ok(()) };
        if tracked.is_inherited() {
            let reason = "this process was forked from the one that has them observed";
            return Err(ClientError::Untrackable { file: self.info.name.clone(), reason });
        }
        self.mapping.protect_read_only()?;
        self.writable = false;
        let (place, timeouts) = &self.from;
        tracked.end(place, *timeouts)?;
        self.tracked = None;
        Ok(())
    }

    /// True if the service observes the writes through this mapping.
    #[must_use]
    pub const fn is_tracked(&self) -> bool {
        self.tracked.is_some()
    }

    /// The service's ids for what it observes; none if it does not.
    #[must_use]
    pub fn tracked_ids(&self) -> &[MappingId] {
        self.tracked.as_ref().map_or(&[], Tracked::ids)
    }
}

impl Drop for MappedFile {
    /// Untracks it, which may take as long as the service's answer is waited for. If that fails the service tells the
    /// mapping's data pages as written.
    fn drop(&mut self) {
        let _ = self.untrack();
    }
}
