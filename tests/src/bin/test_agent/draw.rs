//! Pseudo-random pages, lengths and contents.

use fdmap_tests::pattern::mix;

#[derive(Clone, Debug)]
pub struct Draw {
    word: u64,
    first: u64,
    pages: u64,
}

impl Draw {
    /// Draws from the pages from `first` up to `end`.
    pub const fn new(seed: u64, first: u64, end: u64) -> Self {
        Self { word: mix(seed), first, pages: end - first }
    }

    /// An arbitrary number.
    pub const fn word(&mut self) -> u64 {
        self.word = mix(self.word);
        self.word
    }

    /// A number less than `end`.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// A page. Every other time, it is one of a few pages that are drawn often.
    pub const fn page(&mut self) -> u64 {
        let word = self.word();
        let few = self.pages / 64 + 1;
        let among = if word >> 63 == 0 { self.pages } else { few };
        // The few pages are spread over different page tables.
        self.first + (word % among) * (self.pages / among) % self.pages
    }

    /// Consecutive pages, at most `max_pages`: the first page, and the number of pages.
    pub const fn run(&mut self, max_pages: u64) -> (u64, u64) {
        let page = self.page();
        let left = self.first + self.pages - page;
        let wanted = 1 + self.below(max_pages);
        (page, if wanted < left { wanted } else { left })
    }

    /// Consecutive bytes in at most `max_pages` pages: the offset in the file, and the length.
    pub const fn bytes(&mut self, max_pages: u64) -> (u64, u64) {
        let (page, pages) = self.run(max_pages);
        match self.below(3) {
            // Whole pages, a few bytes, or any range.
            0 => (page * 4096, pages * 4096),
            1 => (page * 4096 + self.below(4088), 8),
            _ => {
                let from = self.below(4096);
                let len = 1 + self.below(pages * 4096 - from);
                (page * 4096 + from, len)
            }
        }
    }
}

/// The pages that a byte range touches: the first page, and the number of pages.
pub const fn touched(offset: u64, len: u64) -> (u64, u64) {
    let first = offset / 4096;
    (first, (offset + len).div_ceil(4096) - first)
}
