//! Disks of guests: files with known content.

use std::path::{Path, PathBuf};

use super::PAGE;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::pattern::mix;
use crate::{HarnessError, HarnessResult};

/// A disk, removed on drop.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    seed: u64,
    pages: u64,
    _folder: CleanupGuard,
}

impl Disk {
    /// Creates a disk in a new directory below `parent`, whose file system must support O_DIRECT.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn make(parent: &Path, seed: u64, pages: u64) -> HarnessResult<Self> {
        let failed =
            |error| HarnessError::File { what: "creating a disk in", path: parent.to_owned(), error };
        let folder = tempfile::Builder::new().prefix("fdmap-disk-").tempdir_in(parent).map_err(failed)?;
        let folder = folder.keep();
        let guard = CleanupGuard::new(Cleanup::RemoveDir(folder.clone()))?;
        let disk = Self { path: folder.join("disk"), seed, pages, _folder: guard };
        let mut content = vec![0; (pages * PAGE) as usize];
        for (page, bytes) in (0..).zip(content.chunks_mut(PAGE as usize)) {
            bytes[..16].copy_from_slice(&disk.content(page));
        }
        std::fs::write(&disk.path, content).map_err(failed)?;
        Ok(disk)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size in pages.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// The first 16 bytes of a page.
    #[must_use]
    pub fn content(&self, page: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&mix(self.seed).to_le_bytes());
        bytes[8..].copy_from_slice(&(!page).to_le_bytes());
        bytes
    }
}
