//! Map of changed pages.

use fdmap_proto::units::to_f64;
use fdmap_proto::{ChangedRun, PageRange};

use super::grid::{Grid, RESET, shade};

const OBSERVED: usize = 0;
const CONSERVATIVE: usize = 1;

/// Map of changed pages.
#[derive(Clone, Debug)]
pub struct ChangedMap(Grid<2>);

impl ChangedMap {
    /// Creates an empty map of `range` with `columns` cells per row.
    #[must_use]
    pub fn new(range: PageRange, columns: usize) -> Self {
        Self(Grid::new(range, columns))
    }

    /// Number of pages per cell.
    #[must_use]
    pub const fn pages_per_cell(&self) -> u64 {
        self.0.pages_per_cell()
    }

    /// Adds a run.
    pub fn add(&mut self, run: &ChangedRun) {
        self.0.add(run.range, if run.conservative { CONSERVATIVE } else { OBSERVED });
    }

    /// Rows of the map, each with its first page.
    pub fn rows(&self, color: bool) -> impl Iterator<Item = (u64, String)> {
        self.0.rows(color, move |cell, pages| glyph_of(cell, pages, color))
    }

    /// Legend of the cells.
    #[must_use]
    pub fn legend(color: bool) -> String {
        if color {
            return format!(
                "{OBSERVED_COLOR}█{RESET} observed  {CONSERVATIVE_COLOR}█{RESET} conservative  (░▒▓█: changed share of the cell)"
            );
        }
        "W observed  C conservative  . unchanged  (lower case: part of the cell)".to_owned()
    }
}

const OBSERVED_COLOR: &str = "\u{1b}[31m";
const CONSERVATIVE_COLOR: &str = "\u{1b}[33m";

fn glyph_of(cell: &[u64; 2], pages: u64, color: bool) -> (char, &'static str) {
    let changed = cell[OBSERVED] + cell[CONSERVATIVE];
    if changed == 0 {
        return (if color { ' ' } else { '.' }, "");
    }
    let conservative = cell[CONSERVATIVE] > cell[OBSERVED];
    if color {
        return (
            shade(to_f64(changed) / to_f64(pages)),
            if conservative { CONSERVATIVE_COLOR } else { OBSERVED_COLOR },
        );
    }
    let letter = if conservative { 'c' } else { 'w' };
    (if changed == pages { letter.to_ascii_uppercase() } else { letter }, "")
}

#[cfg(test)]
mod tests {
    use fdmap_proto::PageIndex;

    use super::*;

    fn run(start: u64, end: u64, conservative: bool) -> ChangedRun {
        let range = PageRange::new(PageIndex(start), PageIndex(end)).unwrap();
        ChangedRun { range, conservative }
    }

    #[test]
    fn unchanged_pages_are_blank() {
        let mut map = ChangedMap::new(PageRange::first(7), 4);
        map.add(&run(1, 3, false));
        map.add(&run(5, 6, true));
        let rows: Vec<_> = map.rows(false).collect();
        assert_eq!(rows, [(0, ".WW.".to_owned()), (4, ".C.".to_owned())]);
    }

    #[test]
    fn partly_changed_cell_has_a_small_block() {
        // Two pages per cell, one in the last.
        let mut map = ChangedMap::new(PageRange::at(PageIndex(100), 639), 10);
        assert_eq!(map.pages_per_cell(), 2);
        map.add(&run(100, 101, false));
        map.add(&run(102, 104, true));
        map.add(&run(738, 739, false));
        let rows: Vec<_> = map.rows(false).collect();
        assert_eq!(rows[0].1, "wC........");
        assert!(rows[31].1.ends_with(".W"), "the last cell is one page, which was written");
        let (_, colored) = map.rows(true).next().unwrap();
        assert!(colored.starts_with("\u{1b}[31m▒\u{1b}[33m█"), "{colored}");
    }
}
