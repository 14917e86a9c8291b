//! What one look at the kernel found. Data only: [`super::Observer`] fills it, `classify` judges it.

use std::collections::BTreeSet;
use std::time::Instant;

use fdmap_proto::units::PageRange;
use fdmap_sys::address::AddressRange;
use fdmap_sys::memfd::FileOrigin;

use super::remaps::Remaps;
use crate::probe::KernelAddress;
use crate::tracking::baseline::InodeBaseline;

/// Properties of a file that do not change while it is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileTraits {
    /// Write faults on hugetlb pages do not change ctime.
    pub(crate) hugetlb: bool,
    /// Descriptors may exist whose writes raise no event, because the memfd was not created by the service.
    pub(crate) unnotified_descriptors: bool,
    /// Who created the file: it decides how a process without a descriptor can map it.
    pub(crate) origin: FileOrigin,
}

/// A thread, by its id in the initial pid namespace.
pub type Thread = u32;

/// The writers that events of the file name (FAN_MODIFY or IN_MODIFY).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Modifiers {
    pub(crate) threads: BTreeSet<Thread>,
    /// A write whose thread is not known.
    pub(crate) unnamed: bool,
}

impl Modifiers {
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty() && !self.unnamed
    }
}

/// The signals of a file since the last observation, and its mappings now, before any written bit is harvested.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    /// Read first. A write that changes the inode after this belongs to the next generation, or to both.
    pub(crate) inode: InodeBaseline,
    pub(crate) modifiers: Modifiers,
    /// Signals were lost, or the service was not running.
    pub(crate) signals_lost: bool,
    /// Writable shared VMAs of the file as the kernel counts them; `None`: the kernel does not report the count.
    pub(crate) writable_vmas: Option<u64>,
    /// Number of VMAs of tracked mappings; `None`: at least one tracked mapping changed or was unmapped.
    pub(crate) intact_vmas: Option<u64>,
    /// Calls that were not the service's may have taken written bits since the last harvest, or a range is no longer
    /// write-protected.
    pub(crate) bits_taken: bool,
    /// Address spaces that were forked, or may have been, where no fork event reports the child.
    pub(crate) forked: Vec<AddressSpacePages>,
    /// A child of a tracked process whose forks are neither observed nor counted was reaped.
    pub(crate) child_reaped: bool,
    /// Forks of a tracked process are neither observed nor counted, and processes were started on this host.
    pub(crate) forks_possible: bool,
    /// `None`: system calls are not traced.
    pub(crate) calls: Option<CallWrites>,
    /// A loop device has the file open, or had it since the last observation, or this is unknown.
    pub(crate) loop_device: bool,
    /// The file was attached to what may write to it at any time: iommufd or FUSE passthrough.
    pub(crate) permanently_attached: bool,
    pub(crate) time: Instant,
}

impl Observation {
    /// True if the tracked mappings are intact and are the only writable mappings.
    #[must_use]
    pub(crate) fn all_writers_tracked(&self) -> bool {
        self.writable_vmas.is_some() && self.writable_vmas == self.intact_vmas
    }

    #[must_use]
    pub(crate) fn ctime_changed(&self, baseline: &InodeBaseline) -> bool {
        self.inode.ctime != baseline.ctime
    }

    /// True if the inode may have changed: its time is another one, or proves nothing.
    #[must_use]
    pub(crate) fn ctime_may_have_changed(&self, baseline: &InodeBaseline) -> bool {
        self.ctime_changed(baseline) || baseline.ctime_recent
    }

    /// Calls of the address spaces that map the file may have made further mappings of it: so may all others, if some of those are
    /// not tracked.
    pub(crate) fn judge_remaps(&mut self, all_were_tracked: bool) {
        let Some(calls) = &mut self.calls else { return };
        let harmless = match calls.remaps {
            Remaps::None => true,
            Remaps::ByOthers => all_were_tracked,
            Remaps::ByMapper => false,
        };
        calls.mapped |= !harmless;
        calls.remapped |= !harmless;
    }

    /// True if traced calls wrote to the file, or may have.
    #[must_use]
    pub(crate) fn has_traced_writes(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| !calls.is_empty())
    }
}

/// Calls since the last observation that may have written to the file and did not name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherCalls {
    /// Trace records were lost, or it is not known which files were written.
    pub(crate) unmatched: bool,
    /// io_uring requests of the file are in flight, or have ended; or requests are not observed at all.
    pub(crate) requests: bool,
    /// A call truncated or emptied a file by its path.
    pub(crate) paths: bool,
    /// A call wrote to a file of a stacked file system.
    pub(crate) stacked: bool,
    /// A process mapped a file of a stacked file system, and not privately.
    pub(crate) stacked_mappings: bool,
    /// A call wrote to a file of a stacked file system and raised no event on that of the lower one.
    pub(crate) stacked_silent: bool,
    /// Those among the threads that modified the file which also made such calls.
    pub(crate) threads: BTreeSet<Thread>,
}

/// Writes by traced calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallWrites {
    pub(crate) other: OtherCalls,
    /// Threads of calls that name the file.
    pub(crate) threads: BTreeSet<Thread>,
    /// Pages written by calls that have ended.
    pub(crate) ended: Vec<PageRange>,
    /// Pages that calls may have written. The exact range of these calls is unknown.
    pub(crate) imprecise: Vec<PageRange>,
    /// Pages that calls in progress may be writing.
    pub(crate) in_flight: Vec<PageRange>,
    /// A process mapped the file, or tried to. Valid also if trace records were lost.
    pub(crate) mapped: bool,
    /// The same for the calls that no seal refuses.
    pub(crate) remapped: bool,
    /// The same for such calls whose file is unknown.
    pub(crate) remaps: Remaps,
}

impl CallWrites {
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.ended.is_empty()
            && self.imprecise.is_empty()
            && self.in_flight.is_empty()
            && self.threads.is_empty()
            && !self.other.unmatched
            && !self.other.requests
    }
}

/// A shared VMA of the file that may be written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapper {
    /// The process; `None`: it has no pid in the pid namespace of the service, or is being created.
    pub(crate) pid: Option<u32>,
    pub(crate) range: AddressRange,
    pub(crate) pages: PageRange,
    /// The address space, which identifies the mapping; `None`: the pid does, because the VMA was found in `/proc`.
    pub(crate) mm: Option<KernelAddress>,
    /// The userfaultfd with which the VMA is registered, if `mm` is known.
    pub(crate) userfaultfd: Option<KernelAddress>,
}

/// The writable mappings of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MapperAudit {
    pub(crate) mappers: Vec<Mapper>,
    pub(crate) completeness: Completeness,
}

/// Whether a [`MapperAudit`] lists all mappers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completeness {
    /// The VMAs were read from the file: all of them are listed.
    Complete,
    /// The maps of processes were read. All mappers are listed if each process was read, and there are as many as the kernel counts.
    Counted {
        /// Some processes are not listed, or their maps are not readable.
        incomplete: bool,
    },
    /// The mappings changed all the while.
    Unknown,
}

/// What a harvest found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Harvest {
    /// Written pages. Not normalized.
    pub(crate) written: Vec<PageRange>,
    /// Extents that ended before they were harvested.
    pub(crate) ended: Vec<EndedMapping>,
    /// Address spaces whose written bits other processes may have taken.
    pub(crate) taken: Vec<AddressSpacePages>,
    /// Ranges with guard regions, which are not tracked.
    pub(crate) guarded: Vec<AddressSpacePages>,
    /// Address spaces that were not harvested in time, because a process holds the lock of each.
    pub(crate) blocked: Vec<AddressSpacePages>,
    /// Calls that take written bits are not traced in at least one address space.
    pub(crate) taken_unobserved: bool,
}

/// Pages of the file that an address space maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressSpacePages {
    pub(crate) pid: u32,
    /// Normalized.
    pub(crate) pages: Vec<PageRange>,
}

/// Pages whose written bits are lost, because the mapping ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedMapping {
    /// The process that had the mapping. For a child that was not found, the tracked process from which it descends.
    pub(crate) pid: u32,
    pub(crate) pages: PageRange,
}

/// What the search for forked children found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChildHarvest {
    /// Pages with written bits. A child inherits the bits of its parent, so they may be of an earlier generation.
    pub(crate) written: Vec<PageRange>,
    /// Mappings that identified children unmapped.
    pub(crate) ended: Vec<EndedMapping>,
    /// Identified children. Calls that take written bits were not traced before.
    pub(crate) taken: Vec<AddressSpacePages>,
    /// Mappings of children that were not identified. Such children may have written and exited.
    pub(crate) unidentified: Vec<EndedMapping>,
}

/// Pages that a device or the kernel may write to without a page table. Both sets are normalized.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PinnedPages {
    /// May be pinned for DMA.
    pub(crate) dma: Vec<PageRange>,
    /// Have a reference that neither the page cache nor a mapping explains.
    pub(crate) referenced: Vec<PageRange>,
}

/// Outcome of a search for pins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PinScan {
    /// No page had to be checked.
    NoCandidates,
    /// The scan failed, or the probe cannot see pins.
    Unavailable {
        /// The probe can see pins in general, so that the last result may still hold.
        supported: bool,
    },
    Found(PinnedPages),
}

impl PinScan {
    /// True if no candidate is pinned, or if no scan will ever show that one is.
    #[must_use]
    pub(crate) fn found_none(&self) -> bool {
        match self {
            Self::NoCandidates => true,
            Self::Unavailable { supported } => !supported,
            Self::Found(pinned) => pinned.dma.is_empty() && pinned.referenced.is_empty(),
        }
    }
}
