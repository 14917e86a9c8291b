//! A file that is being restored.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_proto::units::{PageIndex, to_u64, to_usize};
use fdmap_proto::{Access, Backing, FileInfo, FileName, PageRange, Rights};
use fdmap_sys::mapping::SharedMapping;
use tokio::runtime::Handle;

use super::super::PAGE_BYTES;
use super::super::chain::{ImageChain, ImageFile, Located};
use super::super::chunks::CHUNK_PAGES;
use super::super::error::ImageError;
use super::super::ordered;
use super::super::progress::Control;
use super::RestoredFile;
use super::file::seals_of;
use crate::grpc::CreateFile;
use crate::{Client, FdpassClient};

/// A new file. Deleted on drop, unless it is kept.
#[derive(Debug)]
pub(in crate::image) struct Target {
    client: Client,
    runtime: Handle,
    info: FileInfo,
    /// Owner and rights that it gets; `None`: the caller's.
    access: Option<Access>,
    /// Only administrators can open it now.
    is_hidden: bool,
    /// `None`: not opened yet, or kept.
    fd: Option<OwnedFd>,
    pages: u64,
    is_kept: bool,
}

impl Target {
    pub(in crate::image) fn create(
        client: &Client,
        fdpass: &mut FdpassClient,
        runtime: &Handle,
        file: CreateFile,
    ) -> Result<Self, ImageError> {
        let (access, size) = (file.access, file.size_bytes);
        // The service creates no empty file.
        let unit = if let Backing::Hugetlb(bytes) = file.backing { bytes } else { 1 };
        // Only its owner has rights while it is incomplete.
        let private = access.map(|access| Access::private(access.uid, access.gid));
        let created = CreateFile { size_bytes: size.max(unit), access: private, ..file };
        let info = runtime.block_on(client.create(created))?;
        let mut target = Self {
            client: client.clone(),
            runtime: runtime.clone(),
            info,
            access,
            is_hidden: false,
            fd: None,
            pages: 0,
            is_kept: false,
        };
        let fd = fdpass.open(&target.id(), true)?.0;
        if size == 0 {
            fdmap_sys::memfd::resize(fd.as_fd(), 0)?;
            target.info = runtime.block_on(client.get(&target.id()))?;
        }
        target.fd = Some(fd);
        Ok(target)
    }

    /// Metadata of the file.
    pub(in crate::image) const fn info(&self) -> &FileInfo {
        &self.info
    }

    /// The descriptor; the file no longer has one then.
    pub(in crate::image) const fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// Takes all rights from its owner until it is complete: only administrators can open it.
    pub(in crate::image) fn hide(&mut self) -> Result<(), ImageError> {
        let before = self.info.access;
        self.access = Some(self.access.unwrap_or(before));
        let none = Access { owner: Rights::NONE, group: Rights::NONE, other: Rights::NONE, ..before };
        self.info = self.runtime.block_on(self.client.set_access(&self.id(), none))?;
        self.is_hidden = true;
        Ok(())
    }

    fn id(&self) -> FileName {
        FileName::Id(self.info.id)
    }

    /// Copies the stored pages.
    pub(super) fn copy(
        &mut self,
        chain: &ImageChain,
        file: &ImageFile,
        jobs: usize,
        control: &Control,
    ) -> Result<(), ImageError> {
        let Some(fd) = &self.fd else { return Ok(()) };
        let size = self.info.size_bytes;
        let huge = match self.info.backing {
            Backing::Hugetlb(bytes) => Some(bytes),
            Backing::Shmem | Backing::ShmemThp => None,
        };
        let workers = (0..jobs).map(|_| {
            let mut reader = chain.reader(file.inode.shmid);
            move |extent: &Located| {
                control.check()?;
                let mut left = *extent;
                while !left.range.is_empty() {
                    let bytes = reader.read(left)?;
                    let pages = to_u64(bytes.len()) / PAGE_BYTES;
                    write(fd, huge, left.range.start(), bytes, size)?;
                    control.advance(pages, to_u64(bytes.len()));
                    left = rest(left, pages);
                }
                Ok(extent.range.len())
            }
        });
        let parts: Vec<_> = file.extents.iter().flat_map(parts).collect();
        ordered::process(&parts, workers.collect(), |pages| {
            self.pages += pages;
            Ok(())
        })
    }

    /// Adds the seals of the image, and gives the file its rights.
    pub(in crate::image) fn complete(&mut self, file: &ImageFile) -> Result<(), ImageError> {
        let Access { uid, gid, .. } = self.info.access;
        if self.is_hidden {
            let private = Access::private(uid, gid);
            self.info = self.runtime.block_on(self.client.set_access(&self.id(), private))?;
        }
        let seals = seals_of(file)?;
        if !seals.is_empty() {
            self.info = self.runtime.block_on(self.client.seal(&self.id(), seals))?;
        }
        if let Some(access) = self.access {
            self.info = self.runtime.block_on(self.client.set_access(&self.id(), access))?;
        }
        Ok(())
    }

    /// Keeps the file. Returns it with its descriptor.
    pub(in crate::image) fn keep(mut self) -> (RestoredFile, Option<OwnedFd>) {
        self.is_kept = true;
        (RestoredFile { info: self.info.clone(), pages: self.pages }, self.fd.take())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.is_kept {
            // The error that ends the restore is reported.
            let _ = self.runtime.block_on(self.client.delete(&self.id()));
        }
    }
}

/// Writes pages to a file of `size` bytes; what is past its end is padding. `huge`: the page size of a hugetlb file.
pub(crate) fn write(
    fd: &OwnedFd,
    huge: Option<u64>,
    first: PageIndex,
    bytes: &[u8],
    size: u64,
) -> Result<(), ImageError> {
    let offset = first.0 * PAGE_BYTES;
    let len = to_u64(bytes.len()).min(size.saturating_sub(offset));
    let bytes = &bytes[..to_usize(len)];
    let Some(huge) = huge else { return Ok(fdmap_sys::fd::write_at(fd.as_fd(), offset, bytes)?) };
    // hugetlbfs has no write(2). A mapping of these pages alone reserves none for holes.
    let start = offset - offset % huge;
    let mapped = (offset + len - start).next_multiple_of(huge);
    let mapping = SharedMapping::shared(fd, start, to_usize(mapped), true)?;
    // The mapping has all of these bytes.
    let _ = mapping.write_at(to_usize(offset - start), bytes);
    Ok(())
}

/// The pages after the first `pages`.
fn rest(located: Located, pages: u64) -> Located {
    let Located { range, level, position } = located;
    Located {
        range: PageRange::at(range.start().plus(pages), range.len() - pages),
        level,
        position: position + pages,
    }
}

/// Parts of at most [`CHUNK_PAGES`] pages.
fn parts(extent: &Located) -> impl Iterator<Item = Located> + use<> {
    let Located { range, level, position } = *extent;
    (0..range.len()).step_by(to_usize(CHUNK_PAGES)).map(move |skip| {
        let pages = CHUNK_PAGES.min(range.len() - skip);
        Located { range: PageRange::at(range.start().plus(skip), pages), level, position: position + skip }
    })
}
