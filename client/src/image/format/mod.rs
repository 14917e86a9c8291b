//! CRIU's image files: the protobuf entries, and the frames around them.
//!
//! Owns the bytes of one image file. Knows neither directories nor the content of pages.

mod entries;
mod framing;

pub use entries::{
    InventoryEntry, MemfdInodeEntry, PAGE_IN_PARENT, PAGE_LAZY, PAGE_PRESENT, PagemapEntry, PagemapHead,
};
pub use framing::{EntryReader, FormatError, ImageKind, append_entry, header};
