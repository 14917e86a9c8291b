//! The part of a mapped file that has its writes observed.

use std::fs::File;
use std::os::fd::AsFd as _;

use fdmap_proto::convert::FileName;
use fdmap_proto::units::to_u64;
use fdmap_proto::{Backing, ClientMapping, FileInfo, MappingId, PageIndex, PageSize};
use fdmap_sys::Errno;
use fdmap_sys::error::{CallContext as _, SyscallError};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::uffd::Userfaultfd;

use crate::{ClientError, Endpoint, FdpassClient, Timeouts};

/// Writes that the service observes.
#[derive(Debug)]
pub(super) struct Tracked {
    file: FileName,
    ids: Vec<MappingId>,
    /// The process that asked for it. A fork has the session's socket too, where the service would take it for its parent.
    pid: u32,
    /// `None` after a request that was not answered: its answer may still come, and must not be taken for another's.
    session: Option<FdpassClient>,
}

impl Tracked {
    /// Has the service observe a mapping of this process. The file is named by its id, lest another one that got its name
    /// be meant.
    pub(super) fn begin(
        place: &Endpoint,
        timeouts: Timeouts,
        id: fdmap_proto::FileId,
        mapping: ClientMapping,
    ) -> Result<Self, ClientError> {
        let mut session = FdpassClient::connect(place, timeouts)?;
        let uffd = Userfaultfd::create()?;
        let pagemap = open_own("/proc/self/pagemap")?;
        let maps = open_own("/proc/self/maps")?;
        let file = FileName::Id(id);
        let ids = session.track(
            &file,
            uffd.as_fd(),
            pagemap.as_ref().map(File::as_fd),
            maps.as_ref().map(File::as_fd),
            &[mapping],
        )?;
        Ok(Self { file, ids, pid: std::process::id(), session: Some(session) })
    }

    /// Has the service take what was written, and observe it no longer. If the connection has ended meanwhile, once more over
    /// a new one.
    pub(super) fn end(&mut self, place: &Endpoint, timeouts: Timeouts) -> Result<(), ClientError> {
        if let Some(mut session) = self.session.take() {
            match session.untrack(&self.file, &self.ids) {
                Err(ClientError::Broken(_)) => {}
                Err(error @ ClientError::Refused { .. }) => {
                    self.session = Some(session);
                    return Err(error);
                }
                other => return other,
            }
        }
        let mut session = FdpassClient::connect(place, timeouts)?;
        session.untrack(&self.file, &self.ids)
    }

    pub(super) fn ids(&self) -> &[MappingId] {
        &self.ids
    }

    /// True in a process that was forked from the one that asked for it.
    pub(super) fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }
}

/// A mapping of a whole file, as the kernel has it: up to the end of the last page, or huge page of hugetlb.
pub(super) fn whole(mapping: &SharedMapping, info: &FileInfo, page_size: PageSize) -> ClientMapping {
    let unit = match info.backing {
        Backing::Hugetlb(bytes) => bytes,
        Backing::Shmem | Backing::ShmemThp => page_size.bytes(),
    };
    ClientMapping {
        address: to_u64(mapping.as_ptr().addr()),
        length: to_u64(mapping.len()).next_multiple_of(unit),
        first_page: PageIndex(0),
    }
}

/// A file of `/proc/self`. `None` if this process may not look into itself, as one that is not dumpable: the service may.
fn open_own(path: &str) -> Result<Option<File>, SyscallError> {
    match File::open(path).call(|| format!("open of {path}")) {
        Ok(file) => Ok(Some(file)),
        Err(SyscallError { errno: Errno::EACCES | Errno::EPERM | Errno::ENOENT, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
