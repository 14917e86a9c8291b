//! The calls that a holder makes, and their results. Data only.

use fdmap_proto::units::PageRange;
use fdmap_sys::SyscallError;
use fdmap_sys::address::AddressRange;

use crate::tracking::mapping::{MappedFile, MappingExtent, VmaExtent};

/// A call on one address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SpaceCall {
    /// Opens the pagemap and the maps of a process, and returns them.
    Open { pid: u32 },
    /// Finds the parts of each extent that shared VMAs map to the same pages of the file. `registered`: only of VMAs that are
    /// registered for asynchronous write protection.
    FindVmas { file: MappedFile, extents: Vec<MappingExtent>, registered: bool },
    /// Finds the shared VMAs of the file that are writable now.
    FindWritable { file: MappedFile },
    /// Collects written pages and write-protects them again, outside of the guarded ranges.
    Harvest { file: MappedFile, mappings: Vec<Vec<MappingExtent>>, guarded: Vec<AddressRange> },
    /// Registers and write-protects all ranges, or none.
    Register { ranges: Vec<AddressRange> },
    /// Unregisters ranges. Those that are not registered are skipped.
    Unregister { ranges: Vec<AddressRange> },
    /// Removes the write protection of every registered part of the ranges.
    Unprotect { ranges: Vec<AddressRange> },
    /// Checks whether the address space exists.
    IsAlive,
}

/// The result of a [`SpaceCall`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SpaceResult {
    Done,
    /// For each extent.
    Vmas(Vec<Vec<VmaExtent>>),
    Writable(Vec<AddressRange>),
    Harvested(HarvestedMappings),
    /// The range at this position was refused. No range is registered.
    Refused {
        at: usize,
        error: SyscallError,
    },
    /// `None`: unknown.
    Alive(Option<bool>),
    Failed(SyscallError),
}

impl SpaceResult {
    /// For an error.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Vmas(_) => "VMAs",
            Self::Writable(_) => "writable ranges",
            Self::Harvested(_) => "harvest",
            Self::Refused { .. } => "refused",
            Self::Alive(_) => "alive",
            Self::Failed(_) => "failed",
        }
    }
}

/// What a harvest found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HarvestedMappings {
    pub(crate) written: Vec<PageRange>,
    /// In the order of the call.
    pub(crate) mappings: Vec<HarvestedMapping>,
}

/// What a harvest found of one mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HarvestedMapping {
    /// The extents that are still mapped and registered.
    pub(crate) mapped: Vec<MappingExtent>,
    /// Pages whose written bits are lost.
    pub(crate) lost: Vec<PageRange>,
}
