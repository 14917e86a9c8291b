//! Ways to read the states of a file's pages from the kernel. It owns what is kernel-specific: facts about this kernel, the
//! BPF program, the system calls, decoding. It refuses to know who asks, and keeps no states: those go to `pages`.

pub mod plan;
pub mod share;
pub mod support;
mod syscalls;

#[cfg(feature = "xarray")]
mod attributes;
#[cfg(feature = "xarray")]
mod bpf;
#[cfg(feature = "xarray")]
mod cached;
#[cfg(feature = "xarray")]
mod decode;
#[cfg(feature = "xarray")]
mod entry;
#[cfg(feature = "xarray")]
mod leaf;
#[cfg(feature = "xarray")]
mod pool;
#[cfg(feature = "xarray")]
mod record;
#[cfg(feature = "xarray")]
mod xarray;

#[cfg(feature = "xarray")]
pub use bpf::LoadError;
pub use syscalls::SyscallsProbe;
#[cfg(feature = "xarray")]
pub use xarray::XarrayProbe;

use std::os::fd::BorrowedFd;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::{Doubts, ProbeKind};
use fdmap_proto::units::PageSize;
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
pub struct Wants {
    /// Tell swap-cached from swapped.
    pub told_apart: bool,
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
    pub doubts: Doubts,
    /// The probe sees nothing of this file: all of the range is unknown, and there are no blocks.
    pub blind: bool,
}

#[cfg(feature = "xarray")]
impl ScanOutput {
    /// Adds what was found in blocks behind those that are there.
    fn append(&mut self, mut later: Self) {
        self.blocks.append(&mut later.blocks);
        self.attributes.append(later.attributes);
        self.doubts += later.doubts;
    }
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
        wants: Wants,
        given_up: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError>;
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
