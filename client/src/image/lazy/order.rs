//! The order in which pages are copied before any process accesses them. Pure.

use fdmap_proto::{PageIndex, PageRange};

use super::super::chain::{ImageFile, Located};
use super::super::ranges::PageSet;
use super::super::side_file::DumpedFile;

/// The stored pages of a file: those that were in memory when it was dumped come before those that were in swap.
pub(super) fn order(file: &ImageFile) -> Vec<PageRange> {
    let resident = file.dumped.as_ref().map(resident).unwrap_or_default();
    let parts = || file.extents.iter().flat_map(|extent| resident.split(extent.range));
    let of = |wanted: bool| parts().filter(move |(_, is_in)| *is_in == wanted).map(|(range, _)| range);
    merged(of(true).chain(of(false)))
}

/// The pages that the side file lists. What is not in ascending order is ignored: the order of the copies changes no content.
fn resident(dumped: &DumpedFile) -> PageSet {
    let mut set = PageSet::default();
    let mut end = 0;
    for [first, pages] in dumped.resident.iter().take(DumpedFile::MAX_RESIDENT_RANGES) {
        if *first >= end {
            let range = PageRange::at(PageIndex(*first), *pages);
            end = range.end().0;
            set.push(range);
        }
    }
    set
}

/// Joins ranges that follow one another.
fn merged(ranges: impl Iterator<Item = PageRange>) -> Vec<PageRange> {
    let mut all: Vec<PageRange> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.end() == range.start() => {
                *last = PageRange::at(last.start(), last.len() + range.len());
            }
            _ => all.push(range),
        }
    }
    all
}

/// The extent that has a page, or the first one after it.
pub(super) fn extent_from(extents: &[Located], page: PageIndex) -> Option<&Located> {
    extents.get(extents.partition_point(|extent| extent.range.end() <= page))
}

#[cfg(test)]
mod tests {
    use super::super::super::format::MemfdInodeEntry;
    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    fn file(resident: Option<Vec<[u64; 2]>>) -> ImageFile {
        let located = |start, end| Located { range: range(start, end), level: 0, position: 0 };
        let dumped = resident.map(|resident| DumpedFile {
            shmid: 0,
            file_id: String::new(),
            generation: 1,
            exact: true,
            backing: "shmem".to_owned(),
            rights: [Vec::new(), Vec::new(), Vec::new()],
            unknown_pages: 0,
            resident,
        });
        let extents = vec![located(0, 10), located(10, 20), located(30, 40)];
        ImageFile { inode: MemfdInodeEntry::default(), dumped, extents }
    }

    #[test]
    fn pages_that_were_in_memory_come_first() {
        for (resident, expected) in [
            (None, vec![range(0, 20), range(30, 40)]),
            (Some(vec![]), vec![range(0, 20), range(30, 40)]),
            (
                Some(vec![[5, 10], [35, 100]]),
                vec![range(5, 15), range(35, 40), range(0, 5), range(15, 20), range(30, 35)],
            ),
            // Not in ascending order.
            (
                Some(vec![[35, 1], [5, 10], [u64::MAX, u64::MAX]]),
                vec![range(35, 36), range(0, 20), range(30, 35), range(36, 40)],
            ),
        ] {
            assert_eq!(order(&file(resident.clone())), expected, "{resident:?}");
        }
    }

    #[test]
    fn extent_is_found_at_and_after_a_page() {
        let extents = file(None).extents;
        for (page, start) in
            [(0, Some(0)), (9, Some(0)), (10, Some(10)), (20, Some(30)), (39, Some(30)), (40, None)]
        {
            let found = extent_from(&extents, PageIndex(page)).map(|extent| extent.range.start().0);
            assert_eq!(found, start, "{page}");
        }
    }
}
