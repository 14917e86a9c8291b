//! The frames of an image file: two magic numbers, then entries with their length in front.
//!
//! ```text
//!   u32 0x54564319 | u32 magic of the kind | u32 length, protobuf | u32 length, protobuf | ...     (little-endian)
//! ```

use std::io::{self, ErrorKind, Read};

use fdmap_proto::units::to_u64;
use prost::Message;

/// `IMG_COMMON_MAGIC` of CRIU.
const COMMON_MAGIC: u32 = 0x5456_4319;
/// Longest entry that is read, bytes. Entries of memfds and page runs have some hundred bytes at most.
const MAX_ENTRY_BYTES: u32 = 1 << 16;

/// Kind of an image file, by its second magic number (`criu/include/magic.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum ImageKind {
    Inventory,
    Memfd,
    Pagemap,
}

impl ImageKind {
    const fn magic(self) -> u32 {
        match self {
            Self::Inventory => 0x5831_3116,
            Self::Memfd => 0x4845_3499,
            Self::Pagemap => 0x5608_4025,
        }
    }
}

/// Fault of an image file.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The file ends inside a magic number or an entry.
    #[error("truncated at byte {offset}")]
    Truncated {
        /// Where the incomplete part begins.
        offset: u64,
    },
    #[error("byte {offset}: magic number {found:#010x}, expected {expected:#010x} ({kind} image)")]
    Magic { offset: u64, found: u32, expected: u32, kind: ImageKind },
    #[error("byte {offset}: entry of {bytes} bytes, of at most {MAX_ENTRY_BYTES}")]
    TooLong { offset: u64, bytes: u32 },
    #[error("byte {offset}: invalid protobuf entry")]
    Entry {
        offset: u64,
        #[source]
        error: prost::DecodeError,
    },
    #[error("byte {offset}: {reason}")]
    Invalid { offset: u64, reason: String },
    #[error("reading at byte {offset}")]
    Read {
        offset: u64,
        #[source]
        error: io::Error,
    },
}

/// The bytes in front of the entries.
#[must_use]
pub fn header(kind: ImageKind) -> Vec<u8> {
    [COMMON_MAGIC, kind.magic()].into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Appends an entry with its length.
pub fn append_entry(bytes: &mut Vec<u8>, entry: &impl Message) {
    // Entries are built from names of at most 249 bytes and numbers.
    let len = u32::try_from(entry.encoded_len()).unwrap_or(u32::MAX);
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&entry.encode_to_vec());
}

/// Reads the entries of an image file. Memory is bounded by the longest entry.
#[derive(Debug)]
pub struct EntryReader<R> {
    reader: R,
    offset: u64,
    buffer: Vec<u8>,
}

impl<R: Read> EntryReader<R> {
    /// Reads and checks the magic numbers.
    ///
    /// # Errors
    /// [`FormatError`]
    pub fn new(reader: R, kind: ImageKind) -> Result<Self, FormatError> {
        let mut entries = Self { reader, offset: 0, buffer: Vec::new() };
        for expected in [COMMON_MAGIC, kind.magic()] {
            let offset = entries.offset;
            let found = entries.word()?.ok_or(FormatError::Truncated { offset })?;
            if found != expected {
                return Err(FormatError::Magic { offset, found, expected, kind });
            }
        }
        Ok(entries)
    }

    /// Offset of the next entry, bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next entry; `None` at the end of the file.
    ///
    /// # Errors
    /// [`FormatError`]
    pub fn next_entry<M: Message + Default>(&mut self) -> Result<Option<M>, FormatError> {
        let offset = self.offset;
        let Some(bytes) = self.word()? else { return Ok(None) };
        if bytes > MAX_ENTRY_BYTES {
            return Err(FormatError::TooLong { offset, bytes });
        }
        self.buffer.resize(usize::try_from(bytes).unwrap_or(0), 0);
        let mut buffer = std::mem::take(&mut self.buffer);
        let filled = self.fill(&mut buffer)?;
        self.buffer = buffer;
        if filled < self.buffer.len() {
            return Err(FormatError::Truncated { offset });
        }
        M::decode(self.buffer.as_slice()).map(Some).map_err(|error| FormatError::Entry { offset, error })
    }

    /// The next 32-bit word; `None` at the end of the file.
    fn word(&mut self) -> Result<Option<u32>, FormatError> {
        let offset = self.offset;
        let mut bytes = [0; 4];
        match self.fill(&mut bytes)? {
            0 => Ok(None),
            4 => Ok(Some(u32::from_le_bytes(bytes))),
            _ => Err(FormatError::Truncated { offset }),
        }
    }

    /// Reads until the buffer is full or the file ends.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, FormatError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.reader.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(FormatError::Read { offset: self.offset, error }),
            }
        }
        self.offset += to_u64(filled);
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{MemfdInodeEntry, PAGE_IN_PARENT, PAGE_PRESENT, PagemapEntry, PagemapHead};
    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<PagemapEntry>, FormatError> {
        let mut reader = EntryReader::new(bytes, ImageKind::Pagemap)?;
        let mut entries = Vec::new();
        while let Some(entry) = reader.next_entry()? {
            entries.push(entry);
        }
        Ok(entries)
    }

    fn image(entries: &[PagemapEntry]) -> Vec<u8> {
        let mut bytes = header(ImageKind::Pagemap);
        entries.iter().for_each(|entry| append_entry(&mut bytes, entry));
        bytes
    }

    #[test]
    fn bytes_are_those_of_criu() {
        let mut bytes = header(ImageKind::Pagemap);
        append_entry(&mut bytes, &PagemapHead { pages_id: 1 });
        append_entry(&mut bytes, &PagemapEntry::new(0x2000, 3, PAGE_PRESENT));
        let expected = [
            0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56, // magic numbers
            2, 0, 0, 0, 0x08, 1, // pages_id
            9, 0, 0, 0, 0x08, 0x80, 0x40, 0x10, 3, 0x20, 4, 0x28, 3,
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn flags_of_older_images_are_derived() {
        let older = PagemapEntry { vaddr: 0, compat_nr_pages: 7, ..PagemapEntry::default() };
        assert_eq!((older.pages(), older.page_flags()), (7, PAGE_PRESENT));
        let inherited = PagemapEntry { in_parent: Some(true), ..older };
        assert_eq!(inherited.page_flags(), PAGE_IN_PARENT);
        assert_eq!(PagemapEntry::new(0, 1 << 33, PAGE_PRESENT).pages(), 1 << 33);
    }

    #[test]
    fn each_truncation_is_found() {
        let bytes = image(&[PagemapEntry::new(0, 1, PAGE_PRESENT), PagemapEntry::new(4096, 2, PAGE_PRESENT)]);
        let ends = [8, 8 + (bytes.len() - 8 - 13), bytes.len()];
        for len in 0..bytes.len() {
            let result = read(&bytes[..len]);
            assert_eq!(result.is_ok(), ends.contains(&len), "{len}: {result:?}");
        }
    }

    #[test]
    fn lying_lengths_and_magic_numbers_are_refused_with_their_offset() {
        let mut bytes = header(ImageKind::Pagemap);
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(read(&bytes), Err(FormatError::TooLong { offset: 8, bytes: u32::MAX })));
        let mut bytes = image(&[]);
        bytes[5] ^= 1;
        assert!(matches!(read(&bytes), Err(FormatError::Magic { offset: 4, .. })));
        assert!(matches!(
            EntryReader::new(&bytes[..3], ImageKind::Memfd),
            Err(FormatError::Truncated { offset: 0 })
        ));
    }

    proptest! {
        #[test]
        fn entries_are_read_as_written(entries in proptest::collection::vec((any::<u64>(), any::<u64>(), 0_u32..8), 0..20)) {
            let entries: Vec<_> =
                entries.into_iter().map(|(vaddr, pages, flags)| PagemapEntry::new(vaddr, pages, flags)).collect();
            prop_assert_eq!(read(&image(&entries)).unwrap(), entries);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut image = header(ImageKind::Memfd);
            image.extend_from_slice(&bytes);
            let mut reader = EntryReader::new(image.as_slice(), ImageKind::Memfd).unwrap();
            while let Ok(Some(MemfdInodeEntry { .. })) = reader.next_entry() {
                prop_assert!(reader.offset() <= to_u64(image.len()));
            }
        }
    }
}
