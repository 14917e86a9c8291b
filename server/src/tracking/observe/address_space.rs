//! An address space whose written bits are harvested.
//!
//! PAGEMAP_SCAN finds nothing, and reports no error, where a mapping was unmapped. So a scan counts only if the mapping existed
//! throughout: each VMA of the range is looked up (it must map this file at this page), and one page of it is scanned with
//! PM_SCAN_CHECK_WPASYNC, which fails unless the VMA is registered. A registered VMA cannot come back once it was unmapped:
//! only the service registers, and it does not register while it harvests.

use std::fmt::Debug;
use std::sync::Arc;

use fdmap_proto::tracking::TrackedMapping;
use fdmap_proto::units::{MappingId, PageRange, PageSize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags, ScanProgress};
use fdmap_sys::{Errno, SyscallError, pidfd};

use super::forks::ForkSubscription;
use super::observation::Mapper;
use super::revocable_uffd::RevocableUffd;
use super::space_history::{BitsTaken, SpaceHistory};
use crate::probe::KernelAddress;
use crate::random::random_id;
use crate::tracking::mapping::{Ending, MappedFile, MappingExtent, RegisteredMapping, VmaExtent};
use crate::tracking::ranges;
use crate::tracking::record::AddressSpaceRecord;
use crate::watchdog;

/// Regions that one scan can return: 96 KiB.
const MAX_SCAN_REGIONS: usize = 4096;

/// The kernel objects by which a walk over the VMAs of a file recognizes an address space. Pids do not identify it: VMAs of a
/// process that is being created have the pid of its parent, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpaceIdentity {
    /// The address space, by its pagemap. `None`: unknown, so that no VMA is recognized.
    pub(crate) mm: Option<KernelAddress>,
    /// The userfaultfd with which its VMAs are registered. `None`: unknown, and not compared.
    pub(crate) userfaultfd: Option<KernelAddress>,
}

impl SpaceIdentity {
    /// True if a walk found `mapper` in this address space, registered with this userfaultfd.
    pub(crate) fn recognizes(self, mapper: &Mapper) -> bool {
        self.mm.is_some()
            && self.mm == mapper.mm
            && (self.userfaultfd.is_none() || self.userfaultfd == mapper.userfaultfd)
    }
}

/// Mappings of one address space that were registered together, or that a fork copied.
#[derive(Debug)]
pub(crate) struct TrackedAddressSpace {
    /// Names the stored descriptors. Not 0.
    pub(crate) key: u64,
    pub(crate) pid: u32,
    pub(crate) identity: SpaceIdentity,
    pub(crate) pagemap: Pagemap,
    pub(crate) maps: Maps,
    /// The kernel sets written bits while at least one copy of it is open.
    pub(crate) userfaultfd: RevocableUffd,
    pub(crate) mappings: Vec<RegisteredMapping>,
    /// A fork created the address space.
    pub(crate) inherited: bool,
    /// Reports forks until it is dropped; `None`: forks are not observed.
    pub(crate) forks: Option<ForkSubscription>,
    /// Where neither forks nor events of the address space are observed: page faults of reaped children, as counted at the last observation.
    pub(crate) reaped_child_faults: u64,
    pub(crate) history: SpaceHistory,
    /// `None`: no user is charged for it, as for the child of a tracked process.
    pub(crate) _charge: Option<Charge>,
}

/// What a user is charged for an address space, until it is dropped.
pub type Charge = Arc<dyn Debug + Send + Sync>;

/// Written pages of one address space, and the pages whose written bits are lost. Both are normalized.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpaceHarvest {
    pub(crate) written: Vec<PageRange>,
    pub(crate) lost: Vec<PageRange>,
    /// Whether the written bits are incomplete because another process took some.
    pub(crate) taken: BitsTaken,
    /// Pages in ranges with guard regions, which are not tracked. Normalized.
    pub(crate) guarded: Vec<PageRange>,
}

/// Buffer for the result of a scan.
#[derive(Debug)]
pub(crate) struct ScanBuffer(Vec<PageRegion>);

impl Default for ScanBuffer {
    fn default() -> Self {
        Self(vec![PageRegion::default(); MAX_SCAN_REGIONS])
    }
}

impl TrackedAddressSpace {
    /// A random key of an address space.
    pub(crate) fn random_key() -> u64 {
        random_id(|key| (key != 0).then_some(key))
    }

    /// A registered mapping with a random id.
    pub(crate) fn new_mapping(extents: Vec<MappingExtent>) -> RegisteredMapping {
        RegisteredMapping { id: random_id(MappingId::new), extents, ending: Ending::Unannounced }
    }

    pub(crate) fn extents(&self) -> impl Iterator<Item = &MappingExtent> {
        self.mappings.iter().flat_map(|mapping| &mapping.extents)
    }

    /// The pages of the file that all extents map. Normalized.
    #[must_use]
    pub(crate) fn pages(&self, page_size: PageSize) -> Vec<PageRange> {
        let mut pages: Vec<_> = self.extents().map(|extent| extent.pages(page_size)).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// The entry of the journal.
    #[must_use]
    pub(crate) fn record(&self) -> AddressSpaceRecord {
        AddressSpaceRecord { key: self.key, pid: self.pid, mappings: self.mappings.clone() }
    }

    /// True if a child whose fork was not observed was reaped since the last call.
    pub(crate) fn child_was_reaped(&mut self) -> bool {
        if self.forks.is_some() || self.history.is_traced() {
            return false;
        }
        // The count is unreadable if the process itself has exited. The harvest finds that.
        let faults = pidfd::faults_of_reaped_children(self.pid).unwrap_or(self.reaped_child_faults);
        std::mem::replace(&mut self.reaped_child_faults, faults) != faults
    }

    /// The mappings as clients list them.
    pub(crate) fn list(&self) -> impl Iterator<Item = TrackedMapping> {
        self.mappings.iter().flat_map(|mapping| {
            mapping.extents.iter().map(|extent| TrackedMapping {
                id: mapping.id,
                pid: self.pid,
                address: extent.range.start,
                length_bytes: extent.range.end - extent.range.start,
                first_page: extent.first_page,
                inherited: self.inherited,
            })
        })
    }

    /// The parts of `extent` that are mapped and registered, one for each VMA; empty if the address space no longer exists.
    ///
    /// # Errors
    /// A failed system call, except for the end of the address space.
    pub(crate) fn registered_vmas(
        &self,
        file: MappedFile,
        extent: &MappingExtent,
    ) -> Result<Vec<VmaExtent>, SyscallError> {
        let _waiting = watchdog::wait_for(self.pid);
        let vmas = match self.vmas(file, extent) {
            Ok(vmas) => vmas,
            Err(error) if address_space_ended(&error) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut registered = Vec::new();
        for found in vmas {
            let start = found.extent.range.start;
            let page = AddressRange { start, end: start + file.page_size.bytes() };
            let flags = ScanFlags::CHECK_WPASYNC;
            match self.pagemap.scan(page, flags, &mut [PageRegion::default()]) {
                Ok(_) => registered.push(found),
                Err(SyscallError { errno: Errno::EPERM, .. }) => {}
                Err(error) if address_space_ended(&error) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            }
        }
        Ok(registered)
    }

    /// The parts of `extent` that shared VMAs map to the same pages of the file, one for each VMA.
    ///
    /// # Errors
    /// A failed read of the maps.
    pub(crate) fn vmas(
        &self,
        file: MappedFile,
        extent: &MappingExtent,
    ) -> Result<Vec<VmaExtent>, SyscallError> {
        let _waiting = watchdog::wait_for(self.pid);
        let mut found = Vec::new();
        let mut at = extent.range.start;
        while at < extent.range.end {
            let vma = match self.maps.vma_at_or_after(at, false) {
                Ok(vma) => vma,
                // Kernels before 6.11 lack PROCMAP_QUERY: read all VMAs as text.
                Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                    let overlaps =
                        |vma: &&Vma| vma.range.start < extent.range.end && vma.range.end > extent.range.start;
                    let vmas = self.maps.all()?;
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

    /// True if a part of `mapping` is mapped writable, or if this is unknown.
    pub(crate) fn is_writable(&self, file: MappedFile, mapping: &RegisteredMapping) -> bool {
        let _waiting = watchdog::wait_for(self.pid);
        match self.maps.shared_of(file.device, file.inode) {
            Ok(vmas) => {
                let writable = vmas.iter().filter(|vma| vma.writable);
                let overlaps = |vma: &Vma| {
                    let mut extents = mapping.extents.iter();
                    extents.any(|extent| !extent.range.intersect(vma.range).is_empty())
                };
                writable.copied().any(|vma| overlaps(&vma))
            }
            Err(error) => !address_space_ended(&error),
        }
    }

    /// True if the end of a mapping, which was found just now, loses writes since the last harvest.
    pub(crate) fn end_loses_writes(&self, mapping: &RegisteredMapping) -> bool {
        !mapping.ending.loses_no_write() || self.history.made_writable()
    }

    /// True if every extent is registered and is exactly one VMA. Only then is the number of extents comparable with the
    /// kernel's count of VMAs.
    ///
    /// # Errors
    /// As [`Self::registered_vmas`].
    pub(crate) fn is_intact(&self, file: MappedFile) -> Result<bool, SyscallError> {
        for extent in self.extents() {
            let whole = VmaExtent { extent: *extent, vma: extent.range };
            if self.registered_vmas(file, extent)? != [whole] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Pages in ranges with guard regions, which are not tracked. Normalized.
    pub(crate) fn guarded_pages(&self, page_size: PageSize) -> Vec<PageRange> {
        let guarded = self.history.guarded();
        let in_extent =
            |extent: &MappingExtent| guarded.iter().map(|range| extent.pages_in(*range, page_size)).collect();
        let mut pages: Vec<_> = self.extents().flat_map::<Vec<_>, _>(in_extent).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// Collects the pages that were written through all mappings since the last harvest, and write-protects them again. Extents
    /// that are no longer mapped are dropped, and their pages are lost, except those of mappings whose end was announced.
    ///
    /// # Errors
    /// A failed system call. Then written bits of every mapping may be lost.
    pub(crate) fn harvest(
        &mut self,
        file: MappedFile,
        buffer: &mut ScanBuffer,
    ) -> Result<SpaceHarvest, SyscallError> {
        let _waiting = watchdog::wait_for(self.pid);
        let mut harvest = SpaceHarvest::default();
        let before = self.history.complete_counts();
        let guarded = self.history.guarded();
        for at in 0..self.mappings.len() {
            let (mut mapped, mut lost) = (Vec::<VmaExtent>::new(), Vec::new());
            for extent in &self.mappings[at].extents {
                let pages = extent.pages(file.page_size);
                harvest.guarded.extend(guarded.iter().map(|range| extent.pages_in(*range, file.page_size)));
                let mut complete = true;
                for part in extent.without(&guarded, file.page_size) {
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
            self.mappings[at].extents = mapped.into_iter().map(|part| part.extent).collect();
            if self.end_loses_writes(&self.mappings[at]) {
                harvest.lost.extend(lost);
            }
        }
        self.mappings.retain(|mapping| !mapping.extents.is_empty());
        ranges::normalize(&mut harvest.written);
        ranges::normalize(&mut harvest.lost);
        ranges::normalize(&mut harvest.guarded);
        self.history.unprotect_guarded_since(&guarded);
        harvest.taken = self.history.after_harvest(before);
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
        let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
        let scan = |rest, regions: &mut [PageRegion]| self.pagemap.scan(rest, flags, regions);
        let complete = scan_whole(extent.range, regions, scan, |region| {
            written.push(pages_of(region, file, extent));
        })?;
        // The order matters: a page that is written and zapped between both scans is found by the second.
        Ok(complete && (!file.hugetlb || self.harvest_zapped(file, extent, regions, written)?))
    }

    /// Collects hugetlb pages that were written and then zapped, by `MADV_DONTNEED` for example. The zap empties the page table
    /// entry, and on hugetlb the scan for written pages does not report an empty entry. No other entry of an armed mapping is
    /// empty: a page that was not written since it was armed keeps its protection as a marker. A truncation drops markers too,
    /// and changes the content of the pages.
    fn harvest_zapped(
        &self,
        file: MappedFile,
        extent: &MappingExtent,
        regions: &mut [PageRegion],
        written: &mut Vec<PageRange>,
    ) -> Result<bool, SyscallError> {
        let scan = |rest, regions: &mut [PageRegion]| self.pagemap.scan_empty_entries(rest, regions);
        scan_whole(extent.range, regions, scan, |region| {
            written.push(pages_of(region, file, extent));
            // PAGEMAP_SCAN cannot arm empty entries of hugetlb. After a failure the next harvest reports the page again.
            let _ = self.userfaultfd.with(|userfaultfd| userfaultfd.write_protect(region.range(), true));
        })
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
