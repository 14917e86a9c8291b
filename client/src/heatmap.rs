//! Maps of files for the terminal: each cell represents the same number of pages.

mod changed;
mod grid;

pub use changed::ChangedMap;

use fdmap_proto::VariantArray as _;
use fdmap_proto::units::to_f64;
use fdmap_proto::{PageRange, PageState, Run};

use grid::{Grid, RESET, shade};

/// Map of page states.
#[derive(Clone, Debug)]
pub struct HeatMap(Grid<5>);

impl HeatMap {
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
    pub fn add(&mut self, run: &Run) {
        self.0.add(run.range, index(run.state));
    }

    /// Rows of the map, each with its first page.
    pub fn rows(&self, color: bool) -> impl Iterator<Item = (u64, String)> {
        self.0.rows(color, move |cell, _| glyph_of(cell, color))
    }

    /// Legend of the cells.
    #[must_use]
    pub fn legend(color: bool) -> String {
        if color {
            let word = |state: PageState| format!("{}█{RESET} {}", paint(state), state);
            let words = [PageState::Resident, PageState::SwapCached, PageState::Swapped, PageState::Unknown];
            return format!("{}  (░▒▓█: share of the cell with data)", words.map(word).join("  "));
        }
        "R resident  C swap-cached  S swapped  ? unknown  . hole  (lower case: most frequent state of a mixed cell)"
            .to_owned()
    }
}

const fn index(state: PageState) -> usize {
    match state {
        PageState::Hole => 0,
        PageState::Resident => 1,
        PageState::SwapCached => 2,
        PageState::Swapped => 3,
        PageState::Unknown => 4,
    }
}

const fn paint(state: PageState) -> &'static str {
    match state {
        PageState::Hole => "",
        PageState::Resident => "\u{1b}[32m",
        PageState::SwapCached => "\u{1b}[36m",
        PageState::Swapped => "\u{1b}[33m",
        PageState::Unknown => "\u{1b}[31m",
    }
}

fn glyph_of(cell: &[u64; 5], color: bool) -> (char, &'static str) {
    let all: u64 = cell.iter().sum();
    let data = all - cell[0];
    if data == 0 {
        return (if color { ' ' } else { '.' }, "");
    }
    let most = PageState::VARIANTS[1..].iter().max_by_key(|state| cell[index(**state)]).copied();
    let most = most.unwrap_or(PageState::Unknown);
    if color {
        let glyph = shade(to_f64(data) / to_f64(all));
        return (glyph, paint(most));
    }
    let letter = match most {
        PageState::Hole => '.',
        PageState::Resident => 'r',
        PageState::SwapCached => 'c',
        PageState::Swapped => 's',
        PageState::Unknown => '?',
    };
    (if cell[index(most)] == all { letter.to_ascii_uppercase() } else { letter }, "")
}

#[cfg(test)]
mod tests {
    use fdmap_proto::PageIndex;

    use super::*;

    fn run(start: u64, end: u64, state: PageState) -> Run {
        let range = PageRange::new(PageIndex(start), PageIndex(end)).unwrap();
        Run { range, state, slot: None, attributes: None }
    }

    #[test]
    fn small_file_has_one_cell_per_page() {
        let mut map = HeatMap::new(PageRange::first(7), 4);
        map.add(&run(0, 2, PageState::Hole));
        map.add(&run(2, 5, PageState::Resident));
        map.add(&run(5, 7, PageState::Swapped));
        let rows: Vec<_> = map.rows(false).collect();
        assert_eq!(rows, [(0, "..RR".to_owned()), (4, "RSS".to_owned())]);
    }

    #[test]
    fn mixed_cell_shows_the_most_frequent_state() {
        let mut map = HeatMap::new(PageRange::at(PageIndex(100), 640), 10);
        assert_eq!(map.pages_per_cell(), 2);
        map.add(&run(100, 101, PageState::Hole));
        map.add(&run(101, 740, PageState::Swapped));
        let (first, row) = map.rows(false).next().unwrap();
        assert_eq!((first, row.as_str()), (100, "sSSSSSSSSS"));
    }

    #[test]
    fn color_is_reset_after_each_row() {
        let mut map = HeatMap::new(PageRange::first(3), 3);
        map.add(&run(0, 2, PageState::Resident));
        map.add(&run(2, 3, PageState::Swapped));
        let (_, row) = map.rows(true).next().unwrap();
        assert_eq!(row, "\u{1b}[32m██\u{1b}[33m█\u{1b}[0m");
    }

    #[test]
    fn huge_file_fits_the_maximum_rows() {
        let map = HeatMap::new(PageRange::first(1 << 40), 80);
        assert!(map.rows(false).count() <= 32);
    }
}
