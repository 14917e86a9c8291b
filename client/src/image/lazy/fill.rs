//! Pages that are to be filled together, while the chunks with their content are read. Pure.

use std::collections::BTreeSet;

use fdmap_proto::units::to_usize;
use fdmap_proto::{PageIndex, PageRange};

use super::super::PAGE_BYTES;
use super::super::chain::ChunkId;
use super::content::Piece;

/// Pages of one mapping, and what is known of their content so far.
#[derive(Debug)]
pub(super) struct Fill {
    /// Number of the mapping.
    pub(super) region: usize,
    /// Pages of the mapping.
    pub(super) pages: PageRange,
    /// Base pages of the file that these map.
    file_pages: PageRange,
    /// Base pages of a page of the mapping.
    unit: u64,
    content: Vec<u8>,
    /// What is not read yet.
    waiting: Vec<Piece>,
    /// Pages of the mapping with content that cannot be read.
    failed: BTreeSet<u64>,
}

impl Fill {
    /// `pieces`: the content of all stored pages. Pages without one are zero.
    pub(super) fn new(region: usize, pages: PageRange, file_pages: PageRange, pieces: Vec<Piece>) -> Self {
        let unit = (file_pages.len() / pages.len().max(1)).max(1);
        let content = vec![0; to_usize(file_pages.len() * PAGE_BYTES)];
        Self { region, pages, file_pages, unit, content, waiting: pieces, failed: BTreeSet::new() }
    }

    /// Bytes of memory that it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.file_pages.len() * PAGE_BYTES
    }

    /// The chunks that are not read yet. A chunk may appear several times.
    pub(super) fn waits_for(&self) -> impl Iterator<Item = ChunkId> {
        self.waiting.iter().map(|piece| piece.chunk)
    }

    /// True once all content was read, or cannot be read.
    pub(super) const fn is_ready(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The bytes of a chunk; `None`: it cannot be read.
    pub(super) fn supply(&mut self, chunk: ChunkId, bytes: Option<&[u8]>) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|piece| {
            if piece.chunk == chunk {
                self.take(piece, bytes);
            }
            piece.chunk != chunk
        });
        self.waiting = waiting;
    }

    fn take(&mut self, piece: &Piece, bytes: Option<&[u8]>) {
        let first = piece.pages.start().0 - self.file_pages.start().0;
        let (to, from) = (to_usize(first * PAGE_BYTES), to_usize(piece.skipped * PAGE_BYTES));
        let len = to_usize(piece.pages.len() * PAGE_BYTES);
        match bytes.and_then(|bytes| bytes.get(from..from + len)) {
            Some(bytes) => self.content[to..to + len].copy_from_slice(bytes),
            None => {
                let begin = self.pages.start().0;
                let end = begin + (first + piece.pages.len()).div_ceil(self.unit);
                self.failed.extend(begin + first / self.unit..end);
            }
        }
    }

    /// Pages of the mapping with content that cannot be read.
    pub(super) fn failed(&self) -> impl Iterator<Item = PageIndex> {
        self.failed.iter().map(|page| PageIndex(*page))
    }

    /// The runs of pages whose content is complete.
    pub(super) fn parts(&self) -> Vec<(PageRange, &[u8])> {
        let mut parts = Vec::new();
        if !self.is_ready() {
            return parts;
        }
        let (mut at, end) = (self.pages.start().0, self.pages.end().0);
        let page_bytes = self.unit * PAGE_BYTES;
        for stop in self.failed.iter().copied().chain([end]) {
            if let Some(run) = PageRange::new(PageIndex(at), PageIndex(stop)).filter(|run| !run.is_empty()) {
                let [from, to] = [at, stop].map(|page| to_usize((page - self.pages.start().0) * page_bytes));
                parts.push((run, &self.content[from..to]));
            }
            at = stop + 1;
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    fn chunk(first_page: u64) -> ChunkId {
        ChunkId { level: 0, first_page }
    }

    fn piece(first_page: u64, start: u64, end: u64, skipped: u64) -> Piece {
        Piece { chunk: chunk(first_page), pages: range(start, end), skipped }
    }

    /// Each page of a chunk has its number in the chunk, from 1.
    fn bytes(pages: u8) -> Vec<u8> {
        (1..=pages).flat_map(|page| [page; PAGE]).collect()
    }

    /// The first byte of each page of each part.
    fn parts(fill: &Fill) -> Vec<(u64, Vec<u8>)> {
        let firsts = |bytes: &[u8]| bytes.chunks(PAGE).map(|page| page[0]).collect();
        fill.parts().into_iter().map(|(pages, bytes)| (pages.start().0, firsts(bytes))).collect()
    }

    #[test]
    fn content_is_assembled_from_chunks_in_any_order() {
        let pieces = vec![piece(0, 10, 12, 6), piece(8, 12, 13, 0), piece(0, 15, 16, 2)];
        let mut fill = Fill::new(0, range(2, 8), range(10, 16), pieces);
        assert_eq!(fill.waits_for().collect::<Vec<_>>(), [chunk(0), chunk(8), chunk(0)]);
        fill.supply(chunk(8), Some(&bytes(8)));
        fill.supply(chunk(99), None);
        assert!(!fill.is_ready() && fill.parts().is_empty());
        fill.supply(chunk(0), Some(&bytes(8)));
        assert!(fill.is_ready());
        assert_eq!(parts(&fill), [(2, vec![7, 8, 1, 0, 0, 3])]);
        assert_eq!(fill.failed().count(), 0);
    }

    #[test]
    fn pages_of_a_failed_chunk_are_in_no_part() {
        let pieces = vec![piece(0, 0, 1, 0), piece(8, 1, 3, 0), piece(16, 3, 4, 0), piece(24, 4, 5, 9)];
        let mut fill = Fill::new(0, range(0, 5), range(0, 5), pieces);
        fill.supply(chunk(0), Some(&bytes(8)));
        fill.supply(chunk(8), None);
        fill.supply(chunk(16), Some(&bytes(8)));
        // A chunk that is too short.
        fill.supply(chunk(24), Some(&bytes(8)));
        assert_eq!(fill.failed().map(|page| page.0).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(parts(&fill), [(0, vec![1]), (3, vec![1])]);
    }

    #[test]
    fn huge_page_fails_with_each_of_its_pieces() {
        let pieces = vec![piece(0, 5, 6, 0), piece(8, 511, 512, 0), piece(8, 600, 601, 1)];
        let mut fill = Fill::new(3, range(0, 3), range(0, 3 * 512), pieces.clone());
        fill.supply(chunk(0), None);
        fill.supply(chunk(8), Some(&bytes(8)));
        assert_eq!(fill.failed().map(|page| page.0).collect::<Vec<_>>(), [0]);
        let found = fill.parts();
        assert_eq!((found.len(), found[0].0, found[0].1.len()), (1, range(1, 3), 2 * 512 * PAGE));
        assert_eq!((found[0].1[88 * PAGE], found[0].1[87 * PAGE]), (2, 0));
        let mut fill = Fill::new(3, range(0, 3), range(0, 3 * 512), pieces);
        fill.supply(chunk(8), None);
        fill.supply(chunk(0), None);
        assert_eq!(fill.failed().map(|page| page.0).collect::<Vec<_>>(), [0, 1]);
    }
}
