//! A loaded `walk_blocks` program (`bpf/block_walk.bpf.c`) with its own maps.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use bytemuck::Zeroable as _;
use fdmap_proto::units::{PageIndex, low_u32, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::ObjectBuilder;

use super::interface::{ScanError, ScanTarget};
use crate::bpf::records::{BlockRecord, BlocksResult, SlotsCopy, Status};
use crate::bpf::{LoadError, map_array, program_fd, run, status_text};
use crate::pages::BlockRange;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/block_walk.bpf.o"));

/// Blocks of one run. Their leaves are read in some 10 us if counts suffice.
const MAX_BLOCKS: usize = 32;
/// Copies of one run: half a megabyte, which is still in the processor's cache when it is decoded. They take some 0.1 ms.
const MAX_COPIES: usize = 1024;

/// Why blocks are not walked by counts.
#[derive(Debug, thiserror::Error)]
pub(super) enum BlockWalkError {
    /// The order in which the processor stores and loads differs from the one that the program relies on.
    #[error("block walks rely on the memory order of x86-64")]
    Architecture,
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The first run.
    #[error("trying block walks: {0}")]
    Trial(&'static str),
}

#[derive(Debug)]
pub(super) struct BlockWalker {
    walk_blocks: OwnedFd,
    blocks: SharedMapping,
    copies: SharedMapping,
    result: SharedMapping,
}

/// What one run found.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockWalk<'a> {
    pub(super) blocks: &'a [BlockRecord],
    pub(super) copies: &'a [SlotsCopy],
    /// The first page that was not walked.
    pub(super) next: PageIndex,
}

impl BlockWalker {
    /// Loads the program, and runs it once to see whether it can read this kernel's locks and counts.
    pub(super) fn load() -> Result<Self, BlockWalkError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(BlockWalkError::Architecture);
        }
        let walker = Self::load_object()?;
        // No process has this descriptor.
        match walker.run_program(&mut [u64::MAX, 0, 0, 0, 0]) {
            Ok(Status::FDMAP_STATUS_BAD_FD) => Ok(walker),
            Ok(status) => Err(BlockWalkError::Trial(status_text(status))),
            Err(_) => Err(BlockWalkError::Trial("BPF_PROG_TEST_RUN failed")),
        }
    }

    fn load_object() -> Result<Self, LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("blocks") => map.set_max_entries(low_u32(to_u64(MAX_BLOCKS)))?,
                Some("copies") => map.set_max_entries(low_u32(to_u64(MAX_COPIES)))?,
                _ => {}
            }
        }
        let object = open.load()?;
        Ok(Self {
            blocks: map_array::<BlockRecord>(&object, "blocks", MAX_BLOCKS, false)?,
            copies: map_array::<SlotsCopy>(&object, "copies", MAX_COPIES, false)?,
            result: map_array::<BlocksResult>(&object, "result", 1, false)?,
            walk_blocks: program_fd(&object, "walk_blocks")?,
        })
    }

    /// Walks blocks from the start of `range` on. `None` if the tree is too small for this walk.
    pub(super) fn run(
        &mut self,
        target: &ScanTarget<'_>,
        range: BlockRange,
    ) -> Result<Option<BlockWalk<'_>>, ScanError> {
        let fd = target.fd.as_raw_fd();
        let pages = range.pages();
        let mut arguments = [
            u64::from(fd.cast_unsigned()),
            pages.start().0,
            pages.end().0 - 1,
            to_u64(MAX_BLOCKS),
            to_u64(MAX_COPIES),
        ];
        match self.run_program(&mut arguments)? {
            Status::FDMAP_STATUS_OK => {}
            status => return Err(ScanError::Walk { fd, why: status_text(status) }),
        }
        let mut result = BlocksResult::zeroed();
        let whole = self.result.read_at(0, bytemuck::bytes_of_mut(&mut result));
        debug_assert!(whole, "map_array checked that the map holds a result");
        if result.small != 0 {
            return Ok(None);
        }
        let count = |written: u32, max: usize| to_usize(u64::from(written)).min(max);
        // SAFETY: only runs of this program write the map, and the slice borrows self mutably, so none begins while it lives.
        let blocks = unsafe { self.blocks.slice_of(0, count(result.blocks, MAX_BLOCKS)) };
        // SAFETY: as above.
        let copies = unsafe { self.copies.slice_of(0, count(result.copies, MAX_COPIES)) };
        Ok(Some(BlockWalk { blocks, copies, next: PageIndex(result.next).min(pages.end()) }))
    }

    fn run_program(&self, arguments: &mut [u64]) -> Result<Status, ScanError> {
        let status =
            run(self.walk_blocks.as_fd(), arguments).map_err(|errno| ScanError::Run(errno.to_string()))?;
        Ok(Status(status.unsigned_abs()))
    }
}

#[cfg(test)]
mod needs_root {
    use std::os::fd::AsFd as _;

    use fdmap_proto::units::{PageRange, PageSize};
    use fdmap_sys::memfd;

    use super::*;

    #[test]
    fn counts_answer_for_a_quiet_file() {
        let mut walker = BlockWalker::load().unwrap();
        let file = memfd::create("by-counts", None).unwrap();
        memfd::resize(file.as_fd(), 1 << 40).unwrap();
        let data = vec![1; 20 << 20];
        let written = nix::sys::uio::pwrite(&file, &data, 0).unwrap();
        nix::sys::uio::pwrite(&file, b"x", 1 << 36).unwrap();
        assert_eq!(written, data.len());
        let page_size = PageSize::new(4096).unwrap();
        let target = ScanTarget { fd: file.as_fd(), page_size, file_pages: 1 << 28, hugetlb_order: None };
        let range = BlockRange::around(PageRange::first(1 << 28));
        let walk = walker.run(&target, range).unwrap().expect("the tree has levels");
        let found =
            walk.blocks.iter().map(|block| (block.first, block.resident, block.copied, block.careful));
        // 4096 pages, 1024 pages, and one page.
        let expected = [(0, u64::MAX, 0, 0), (4096, 0xffff, 0, 0), (1 << 24, 0, 1, 0)];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!((walk.copies.len(), walk.next.0), (1, 1 << 28));
    }
}
