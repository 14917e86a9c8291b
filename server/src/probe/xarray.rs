//! The `xarray` probe: libbpf glue. It loads `page_state.bpf.c`, runs it on demand and hands its records to `decode`.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::state::PageState;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use libbpf_rs::Btf;
use libbpf_rs::btf::types::Enum;

use super::attributes::{AttributeDecoder, FlagTable, MapCounts};
use super::bpf::{ATTRIBUTES, Bpf, LoadError, NODES, REWALK_NODES};
use super::decode::{DecodeError, Decoded, Decoding, Rewalk, Walk, decode};
use super::pool::Pool;
use super::record::{NodeRecord, SLOTS};
use super::references::References;
use super::{Pinned, Probe, ScanError, ScanOptions, ScanOutput, Target, cached};
use crate::pages::{AttributeMap, Block, BlockBuilder, BlockIndex, BlockRange};

/// Walks from the head before what moves is settled leaf by leaf.
const RESTARTS: u32 = 8;

/// Reads page states from the page cache XArray.
#[derive(Debug)]
pub struct XarrayProbe {
    scanners: Pool<Scanner>,
    flags: FlagTable,
    counts: MapCounts,
    references: References,
    /// A huge page was found at the index of its first base page.
    hugetlb_by_base_pages: AtomicBool,
}

/// What the tree of a hugetlb file says of how this kernel counts its pages. Until 6.6 it does by huge pages: then what
/// is found, or not found, under the index of a base page says nothing of that page.
enum HugetlbUnit {
    /// By base pages, as all other files.
    Base,
    /// It has no pages: that is so in either unit.
    Empty,
    /// Otherwise, or it does not come to rest.
    Other,
}

impl XarrayProbe {
    /// Loads the program.
    ///
    /// # Errors
    /// [`LoadError`]: without CAP_BPF and CAP_PERFMON, without BTF, on kernels before 5.17.
    pub fn load() -> Result<Self, LoadError> {
        let first = Scanner::load()?;
        let btf = Btf::from_vmlinux()?;
        let flags = btf.type_by_name::<Enum<'_>>("pageflags").map_or_else(FlagTable::default, |members| {
            FlagTable::new(members.iter().filter_map(|member| Some((member.name?.to_str()?, member.value))))
        });
        let most = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let (counts, unproved) = (MapCounts::default(), AtomicBool::new(false));
        let (scanners, references) = (Pool::new(first, most), References::load(most));
        Ok(Self { scanners, flags, counts, references, hugetlb_by_base_pages: unproved })
    }

    /// Walks `range`, from the head once more if the tree changed under it. Gives what was decoded and where it ended;
    /// `None` if the tree holds what a hugetlb file of that order cannot hold.
    fn walk(
        &self,
        scanner: &mut Scanner,
        target: &Target<'_>,
        range: BlockRange,
        wants: ScanOptions,
        map: &mut AttributeMap,
    ) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
        let pages = range.pages();
        let Scanner { bpf, builder } = scanner;
        for restart in 0..=RESTARTS {
            pause(restart);
            let attributes = if wants.attributes { ATTRIBUTES } else { 0 };
            let result = bpf.run(target, pages, 0..NODES, attributes)?;
            let end = BlockIndex::of(PageIndex(result.next).min(pages.end()));
            let walked = BlockRange::new(range.start(), end).filter(|walked| !walked.is_empty());
            let walked = walked.ok_or_else(|| {
                ScanError::Decode(format!("the walk of pages {pages} ended at page {}", result.next))
            })?;
            // SAFETY: the kernel writes these records only in runs that are told to. The scanner is checked out to
            // us alone, and while the slices live it is run for the records after NODES only.
            let records = unsafe { bpf.nodes.slice_of(0, count(result.records, NODES)) };
            // SAFETY: as above; the runs meanwhile are for no attributes.
            let read = unsafe { bpf.attributes.slice_of(0, count(result.attributes, ATTRIBUTES)) };
            let decoding = Decoding {
                walk: Walk { head: result.head, head_shift: result.head_shift, records, attributes: read },
                walked: walked.pages(),
                hugetlb_order: target.hugetlb_order,
                rewalk: &mut Rewalker { bpf, target },
                attributes: wants.attributes.then_some(AttributeDecoder {
                    map,
                    flags: &self.flags,
                    counts: &self.counts,
                }),
                last_chance: restart == RESTARTS,
            };
            match decode(decoding, builder) {
                Ok(decoded) => return Ok(Some((decoded, end))),
                Err(DecodeError::HugetlbOrder { .. }) if restart == RESTARTS => return Ok(None),
                Err(DecodeError::Restart | DecodeError::HugetlbOrder { .. }) => {}
                Err(DecodeError::Rewalk(error)) => return Err(error),
            }
        }
        Err(ScanError::Decode("the tree never came to rest".to_owned()))
    }

    /// Finds the swap-cached among the swapped pages of the blocks from `first` in `out` on.
    fn tell_apart(
        &self,
        scanner: &mut Scanner,
        target: &Target<'_>,
        wants: ScanOptions,
        out: &mut ScanOutput,
        first: usize,
    ) -> Result<(), ScanError> {
        let ScanOutput { blocks, attributes, uncertainty, .. } = out;
        let mut reread = |index: BlockIndex| {
            let Some((decoded, _)) = self.walk(scanner, target, index.alone(), wants, attributes)? else {
                return Ok(Block::uniform(PageState::Unknown));
            };
            *uncertainty += decoded.uncertainty;
            Ok(decoded.blocks.into_iter().next().map(|(_, block)| block).unwrap_or_default())
        };
        let mut undetermined = 0;
        for (index, block) in &mut blocks[first..] {
            let mut in_core = |index: BlockIndex| super::syscalls::in_core(target, index);
            undetermined += cached::tell_apart(*index, block, &mut in_core, &mut reread)?;
        }
        blocks.retain(|(_, block)| !block.is_hole());
        uncertainty.swap_cache_undetermined += undetermined;
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

    fn sees_slots(&self) -> bool {
        true
    }

    fn scan(
        &self,
        target: &Target<'_>,
        range: BlockRange,
        wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        if target.hugetlb_order.is_some() {
            match self.hugetlb_unit(target, given_up)? {
                HugetlbUnit::Base => {}
                HugetlbUnit::Empty => return Ok(()),
                HugetlbUnit::Other => {
                    out.blind = true;
                    return Ok(());
                }
            }
        }
        let pieces = pieces_of(range, self.scanners.most());
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push((piece.start(), self.scan_piece(target, *piece, wants, given_up)?));
            }
            Ok::<_, ScanError>(done)
        };
        let mut done = std::thread::scope(|scope| {
            let helpers = self.scanners.most().min(pieces.len()) - usize::from(!pieces.is_empty());
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
            let mut done: Vec<(BlockIndex, ScanOutput)> = work()?;
            for helper in helpers {
                done.extend(helper.join().map_err(|_| ScanError::Lost)??);
            }
            Ok::<_, ScanError>(done)
        })?;
        if done.iter().any(|(_, piece)| piece.blind) {
            // What one piece found says of the others that they were looked for in the wrong place.
            *out = ScanOutput { blind: true, ..ScanOutput::default() };
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

    fn pins(
        &self,
        target: &Target<'_>,
        ranges: &[PageRange],
        out: &mut Vec<Pinned>,
    ) -> Result<bool, ScanError> {
        if target.hugetlb_order.is_some() {
            match self.hugetlb_unit(target, &|| false)? {
                HugetlbUnit::Base => {}
                HugetlbUnit::Empty => return Ok(self.references.sees_pins()),
                HugetlbUnit::Other => return Ok(false),
            }
        }
        self.references.pins(target, ranges, out)
    }
}

impl XarrayProbe {
    /// How this kernel counts the pages of hugetlb files, as far as the tree of this one tells: its first page does.
    fn hugetlb_unit(
        &self,
        target: &Target<'_>,
        given_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<HugetlbUnit, ScanError> {
        if self.hugetlb_by_base_pages.load(Ordering::Relaxed) {
            return Ok(HugetlbUnit::Base);
        }
        // All there is: whatever the unit, no page lies beyond.
        let mut rest = BlockRange::around(PageRange::first(u64::MAX / target.page_size.bytes()));
        self.scanners.with(load_another, |scanner| {
            while !rest.is_empty() {
                if given_up() {
                    return Err(ScanError::GivenUp);
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
        })?
    }

    fn scan_piece(
        &self,
        target: &Target<'_>,
        range: BlockRange,
        wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<ScanOutput, ScanError> {
        self.scanners.with(load_another, |scanner| {
            let mut out = ScanOutput::default();
            let mut next = range.start();
            while next < range.end() {
                if given_up() {
                    return Err(ScanError::GivenUp);
                }
                let rest = BlockRange::new(next, range.end()).unwrap_or_default();
                let first = out.blocks.len();
                let walked = self.walk(scanner, target, rest, wants, &mut out.attributes)?;
                let Some((decoded, end)) = walked else {
                    return Ok(ScanOutput { blind: true, ..ScanOutput::default() });
                };
                out.blocks.extend(decoded.blocks);
                out.uncertainty += decoded.uncertainty;
                if wants.distinguish_swap_cached {
                    self.tell_apart(scanner, target, wants, &mut out, first)?;
                }
                next = end;
            }
            Ok(out)
        })?
    }
}

/// Cuts a large range so that several scanners can share it; a tree is skipped through where it is empty, so the pieces
/// need not be small.
fn pieces_of(range: BlockRange, scanners: usize) -> Vec<BlockRange> {
    /// Blocks below which a thread is not worth its start.
    const WORTHWHILE: u64 = 16;
    /// Pieces for each scanner, so that an uneven file is shared evenly.
    const PIECES: u64 = 8;
    if range.is_empty() {
        return Vec::new();
    }
    let pieces =
        if scanners < 2 { 1 } else { (range.len() / WORTHWHILE).clamp(1, to_u64(scanners) * PIECES) };
    let size = range.len().div_ceil(pieces);
    let start =
        |nth: u64| BlockIndex(range.start().0.saturating_add(nth.saturating_mul(size)).min(range.end().0));
    let piece = |nth| BlockRange::new(start(nth), start(nth + 1));
    (0..pieces).filter_map(piece).filter(|piece| !piece.is_empty()).collect()
}

fn load_another() -> Result<Scanner, ScanError> {
    Scanner::load().map_err(|error| ScanError::Run(error.to_string()))
}

/// How many records a run says it wrote, never more than there are.
fn count(records: u32, most: usize) -> usize {
    to_usize(u64::from(records)).min(most)
}

/// Waits a little before looking again: not at all at first, then up to a millisecond.
fn pause(attempt: u32) {
    match attempt {
        0 => {}
        1..4 => std::thread::yield_now(),
        _ => std::thread::sleep(
            Duration::from_micros(50 << (attempt - 4).min(5)).min(Duration::from_millis(1)),
        ),
    }
}

/// Walks single leaves for the decoder.
#[derive(Debug)]
struct Rewalker<'a> {
    bpf: &'a Bpf,
    target: &'a Target<'a>,
}

impl Rewalk for Rewalker<'_> {
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError> {
        pause(attempt);
        let pages = PageRange::at(leaf, to_u64(SLOTS));
        let result = self.bpf.run(self.target, pages, NODES..NODES + REWALK_NODES, 0)?;
        let written = count(result.records, REWALK_NODES);
        let start = NODES * size_of::<NodeRecord>();
        // SAFETY: these records are written in this function's runs only, and the slice borrows self mutably, so
        // it is gone before the next one.
        let records = unsafe { self.bpf.nodes.slice_of(start, written) };
        Ok(Walk { head: result.head, head_shift: result.head_shift, records, attributes: &[] })
    }
}

/// What one scan needs for itself.
#[derive(Debug)]
struct Scanner {
    bpf: Bpf,
    builder: BlockBuilder,
}

impl Scanner {
    fn load() -> Result<Self, LoadError> {
        Ok(Self { bpf: Bpf::load()?, builder: BlockBuilder::default() })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use fdmap_proto::units::PageSize;
    use fdmap_sys::memfd;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_the_range(start in 0_u64..1 << 40, len in prop_oneof![0_u64..200, 0_u64..1 << 40], scanners in 1_usize..9) {
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

    #[test]
    fn pages_found_under_other_indexes_make_the_whole_file_unknown() {
        let probe = match XarrayProbe::load() {
            Ok(probe) => probe,
            Err(error) if std::env::var_os("FDMAP_REQUIRE_ALL").is_none() => {
                eprintln!("not run: this host lacks the xarray probe: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        // As a hugetlb file is where it is counted by huge pages: entries of one page at the beginning of the tree. This
        // one has its data in huge pages 0 and 1, and in blocks 0 and 1 of base pages there is something else to find.
        let file = memfd::create("by-huge-pages", None).unwrap();
        memfd::resize(file.as_fd(), 1 << 40).unwrap();
        let scan = |blocks: std::ops::Range<u64>, order| {
            let range = BlockRange::new(BlockIndex(blocks.start), BlockIndex(blocks.end)).unwrap();
            let page_size = PageSize::new(4096).unwrap();
            let target = Target { fd: file.as_fd(), page_size, file_pages: 1 << 28, hugetlb_order: order };
            let mut out = ScanOutput::default();
            probe.scan(&target, range, ScanOptions::default(), &|| false, &mut out).unwrap();
            (out.blind, out.blocks.len())
        };
        assert_eq!(scan(0..65536, Some(9)), (false, 0), "no pages are none in any unit");
        nix::sys::uio::pwrite(&file, b"x", 0).unwrap();
        nix::sys::uio::pwrite(&file, b"x", 4096).unwrap();
        for blocks in [0..65536, 0..1, 1..2, 40_000..65536] {
            assert_eq!(scan(blocks.clone(), Some(9)), (true, 0), "{blocks:?}");
        }
        // Also where it was proved otherwise before: pieces know nothing of one another.
        probe.hugetlb_by_base_pages.store(true, Ordering::Relaxed);
        assert_eq!(scan(0..65536, Some(9)), (true, 0));
        assert_eq!(scan(0..65536, None), (false, 1));
    }
}
