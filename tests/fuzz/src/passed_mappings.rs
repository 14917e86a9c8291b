//! The JSON list of mappings that a process passes with its userfaultfd.

use arbitrary::{Arbitrary, Unstructured};
use fdmap_client::image::lazy::{LazyRegion, parse_mappings};

use crate::draft::{rare, up_to};

const MAX_PAGE_BYTES: u64 = 1 << 30;

#[derive(Arbitrary, Debug)]
pub struct Input {
    file_pages: u16,
    /// Not a whole number of pages.
    odd_size: bool,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 6))]
    mappings: Vec<MappingDraft>,
    /// One byte of the text is replaced: position and value.
    #[arbitrary(with = rare)]
    damage: Option<(u16, u8)>,
}

#[derive(Arbitrary, Debug)]
struct MappingDraft {
    page: u8,
    pages: u8,
    offset: u8,
    /// Of huge pages of 2 MiB.
    is_huge: bool,
    names_page_size: bool,
    /// Address, size, offset, page size, in place of the fields above.
    #[arbitrary(with = rare)]
    raw: Option<(u64, u64, u64, u64)>,
}

impl MappingDraft {
    fn region(&self) -> LazyRegion {
        let unit = if self.is_huge { 2 << 20 } else { 4096 };
        let of = |pages: u8| u64::from(pages) * unit;
        let (address, bytes, offset, page_bytes) =
            self.raw.unwrap_or((of(self.page), of(self.pages % 16), of(self.offset % 16), unit));
        LazyRegion { address, bytes, offset, page_bytes }
    }

    fn json(&self) -> String {
        let LazyRegion { address, bytes, offset, page_bytes } = self.region();
        let page_size = match (self.raw, self.is_huge, self.names_page_size) {
            (None, false, false) => String::new(),
            (_, _, true) => format!(",\"page_size_kib\":{page_bytes}"),
            _ => format!(",\"page_size\":{page_bytes},\"page_size_kib\":1"),
        };
        format!("{{\"base_host_virt_addr\":{address},\"size\":{bytes},\"offset\":{offset}{page_size}}}")
    }
}

/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    let size = (u64::from(input.file_pages) * 4096).saturating_sub(u64::from(input.odd_size));
    let text: Vec<_> = input.mappings.iter().map(MappingDraft::json).collect();
    let mut text = format!("[{}]", text.join(",")).into_bytes();
    if let Some((at, byte)) = input.damage {
        let nth = usize::from(at) % text.len();
        text[nth] = byte;
        if let Ok(regions) = parse_mappings(&text, size) {
            assert!(are_valid(&regions, size), "{regions:?} of {size} bytes");
        }
        return;
    }
    let expected: Vec<_> = input.mappings.iter().map(MappingDraft::region).collect();
    let parsed = parse_mappings(&text, size);
    let is_valid = are_valid(&expected, size);
    assert_eq!(parsed.ok(), is_valid.then_some(expected));
}

fn are_valid(regions: &[LazyRegion], size: u64) -> bool {
    let is_valid = |region: &LazyRegion| {
        let LazyRegion { address, bytes, offset, page_bytes } = *region;
        let is_whole = |value: u64| value & (page_bytes - 1) == 0;
        page_bytes.is_power_of_two()
            && (4096..=MAX_PAGE_BYTES).contains(&page_bytes)
            && bytes > 0
            && is_whole(address)
            && is_whole(bytes)
            && is_whole(offset)
            && u128::from(address) + u128::from(bytes) <= u128::from(u64::MAX)
            && u128::from(offset) + u128::from(bytes) <= u128::from(size.next_multiple_of(page_bytes))
    };
    let overlap = |one: &LazyRegion, other: &LazyRegion| {
        one.address < other.address + other.bytes && other.address < one.address + one.bytes
    };
    !regions.is_empty()
        && regions.iter().all(is_valid)
        && regions
            .iter()
            .enumerate()
            .all(|(number, one)| !regions[..number].iter().any(|other| overlap(one, other)))
}
