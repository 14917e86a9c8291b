//! The system calls on one address space. Each may wait as long as the processes of the address space hold its mmap_lock, and
//! some of them then wait uninterruptibly. So only a holder makes them.
//!
//! PAGEMAP_SCAN finds nothing, and reports no error, where a mapping was unmapped. So a scan counts only if the mapping existed
//! throughout: each VMA of the range is looked up (it must map this file at this page), and one page of it is scanned with
//! PM_SCAN_CHECK_WPASYNC, which fails unless the VMA is registered. A registered VMA cannot come back once it was unmapped:
//! only the service registers, and it does not register while it harvests.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fdmap_proto::units::PageRange;
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags, ScanProgress};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError};

use super::call::{HarvestedMapping, HarvestedMappings, SpaceCall, SpaceResult};
use crate::tracking::mapping::{MappedFile, MappingExtent, VmaExtent};
use crate::tracking::ranges;

/// Regions that one scan can return: 96 KiB.
const MAX_SCAN_REGIONS: usize = 4096;

/// UFFDIO_WRITEPROTECT fails while the process forks or changes its mappings, for at most this long.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Boundaries of guard regions are multiples of this.
const PAGE_BYTES: u64 = 4096;

/// The descriptors of one address space.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) userfaultfd: Userfaultfd,
    /// `None`: not known yet.
    pub(super) files: Option<SpaceFiles>,
    /// A pipe of the service, which closes after the userfaultfd.
    pub(super) closed: OnceLock<Arc<OwnedFd>>,
}

/// `/proc/PID/pagemap` and `/proc/PID/maps` of an address space.
#[derive(Debug)]
pub(crate) struct SpaceFiles {
    pub(crate) pagemap: Arc<Pagemap>,
    pub(crate) maps: Maps,
}

impl SpaceFiles {
    /// Opens the files of process `pid`.
    ///
    /// # Errors
    /// `open`.
    pub(super) fn open(pid: u32) -> Result<Self, SyscallError> {
        Ok(Self { pagemap: Arc::new(Pagemap::open(Some(pid))?), maps: Maps::open(pid)? })
    }
}

/// Buffer for the result of a scan.
#[derive(Debug)]
pub(super) struct ScanBuffer(Vec<PageRegion>);

impl Default for ScanBuffer {
    fn default() -> Self {
        Self(vec![PageRegion::default(); MAX_SCAN_REGIONS])
    }
}

impl Space {
    /// Makes a call, except [`SpaceCall::Open`].
    pub(super) fn make(&self, call: &SpaceCall, buffer: &mut ScanBuffer) -> SpaceResult {
        let result = match call {
            SpaceCall::Open { .. } => Ok(SpaceResult::Done),
            SpaceCall::FindVmas { file, extents, registered } => {
                let find = |extent| {
                    if *registered { self.registered_vmas(*file, extent) } else { self.vmas(*file, extent) }
                };
                extents.iter().map(find).collect::<Result<_, _>>().map(SpaceResult::Vmas)
            }
            SpaceCall::FindWritable { file } => self.writable(*file).map(SpaceResult::Writable),
            SpaceCall::Harvest { file, mappings, guarded } => {
                self.harvest(*file, mappings, guarded, buffer).map(SpaceResult::Harvested)
            }
            SpaceCall::Register { ranges } => self.register(ranges),
            SpaceCall::Unregister { ranges } => {
                // A range that is not mapped any more is not registered either.
                ranges.iter().for_each(|range| drop(self.userfaultfd.unregister(*range)));
                Ok(SpaceResult::Done)
            }
            SpaceCall::Unprotect { ranges } => {
                let unprotect = |range: &AddressRange| remove_protection(&self.userfaultfd, *range);
                ranges.iter().try_for_each(unprotect).map(|()| SpaceResult::Done)
            }
            SpaceCall::IsAlive => Ok(SpaceResult::Alive(self.userfaultfd.address_space_exists())),
        };
        result.unwrap_or_else(SpaceResult::Failed)
    }

    fn files(&self) -> Result<&SpaceFiles, SyscallError> {
        let missing = || SyscallError {
            call: "use of the pagemap of an address space".to_owned(),
            errno: Errno::EBADF,
        };
        self.files.as_ref().ok_or_else(missing)
    }

    /// The parts of `extent` that are mapped and registered, one for each VMA; empty if the address space no longer exists.
    fn registered_vmas(
        &self,
        file: MappedFile,
        extent: &MappingExtent,
    ) -> Result<Vec<VmaExtent>, SyscallError> {
        let files = self.files()?;
        let pagemap = &files.pagemap;
        let mut registered = Vec::new();
        for found in self.vmas(file, extent)? {
            let start = found.extent.range.start;
            let page = AddressRange { start, end: start + file.page_size.bytes() };
            match pagemap.scan(page, ScanFlags::CHECK_WPASYNC, &mut [PageRegion::default()]) {
                Ok(_) => registered.push(found),
                Err(SyscallError { errno: Errno::EPERM, .. }) => {}
                Err(error) if address_space_ended(&error) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            }
        }
        Ok(registered)
    }

    /// The parts of `extent` that shared VMAs map to the same pages of the file, one for each VMA; empty if the address space no
    /// longer exists.
    fn vmas(&self, file: MappedFile, extent: &MappingExtent) -> Result<Vec<VmaExtent>, SyscallError> {
        match vmas_in(&self.files()?.maps, file, extent) {
            Err(error) if address_space_ended(&error) => Ok(Vec::new()),
            found => found,
        }
    }

    /// The shared VMAs of the file that are writable now; none if the address space no longer exists.
    fn writable(&self, file: MappedFile) -> Result<Vec<AddressRange>, SyscallError> {
        match self.files()?.maps.shared_of(file.device, file.inode) {
            Ok(vmas) => Ok(vmas.iter().filter(|vma| vma.writable).map(|vma| vma.range).collect()),
            Err(error) if address_space_ended(&error) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn register(&self, ranges: &[AddressRange]) -> Result<SpaceResult, SyscallError> {
        let undo = |ranges: &[AddressRange]| {
            // The client's copy of the userfaultfd would keep the ranges registered.
            ranges.iter().for_each(|range| drop(self.userfaultfd.unregister(*range)));
        };
        for (at, range) in ranges.iter().enumerate() {
            if let Err(error) = self.userfaultfd.register_wp(*range) {
                undo(&ranges[..at]);
                return Ok(SpaceResult::Refused { at, error });
            }
        }
        // Pages that were never protected look written, or clean in hugetlb files: their data is stamped in any case. A scan
        // cannot arm them, since it skips untouched pages of hugetlb files.
        let armed = ranges.iter().try_for_each(|range| write_protect(&self.userfaultfd, *range, true));
        armed.inspect_err(|_| undo(ranges)).map(|()| SpaceResult::Done)
    }

    /// Collects the pages that were written since the last harvest, and write-protects them again.
    fn harvest(
        &self,
        file: MappedFile,
        mappings: &[Vec<MappingExtent>],
        guarded: &[AddressRange],
        buffer: &mut ScanBuffer,
    ) -> Result<HarvestedMappings, SyscallError> {
        let mut harvest = HarvestedMappings::default();
        for extents in mappings {
            let mut mapped = Vec::<VmaExtent>::new();
            let mut lost = Vec::new();
            for extent in extents {
                let pages = extent.pages(file.page_size);
                let mut complete = true;
                for part in extent.without(guarded, file.page_size) {
                    complete &= self.scan_and_protect(file, &part, buffer, &mut harvest.written)?;
                }
                let found = self.registered_vmas(file, extent)?;
                if complete {
                    let mut held: Vec<_> =
                        found.iter().map(|found| found.extent.pages(file.page_size)).collect();
                    ranges::normalize(&mut held);
                    lost.extend(ranges::missing(pages, &held));
                } else {
                    // The scan failed part of the way, and what it collected by then is unknown. The VMAs that are still
                    // registered are armed again: the scan stopped before it reached them.
                    lost.push(pages);
                    for part in &found {
                        self.scan_and_protect(file, &part.extent, buffer, &mut harvest.written)?;
                    }
                }
                found.into_iter().for_each(|part| push_joined(&mut mapped, part));
            }
            let mapped = mapped.into_iter().map(|part| part.extent).collect();
            harvest.mappings.push(HarvestedMapping { mapped, lost });
        }
        ranges::normalize(&mut harvest.written);
        Ok(harvest)
    }

    /// Collects the written pages of one extent into `written` and write-protects them. `false` if a part of the extent is no
    /// longer registered, or the address space no longer exists, or the scan stopped early.
    fn scan_and_protect(
        &self,
        file: MappedFile,
        extent: &MappingExtent,
        ScanBuffer(regions): &mut ScanBuffer,
        written: &mut Vec<PageRange>,
    ) -> Result<bool, SyscallError> {
        let files = self.files()?;
        let pagemap = &files.pagemap;
        let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
        let scan = |rest, regions: &mut [PageRegion]| pagemap.scan(rest, flags, regions);
        let complete = scan_whole(extent.range, regions, scan, |region| {
            written.push(pages_of(region, file, extent));
        })?;
        // The order matters: a page that is written and zapped between both scans is found by the second.
        Ok(complete && (!file.hugetlb || self.harvest_zapped(pagemap, file, extent, regions, written)?))
    }

    /// Collects hugetlb pages that were written and then zapped, by `MADV_DONTNEED` for example. The zap empties the page table
    /// entry, and on hugetlb the scan for written pages does not report an empty entry. No other entry of an armed mapping is
    /// empty: a page that was not written since it was armed keeps its protection as a marker. A truncation drops markers too,
    /// and changes the content of the pages.
    fn harvest_zapped(
        &self,
        pagemap: &Pagemap,
        file: MappedFile,
        extent: &MappingExtent,
        regions: &mut [PageRegion],
        written: &mut Vec<PageRange>,
    ) -> Result<bool, SyscallError> {
        let scan = |rest, regions: &mut [PageRegion]| pagemap.scan_empty_entries(rest, regions);
        scan_whole(extent.range, regions, scan, |region| {
            written.push(pages_of(region, file, extent));
            // PAGEMAP_SCAN cannot arm empty entries of hugetlb. After a failure the next harvest reports the page again.
            let _ = self.userfaultfd.write_protect(region.range(), true);
        })
    }
}

fn vmas_in(maps: &Maps, file: MappedFile, extent: &MappingExtent) -> Result<Vec<VmaExtent>, SyscallError> {
    let mut found = Vec::new();
    let mut at = extent.range.start;
    while at < extent.range.end {
        let vma = match maps.vma_at_or_after(at, false) {
            Ok(vma) => vma,
            // Kernels before 6.11 lack PROCMAP_QUERY: read all VMAs as text.
            Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                let overlaps =
                    |vma: &&Vma| vma.range.start < extent.range.end && vma.range.end > extent.range.start;
                let vmas = maps.all()?;
                return Ok(vmas
                    .iter()
                    .filter(overlaps)
                    .filter_map(|vma| part_in(vma, file, extent))
                    .collect());
            }
            Err(error) => return Err(error),
        };
        let Some(vma) = vma.filter(|vma| vma.range.start < extent.range.end) else { break };
        found.extend(part_in(&vma, file, extent));
        at = vma.range.end;
    }
    Ok(found)
}

/// UFFDIO_WRITEPROTECT, repeated while the process forks or changes its mappings.
fn write_protect(userfaultfd: &Userfaultfd, range: AddressRange, protect: bool) -> Result<(), SyscallError> {
    let began = Instant::now();
    loop {
        match userfaultfd.write_protect(range, protect) {
            Err(SyscallError { errno: Errno::EAGAIN, .. }) if began.elapsed() < CHANGE_TIMEOUT => {
                std::thread::yield_now();
            }
            other => return other,
        }
    }
}

/// Removes the write protection of every part of the range that is registered.
fn remove_protection(userfaultfd: &Userfaultfd, range: AddressRange) -> Result<(), SyscallError> {
    match write_protect(userfaultfd, range, false) {
        // The call ends at the first part that is not mapped or not registered.
        Err(SyscallError { errno: Errno::ENOENT, .. }) if range.len() > PAGE_BYTES => {
            let middle = range.start + (range.len() / PAGE_BYTES).div_ceil(2) * PAGE_BYTES;
            remove_protection(userfaultfd, AddressRange { end: middle, ..range })?;
            remove_protection(userfaultfd, AddressRange { start: middle, ..range })
        }
        Err(SyscallError { errno: Errno::ENOENT | Errno::ESRCH, .. }) => Ok(()),
        other => other,
    }
}

/// Scans all of `range`, and passes each region to `found`. `false` if a part of the range is no longer registered, or the address
/// space no longer exists, or the scan stopped early.
fn scan_whole(
    range: AddressRange,
    regions: &mut [PageRegion],
    scan: impl Fn(AddressRange, &mut [PageRegion]) -> Result<ScanProgress, SyscallError>,
    mut found: impl FnMut(PageRegion),
) -> Result<bool, SyscallError> {
    let mut rest = range;
    while !rest.is_empty() {
        let scanned = match scan(rest, regions) {
            Ok(scanned) => scanned,
            Err(error) if address_space_ended(&error) || error.errno == Errno::EPERM => return Ok(false),
            Err(error) => return Err(error),
        };
        regions[..scanned.count].iter().copied().for_each(&mut found);
        let Some(unscanned) = rest_after(rest, scanned.walk_end) else { return Ok(false) };
        rest = unscanned;
    }
    Ok(true)
}

/// The part of `rest` that a scan of it did not reach; `None` if the scan made no progress, so that `rest` is still unknown.
fn rest_after(rest: AddressRange, walk_end: u64) -> Option<AddressRange> {
    (walk_end > rest.start).then_some(AddressRange { start: walk_end.min(rest.end), ..rest })
}

/// The pages of the file that `region` of `extent` maps.
fn pages_of(region: PageRegion, file: MappedFile, extent: &MappingExtent) -> PageRange {
    let pages = (region.end - region.start).div_ceil(file.page_size.bytes());
    PageRange::at(extent.page_at(region.start, file.page_size), pages)
}

/// The part of `extent` that `vma` maps, if `vma` maps the same pages of the file there.
fn part_in(vma: &Vma, file: MappedFile, extent: &MappingExtent) -> Option<VmaExtent> {
    let start = vma.range.start.max(extent.range.start);
    let first_page = extent.page_at(start, file.page_size);
    let offset = vma.offset.checked_add(start - vma.range.start);
    let same_file = vma.shared && vma.device == file.device && vma.inode == file.inode;
    let range = AddressRange { start, end: vma.range.end.min(extent.range.end) };
    (same_file && file.page_size.offset_of(first_page) == offset)
        .then_some(VmaExtent { extent: MappingExtent { range, first_page }, vma: vma.range })
}

/// Appends `part`. If the kernel merged its VMA with that of the last part, both parts become one.
fn push_joined(parts: &mut Vec<VmaExtent>, part: VmaExtent) {
    match parts.last_mut() {
        Some(last) if last.vma == part.vma && last.extent.range.end == part.extent.range.start => {
            last.extent.range.end = part.extent.range.end;
        }
        _ => parts.push(part),
    }
}

/// The process has exited or executed another program.
fn address_space_ended(error: &SyscallError) -> bool {
    error.errno == Errno::ESRCH
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const RANGE: AddressRange = AddressRange { start: 0x1000, end: 0x9000 };

    /// Scans [`RANGE`] with these results. Returns the result and the scanned ranges.
    fn scan_with(results: &[Result<u64, Errno>]) -> (Result<bool, SyscallError>, Vec<(u64, u64)>) {
        let (results, scanned) = (RefCell::new(results.iter()), RefCell::new(Vec::new()));
        let scan = |rest: AddressRange, _: &mut [PageRegion]| {
            scanned.borrow_mut().push((rest.start, rest.end));
            let walk_end = *results.borrow_mut().next().unwrap();
            walk_end
                .map(|walk_end| ScanProgress { count: 0, walk_end })
                .map_err(|errno| SyscallError { call: String::new(), errno })
        };
        let complete = scan_whole(RANGE, &mut [PageRegion::default()], scan, |_| {});
        (complete, scanned.into_inner())
    }

    #[test]
    fn scan_continues_where_it_stopped() {
        let (complete, scanned) = scan_with(&[Ok(0x2000), Ok(0x9000)]);
        assert_eq!((complete, scanned), (Ok(true), vec![(0x1000, 0x9000), (0x2000, 0x9000)]));
    }

    #[test]
    fn scan_without_progress_or_of_an_ended_mapping_is_incomplete() {
        for last in [Ok(0x4000), Ok(0x3000), Ok(0), Err(Errno::EPERM), Err(Errno::ESRCH)] {
            let (complete, scanned) = scan_with(&[Ok(0x4000), last]);
            assert_eq!((complete, scanned.len()), (Ok(false), 2), "{last:?}");
        }
        assert_eq!(scan_with(&[Err(Errno::EFAULT)]).0.unwrap_err().errno, Errno::EFAULT);
    }
}
