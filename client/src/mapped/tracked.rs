//! Write tracking of a [`MappedFile`](super::MappedFile).

use std::fs::File;
use std::os::fd::AsFd as _;

use fdmap_proto::convert::FileName;
use fdmap_proto::units::to_u64;
use fdmap_proto::{Backing, ClientMapping, FileInfo, MappingId, PageIndex, PageSize};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::process::open_own;
use fdmap_sys::uffd::Userfaultfd;

use crate::{ClientError, Endpoint, FdpassClient, Timeouts};

/// A tracked mapping and its session.
#[derive(Debug)]
pub(super) struct Tracked {
    file: FileName,
    ids: Vec<MappingId>,
    /// Process that started tracking. A forked child inherits the socket, and the service cannot distinguish it from the parent.
    pid: u32,
    /// `None` after a timeout: a late reply must not be matched to another request.
    session: Option<FdpassClient>,
}

impl Tracked {
    /// Starts to track a mapping of this process. Identifies the file by id, because its name may be reused.
    pub(super) fn begin(
        endpoint: &Endpoint,
        timeouts: Timeouts,
        id: fdmap_proto::FileId,
        mapping: ClientMapping,
    ) -> Result<Self, ClientError> {
        let mut session = FdpassClient::connect(endpoint, timeouts)?;
        let uffd = Userfaultfd::create()?;
        let pagemap = open_own("pagemap")?;
        let maps = open_own("maps")?;
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

    /// Untracks the mapping. If the connection was lost, retries once over a new connection.
    pub(super) fn end(&mut self, endpoint: &Endpoint, timeouts: Timeouts) -> Result<(), ClientError> {
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
        let mut session = FdpassClient::connect(endpoint, timeouts)?;
        session.untrack(&self.file, &self.ids)
    }

    /// Returns true in a process forked from the one that started tracking.
    pub(super) fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }
}

/// Mapping of a whole file. The kernel rounds its length up to whole pages, or huge pages for hugetlb.
pub(super) fn whole(mapping: &SharedMapping, info: &FileInfo, page_size: PageSize) -> ClientMapping {
    let unit = match info.backing {
        Backing::Hugetlb(bytes) => bytes,
        Backing::Shmem | Backing::ShmemThp => page_size.bytes(),
    };
    ClientMapping {
        address: to_u64(mapping.as_ptr().addr()),
        length_bytes: to_u64(mapping.len()).next_multiple_of(unit),
        first_page: PageIndex(0),
    }
}

#[cfg(test)]
mod tests;
