//! Layout of a shared snapshot: a sealed memfd with a header and the states of a range of pages. docs/wire-formats.md
//! specifies each byte.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use strum::VariantArray as _;

use crate::pagemap_entry::PagemapEntry;
use crate::provenance::{Moment, ProbeKind, Provenance, Uncertainty};
use crate::state::PageState;
use crate::units::{FileId, PageIndex, PageRange, PageSize, low_u32, to_u64, to_usize};

/// First eight bytes of a shared snapshot.
pub const MAGIC: [u8; 8] = *b"FDMAPSNP";
/// Layout version that this crate reads and writes.
pub const VERSION: u32 = 1;
/// Size of the header in bytes, and offset of the body.
pub const HEADER_BYTES: usize = 128;

const FLAG_SWAP_CACHED_DISTINGUISHED: u32 = 1;
const FLAG_SLOTS: u32 = 2;

/// Encoding of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLayout {
    /// One little-endian 64-bit pagemap entry per page.
    Entries,
    /// 2 bits per page; the first page is in the lowest bits of the first byte.
    States,
}

impl BodyLayout {
    /// Size in bytes of a body of `pages` pages; `None` on overflow.
    #[must_use]
    pub const fn body_bytes(self, pages: u64) -> Option<u64> {
        match self {
            Self::Entries => pages.checked_mul(8),
            Self::States => Some(pages.div_ceil(4)),
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Entries => 1,
            Self::States => 2,
        }
    }
}

/// Header of a shared snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Encoding of the body.
    pub layout: BodyLayout,
    /// Entries of swapped pages contain the swap slot.
    pub slots: bool,
    /// Base page size.
    pub page_size: PageSize,
    /// Pages in the body.
    pub range: PageRange,
    /// File whose pages are in the body.
    pub file: FileId,
    /// Size of the file in pages when it was read.
    pub file_pages: u64,
    /// Provenance of the states.
    pub provenance: Provenance,
}

/// Reason why bytes are not a readable shared snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Fewer bytes than a header.
    #[error("shared snapshot of {0} bytes is shorter than its header of {HEADER_BYTES} bytes")]
    Short(u64),
    /// The magic number differs.
    #[error("not a shared snapshot: the first bytes are {0:02x?}")]
    Magic([u8; 8]),
    /// The layout version is not supported.
    #[error("shared snapshot has layout version {0}; supported is version {VERSION}")]
    Version(u32),
    /// A header field has an invalid value.
    #[error("invalid header field {field} = {value} in a shared snapshot")]
    Field {
        /// Field name, as in docs/wire-formats.md.
        field: &'static str,
        /// Invalid value.
        value: u64,
    },
    /// The size does not match the header.
    #[error("shared snapshot has {got} bytes; its header requires {expected}")]
    Length {
        /// Size required by the header, bytes.
        expected: u64,
        /// Actual size, bytes.
        got: u64,
    },
}

impl Header {
    /// Size of header and body in bytes; `None` on overflow.
    #[must_use]
    pub fn total_bytes(&self) -> Option<u64> {
        self.layout.body_bytes(self.range.len())?.checked_add(to_u64(HEADER_BYTES))
    }

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut flags = 0;
        if self.provenance.swap_cached_distinguished {
            flags |= FLAG_SWAP_CACHED_DISTINGUISHED;
        }
        if self.slots {
            flags |= FLAG_SLOTS;
        }
        let probe = probe_number(self.provenance.probe);
        let mut out = Writer { bytes: [0; HEADER_BYTES], at: 0 };
        out.put(&MAGIC);
        for word in [
            VERSION,
            low_u32(to_u64(HEADER_BYTES)),
            self.layout.number(),
            flags,
            probe,
            low_u32(self.page_size.bytes()),
        ] {
            out.put(&word.to_le_bytes());
        }
        let uncertainty = self.provenance.uncertainty;
        for word in [
            self.range.start().0,
            self.range.len(),
            self.file.get(),
            self.provenance.instance,
            self.file_pages,
            self.provenance.begin.monotonic_ns,
            self.provenance.end.monotonic_ns,
            wall_ns(self.provenance.begin.wall),
            wall_ns(self.provenance.end.wall),
            uncertainty.unsettled_leaves,
            uncertainty.unknown_pages,
            uncertainty.swap_cache_undetermined_pages,
        ] {
            out.put(&word.to_le_bytes());
        }
        out.bytes
    }

    /// Decodes a header. `total_bytes` is the size of header and body, which must match the header.
    ///
    /// # Errors
    /// [`LayoutError`] with the invalid field.
    pub fn decode(bytes: &[u8], total_bytes: u64) -> Result<Self, LayoutError> {
        let header = bytes.first_chunk::<HEADER_BYTES>().ok_or(LayoutError::Short(to_u64(bytes.len())))?;
        let u32_at =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let field = |field, value| LayoutError::Field { field, value };

        let magic = u64_at(0).to_le_bytes();
        if magic != MAGIC {
            return Err(LayoutError::Magic(magic));
        }
        if u32_at(8) != VERSION {
            return Err(LayoutError::Version(u32_at(8)));
        }
        if to_usize(u64::from(u32_at(12))) != HEADER_BYTES {
            return Err(field("header_bytes", u64::from(u32_at(12))));
        }
        let layout = match u32_at(16) {
            1 => BodyLayout::Entries,
            2 => BodyLayout::States,
            other => return Err(field("layout", u64::from(other))),
        };
        let flags = u32_at(20);
        if flags & !(FLAG_SWAP_CACHED_DISTINGUISHED | FLAG_SLOTS) != 0 {
            return Err(field("flags", u64::from(flags)));
        }
        let number = u32_at(24);
        let probe = ProbeKind::VARIANTS.iter().copied().find(|probe| probe_number(*probe) == number);
        let probe = probe.ok_or(field("probe", u64::from(number)))?;
        let page_size = u64::from(u32_at(28));
        let page_size = PageSize::new(page_size).ok_or(field("page_size", page_size))?;
        let (first, count) = (u64_at(32), u64_at(40));
        let end = first.checked_add(count).ok_or(field("page_count", count))?;
        let range = PageRange::new(PageIndex(first), PageIndex(end)).ok_or(field("page_count", count))?;
        let header = Self {
            layout,
            slots: flags & FLAG_SLOTS != 0,
            page_size,
            range,
            file: FileId::new(u64_at(48)).ok_or(field("file_id", 0))?,
            file_pages: u64_at(64),
            provenance: Provenance {
                probe,
                begin: moment(u64_at(72), u64_at(88)),
                end: moment(u64_at(80), u64_at(96)),
                uncertainty: Uncertainty {
                    unsettled_leaves: u64_at(104),
                    unknown_pages: u64_at(112),
                    swap_cache_undetermined_pages: u64_at(120),
                },
                swap_cached_distinguished: flags & FLAG_SWAP_CACHED_DISTINGUISHED != 0,
                instance: u64_at(56),
            },
        };
        let expected = header.total_bytes().ok_or(field("page_count", count))?;
        if expected == total_bytes {
            Ok(header)
        } else {
            Err(LayoutError::Length { expected, got: total_bytes })
        }
    }
}

/// The number of a probe in the header (docs/wire-formats.md).
const fn probe_number(probe: ProbeKind) -> u32 {
    match probe {
        ProbeKind::Xarray => 1,
        ProbeKind::Syscalls => 2,
    }
}

struct Writer {
    bytes: [u8; HEADER_BYTES],
    at: usize,
}

impl Writer {
    fn put(&mut self, field: &[u8]) {
        self.bytes[self.at..self.at + field.len()].copy_from_slice(field);
        self.at += field.len();
    }
}

fn wall_ns(wall: SystemTime) -> u64 {
    // 64-bit nanoseconds overflow in the year 2554. A clock before 1970 is encoded as 1970.
    wall.duration_since(UNIX_EPOCH).ok().and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0)
}

fn moment(monotonic_ns: u64, wall_ns: u64) -> Moment {
    Moment { monotonic_ns, wall: UNIX_EPOCH + Duration::from_nanos(wall_ns) }
}

/// Encodes a state as the two bits of [`BodyLayout::States`].
#[must_use]
pub const fn state_bits(state: PageState) -> u8 {
    match state {
        PageState::Hole => 0,
        PageState::Resident => 1,
        PageState::Swapped | PageState::SwapCached => 2,
        PageState::Unknown => 3,
    }
}

/// Entry of the `nth` page in a [`BodyLayout::Entries`] body; `None` past its end.
#[must_use]
pub fn entry_at(body: &[u8], nth: u64) -> Option<PagemapEntry> {
    let at = usize::try_from(nth.checked_mul(8)?).ok()?;
    let word = body.get(at..)?.first_chunk::<8>()?;
    Some(PagemapEntry(u64::from_le_bytes(*word)))
}

/// State of the `nth` page in a [`BodyLayout::States`] body; `None` past its end.
#[must_use]
pub fn state_at(body: &[u8], nth: u64) -> Option<PageState> {
    let byte = body.get(usize::try_from(nth / 4).ok()?)?;
    Some(match byte >> (2 * (nth % 4)) & 3 {
        0 => PageState::Hole,
        1 => PageState::Resident,
        2 => PageState::Swapped,
        _ => PageState::Unknown,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(first: u64, pages: u64, layout: BodyLayout) -> Header {
        Header {
            layout,
            slots: layout == BodyLayout::Entries,
            page_size: PageSize::new(4096).unwrap(),
            range: PageRange::at(PageIndex(first), pages),
            file: FileId::new(0xfeed).unwrap(),
            file_pages: first + pages,
            provenance: Provenance {
                probe: if layout == BodyLayout::Entries { ProbeKind::Xarray } else { ProbeKind::Syscalls },
                begin: moment(5, 1_000),
                end: moment(6, 2_000),
                uncertainty: Uncertainty {
                    unsettled_leaves: 1,
                    unknown_pages: 2,
                    swap_cache_undetermined_pages: 3,
                },
                swap_cached_distinguished: true,
                instance: 9,
            },
        }
    }

    proptest! {
        #[test]
        fn encoded_header_is_decoded(first in 0_u64..1 << 40, pages in 0_u64..1 << 40, entries in any::<bool>()) {
            let layout = if entries { BodyLayout::Entries } else { BodyLayout::States };
            let header = header(first, pages, layout);
            let total = header.total_bytes().unwrap();
            prop_assert!(Header::decode(&header.encode(), total + 1).is_err());
            prop_assert_eq!(Header::decode(&header.encode(), total), Ok(header));
        }

        #[test]
        fn any_bytes_are_a_header_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200), total in any::<u64>()) {
            let mut with_magic = bytes.clone();
            if with_magic.len() > 12 {
                with_magic[..8].copy_from_slice(&MAGIC);
                with_magic[8..12].copy_from_slice(&1_u32.to_le_bytes());
            }
            for bytes in [bytes, with_magic] {
                if let Ok(header) = Header::decode(&bytes, total) {
                    prop_assert_eq!(header.total_bytes(), Some(total));
                }
            }
        }
    }

    #[test]
    fn header_fields_have_the_documented_offsets() {
        let bytes = header(1 << 40, 1 << 41, BodyLayout::Entries).encode();
        assert_eq!(&bytes[..8], b"FDMAPSNP");
        assert_eq!(bytes[120], 3, "the last field begins at 120");
    }

    #[test]
    fn pages_past_the_end_of_the_body_have_no_state() {
        assert_eq!(state_at(&[0b11_10_01_00], 3), Some(PageState::Unknown));
        assert_eq!(state_at(&[0b11_10_01_00], 1), Some(PageState::Resident));
        assert_eq!(state_at(&[0b11_10_01_00], 4), None);
        assert_eq!(entry_at(&[1, 0, 0, 0, 0, 0, 0, 0], 0), Some(PagemapEntry(1)));
        assert_eq!(entry_at(&[1, 0, 0, 0, 0, 0, 0, 0], 1), None);
        assert_eq!(entry_at(&[0; 8], u64::MAX), None);
    }
}
