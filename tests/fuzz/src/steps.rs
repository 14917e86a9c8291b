//! Pages of a step of a migration.

use arbitrary::{Arbitrary, Unstructured};
use fdmap_client::image::CHUNK_PAGES;
use fdmap_client::migration::ReceivedPages;
use fdmap_proto::units::to_u64;
use fdmap_proto::{PageRange, v1};
use prost::Message as _;

use crate::draft::{rare, rarely, up_to};

const PAGE_BYTES: u64 = 4096;

#[derive(Arbitrary, Debug)]
pub struct Input {
    file_pages: u16,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 8))]
    content: Vec<RangeDraft>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 8))]
    zero: Vec<RangeDraft>,
    /// Bytes that the frame lacks, or has too many.
    #[arbitrary(with = rare)]
    wrong_bytes: Option<i16>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| Ok(if rarely(u)? { u.arbitrary()? } else { 1 }))]
    compression: i32,
    /// One byte of the encoded message is replaced: position and value.
    #[arbitrary(with = rare)]
    damage: Option<(u16, u8)>,
}

#[derive(Arbitrary, Debug)]
struct RangeDraft {
    /// Pages after the range before; from 240 on, the range begins 1 to 16 pages before the end of that.
    skip: u8,
    pages: u8,
    /// In place of the fields above.
    #[arbitrary(with = rare)]
    raw: Option<(u64, u64)>,
}

fn ranges(drafts: &[RangeDraft]) -> Vec<v1::PageRange> {
    let mut at: u64 = 0;
    let mut ranges = Vec::with_capacity(drafts.len());
    for draft in drafts {
        let start = match draft.skip {
            skip @ ..240 => at.saturating_add(skip.into()),
            skip => at.saturating_sub(u64::from(skip - 239)),
        };
        let (start, end) = draft.raw.unwrap_or((start, start.saturating_add(u64::from(draft.pages % 64))));
        ranges.push(v1::PageRange { start, end });
        at = end;
    }
    ranges
}

/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    let file_pages = u64::from(input.file_pages);
    let (content, zero) = (ranges(&input.content), ranges(&input.zero));
    let pages =
        content.iter().fold(0_u64, |sum, range| sum.saturating_add(range.end.saturating_sub(range.start)));
    let is_small = pages <= CHUNK_PAGES;
    let exact = if is_small { usize::try_from(pages * PAGE_BYTES).unwrap() } else { 0 };
    let len = exact.saturating_add_signed(input.wrong_bytes.unwrap_or(0).into());
    let message = v1::MigratedPages {
        content: content.clone(),
        frame: vec![7; len].into(),
        compression: input.compression,
        zero: zero.clone(),
    };
    if let Some((at, byte)) = input.damage {
        let mut encoded = message.encode_to_vec();
        if let Some(nth) = usize::from(at).checked_rem(encoded.len()) {
            encoded[nth] = byte;
        }
        if let Ok(message) = v1::MigratedPages::decode(&*encoded) {
            check(ReceivedPages::decode(message, file_pages).ok(), file_pages);
        }
        return;
    }
    let decoded = ReceivedPages::decode(message, file_pages);
    // What compressed frames contain is not modelled.
    if input.compression == v1::FrameCompression::None as i32 {
        let is_valid =
            is_small && len == exact && are_valid(&content, file_pages) && are_valid(&zero, file_pages);
        assert_eq!(decoded.is_ok(), is_valid, "{content:?} {zero:?} in {file_pages} pages: {decoded:?}");
    }
    check(decoded.ok(), file_pages);
}

fn are_valid(ranges: &[v1::PageRange], file_pages: u64) -> bool {
    ranges.iter().all(|range| range.start < range.end && range.end <= file_pages)
        && ranges.is_sorted_by(|one, next| one.end <= next.start)
}

fn check(decoded: Option<ReceivedPages>, file_pages: u64) {
    let Some(ReceivedPages { content, bytes, zero }) = decoded else { return };
    for ranges in [&content, &zero] {
        assert!(ranges.iter().all(|range| !range.is_empty() && range.end().0 <= file_pages), "{ranges:?}");
        assert!(ranges.is_sorted_by(|one, next| one.end() <= next.start()), "{ranges:?}");
    }
    let pages: u64 = content.iter().map(|range: &PageRange| range.len()).sum();
    assert_eq!(to_u64(bytes.len()), pages * PAGE_BYTES);
}
