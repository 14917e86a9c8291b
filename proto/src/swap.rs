//! Swap areas of the host, and where the content of swap slots is.

use std::path::PathBuf;

use crate::state::SwapSlot;

/// Where the content of a swap slot is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlotContent {
    /// In the swap area, unless zswap has it.
    Device,
    /// Nowhere: the kernel marks the slot as zero. The bytes in the swap area may be those of another page.
    Zero,
    /// The page is not swapped, the slot is in the swap cache, or the kernel's swap areas cannot be read.
    #[default]
    Unknown,
}

/// The swap slots of requested pages, and where their content is. Each element is valid for one moment during the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotContents {
    /// One element per requested page, in request order. `None`: the page is not swapped.
    pub slots: Vec<(Option<SwapSlot>, SlotContent)>,
    /// The swap areas of the host, in ascending order of swap types. Empty if the service cannot read them.
    pub areas: Vec<SwapArea>,
}

/// Kind of a swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapAreaKind {
    /// A block device.
    Partition,
    /// A file. Slots are pages of the file.
    File,
}

/// A swap area of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapArea {
    /// The kernel's index of the area.
    pub swap_type: u8,
    /// Kind of the area.
    pub kind: SwapAreaKind,
    /// Path as in `/proc/swaps`, without its escapes.
    pub path: PathBuf,
    /// Pages that the kernel can fill; the header is not among them.
    pub pages: u64,
    /// Major and minor number of the block device that has the slots: of a file, that of its file system.
    pub device: (u32, u32),
    /// Inode number of the file or device node.
    pub inode: u64,
}
