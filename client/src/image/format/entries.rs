//! Entries of CRIU's image files (`images/*.proto` of CRIU), as far as shared memory needs them.

/// `PE_PARENT` of CRIU: the pages are in the parent image.
pub const PAGE_IN_PARENT: u32 = 1;
/// `PE_LAZY` of CRIU: the pages may be restored on demand.
pub const PAGE_LAZY: u32 = 2;
/// `PE_PRESENT` of CRIU: the pages are in the pages file of this image.
pub const PAGE_PRESENT: u32 = 4;

/// The entry of `inventory.img`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct InventoryEntry {
    /// Version of the image format; see [`Self::VERSION`].
    #[prost(uint32, required, tag = "1")]
    pub img_version: u32,
}

impl InventoryEntry {
    /// `CRTOOLS_IMAGES_V1_1` of CRIU.
    pub const VERSION: u32 = 2;
}

/// An entry of `memfd.img`: one memfd.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MemfdInodeEntry {
    #[prost(string, required, tag = "1")]
    pub name: String,
    #[prost(uint32, required, tag = "2")]
    pub uid: u32,
    #[prost(uint32, required, tag = "3")]
    pub gid: u32,
    /// Bytes.
    #[prost(uint64, required, tag = "4")]
    pub size: u64,
    /// Number in the name of the pagemap file. CRIU uses the inode number.
    #[prost(uint32, required, tag = "5")]
    pub shmid: u32,
    /// `F_SEAL_*` bits.
    #[prost(uint32, required, tag = "6")]
    pub seals: u32,
    /// Number of the memfd among those of the image, from 1.
    #[prost(uint64, required, tag = "7")]
    pub inode_id: u64,
    /// `MFD_HUGETLB` and the page size, as for memfd_create(2).
    #[prost(uint32, optional, tag = "8")]
    pub hugetlb_flag: Option<u32>,
    /// Permission bits.
    #[prost(uint32, optional, tag = "9")]
    pub mode: Option<u32>,
}

/// The first entry of `pagemap-shmem-SHMID.img`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PagemapHead {
    /// Number in the name of the pages file.
    #[prost(uint32, required, tag = "1")]
    pub pages_id: u32,
}

/// A further entry of `pagemap-shmem-SHMID.img`: pages in ascending order. The pages of entries with [`PAGE_PRESENT`] follow each other in
/// the pages file.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PagemapEntry {
    /// Offset in the file, bytes.
    #[prost(uint64, required, tag = "1")]
    pub vaddr: u64,
    /// Number of pages, for versions of CRIU before `nr_pages`.
    #[prost(uint32, required, tag = "2")]
    pub compat_nr_pages: u32,
    /// Older form of [`PAGE_IN_PARENT`].
    #[prost(bool, optional, tag = "3")]
    pub in_parent: Option<bool>,
    /// `PAGE_*` bits. Absent in images of older versions: present, unless `in_parent`.
    #[prost(uint32, optional, tag = "4")]
    pub flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pub nr_pages: Option<u64>,
}

impl PagemapEntry {
    /// An entry of `pages` pages from byte `vaddr`.
    #[must_use]
    pub fn new(vaddr: u64, pages: u64, flags: u32) -> Self {
        // Readers that know `nr_pages` ignore the other field.
        let compat_nr_pages = u32::try_from(pages).unwrap_or(0);
        Self { vaddr, compat_nr_pages, in_parent: None, flags: Some(flags), nr_pages: Some(pages) }
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.nr_pages.unwrap_or(u64::from(self.compat_nr_pages))
    }

    /// `PAGE_*` bits, also of images of older versions.
    #[must_use]
    pub fn page_flags(&self) -> u32 {
        match self.flags {
            _ if self.in_parent == Some(true) => self.flags.unwrap_or(0) | PAGE_IN_PARENT,
            Some(flags) => flags,
            None => PAGE_PRESENT,
        }
    }
}
