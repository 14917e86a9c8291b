//! The shared snapshot: a sealed memfd with a header and the states of a range of pages
//! (docs/wire-formats.md describes it to the byte).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::pagemap_entry::PagemapEntry;
use crate::provenance::{Moment, ProbeKind, Provenance, Uncertainty};
use crate::state::PageState;
use crate::units::{FileId, PageIndex, PageRange, PageSize, low_u32, to_u64, to_usize};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"FDMAPSNP";
/// The version of the layout that this crate writes.
pub const VERSION: u32 = 1;
/// Bytes of the header of this version; the body begins there.
pub const HEADER_BYTES: usize = 128;

const FLAG_TOLD_APART: u32 = 1;
const FLAG_SLOTS: u32 = 2;

/// How the body tells the states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLayout {
    /// A little-endian 64-bit pagemap entry for each page.
    Entries,
    /// 2 bits for each page, the first page in the lowest bits of the first byte.
    States,
}

impl BodyLayout {
    /// Bytes of a body of `pages` pages; `None` if that overflows.
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

/// The header of a shared snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// How the body tells the states.
    pub layout: BodyLayout,
    /// Swapped entries carry their slot.
    pub slots: bool,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// The pages that the body tells of.
    pub range: PageRange,
    /// The file.
    pub file: FileId,
    /// Its size in pages when it was read.
    pub file_pages: u64,
    /// What the states rest on.
    pub provenance: Provenance,
}

/// Why bytes are no shared snapshot that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not even a header.
    #[error("shared snapshot of {0} bytes is shorter than its header of {HEADER_BYTES}")]
    Short(u64),
    /// Something else.
    #[error("no shared snapshot: it begins with {0:02x?}")]
    Magic([u8; 8]),
    /// Written by a newer service.
    #[error("shared snapshot of version {0}; this program reads version {VERSION}")]
    Version(u32),
    /// A field has a value that no snapshot has.
    #[error("field {field} of the shared snapshot's header is {value}")]
    Field {
        /// The field's name in docs/wire-formats.md.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The body is not as long as the header says.
    #[error("shared snapshot of {got} bytes should have {expected}")]
    Length {
        /// By the header.
        expected: u64,
        /// In fact.
        got: u64,
    },
}

impl Header {
    /// The bytes of header and body together; `None` if that overflows.
    #[must_use]
    pub fn total_bytes(&self) -> Option<u64> {
        self.layout.body_bytes(self.range.len())?.checked_add(to_u64(HEADER_BYTES))
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut flags = 0;
        if self.provenance.swap_cached_distinguished {
            flags |= FLAG_TOLD_APART;
        }
        if self.slots {
            flags |= FLAG_SLOTS;
        }
        let probe = match self.provenance.probe {
            ProbeKind::Xarray => 1,
            ProbeKind::Syscalls => 2,
        };
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
            uncertainty.swap_cache_undetermined,
        ] {
            out.put(&word.to_le_bytes());
        }
        out.bytes
    }

    /// Reads a header and checks that `total_bytes`, the length of header and body, fits it.
    ///
    /// # Errors
    /// [`LayoutError`] names the field that is wrong.
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
        if flags & !(FLAG_TOLD_APART | FLAG_SLOTS) != 0 {
            return Err(field("flags", u64::from(flags)));
        }
        let probe = match u32_at(24) {
            1 => ProbeKind::Xarray,
            2 => ProbeKind::Syscalls,
            other => return Err(field("probe", u64::from(other))),
        };
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
                    swap_cache_undetermined: u64_at(120),
                },
                swap_cached_distinguished: flags & FLAG_TOLD_APART != 0,
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
    // 64 bits of nanoseconds last until 2554; a clock before 1970 counts as 1970.
    wall.duration_since(UNIX_EPOCH).ok().and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0)
}

fn moment(monotonic_ns: u64, wall_ns: u64) -> Moment {
    Moment { monotonic_ns, wall: UNIX_EPOCH + Duration::from_nanos(wall_ns) }
}

/// The two bits of a state in [`BodyLayout::States`].
#[must_use]
pub const fn state_bits(state: PageState) -> u8 {
    match state {
        PageState::Hole => 0,
        PageState::Resident => 1,
        PageState::Swapped | PageState::SwapCached => 2,
        PageState::Unknown => 3,
    }
}

/// The entry of the `nth` page of a [`BodyLayout::Entries`] body; `None` past its end.
#[must_use]
pub fn entry_at(body: &[u8], nth: u64) -> Option<PagemapEntry> {
    let at = usize::try_from(nth.checked_mul(8)?).ok()?;
    let word = body.get(at..)?.first_chunk::<8>()?;
    Some(PagemapEntry(u64::from_le_bytes(*word)))
}

/// The state of the `nth` page of a [`BodyLayout::States`] body; `None` past its end.
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
                probe: ProbeKind::Xarray,
                begin: moment(5, 1_000),
                end: moment(6, 2_000),
                uncertainty: Uncertainty {
                    unsettled_leaves: 1,
                    unknown_pages: 2,
                    swap_cache_undetermined: 3,
                },
                swap_cached_distinguished: true,
                instance: 9,
            },
        }
    }

    proptest! {
        #[test]
        fn header_survives(first in 0_u64..1 << 40, pages in 0_u64..1 << 40, entries in any::<bool>()) {
            let layout = if entries { BodyLayout::Entries } else { BodyLayout::States };
            let header = header(first, pages, layout);
            let total = header.total_bytes().unwrap();
            prop_assert!(Header::decode(&header.encode(), total + 1).is_err());
            prop_assert_eq!(Header::decode(&header.encode(), total), Ok(header));
        }

        #[test]
        fn any_bytes_are_a_header_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), total in any::<u64>()) {
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
    fn every_byte_of_the_header_is_written() {
        let bytes = header(1 << 40, 1 << 41, BodyLayout::Entries).encode();
        assert_eq!(&bytes[..8], b"FDMAPSNP");
        assert_eq!(bytes[120], 3, "the last field begins at 120");
    }

    #[test]
    fn body_is_read_at_its_ends_and_not_beyond() {
        assert_eq!(state_at(&[0b11_10_01_00], 3), Some(PageState::Unknown));
        assert_eq!(state_at(&[0b11_10_01_00], 1), Some(PageState::Resident));
        assert_eq!(state_at(&[0b11_10_01_00], 4), None);
        assert_eq!(entry_at(&[1, 0, 0, 0, 0, 0, 0, 0], 0), Some(PagemapEntry(1)));
        assert_eq!(entry_at(&[1, 0, 0, 0, 0, 0, 0, 0], 1), None);
        assert_eq!(entry_at(&[0; 8], u64::MAX), None);
    }
}
