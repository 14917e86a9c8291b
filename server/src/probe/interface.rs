//! The interface of a probe: its input, its output, and trait [`Probe`].

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::{ProbeKind, Uncertainty};
use fdmap_proto::units::{PageRange, PageSize};
use fdmap_proto::{SlotContent, SwapArea, SwapSlot};
use fdmap_sys::SyscallError;

use super::dentry::DentryReferences;
use super::file_vma::{KernelAddress, MapperWalk, PageTables};
use crate::pages::{AttributeMap, Block, BlockIndex, BlockRange, ScanOptions};

/// The file that a probe reads.
#[derive(Clone, Copy, Debug)]
pub struct ScanTarget<'a> {
    /// A descriptor that is open for reading.
    pub fd: BorrowedFd<'a>,
    /// Size of a base page.
    pub page_size: PageSize,
    /// Size of the file, in base pages.
    pub file_pages: u64,
    /// log2 of the base pages in a huge page; `None` if the file is not on hugetlbfs.
    pub hugetlb_order: Option<u8>,
}

/// What a scan found.
#[derive(Debug, Default)]
pub struct ScanOutput {
    /// Blocks that are not all hole, in ascending order.
    pub blocks: Vec<(BlockIndex, Block)>,
    /// Attributes; empty unless [`ScanOptions::attributes`] is set.
    pub attributes: AttributeMap,
    /// What the scan could not determine. Unknown pages are not counted here.
    pub uncertainty: Uncertainty,
    /// The probe cannot read this file: every page of the range is unknown, and `blocks` is empty.
    pub opaque: bool,
}

#[cfg(feature = "xarray")]
impl ScanOutput {
    /// Appends the output for a range of higher blocks.
    pub(super) fn append(&mut self, mut later: Self) {
        self.blocks.append(&mut later.blocks);
        self.attributes.append(later.attributes);
        self.uncertainty += later.uncertainty;
    }
}

/// How a page can be written without a page table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PinKind {
    /// The page is pinned for DMA: direct I/O, a registered io_uring buffer, or a device that was given the memory.
    Dma,
    /// The page has a reference that neither the page cache nor a mapping explains: a pipe, a debugger in the middle of
    /// a write, or the kernel while it migrates the page. Pages that changed during the search are reported as well.
    ExtraReference,
}

/// Pages that can be written without a page table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedRange {
    pub range: PageRange,
    pub kind: PinKind,
}

/// Where the content of swap slots is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotReading {
    /// The swap areas of the host; empty if the probe cannot read them.
    pub areas: Vec<SwapArea>,
    /// One element per slot, in the order of the request.
    pub contents: Vec<SlotContent>,
}

impl SlotReading {
    /// The answer of a probe that cannot read swap areas.
    pub(super) fn unknown(slots: &[SwapSlot]) -> Self {
        Self { areas: Vec::new(), contents: vec![SlotContent::Unknown; slots.len()] }
    }
}

/// A way to read page states from the kernel.
pub trait Probe: Send + Sync {
    fn kind(&self) -> ProbeKind;

    /// The attributes that this probe can read on this kernel.
    fn attributes(&self) -> AttributeSet;

    /// True if the probe reports the slots of swapped pages and distinguishes swap-cached from swapped.
    fn reports_slots(&self) -> bool;

    /// Reads the blocks of `range` into `out`. The probe calls `is_cancelled` at least every few tens of milliseconds
    /// and stops when it returns true.
    ///
    /// # Errors
    /// [`ScanError`]. The caller must then discard `out`.
    fn scan(
        &self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError>;

    /// Counts the shared mappings of the file in all processes that may ever write (`VM_MAYWRITE`), including mappings
    /// that are read-only now. The count is 0 for a file with `F_SEAL_WRITE`. `None` if the probe cannot count them.
    /// The call takes one or two microseconds and waits for no scan.
    ///
    /// # Errors
    /// [`ScanError`]
    fn writable_mappings(&self, _fd: BorrowedFd<'_>) -> Result<Option<u64>, ScanError> {
        Ok(None)
    }

    /// Finds every VMA of the file, in all processes and namespaces, without waiting for any of them.
    ///
    /// # Errors
    /// [`ScanError`]
    fn mappers(&self, _fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        Ok(MapperWalk::Unavailable("needs xarray-walk".to_owned()))
    }

    /// The same with little effort: [`MapperWalk::Unknown`] also if other walks are in progress, or the file has many VMAs, which
    /// processes that may only read can make.
    ///
    /// # Errors
    /// [`ScanError`]
    fn mappers_at_once(&self, _fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        Ok(MapperWalk::Unavailable("needs xarray-walk".to_owned()))
    }

    /// The kernel object behind a descriptor of this process: the context of a userfaultfd, or the address space of a
    /// `/proc/PID/pagemap`. The VMAs of [`Self::mappers`] refer to the same objects. `None` if the probe cannot read it, or
    /// [`Self::mappers`] is unavailable.
    ///
    /// # Errors
    /// [`ScanError`]
    fn private_data(&self, _fd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        Ok(None)
    }

    /// The address space of a userfaultfd of this process. `None` if the probe cannot read it.
    ///
    /// # Errors
    /// [`ScanError`]
    fn userfaultfd_space(&self, _userfaultfd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        Ok(None)
    }

    /// The page tables of the address space of a `/proc/PID/pagemap` of this process, as the kernel counts them. `None` if the probe
    /// cannot read it. The call takes a few microseconds and waits for no process.
    ///
    /// # Errors
    /// [`ScanError`]
    fn page_tables(&self, _pagemap: BorrowedFd<'_>) -> Result<Option<PageTables>, ScanError> {
        Ok(None)
    }

    /// Appends to `out` the pages of `ranges` that can be written without a page table entry, in ascending order, with
    /// adjacent pages of one kind merged. `ranges` must be in ascending order and must not overlap. Returns `false`,
    /// and appends nothing, if the probe cannot find pins. If a large folio is pinned, all its requested pages are
    /// reported.
    ///
    /// A pin that exists throughout the call is always reported. Pages that are not in memory have no pins.
    ///
    /// # Errors
    /// [`ScanError`]. The caller must then discard `out`.
    fn pins(
        &self,
        _target: &ScanTarget<'_>,
        _ranges: &[PageRange],
        _out: &mut Vec<PinnedRange>,
    ) -> Result<bool, ScanError> {
        Ok(false)
    }

    /// Counts the references to the dentry of a file. `own`: two descriptors of the service that stay open as long as it has the
    /// file, each with an open file description that is mapped or duplicated in no other process. `None` if the probe cannot count
    /// them. The call takes a few microseconds and waits for no process.
    ///
    /// # Errors
    /// [`ScanError`]
    fn dentry_references(&self, _own: [BorrowedFd<'_>; 2]) -> Result<Option<DentryReferences>, ScanError> {
        Ok(None)
    }

    /// Why this kernel refuses [`Probe::dentry_references`]; `None` if it does not, or if the probe does not have it.
    fn users_refused(&self) -> Option<String> {
        None
    }

    /// Finds out where the content of swap slots is. Each answer is valid for one moment, if a page has the slot then: the caller looks
    /// for that before and afterwards. A run takes less than a millisecond for 512 slots.
    ///
    /// # Errors
    /// [`ScanError`]
    fn slot_contents(&self, slots: &[SwapSlot]) -> Result<SlotReading, ScanError> {
        Ok(SlotReading::unknown(slots))
    }

    /// Checks that [`Probe::slot_contents`] finds the swap areas that `/proc/swaps` lists.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn check_swap_slots(&self) -> Result<(), String> {
        Err("needs xarray-walk".to_owned())
    }

    /// Why this kernel refuses [`Probe::writable_mappings`] and [`Probe::pins`]; `None` if it does not, or if the probe
    /// has neither.
    fn references_refused(&self) -> Option<String> {
        None
    }
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    #[error("scan of a file")]
    Syscall(#[from] SyscallError),
    /// BPF_PROG_TEST_RUN failed.
    #[error("BPF_PROG_TEST_RUN: {0}")]
    Run(String),
    /// The BPF program ran, but could not walk the file.
    #[error("the BPF program could not walk descriptor {fd}: {why}")]
    Walk { fd: i32, why: &'static str },
    /// The records of the BPF program are inconsistent.
    #[error("decoding the records of the BPF program: {0}")]
    Decode(String),
    /// Every requester dropped its request.
    #[error("the scan was cancelled: no requester waits for it")]
    Cancelled,
    /// The scanning thread panicked. This is a bug in the service.
    #[error("the scan ended without a result")]
    Panicked,
}

/// What the service knows about a probe before it is loaded.
#[derive(Clone, Copy, Debug)]
pub struct ProbeEntry {
    pub kind: ProbeKind,
    /// One line for `--help`.
    pub description: &'static str,
    /// Name of the host capability that the probe provides.
    pub capability: &'static str,
    /// What users lose without the probe.
    pub impact: &'static str,
    /// Loads the probe. The error says why this host or this build cannot run it.
    pub load: fn() -> Result<Arc<dyn Probe>, String>,
}
