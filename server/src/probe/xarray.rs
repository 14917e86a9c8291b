//! The `xarray` probe: runs `page_state.bpf.c` on demand, passes the records to `decode`, and distributes large ranges
//! over threads.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageRange, to_u64};
use libbpf_rs::Btf;
use libbpf_rs::btf::types::Enum;

use super::attributes::FlagTable;
use super::dentry::DentryReferences;
use super::file_vma::{KernelAddress, MapperWalk, PageTables};
use super::interface::{PinnedRange, Probe, ScanError, ScanOutput, ScanTarget, SlotReading};
use super::mappers::MapperFinder;
use super::pool::Pool;
use super::references::ReferenceFinder;
use super::scanner::{AttributeTables, Scanner};
use super::swap_cache;
use super::swap_slots::SlotFinder;
use super::users::UserFinder;
use crate::bpf::{LoadError, loaded_or_logged};
use crate::pages::{AttributeMap, Block, BlockIndex, BlockRange, ScanOptions};

/// Threads that scan or search at the same time. Each has programs and maps of its own, some 2 MiB of kernel memory.
const MAX_SCANNERS: usize = 32;
/// Time of a scan before it starts further threads. That takes as long as one thread takes for a resident file of a gigabyte.
const ALONE: Duration = Duration::from_micros(200);

/// Reads page states from the page cache XArray.
#[derive(Debug)]
pub struct XarrayProbe {
    scanners: Pool<Scanner>,
    attribute_tables: AttributeTables,
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
        let attribute_tables = AttributeTables { flags, ..AttributeTables::default() };
        let scanners = Pool::new(first, threads, || loaded_or_logged(Scanner::load()));
        let (references, mappers) = (ReferenceFinder::load(threads), MapperFinder::load(threads));
        let (users, slots) = (UserFinder::load(), SlotFinder::load(threads));
        Ok(Self {
            scanners,
            attribute_tables,
            references,
            mappers,
            users,
            slots,
            hugetlb_by_base_pages: AtomicBool::new(false),
        })
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
            let Some((decoded, _)) =
                scanner.walk(target, index.alone(), options, &self.attribute_tables, attributes)?
            else {
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
        AttributeSet { flags: !self.attribute_tables.flags.is_empty(), ..AttributeSet::ALL }
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
        let work = |until: Option<Instant>| {
            let mut done = Vec::new();
            while until.is_none_or(|until| Instant::now() < until)
                && let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed))
            {
                done.push((piece.start(), self.scan_piece(target, *piece, options, is_cancelled)?));
            }
            Ok::<_, ScanError>(done)
        };
        let mut done: Vec<(BlockIndex, ScanOutput)> = work(Some(Instant::now() + ALONE))?;
        std::thread::scope(|scope| {
            let rest = pieces.len().saturating_sub(next.load(Ordering::Relaxed));
            let helpers = self.scanners.count().min(rest).saturating_sub(1);
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(|| work(None))).collect();
            done.extend(work(None)?);
            for helper in helpers {
                done.extend(helper.join().map_err(|_| ScanError::Panicked)??);
            }
            Ok::<_, ScanError>(())
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

    fn userfaultfd_space(&self, userfaultfd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        self.mappers.userfaultfd_space(userfaultfd)
    }

    fn page_tables(&self, pagemap: BorrowedFd<'_>) -> Result<Option<PageTables>, ScanError> {
        self.mappers.page_tables(pagemap)
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
                let walked =
                    scanner.walk(target, rest, ScanOptions::default(), &self.attribute_tables, &mut none)?;
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
                let walked =
                    scanner.walk(target, rest, options, &self.attribute_tables, &mut out.attributes)?;
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
