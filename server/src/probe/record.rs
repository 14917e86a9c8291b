//! The records that `bpf/page_state.bpf.c` writes: `bpf/page_record.h`, field by field.

use bytemuck::{Pod, Zeroable};

/// Slots of an XArray node.
pub const SLOTS: usize = 64;
/// log2 of [`SLOTS`].
pub const SHIFT: u32 = 6;

/// A node of the XArray as it was copied.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NodeRecord {
    /// Index of the first page under the node.
    pub base: u64,
    /// A slot stands for `1 << shift` pages; 0 is a leaf.
    pub shift: u32,
    /// Not 0: the node could not be read, slots mean nothing.
    pub fault: u32,
    /// The slots.
    pub slots: [u64; SLOTS],
    /// The slots read once more: of leaves always, one level above only along with attributes.
    pub again: [u64; SLOTS],
}

/// [`RawAttributes::flags`] is there.
pub const KNOWN_FLAGS: u32 = 1;
/// [`RawAttributes::map_count`] is there.
pub const KNOWN_MAP_COUNT: u32 = 2;
/// [`RawAttributes::refcount`] is there.
pub const KNOWN_REFCOUNT: u32 = 4;
/// The folio is a large one, and its `entire_map_count` and `pin_count` are there.
pub const KNOWN_FOLIO: u32 = 8;
/// [`RawAttributes::large_map_count`] is there.
pub const KNOWN_LARGE: u32 = 16;

/// What was read of one page and its folio.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RawAttributes {
    /// `page->flags` of the folio, in the kernel's own bit numbers.
    pub flags: u64,
    /// `page->_mapcount`: -1 is none.
    pub map_count: i32,
    /// References to the folio.
    pub refcount: i32,
    /// `folio->_entire_mapcount`: -1 is none.
    pub entire_map_count: i32,
    /// `folio->_pincount`
    pub pin_count: i32,
    /// `folio->_large_mapcount`: mappings of all its pages together, -1 is none.
    pub large_map_count: i32,
    /// `KNOWN_*`
    pub known: u32,
}

/// Attributes of the 64 pages from `base` on.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AttributesRecord {
    /// The first page.
    pub base: u64,
    /// Nothing.
    pub pad: u64,
    /// One a page.
    pub pages: [RawAttributes; SLOTS],
}

/// What one run came to.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct WalkResult {
    /// `xa_head` of the file.
    pub head: u64,
    /// The first page that was not walked; beyond the last when all were.
    pub next: u64,
    /// If the head is a node: a slot of it stands for `1 << head_shift` pages.
    pub head_shift: u32,
    /// Node records written, counted from the first one allowed.
    pub records: u32,
    /// Attributes records written.
    pub attributes: u32,
    /// `STATUS_*`
    pub status: u32,
}

/// The walk was made.
pub const STATUS_OK: u32 = 0;
/// No such descriptor in the calling process.
pub const STATUS_BAD_FD: u32 = 1;
/// The file's structures could not be read.
pub const STATUS_FAULT: u32 = 2;
/// This kernel's structures are not as expected: nodes do not have 64 slots, or a field is not there.
pub const STATUS_LAYOUT: u32 = 3;

const _: () = assert!(size_of::<NodeRecord>() == 1040);
const _: () = assert!(size_of::<RawAttributes>() == 32);
const _: () = assert!(size_of::<AttributesRecord>() == 2064);
const _: () = assert!(size_of::<WalkResult>() == 32);
