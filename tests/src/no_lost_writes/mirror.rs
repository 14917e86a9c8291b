//! A copy of the file as an incremental backup makes it: after each checkpoint the changed pages are looked at again. In the
//! end it must equal the file, whatever the clocks say. Detects writes of unknown time, such as those of a device.

use fdmap_client::MappedFile;

use super::pages::PageSet;
use crate::pattern::mix;

/// What each page held when it was last looked at.
#[derive(Debug)]
pub struct Mirror {
    mapped: MappedFile,
    prints: Vec<u64>,
}

impl Mirror {
    /// Of a file that is mapped read-only; nothing was looked at yet.
    #[must_use]
    pub fn of(mapped: MappedFile) -> Self {
        let pages = mapped.len() / 4096;
        Self { mapped, prints: vec![0; pages] }
    }

    /// Looks at some pages.
    pub fn look(&mut self, pages: &PageSet) {
        for page in pages.iter() {
            self.prints[page as usize] = self.print(page);
        }
    }

    /// The pages that no longer hold what they held when they were last looked at.
    #[must_use]
    pub fn stale(&self) -> PageSet {
        let pages = self.prints.len() as u64;
        let mut stale = PageSet::of(pages);
        stale.extend((0..pages).filter(|page| self.print(*page) != self.prints[*page as usize]));
        stale
    }

    fn print(&self, page: u64) -> u64 {
        let mut bytes = [0; 4096];
        assert!(self.mapped.read_at(page * 4096, &mut bytes), "page {page} is not mapped");
        // A page of zeroes has the print 0, as one that was never looked at.
        bytes.chunks_exact(8).fold(0_u64, |print, word| {
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            if word == 0 { print.rotate_left(1) } else { mix(print.rotate_left(1) ^ word) }
        })
    }
}
