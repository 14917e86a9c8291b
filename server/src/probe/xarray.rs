//! The `xarray` probe: runs `page_state.bpf.c` on demand, passes the records to `decode`, and distributes large ranges
//! over threads.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use libbpf_rs::Btf;
use libbpf_rs::btf::types::Enum;

use super::attributes::{AttributeDecoder, FlagTable, MapCounts};
use super::decode::{DecodeError, Decoded, Decoding, Rewalk, Walk, decode};
use super::dentry::DentryReferences;
use super::file_vma::{KernelAddress, MapperWalk};
use super::interface::{PinnedRange, Probe, ScanError, ScanOutput, ScanTarget, SlotReading};
use super::mappers::MapperFinder;
use super::pool::Pool;
use super::references::ReferenceFinder;
use super::swap_cache;
use super::swap_slots::SlotFinder;
use super::users::UserFinder;
use super::walker::{MAX_ATTRIBUTES, MAX_NODES, MAX_REWALK_NODES, Walker};
use crate::bpf::records::{NodeRecord, SLOTS};
use crate::bpf::{LoadError, loaded_or_logged};
use crate::pages::{AttributeMap, Block, BlockBuilder, BlockIndex, BlockRange, ScanOptions};

/// Threads that scan or search at the same time. Each has programs and maps of its own, some 2 MiB of kernel memory.
const MAX_SCANNERS: usize = 32;
/// Walks from the head before changing parts are walked again leaf by leaf.
const MAX_RESTARTS: u32 = 8;

/// Reads page states from the page cache XArray.
#[derive(Debug)]
pub struct XarrayProbe {
    scanners: Pool<Scanner>,
    flags: FlagTable,
    counts: MapCounts,
    references: ReferenceFinder,
    mappers: MapperFinder,
    users: UserFinder,
    slots: SlotFinder,
    /// A huge page was found at the index of its first base page, so this kernel indexes hugetlb files by base pages.
    hugetlb_by_base_pages: AtomicBool,
}

/// How this kernel indexes the page cache of a hugetlb file, as far as its tree shows. Until 6.6 the unit is the huge
/// page; the entry at the index of a base page then says nothing about that page.
enum HugetlbUnit {
    /// By base pages, like all other files.
    Base,
    /// Unknown: the tree has no pages in either unit.
    Empty,
    /// By huge pages, or the tree kept changing.
    Other,
}

impl XarrayProbe {
    /// Loads the BPF programs.
    ///
    /// # Errors
    /// [`LoadError`]: the process lacks CAP_BPF or CAP_PERFMON, or the kernel lacks BTF or bpf_loop() (5.17).
    pub fn load() -> Result<Self, LoadError> {
        let first = Scanner::load()?;
        let btf = Btf::from_vmlinux()?;
        let flags = btf.type_by_name::<Enum<'_>>("pageflags").map_or_else(FlagTable::default, |members| {
            FlagTable::new(members.iter().filter_map(|member| Some((member.name?.to_str()?, member.value))))
        });
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let threads = threads.min(MAX_SCANNERS);
        let (counts, by_base_pages) = (MapCounts::default(), AtomicBool::new(false));
        let scanners = Pool::new(first, threads, || loaded_or_logged(Scanner::load()));
        let (references, mappers) = (ReferenceFinder::load(threads), MapperFinder::load(threads));
        let (users, slots) = (UserFinder::load(), SlotFinder::load(threads));
        Ok(Self {
            scanners,
            flags,
            counts,
            references,
            mappers,
            users,
            slots,
            hugetlb_by_base_pages: by_base_pages,
        })
    }

    /// Walks `range`, and starts again if the tree changes during the walk. Returns the decoded blocks and the block
    /// after the last walked one. `None` if the tree contains entries that a hugetlb file of this order cannot contain.
    fn walk(
        &self,
        scanner: &mut Scanner,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        map: &mut AttributeMap,
    ) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
        let pages = range.pages();
        let Scanner { walker, builder } = scanner;
        for restart in 0..=MAX_RESTARTS {
            back_off(restart);
            let attributes = if options.attributes { MAX_ATTRIBUTES } else { 0 };
            let result = walker.run(target, pages, 0..MAX_NODES, attributes)?;
            let end = BlockIndex::of(PageIndex(result.next).min(pages.end()));
            let walked = BlockRange::new(range.start(), end).filter(|walked| !walked.is_empty());
            let walked = walked.ok_or_else(|| {
                ScanError::Decode(format!("the walk of pages {pages} ended at page {}", result.next))
            })?;
            // SAFETY: the kernel writes these records only in runs that request them. No other thread uses this
            // scanner, and while the slices live, runs request only the records after MAX_NODES.
            let records = unsafe { walker.nodes.slice_of(0, count(result.records, MAX_NODES)) };
            // SAFETY: as above; runs while the slice lives request no attributes.
            let read = unsafe { walker.attributes.slice_of(0, count(result.attributes, MAX_ATTRIBUTES)) };
            let decoding = Decoding {
                walk: Walk { head: result.head, head_shift: result.head_shift, records, attributes: read },
                walked: walked.pages(),
                hugetlb_order: target.hugetlb_order,
                rewalk: &mut Rewalker { walker, target },
                attributes: options.attributes.then_some(AttributeDecoder {
                    map,
                    flags: &self.flags,
                    counts: &self.counts,
                }),
                last_attempt: restart == MAX_RESTARTS,
            };
            match decode(decoding, builder) {
                Ok(decoded) => return Ok(Some((decoded, end))),
                Err(DecodeError::HugetlbOrder { .. }) if restart == MAX_RESTARTS => return Ok(None),
                Err(DecodeError::Restart | DecodeError::HugetlbOrder { .. }) => {}
                Err(DecodeError::Rewalk(error)) => return Err(error),
            }
        }
        Err(ScanError::Decode("the page cache XArray changed during every walk".to_owned()))
    }

    /// Finds the swap-cached pages in the blocks of `out` from index `first` on.
    fn distinguish_swap_cached(
        &self,
        scanner: &mut Scanner,
        target: &ScanTarget<'_>,
        options: ScanOptions,
        out: &mut ScanOutput,
        first: usize,
    ) -> Result<(), ScanError> {
        let ScanOutput { blocks, attributes, uncertainty, .. } = out;
        let mut rescan = |index: BlockIndex| {
            let Some((decoded, _)) = self.walk(scanner, target, index.alone(), options, attributes)? else {
                return Ok(Block::uniform(PageState::Unknown));
            };
            *uncertainty += decoded.uncertainty;
            Ok(decoded.blocks.into_iter().next().map(|(_, block)| block).unwrap_or_default())
        };
        let mut undetermined = 0;
        for (index, block) in &mut blocks[first..] {
            let mut in_core = |index: BlockIndex| super::syscalls::in_core(target, index);
            undetermined += swap_cache::distinguish(*index, block, &mut in_core, &mut rescan)?;
        }
        blocks.retain(|(_, block)| !block.is_hole());
        uncertainty.swap_cache_undetermined_pages += undetermined;
        Ok(())
    }
}

impl Probe for XarrayProbe {
    fn kind(&self) -> ProbeKind {
        ProbeKind::Xarray
    }

    fn attributes(&self) -> AttributeSet {
        AttributeSet { flags: !self.flags.is_empty(), ..AttributeSet::ALL }
    }

    fn reports_slots(&self) -> bool {
        true
    }

    fn scan(
        &self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        if target.hugetlb_order.is_some() {
            match self.hugetlb_unit(target, is_cancelled)? {
                HugetlbUnit::Base => {}
                HugetlbUnit::Empty => return Ok(()),
                HugetlbUnit::Other => {
                    out.opaque = true;
                    return Ok(());
                }
            }
        }
        let pieces = pieces_of(range, self.scanners.count());
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push((piece.start(), self.scan_piece(target, *piece, options, is_cancelled)?));
            }
            Ok::<_, ScanError>(done)
        };
        let mut done = std::thread::scope(|scope| {
            let helpers = self.scanners.count().min(pieces.len()) - usize::from(!pieces.is_empty());
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
            let mut done: Vec<(BlockIndex, ScanOutput)> = work()?;
            for helper in helpers {
                done.extend(helper.join().map_err(|_| ScanError::Panicked)??);
            }
            Ok::<_, ScanError>(done)
        })?;
        if done.iter().any(|(_, piece)| piece.opaque) {
            // One piece shows that the whole tree is indexed differently.
            *out = ScanOutput { opaque: true, ..ScanOutput::default() };
            return Ok(());
        }
        done.sort_unstable_by_key(|(start, _)| *start);
        for (_, piece) in done {
            out.append(piece);
        }
        Ok(())
    }

    fn writable_mappings(&self, fd: BorrowedFd<'_>) -> Result<Option<u64>, ScanError> {
        self.references.writable_mappings(fd)
    }

    fn mappers(&self, fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        self.mappers.mappers(fd)
    }

    fn mappers_at_once(&self, fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        self.mappers.mappers_at_once(fd)
    }

    fn private_data(&self, fd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        self.mappers.private_data(fd)
    }

    fn dentry_references(&self, own: [BorrowedFd<'_>; 2]) -> Result<Option<DentryReferences>, ScanError> {
        self.users.dentry_references(own)
    }

    fn users_refused(&self) -> Option<String> {
        self.users.refused()
    }

    fn slot_contents(&self, slots: &[SwapSlot]) -> Result<SlotReading, ScanError> {
        self.slots.slot_contents(slots)
    }

    fn check_swap_slots(&self) -> Result<(), String> {
        self.slots.check()
    }

    fn pins(
        &self,
        target: &ScanTarget<'_>,
        ranges: &[PageRange],
        out: &mut Vec<PinnedRange>,
    ) -> Result<bool, ScanError> {
        if target.hugetlb_order.is_some() {
            match self.hugetlb_unit(target, &|| false)? {
                HugetlbUnit::Base => {}
                HugetlbUnit::Empty => return Ok(self.references.finds_pins()),
                HugetlbUnit::Other => return Ok(false),
            }
        }
        self.references.pins(target, ranges, out)
    }

    fn references_refused(&self) -> Option<String> {
        self.references.refused()
    }
}

impl XarrayProbe {
    /// Determines how this kernel indexes hugetlb files, from the first page in the tree of `target`.
    fn hugetlb_unit(
        &self,
        target: &ScanTarget<'_>,
        is_cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<HugetlbUnit, ScanError> {
        if self.hugetlb_by_base_pages.load(Ordering::Relaxed) {
            return Ok(HugetlbUnit::Base);
        }
        // The range covers every page of a file in either unit.
        let mut rest = BlockRange::around(PageRange::first(u64::MAX / target.page_size.bytes()));
        self.scanners.with(|scanner| {
            while !rest.is_empty() {
                if is_cancelled() {
                    return Err(ScanError::Cancelled);
                }
                let mut none = AttributeMap::default();
                let walked = self.walk(scanner, target, rest, ScanOptions::default(), &mut none)?;
                let Some((decoded, end)) = walked else { return Ok(HugetlbUnit::Other) };
                if decoded.blocks.iter().any(|(_, block)| block.has_data()) {
                    self.hugetlb_by_base_pages.store(true, Ordering::Relaxed);
                    return Ok(HugetlbUnit::Base);
                }
                if !decoded.blocks.is_empty() {
                    return Ok(HugetlbUnit::Other);
                }
                rest = BlockRange::new(end, rest.end()).unwrap_or_default();
            }
            Ok(HugetlbUnit::Empty)
        })
    }

    fn scan_piece(
        &self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<ScanOutput, ScanError> {
        self.scanners.with(|scanner| {
            let mut out = ScanOutput::default();
            let mut next = range.start();
            while next < range.end() {
                if is_cancelled() {
                    return Err(ScanError::Cancelled);
                }
                let rest = BlockRange::new(next, range.end()).unwrap_or_default();
                let first = out.blocks.len();
                let walked = self.walk(scanner, target, rest, options, &mut out.attributes)?;
                let Some((decoded, end)) = walked else {
                    return Ok(ScanOutput { opaque: true, ..ScanOutput::default() });
                };
                out.blocks.extend(decoded.blocks);
                out.uncertainty += decoded.uncertainty;
                if options.distinguish_swap_cached {
                    self.distinguish_swap_cached(scanner, target, options, &mut out, first)?;
                }
                next = end;
            }
            Ok(out)
        })
    }
}

/// Splits a large range into pieces for several scanners. A walk skips empty parts of a tree quickly, so pieces may be
/// large.
fn pieces_of(range: BlockRange, scanners: usize) -> Vec<BlockRange> {
    /// A piece of fewer blocks does not justify a thread.
    const MIN_PIECE_BLOCKS: u64 = 16;
    /// Pieces for each scanner. Several pieces balance the load of an unevenly populated file.
    const PIECES_PER_SCANNER: u64 = 8;
    if range.is_empty() {
        return Vec::new();
    }
    let pieces = if scanners < 2 {
        1
    } else {
        (range.len() / MIN_PIECE_BLOCKS).clamp(1, to_u64(scanners) * PIECES_PER_SCANNER)
    };
    let size = range.len().div_ceil(pieces);
    let start =
        |nth: u64| BlockIndex(range.start().0.saturating_add(nth.saturating_mul(size)).min(range.end().0));
    let piece = |nth| BlockRange::new(start(nth), start(nth + 1));
    (0..pieces).filter_map(piece).filter(|piece| !piece.is_empty()).collect()
}

/// The number of records that a run wrote, limited to the size of the array.
fn count(records: u32, max: usize) -> usize {
    to_usize(u64::from(records)).min(max)
}

/// Waits before another attempt: first not at all, finally a millisecond.
fn back_off(attempt: u32) {
    match attempt {
        0 => {}
        1..4 => std::thread::yield_now(),
        _ => std::thread::sleep(
            Duration::from_micros(50 << (attempt - 4).min(5)).min(Duration::from_millis(1)),
        ),
    }
}

#[derive(Debug)]
struct Rewalker<'a> {
    walker: &'a Walker,
    target: &'a ScanTarget<'a>,
}

impl Rewalk for Rewalker<'_> {
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError> {
        back_off(attempt);
        let pages = PageRange::at(leaf, to_u64(SLOTS));
        let result = self.walker.run(self.target, pages, MAX_NODES..MAX_NODES + MAX_REWALK_NODES, 0)?;
        let written = count(result.records, MAX_REWALK_NODES);
        let start = MAX_NODES * size_of::<NodeRecord>();
        // SAFETY: only the runs of this function write these records, and the slice borrows self mutably, so it does
        // not live until the next run.
        let records = unsafe { self.walker.nodes.slice_of(start, written) };
        Ok(Walk { head: result.head, head_shift: result.head_shift, records, attributes: &[] })
    }
}

/// The state that one scan uses exclusively.
#[derive(Debug)]
struct Scanner {
    walker: Walker,
    builder: BlockBuilder,
}

impl Scanner {
    fn load() -> Result<Self, LoadError> {
        Ok(Self { walker: Walker::load()?, builder: BlockBuilder::default() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_cover_the_range(start in 0_u64..1 << 40, len in prop_oneof![0_u64..200, 0_u64..1 << 40], scanners in 1_usize..9) {
            let range = BlockRange::new(BlockIndex(start), BlockIndex(start + len)).unwrap();
            let pieces = pieces_of(range, scanners);
            prop_assert!(pieces.len() <= scanners * 8);
            let mut next = range.start();
            for piece in pieces {
                prop_assert!(piece.start() == next && !piece.is_empty());
                next = piece.end();
            }
            prop_assert_eq!(next, range.end());
        }
    }
}

#[cfg(test)]
mod needs_root {
    use std::os::fd::AsFd as _;

    use fdmap_proto::units::PageSize;
    use fdmap_sys::memfd;

    use super::*;

    #[test]
    fn file_indexed_by_huge_pages_is_opaque() {
        let probe = XarrayProbe::load().unwrap_or_else(|error| panic!("no xarray probe: {error}"));
        // Imitates a hugetlb file on a kernel that indexes by huge pages: single-page entries at the start of the tree.
        // The file has its data in huge pages 0 and 1, which blocks 0 and 1 of base pages would misreport.
        let file = memfd::create("by-huge-pages", None).unwrap();
        memfd::resize(file.as_fd(), 1 << 40).unwrap();
        let scan = |blocks: std::ops::Range<u64>, order| {
            let range = BlockRange::new(BlockIndex(blocks.start), BlockIndex(blocks.end)).unwrap();
            let page_size = PageSize::new(4096).unwrap();
            let target =
                ScanTarget { fd: file.as_fd(), page_size, file_pages: 1 << 28, hugetlb_order: order };
            let mut out = ScanOutput::default();
            probe.scan(&target, range, ScanOptions::default(), &|| false, &mut out).unwrap();
            (out.opaque, out.blocks.len())
        };
        assert_eq!(scan(0..65536, Some(9)), (false, 0), "an empty tree is empty in any unit");
        nix::sys::uio::pwrite(&file, b"x", 0).unwrap();
        nix::sys::uio::pwrite(&file, b"x", 4096).unwrap();
        for blocks in [0..65536, 0..1, 1..2, 40_000..65536] {
            assert_eq!(scan(blocks.clone(), Some(9)), (true, 0), "{blocks:?}");
        }
        // The result stays the same after this kernel was found to index by base pages: each piece is checked separately.
        probe.hugetlb_by_base_pages.store(true, Ordering::Relaxed);
        assert_eq!(scan(0..65536, Some(9)), (true, 0));
        assert_eq!(scan(0..65536, None), (false, 1));
    }
}
