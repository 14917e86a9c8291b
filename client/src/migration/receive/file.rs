//! A file of the service on this host that is being received.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{Access, Backing, FileInfo, FileName, PageIndex, PageRange, Seals};
use fdmap_sys::memfd;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::grpc::CreateFile;
use crate::image::restore::write;
use crate::image::{CHUNK_PAGES, ImageError, PAGE_BYTES};
use crate::{Client, FdpassClient};

/// A new file. Deleted on drop, unless it is kept. Its calls block.
#[derive(Debug)]
pub(super) struct IncomingFile {
    client: Client,
    runtime: Handle,
    info: FileInfo,
    fd: OwnedFd,
    size_bytes: u64,
    is_kept: bool,
    /// Dropped when the deletion of the file has ended.
    deletion: mpsc::Sender<()>,
}

impl IncomingFile {
    /// Creates a file of zeroes. Only its owner has rights while it is incomplete.
    pub(super) fn create(
        client: &Client,
        fdpass: &mut FdpassClient,
        runtime: &Handle,
        deletion: mpsc::Sender<()>,
        file: CreateFile,
    ) -> Result<Self, ImageError> {
        let size_bytes = file.size_bytes;
        // The service creates no empty file.
        let unit = if let Backing::Hugetlb(bytes) = file.backing { bytes } else { 1 };
        let access = file.access.map(|access| Access::private(access.uid, access.gid));
        let created = CreateFile { size_bytes: size_bytes.max(unit), access, ..file };
        let info = runtime.block_on(client.create(created))?;
        let id = FileName::Id(info.id);
        let fd = match fdpass.open(&id, true) {
            Ok((fd, _)) => fd,
            Err(error) => {
                // The first error is reported.
                let _ = runtime.block_on(client.delete(&id));
                return Err(error.into());
            }
        };
        let mut incoming = Self {
            client: client.clone(),
            runtime: runtime.clone(),
            info,
            fd,
            size_bytes: size_bytes.max(unit),
            is_kept: false,
            deletion,
        };
        incoming.resize(size_bytes)?;
        Ok(incoming)
    }

    pub(super) const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(super) fn pages(&self) -> u64 {
        self.size_bytes.div_ceil(PAGE_BYTES)
    }

    pub(super) fn resize(&mut self, bytes: u64) -> Result<(), ImageError> {
        if bytes != self.size_bytes {
            // The service checks its limits.
            self.info = match bytes {
                0 => {
                    memfd::resize(self.fd.as_fd(), 0)?;
                    self.runtime.block_on(self.client.get(&self.id()))?
                }
                bytes => self.runtime.block_on(self.client.resize(&self.id(), bytes))?,
            };
            self.size_bytes = bytes;
        }
        Ok(())
    }

    pub(super) fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), ImageError> {
        write(&self.fd, self.huge(), range.start(), bytes, self.size_bytes)
    }

    /// Makes pages zero.
    pub(super) fn zero(&self, range: PageRange) -> Result<(), ImageError> {
        if self.huge().is_none() {
            let (offset, len) = (range.start().0 * PAGE_BYTES, range.len() * PAGE_BYTES);
            return Ok(memfd::punch_hole(self.fd.as_fd(), offset, len)?);
        }
        // A hole has whole huge pages.
        let zeroes = vec![0; to_usize(CHUNK_PAGES.min(range.len()) * PAGE_BYTES)];
        let mut left = range;
        while !left.is_empty() {
            let pages = left.len().min(to_u64(zeroes.len()) / PAGE_BYTES);
            self.write(PageRange::at(left.start(), pages), &zeroes[..to_usize(pages * PAGE_BYTES)])?;
            left = PageRange::at(PageIndex(left.start().0 + pages), left.len() - pages);
        }
        Ok(())
    }

    /// Adds seals, and gives the file its rights. Then it stays.
    pub(super) fn complete(&mut self, seals: Seals, access: Option<Access>) -> Result<FileInfo, ImageError> {
        if !seals.is_empty() {
            self.info = self.runtime.block_on(self.client.seal(&self.id(), seals))?;
        }
        if let Some(access) = access {
            self.info = self.runtime.block_on(self.client.set_access(&self.id(), access))?;
        }
        self.is_kept = true;
        Ok(self.info.clone())
    }

    /// A descriptor of the file, which keeps an ephemeral one.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, ImageError> {
        Ok(fdmap_sys::fd::duplicate(self.fd.as_fd())?)
    }

    fn id(&self) -> FileName {
        FileName::Id(self.info.id)
    }

    fn huge(&self) -> Option<u64> {
        match self.info.backing {
            Backing::Hugetlb(bytes) => Some(bytes),
            Backing::Shmem | Backing::ShmemThp => None,
        }
    }
}

impl Drop for IncomingFile {
    fn drop(&mut self) {
        if !self.is_kept {
            let (client, id, deletion) = (self.client.clone(), self.id(), self.deletion.clone());
            // A thread of the runtime may drop the file: it must not wait.
            self.runtime.spawn(async move {
                // The error that ends the migration is reported.
                let _ = client.delete(&id).await;
                drop(deletion);
            });
        }
    }
}
