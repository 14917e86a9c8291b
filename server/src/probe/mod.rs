//! Ways to read the states of a file's pages from the kernel. It owns what is kernel-specific: facts about this kernel, the
//! BPF program, the system calls, decoding. It refuses to know who asks, and keeps no states: those go to `pages`.

pub mod capabilities;
pub mod coalesce;
pub mod select;
mod syscalls;

#[cfg(feature = "xarray")]
mod attributes;
#[cfg(feature = "xarray")]
pub(crate) mod bpf;
#[cfg(feature = "xarray")]
mod cached;
#[cfg(feature = "xarray")]
mod decode;
#[cfg(feature = "xarray")]
mod entry;
#[cfg(feature = "xarray")]
mod leaf;
#[cfg(feature = "xarray")]
mod pins;
#[cfg(feature = "xarray")]
mod pool;
#[cfg(feature = "xarray")]
mod record;
#[cfg(feature = "xarray")]
mod references;
#[cfg(feature = "xarray")]
mod xarray;

#[cfg(feature = "xarray")]
pub use bpf::LoadError;
pub use syscalls::SyscallsProbe;
#[cfg(feature = "xarray")]
pub use xarray::XarrayProbe;

use std::os::fd::BorrowedFd;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::{ProbeKind, Uncertainty};
use fdmap_proto::units::{PageRange, PageSize};
use fdmap_sys::SyscallError;

use crate::pages::{AttributeMap, Block, BlockIndex, BlockRange};

/// A file to read.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Open for reading.
    pub fd: BorrowedFd<'a>,
    /// The base page size.
    pub page_size: PageSize,
    /// The file's size in pages.
    pub file_pages: u64,
    /// log2 of the base pages of a huge page, for hugetlb files.
    pub hugetlb_order: Option<u8>,
}

/// What to find out beyond hole, resident, swapped and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Tell swap-cached from swapped.
    pub distinguish_swap_cached: bool,
    /// Read attributes.
    pub attributes: bool,
}

/// Where a scan puts what it finds.
#[derive(Debug, Default)]
pub struct ScanOutput {
    /// Blocks that are not all hole, in ascending order.
    pub blocks: Vec<(BlockIndex, Block)>,
    /// Attributes, if they were wanted.
    pub attributes: AttributeMap,
    /// What could not be determined, except unknown pages.
    pub uncertainty: Uncertainty,
    /// The probe sees nothing of this file: all of the range is unknown, and there are no blocks.
    pub blind: bool,
}

#[cfg(feature = "xarray")]
impl ScanOutput {
    /// Adds what was found in blocks behind those that are there.
    fn append(&mut self, mut later: Self) {
        self.blocks.append(&mut later.blocks);
        self.attributes.append(later.attributes);
        self.uncertainty += later.uncertainty;
    }
}

/// Who may write to a page without a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PinKind {
    /// The page is pinned for DMA: direct I/O, a registered io_uring buffer, a device that was given the memory.
    Dma,
    /// Somebody holds it whom neither the file nor a mapping explains: a pipe, a debugger in mid-write, the kernel while it
    /// moves the page. Also told of pages that changed while they were looked at.
    Held,
}

/// Pages that somebody may write to without a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The pages.
    pub range: PageRange,
    /// By whom.
    pub kind: PinKind,
}

/// A way to read page states.
pub trait Probe: Send + Sync {
    /// Which one it is.
    fn kind(&self) -> ProbeKind;

    /// The attributes that it can see.
    fn attributes(&self) -> AttributeSet;

    /// True if it tells where swapped pages lie, and swap-cached from swapped.
    fn sees_slots(&self) -> bool;

    /// Reads the blocks of `range`. `given_up` is asked now and then, at least every few tens of milliseconds.
    ///
    /// # Errors
    /// [`ScanError`]; what is in `out` is not to be used then.
    fn scan(
        &self,
        target: &Target<'_>,
        range: BlockRange,
        wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError>;

    /// How many shared mappings of the file there are, in all processes, that can ever write (`VM_MAYWRITE`), also those
    /// that are read-only now; `None` if the probe cannot see that. 0 for a file with `F_SEAL_WRITE`. Takes one or two
    /// microseconds and waits for no scan.
    ///
    /// # Errors
    /// [`ScanError`]
    fn writable_mappings(&self, _fd: BorrowedFd<'_>) -> Result<Option<u64>, ScanError> {
        Ok(None)
    }

    /// Adds those pages of `ranges`, which are in ascending order and do not overlap, to `out` that may be written without
    /// a page table; in ascending order, neighbours of a kind put together. `false`, and nothing added, if the probe
    /// cannot see that. Of pages in folios larger than a page all that were asked for are told if the folio is pinned.
    ///
    /// A pin that is there throughout the call is always told. Pages that are not in memory have none.
    ///
    /// # Errors
    /// [`ScanError`]; what is in `out` is not to be used then.
    fn pins(
        &self,
        _target: &Target<'_>,
        _ranges: &[PageRange],
        _out: &mut Vec<Pinned>,
    ) -> Result<bool, ScanError> {
        Ok(false)
    }
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// A system call.
    #[error("scan of a file")]
    Syscall(#[from] SyscallError),
    /// The BPF program could not be run.
    #[error("run of the BPF program: {0}")]
    Run(String),
    /// The BPF program ran and could not walk the file.
    #[error("the BPF program could not walk descriptor {fd}: {why}")]
    Walk {
        /// The descriptor.
        fd: i32,
        /// What it met.
        why: &'static str,
    },
    /// The records could not be decoded.
    #[error("decoding: {0}")]
    Decode(String),
    /// Everybody who waited for it has gone.
    #[error("the scan was given up: nobody waits for it")]
    GivenUp,
    /// The scanning thread panicked; the service is at fault.
    #[error("the scan ended without a result")]
    Lost,
}
