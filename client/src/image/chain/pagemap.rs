//! The pagemap of one file in one image.

use std::io::Read;

use fdmap_proto::{PageIndex, PageRange};

use super::super::PAGE_BYTES;
use super::super::format::{
    EntryReader, FormatError, ImageKind, PAGE_IN_PARENT, PAGE_LAZY, PAGE_PRESENT, PagemapEntry, PagemapHead,
};
use super::Located;

/// The pages of one file in one image, in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pagemap {
    pub(super) pages_id: u32,
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    range: PageRange,
    /// Number of the first page in the pages file; `None`: in the parent.
    position: Option<u64>,
}

impl Pagemap {
    /// Reads a pagemap image of a file of `size` bytes.
    pub(super) fn read(reader: impl Read, size: u64) -> Result<Self, FormatError> {
        let mut entries = EntryReader::new(reader, ImageKind::Pagemap)?;
        let offset = entries.offset();
        let head: PagemapHead = entries.next_entry()?.ok_or(FormatError::Truncated { offset })?;
        let mut pagemap = Self { pages_id: head.pages_id, parts: Vec::new() };
        let (mut end, mut position) = (PageIndex(0), 0);
        loop {
            let offset = entries.offset();
            let Some(entry) = entries.next_entry::<PagemapEntry>()? else { return Ok(pagemap) };
            let invalid = |reason: String| FormatError::Invalid { offset, reason };
            let range = range_of(&entry, end, size).map_err(invalid)?;
            end = range.end();
            let flags = entry.page_flags();
            let part = match flags & !PAGE_LAZY {
                PAGE_PRESENT => {
                    let part = Part { range, position: Some(position) };
                    position += range.len();
                    part
                }
                PAGE_IN_PARENT => Part { range, position: None },
                // CRIU's entry of pages that are neither stored nor inherited.
                0 => continue,
                _ => return Err(invalid(format!("flags {flags:#x} of pages {range}"))),
            };
            pagemap.parts.push(part);
        }
    }

    /// Number of pages in the pages file.
    pub(super) fn present_pages(&self) -> u64 {
        self.parts.iter().filter(|part| part.position.is_some()).map(|part| part.range.len()).sum()
    }

    /// The stored pages, given those of the parent. The error is a page that the parent does not have.
    pub(super) fn resolve(&self, level: usize, parent: &[Located]) -> Result<Vec<Located>, PageIndex> {
        let mut found = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            if let Some(position) = part.position {
                found.push(Located { range: part.range, level, position });
                continue;
            }
            let mut at = part.range.start();
            let first = parent.partition_point(|one| one.range.end() <= at);
            for one in &parent[first..] {
                let shared = one.range.intersect(part.range);
                if shared.is_empty() {
                    break;
                }
                if shared.start() != at {
                    return Err(at);
                }
                let position = one.position + (at.0 - one.range.start().0);
                found.push(Located { range: shared, level: one.level, position });
                at = shared.end();
            }
            if at != part.range.end() {
                return Err(at);
            }
        }
        Ok(found)
    }
}

/// The pages of an entry that follows page `end`, or the reason why it is invalid.
fn range_of(entry: &PagemapEntry, end: PageIndex, size: u64) -> Result<PageRange, String> {
    let (vaddr, pages) = (entry.vaddr, entry.pages());
    if !vaddr.is_multiple_of(PAGE_BYTES) {
        return Err(format!("address {vaddr:#x} is not a multiple of {PAGE_BYTES}"));
    }
    let start = PageIndex(vaddr / PAGE_BYTES);
    let file_end = PageIndex(size.div_ceil(PAGE_BYTES));
    if start < end {
        return Err(format!("page {start} after page {end}"));
    }
    match start.0.checked_add(pages).and_then(|end| PageRange::new(start, PageIndex(end))) {
        Some(range) if range.is_empty() => Err(format!("no pages at page {start}")),
        Some(range) if range.end() <= file_end => Ok(range),
        _ => Err(format!(
            "{pages} pages from page {start} on extend past the end of the file, page {file_end}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::format::{append_entry, header};
    use super::*;

    const SIZE: u64 = 100 * PAGE_BYTES;

    fn image(entries: &[PagemapEntry]) -> Vec<u8> {
        let mut bytes = header(ImageKind::Pagemap);
        append_entry(&mut bytes, &PagemapHead { pages_id: 3 });
        entries.iter().for_each(|entry| append_entry(&mut bytes, entry));
        bytes
    }

    fn entry(page: u64, pages: u64, flags: u32) -> PagemapEntry {
        PagemapEntry::new(page * PAGE_BYTES, pages, flags)
    }

    fn read(entries: &[PagemapEntry]) -> Result<Pagemap, FormatError> {
        Pagemap::read(image(entries).as_slice(), SIZE)
    }

    fn located(start: u64, end: u64, level: usize, position: u64) -> Located {
        let range = PageRange::new(PageIndex(start), PageIndex(end)).unwrap();
        Located { range, level, position }
    }

    #[test]
    fn positions_count_present_pages_only() {
        let entries =
            [entry(2, 3, PAGE_PRESENT), entry(5, 4, PAGE_IN_PARENT), entry(20, 1, PAGE_PRESENT | PAGE_LAZY)];
        let pagemap = read(&entries).unwrap();
        assert_eq!((pagemap.pages_id, pagemap.present_pages()), (3, 4));
        let parent = [located(0, 7, 1, 10), located(7, 50, 2, 0)];
        let found = pagemap.resolve(0, &parent).unwrap();
        let expected =
            [located(2, 5, 0, 0), located(5, 7, 1, 15), located(7, 9, 2, 0), located(20, 21, 0, 3)];
        assert_eq!(found, expected);
    }

    #[test]
    fn pages_that_no_parent_has_are_refused() {
        let pagemap = read(&[entry(5, 4, PAGE_IN_PARENT)]).unwrap();
        assert_eq!(pagemap.resolve(0, &[]), Err(PageIndex(5)));
        assert_eq!(pagemap.resolve(0, &[located(5, 8, 1, 0)]), Err(PageIndex(8)));
        assert_eq!(pagemap.resolve(0, &[located(6, 9, 1, 0)]), Err(PageIndex(5)));
        assert_eq!(pagemap.resolve(0, &[located(5, 6, 1, 0), located(7, 9, 1, 1)]), Err(PageIndex(6)));
    }

    #[test]
    fn invalid_entries_are_refused_with_offset_and_reason() {
        for (entries, reason) in [
            (vec![PagemapEntry::new(5, 1, PAGE_PRESENT)], "address 0x5 is not a multiple of 4096"),
            (vec![entry(1, 0, PAGE_PRESENT)], "no pages at page 1"),
            (
                vec![entry(1, 100, PAGE_PRESENT)],
                "100 pages from page 1 on extend past the end of the file, page 100",
            ),
            (
                vec![entry(1, u64::MAX, PAGE_PRESENT)],
                "18446744073709551615 pages from page 1 on extend past the end of the file, page 100",
            ),
            (vec![entry(1, 2, PAGE_PRESENT), entry(2, 2, PAGE_PRESENT)], "page 2 after page 3"),
            (vec![entry(1, 2, PAGE_PRESENT | PAGE_IN_PARENT)], "flags 0x5 of pages 1..3"),
            (vec![entry(1, 2, 8)], "flags 0x8 of pages 1..3"),
        ] {
            match read(&entries) {
                Err(FormatError::Invalid { offset, reason: found }) => {
                    assert!(offset >= 14, "{offset}");
                    assert_eq!(found, reason);
                }
                other => panic!("{reason}: {other:?}"),
            }
        }
    }

    proptest! {
        /// Against a reference that looks each page up by itself.
        #[test]
        fn chain_resolves_like_page_by_page(images in proptest::collection::vec(proptest::collection::vec((0_u64..4, 1_u64..6, any::<bool>()), 0..12), 1..4)) {
            let mut known = Vec::new();
            let mut reference: std::collections::BTreeMap<u64, (usize, u64)> = std::collections::BTreeMap::new();
            for (level, image) in images.iter().enumerate() {
                let (mut at, mut position) = (0, 0);
                let (mut entries, mut next) = (Vec::new(), std::collections::BTreeMap::new());
                for (skip, pages, inherited) in image {
                    let start = at + skip;
                    at = start + pages;
                    let in_parent = *inherited && (start..at).all(|page| reference.contains_key(&page));
                    entries.push(entry(start, *pages, if in_parent { PAGE_IN_PARENT } else { PAGE_PRESENT }));
                    for page in start..at {
                        let value = if in_parent { reference[&page] } else { (level, position) };
                        position += u64::from(!in_parent);
                        next.insert(page, value);
                    }
                }
                reference = next;
                known = read(&entries).unwrap().resolve(level, &known).unwrap();
            }
            let all: Vec<_> = known.iter().flat_map(|one| {
                (one.range.start().0..one.range.end().0).map(move |page| (page, (one.level, one.position + page - one.range.start().0)))
            }).collect();
            prop_assert_eq!(all, reference.into_iter().collect::<Vec<_>>());
        }
    }
}
