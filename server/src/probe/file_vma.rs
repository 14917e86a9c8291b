//! The VMAs that map a file, and the address spaces to which they belong. Data only.

use std::fmt;
use std::num::NonZeroU64;

use fdmap_proto::units::PageIndex;
use fdmap_sys::address::AddressRange;

/// The address of a kernel object, which identifies it while the object exists. It never leaves the service: `Debug` hides it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelAddress(NonZeroU64);

impl KernelAddress {
    /// `None` for a null pointer.
    #[must_use]
    pub fn new(address: u64) -> Option<Self> {
        NonZeroU64::new(address).map(Self)
    }

    /// The key of the object in a map of a BPF program.
    #[cfg(feature = "xarray")]
    #[must_use]
    pub(crate) const fn to_ne_bytes(self) -> [u8; 8] {
        self.0.get().to_ne_bytes()
    }
}

impl fmt::Debug for KernelAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("KernelAddress")
    }
}

/// The page tables of one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    /// The address space.
    pub space: KernelAddress,
    /// As `VmPTE` of `/proc/PID/status`; 0 when the kernel has freed the address space.
    pub bytes: u64,
}

/// One VMA of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileVma {
    pub range: AddressRange,
    /// The base page of the file that is mapped at the start of `range`.
    pub first_page: PageIndex,
    /// Shared, and writable now or after an mprotect(2).
    pub writable: bool,
    /// The address space. `private_data` of its `/proc/PID/pagemap` is the same address.
    pub mm: KernelAddress,
    /// The userfaultfd with which the VMA is registered. `private_data` of its descriptors is the same address.
    pub userfaultfd: Option<KernelAddress>,
    /// Registered for write protection.
    pub write_protected: bool,
    /// The process, as the pid namespace of the service numbers it. `None`: not visible from there, or unknown. While a process
    /// is created, this may be its parent: do not identify an address space by it.
    pub pid: Option<u32>,
}

/// Result of a walk over the VMAs of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapperWalk {
    /// The kernel or the build lacks what the walk needs.
    Unavailable(String),
    /// The VMAs changed during every walk, or there are too many.
    Unknown,
    /// Every VMA that existed throughout the call, in all processes. VMAs that were created or removed meanwhile may be missing.
    Found(Vec<FileVma>),
}
