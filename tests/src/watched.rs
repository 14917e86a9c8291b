//! A file whose writers a test lets hide one another.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, MappedFile};
use fdmap_sys::{fd, memfd};

use crate::HarnessResult;
use crate::reported::{Reported, create_file};
use crate::service::{Service, named};

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;
/// Size of the file in pages.
pub const PAGES: u64 = 64;

/// A file with a tracked mapping of this process and a consumer.
#[derive(Debug)]
pub struct Watched {
    client: Client,
    name: FileName,
    pub mapped: MappedFile,
    since: Generation,
}

impl Watched {
    /// Creates a file, writes all of it, and closes the generations of these writes.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn create(service: &Service, name: &str) -> HarnessResult<Self> {
        create_file(&service.client().await?, name, PAGES * PAGE).await?;
        Self::of(service, name).await
    }

    /// Transfers a file of [`PAGES`] pages to the service.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn adopt(service: &Service, name: &str, file: &OwnedFd) -> HarnessResult<Self> {
        service.fdpass()?.adopt(file.as_fd(), name, None)?;
        Self::of(service, name).await
    }

    /// A file that the service has.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn of(service: &Service, name: &str) -> HarnessResult<Self> {
        let client = service.client().await?;
        let mut mapped = service.fdpass()?.map(&named(name), true)?;
        mapped.track()?;
        let mut watched = Self { client, name: named(name), mapped, since: Generation::NONE };
        for page in 0..PAGES {
            watched.store(page);
        }
        for _ in 0..3 {
            watched.next().await?;
        }
        Ok(watched)
    }

    /// Closes a generation.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn next(&mut self) -> HarnessResult<Reported> {
        let made = self.client.checkpoint(&self.name, true, None).await?;
        let reported = Reported::since(&self.client, &self.name, self.since).await?;
        self.since = made.generation;
        Ok(reported)
    }

    /// Writes to a page through the tracked mapping.
    ///
    /// # Panics
    /// If the file has no such page.
    pub fn store(&self, page: u64) {
        assert!(self.mapped.write_at(page * PAGE, b"store"), "page {page}");
    }

    /// A descriptor that was opened by path, as the service passes it.
    ///
    /// # Errors
    /// The open.
    pub fn file(&self) -> HarnessResult<File> {
        Ok(fd::reopen(self.mapped.as_fd(), true)?.into())
    }
}

/// A memfd of [`PAGES`] pages.
///
/// # Errors
/// `memfd_create` or `ftruncate`.
pub fn sized_memfd(name: &str) -> HarnessResult<OwnedFd> {
    let fd = memfd::create(name, None)?;
    memfd::resize(fd.as_fd(), PAGES * PAGE)?;
    Ok(fd)
}
