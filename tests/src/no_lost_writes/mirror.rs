//! A copy of the file as an incremental backup makes it: the changed pages are read again after each checkpoint. At
//! the end, the copy must equal the file. Unlike the log, it also detects lost writes whose time is unknown, such as
//! those of a device.

use fdmap_client::MappedFile;

use super::pages::PageSet;
use crate::pattern::mix;

/// A hash of each page when it was last read.
#[derive(Debug)]
pub struct Mirror {
    mapped: MappedFile,
    hashes: Vec<u64>,
}

impl Mirror {
    /// The mirror of a file that is mapped read-only. No page has been read yet.
    #[must_use]
    pub fn of(mapped: MappedFile) -> Self {
        let pages = mapped.len() / 4096;
        Self { mapped, hashes: vec![0; pages] }
    }

    /// Reads these pages again.
    pub fn update(&mut self, pages: &PageSet) {
        for page in pages.iter() {
            self.hashes[page as usize] = self.hash(page);
        }
    }

    /// The pages whose content has changed since they were last read.
    #[must_use]
    pub fn stale(&self) -> PageSet {
        let pages = self.hashes.len() as u64;
        let mut stale = PageSet::of(pages);
        stale.extend((0..pages).filter(|page| self.hash(*page) != self.hashes[*page as usize]));
        stale
    }

    fn hash(&self, page: u64) -> u64 {
        let mut bytes = [0; 4096];
        assert!(self.mapped.read_at(page * 4096, &mut bytes), "page {page} is not mapped");
        // A page of zeroes has the hash 0, like a page that was never read.
        bytes.chunks_exact(8).fold(0_u64, |hash, word| {
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            if word == 0 { hash.rotate_left(1) } else { mix(hash.rotate_left(1) ^ word) }
        })
    }
}
