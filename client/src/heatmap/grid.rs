//! Grid of cells that count pages of several kinds.

use fdmap_proto::PageRange;
use fdmap_proto::units::{to_u64, to_usize};

/// Maximum number of rows.
const MAX_ROWS: u64 = 32;

/// Escape sequence that resets the color.
pub(super) const RESET: &str = "\u{1b}[0m";

/// Number of pages of each of `KINDS` kinds per cell.
#[derive(Clone, Debug)]
pub(super) struct Grid<const KINDS: usize> {
    range: PageRange,
    pages_per_cell: u64,
    columns: usize,
    cells: Vec<[u64; KINDS]>,
}

impl<const KINDS: usize> Grid<KINDS> {
    pub(super) fn new(range: PageRange, columns: usize) -> Self {
        let columns = columns.max(1);
        let pages_per_cell = range.len().div_ceil(to_u64(columns) * MAX_ROWS).max(1);
        let cells = vec![[0; KINDS]; to_usize(range.len().div_ceil(pages_per_cell))];
        Self { range, pages_per_cell, columns, cells }
    }

    pub(super) const fn pages_per_cell(&self) -> u64 {
        self.pages_per_cell
    }

    /// Adds pages of one kind.
    pub(super) fn add(&mut self, pages: PageRange, kind: usize) {
        let pages = pages.intersect(self.range);
        let mut page = pages.start().0 - self.range.start().0;
        let end = pages.end().0 - self.range.start().0;
        while page < end {
            let cell = page / self.pages_per_cell;
            let upto = end.min((cell + 1) * self.pages_per_cell);
            self.cells[to_usize(cell)][kind] += upto - page;
            page = upto;
        }
    }

    /// Rows of the grid, each with its first page. `glyph` returns the character and color of a cell from its counts and its
    /// number of pages.
    pub(super) fn rows(
        &self,
        color: bool,
        glyph: impl Fn(&[u64; KINDS], u64) -> (char, &'static str),
    ) -> impl Iterator<Item = (u64, String)> {
        let row_pages = self.pages_per_cell * to_u64(self.columns);
        let (first, all) = (self.range.start().0, self.range.len());
        self.cells.chunks(self.columns).zip(0_u64..).map(move |(cells, nth)| {
            let mut row = String::new();
            let mut last = "";
            for (cell, place) in cells.iter().zip(0_u64..) {
                let before = nth * row_pages + place * self.pages_per_cell;
                let (glyph, paint) = glyph(cell, self.pages_per_cell.min(all - before));
                if color && paint != last {
                    row.push_str(paint);
                    last = paint;
                }
                row.push(glyph);
            }
            if !last.is_empty() {
                row.push_str(RESET);
            }
            (first + nth * row_pages, row)
        })
    }
}

/// Block character for a share greater than 0.
pub(super) const fn shade(share: f64) -> char {
    match share {
        s if s <= 0.25 => '░',
        s if s <= 0.5 => '▒',
        s if s < 1.0 => '▓',
        _ => '█',
    }
}
