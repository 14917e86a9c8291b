//! Where the content of pages is: which chunks of the images have it, and what each chunk has. Pure.

use fdmap_proto::PageRange;

use super::super::chain::{ChunkId, Located};
use super::order::extent_from;

/// What one chunk has of a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) chunk: ChunkId,
    /// Base pages of the file.
    pub(super) pages: PageRange,
    /// Number of the first of them in the chunk.
    pub(super) skipped: u64,
}

/// The chunk that has the first page, and the number of its pages.
type ChunkOf<'a> = Box<dyn Fn(&Located) -> (ChunkId, u64) + 'a>;

/// The stored pages of one file.
pub(super) struct Content<'a> {
    /// In ascending order.
    extents: &'a [Located],
    chunk_of: ChunkOf<'a>,
}

impl<'a> Content<'a> {
    pub(super) fn new(extents: &'a [Located], chunk_of: impl Fn(&Located) -> (ChunkId, u64) + 'a) -> Self {
        Self { extents, chunk_of: Box::new(chunk_of) }
    }

    /// The pieces of base pages of the file, in ascending order. Pages without data have none.
    pub(super) fn pieces(&self, pages: PageRange) -> Vec<Piece> {
        let mut found = Vec::new();
        let mut at = pages.start();
        while let Some(extent) = extent_from(self.extents, at) {
            let wanted = PageRange::new(at, pages.end()).map(|rest| extent.range.intersect(rest));
            let Some(wanted) = wanted.filter(|wanted| !wanted.is_empty()) else { break };
            let position = extent.position + (wanted.start().0 - extent.range.start().0);
            let (chunk, chunk_pages) =
                (self.chunk_of)(&Located { range: wanted, level: extent.level, position });
            let skipped = position.saturating_sub(chunk.first_page);
            let count = chunk_pages.saturating_sub(skipped).clamp(1, wanted.len());
            found.push(Piece { chunk, pages: PageRange::at(wanted.start(), count), skipped });
            at = wanted.start().plus(count);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::PageIndex;

    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    #[test]
    fn pieces_are_those_of_the_chunks_of_each_image() {
        let located = |start, end, level, position| Located { range: range(start, end), level, position };
        let extents = [located(0, 10, 0, 0), located(10, 14, 1, 30), located(20, 30, 0, 10)];
        // Chunks of 8 pages.
        let content = Content::new(&extents, |located| {
            (ChunkId { level: located.level, first_page: located.position - located.position % 8 }, 8)
        });
        let piece = |level, first_page, start, end, skipped| Piece {
            chunk: ChunkId { level, first_page },
            pages: range(start, end),
            skipped,
        };
        assert_eq!(
            content.pieces(range(3, 26)),
            [
                piece(0, 0, 3, 8, 3),
                piece(0, 8, 8, 10, 0),
                piece(1, 24, 10, 12, 6),
                piece(1, 32, 12, 14, 0),
                piece(0, 8, 20, 26, 2),
            ]
        );
        assert_eq!(content.pieces(range(14, 20)), []);
        assert_eq!(content.pieces(range(30, 40)), []);
        assert_eq!(content.pieces(range(5, 5)), []);
    }
}
