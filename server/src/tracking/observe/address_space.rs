//! An address space whose written bits are harvested.

use std::sync::Arc;

use fdmap_proto::tracking::TrackedMapping;
use fdmap_proto::units::{MappingId, PageRange, PageSize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::pidfd;

use super::charge::Charge;
use super::forks::ForkSubscription;
use super::holder::{CallError, HarvestedMappings, HeldSpace, LateHarvest, SpaceCall, SpaceResult};
use super::observation::Mapper;
use super::space_counts::SpaceCounts;
use super::space_history::{BitsTaken, SpaceHistory};
use crate::probe::KernelAddress;
use crate::random::random_id;
use crate::tracking::mapping::{Ending, MappedFile, MappingExtent, RegisteredMapping, VmaExtent};
use crate::tracking::ranges;
use crate::tracking::record::AddressSpaceRecord;
use crate::watchdog;

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
    /// Its userfaultfd, pagemap and maps. The kernel sets written bits while at least one copy of the userfaultfd is open.
    pub(crate) held: HeldSpace,
    /// A harvest that was not answered in time.
    pub(crate) late: Option<LateCall>,
    pub(crate) mappings: Vec<RegisteredMapping>,
    /// A fork created the address space.
    pub(crate) inherited: bool,
    /// Reports forks until it is dropped; `None`: forks are not observed.
    pub(crate) forks: Option<ForkSubscription>,
    /// Where neither forks nor events of the address space are observed: page faults of reaped children, as counted at the last observation.
    /// `None`: unknown, so that the next observation assumes that one was reaped.
    pub(crate) reaped_child_faults: Option<u64>,
    pub(crate) history: SpaceHistory,
    pub(crate) charge: Charge,
}

/// Written pages of one address space, and the pages whose written bits are lost. Both are normalized.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpaceHarvest {
    pub(crate) written: Vec<PageRange>,
    pub(crate) lost: Vec<PageRange>,
    /// Whether the written bits are incomplete because another process took some.
    pub(crate) taken: BitsTaken,
    /// Pages in ranges with guard regions, which are not tracked. Normalized.
    pub(crate) guarded: Vec<PageRange>,
    /// Why not all written bits were collected.
    pub(crate) unanswered: Option<CallError>,
}

/// A harvest whose result is not known yet.
#[derive(Debug)]
pub(crate) struct LateCall {
    /// Of the mappings, in the order of the call.
    ids: Vec<MappingId>,
    guarded: Vec<AddressRange>,
    /// The counts before the call.
    counts: Option<SpaceCounts>,
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

    /// The entry of the journal. Children are never recorded: their forks are observed only without a descriptor store.
    #[must_use]
    pub(crate) fn record(&self) -> AddressSpaceRecord {
        let user = self.held.holder().user();
        let (charged, mappings) = (self.charge.user(), self.mappings.clone());
        AddressSpaceRecord { key: self.key, pid: self.pid, user, charged, mappings }
    }

    /// True if a child whose fork was not observed was reaped since the last call.
    pub(crate) fn child_was_reaped(&mut self) -> bool {
        if self.forks.is_some() || self.history.is_traced() {
            return false;
        }
        // The count is unreadable if the process itself has exited. The harvest finds that.
        let faults = pidfd::faults_of_reaped_children(self.pid).ok().or(self.reaped_child_faults);
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

    /// The parts of each extent that are mapped and registered, one for each VMA; none if the address space no longer exists.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn registered_vmas(
        &self,
        file: MappedFile,
        extents: &[MappingExtent],
    ) -> Result<Vec<Vec<VmaExtent>>, CallError> {
        self.find_vmas(file, extents, true)
    }

    /// The parts of each extent that shared VMAs map to the same pages of the file, one for each VMA.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn vmas(
        &self,
        file: MappedFile,
        extents: &[MappingExtent],
    ) -> Result<Vec<Vec<VmaExtent>>, CallError> {
        self.find_vmas(file, extents, false)
    }

    fn find_vmas(
        &self,
        file: MappedFile,
        extents: &[MappingExtent],
        registered: bool,
    ) -> Result<Vec<Vec<VmaExtent>>, CallError> {
        let _waiting = watchdog::wait_for(self.pid);
        let call = SpaceCall::FindVmas { file, extents: extents.to_vec(), registered };
        match self.held.call(&call)? {
            SpaceResult::Vmas(found) if found.len() == extents.len() => Ok(found),
            other => Err(CallError::Result(other.name())),
        }
    }

    /// The shared VMAs of the file that are writable now.
    ///
    /// # Errors
    /// [`CallError`]
    fn writable_vmas(&self, file: MappedFile) -> Result<Vec<AddressRange>, CallError> {
        let _waiting = watchdog::wait_for(self.pid);
        match self.held.call(&SpaceCall::FindWritable { file })? {
            SpaceResult::Writable(ranges) => Ok(ranges),
            other => Err(CallError::Result(other.name())),
        }
    }

    /// True if a part of `mapping` is mapped writable, or if this is unknown.
    pub(crate) fn is_writable(&self, file: MappedFile, mapping: &RegisteredMapping) -> bool {
        self.writable_vmas(file).map_or(true, |writable| {
            let overlaps = |vma: &AddressRange| {
                let mut extents = mapping.extents.iter();
                extents.any(|extent| !extent.range.intersect(*vma).is_empty())
            };
            writable.iter().any(overlaps)
        })
    }

    /// True if the end of a mapping, which was found just now, loses writes since the last harvest.
    pub(crate) fn end_loses_writes(&self, mapping: &RegisteredMapping) -> bool {
        !mapping.ending.loses_no_write() || self.history.made_writable()
    }

    /// True if every extent is registered and is exactly one VMA. Only then is the number of extents comparable with the
    /// kernel's count of VMAs.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn is_intact(&self, file: MappedFile) -> Result<bool, CallError> {
        let extents: Vec<_> = self.extents().copied().collect();
        let found = self.registered_vmas(file, &extents)?;
        let whole = |extent: &MappingExtent| VmaExtent { extent: *extent, vma: extent.range };
        Ok(extents.iter().zip(found).all(|(extent, found)| found == [whole(extent)]))
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
    /// A harvest that waits for the process too long is late: what it finds belongs to a later call of this function.
    pub(crate) fn harvest(&mut self, file: MappedFile) -> SpaceHarvest {
        let _waiting = watchdog::wait_for(self.pid);
        let mut harvest = SpaceHarvest { taken: BitsTaken::No, ..SpaceHarvest::default() };
        harvest.unanswered = self.harvest_into(file, &mut harvest).err();
        ranges::normalize(&mut harvest.written);
        ranges::normalize(&mut harvest.lost);
        ranges::normalize(&mut harvest.guarded);
        harvest
    }

    fn harvest_into(&mut self, file: MappedFile, harvest: &mut SpaceHarvest) -> Result<(), CallError> {
        match self.held.take_late_harvest() {
            LateHarvest::None => self.late = None,
            LateHarvest::Waiting => return Err(CallError::Blocked),
            LateHarvest::Harvested(late) => match self.late.take() {
                Some(call) => self.apply(file, call, late?, harvest),
                // A child that was not identified: its pages are conservative.
                None => {
                    let late = late?;
                    harvest.written.extend(late.written);
                    harvest.lost.extend(late.mappings.into_iter().flat_map(|mapping| mapping.lost));
                }
            },
        }
        let call = LateCall {
            ids: self.mappings.iter().map(|mapping| mapping.id).collect(),
            guarded: self.history.guarded(),
            counts: self.history.complete_counts(),
        };
        let mappings = self.mappings.iter().map(|mapping| mapping.extents.clone()).collect();
        match self.held.call(&SpaceCall::Harvest { file, mappings, guarded: call.guarded.clone() }) {
            Ok(SpaceResult::Harvested(found)) => self.apply(file, call, found, harvest),
            Ok(other) => return Err(CallError::Result(other.name())),
            Err(error) => {
                self.late = (error == CallError::Blocked).then_some(call);
                if self.late.is_some() {
                    // It may allocate page tables after the end of this address space.
                    self.held.set_charge(Arc::clone(&self.charge));
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes over what a harvest found. Mappings that were detached or replaced since its call stay so.
    fn apply(
        &mut self,
        file: MappedFile,
        LateCall { ids, guarded, counts }: LateCall,
        HarvestedMappings { written, mappings }: HarvestedMappings,
        harvest: &mut SpaceHarvest,
    ) {
        let pages_in = |range: &AddressRange| {
            let range = *range;
            self.extents().map(move |extent| extent.pages_in(range, file.page_size))
        };
        harvest.guarded.extend(guarded.iter().flat_map(pages_in));
        harvest.written.extend(written);
        for (id, found) in ids.into_iter().zip(mappings) {
            let Some(at) = self.mappings.iter().position(|mapping| mapping.id == id) else { continue };
            let tracked = &mut self.mappings[at].extents;
            let is_tracked =
                |extent: &MappingExtent| tracked.iter().any(|one| one.range.covers(extent.range));
            let mapped = found.mapped.into_iter().filter(is_tracked).collect();
            *tracked = mapped;
            if self.end_loses_writes(&self.mappings[at]) {
                harvest.lost.extend(found.lost);
            }
        }
        self.mappings.retain(|mapping| !mapping.extents.is_empty());
        self.history.unprotect_guarded_since(&guarded);
        harvest.taken = harvest.taken.or(self.history.after_harvest(counts));
    }
}
