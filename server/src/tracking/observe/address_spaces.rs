//! The tracked address spaces of one file.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;

use fdmap_proto::tracking::TrackedMapping;
use fdmap_proto::units::{FileId, MappingId, PageRange, PageSize, to_u64};
use fdmap_sys::address::AddressRange;

use super::address_space::TrackedAddressSpace;
use super::children::{ChildSearch, ForkedChildren, UnidentifiedChild};
use super::event_sources::EventSources;
use super::fork_events::{ChildUffd, Fork};
use super::forks::FollowId;
use super::holder::{CallError, HeldSpace, SpaceCall};
use super::intact::FoundVmas;
use super::kernel_objects::KernelObjects;
use super::observation::{AddressSpacePages, ChildHarvest, EndedMapping, Harvest, Mapper};
use super::space_history::BitsTaken;
use crate::probe::{FileVma, KernelAddress};
use crate::store::{FdStore, StoredFd};
use crate::tracking::mapping::{Ending, MappedFile, RegisteredMapping};
use crate::tracking::ranges;
use crate::tracking::record::AddressSpaceRecord;

#[derive(Debug, Default)]
pub(crate) struct AddressSpaces {
    spaces: Vec<TrackedAddressSpace>,
    children: ForkedChildren,
    /// Address spaces that were forked since the last checkpoint, where no fork event reports the child.
    forked: Vec<AddressSpacePages>,
    /// An address space was forked whose forks raise events.
    fork_events_due: bool,
    /// Address spaces whose descriptors are in the descriptor store, by key. Their userfaultfds stay open until the store has closed
    /// its copies: the last close may block.
    stored: BTreeMap<u64, HeldSpace>,
}

impl AddressSpaces {
    pub(crate) fn add(&mut self, space: TrackedAddressSpace) {
        self.spaces.push(space);
    }

    /// Adds an address space whose descriptors are in the descriptor store.
    pub(crate) fn add_stored(&mut self, space: TrackedAddressSpace) {
        self.stored.insert(space.key, space.held.clone());
        self.spaces.push(space);
    }

    /// Adds a child that may exist, and whose written bits are lost.
    pub(crate) fn add_lost_child(&mut self, ancestor: u32, pages: Vec<PageRange>) {
        self.children.add(UnidentifiedChild::lost(ancestor, pages));
    }

    /// The address spaces that map the file; `None`: not all of them are known.
    pub(crate) fn known(&self) -> Option<BTreeSet<KernelAddress>> {
        if !self.children.is_empty() {
            return None;
        }
        self.spaces.iter().map(|space| space.identity.mm).collect()
    }

    /// The address spaces that process `pid` registered, or inherited.
    pub(crate) fn of_process(&self, pid: u32) -> impl Iterator<Item = &TrackedAddressSpace> {
        self.spaces.iter().filter(move |space| space.pid == pid)
    }

    /// True if `id` is a mapping of process `pid`.
    pub(crate) fn contains(&self, pid: u32, id: MappingId) -> bool {
        self.of_process(pid).flat_map(|space| &space.mappings).any(|mapping| mapping.id == id)
    }

    pub(crate) fn mapping_count(&self) -> usize {
        self.spaces.iter().map(|space| space.mappings.len()).sum()
    }

    /// Number of extents: the number of VMAs, if all mappings are intact.
    pub(crate) fn extent_count(&self) -> u64 {
        self.spaces.iter().map(|space| to_u64(space.extents().count())).sum()
    }

    /// The pages of all tracked mappings. Normalized.
    pub(crate) fn pages(&self, page_size: PageSize) -> Vec<PageRange> {
        let mut pages: Vec<_> = self.spaces.iter().flat_map(|space| space.pages(page_size)).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// The address space and the addresses of every extent.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&TrackedAddressSpace, AddressRange)> {
        self.spaces.iter().flat_map(|space| space.extents().map(move |extent| (space, extent.range)))
    }

    pub(crate) fn list(&self) -> Vec<TrackedMapping> {
        self.spaces.iter().flat_map(TrackedAddressSpace::list).collect()
    }

    pub(crate) fn records(&self) -> Vec<AddressSpaceRecord> {
        self.spaces.iter().map(TrackedAddressSpace::record).collect()
    }

    /// True if these VMAs of the file include each tracked mapping, unchanged.
    pub(super) fn are_found_in(&self, vmas: &[FileVma]) -> bool {
        let found = FoundVmas::new(vmas);
        let mut spaces = self.spaces.iter();
        spaces.all(|space| {
            // The kernel may use the address of a userfaultfd that was closed for another one.
            let is_open = space.held.with(|_| ()).is_some();
            is_open && space.extents().all(|extent| found.has_whole(space.identity, extent))
        })
    }

    /// Number of VMAs of tracked mappings, as the holders report them; `None`: at least one mapping changed or was unmapped, or is
    /// unknown.
    pub(crate) fn intact_vmas(&self, file: MappedFile) -> Option<u64> {
        let intact = |space: &TrackedAddressSpace| space.is_intact(file).unwrap_or(false);
        self.spaces.iter().all(intact).then(|| self.extent_count())
    }

    /// True if calls that were not the service's may have taken written bits since the last harvest, or a range is no longer
    /// write-protected.
    pub(crate) fn bits_were_taken(&self) -> bool {
        self.spaces.iter().any(|space| {
            space.history.bits_taken() == BitsTaken::Possibly || !space.history.guarded().is_empty()
        })
    }

    /// Pages in ranges with guard regions, which are not tracked.
    pub(crate) fn guarded(&self, page_size: PageSize) -> Vec<AddressSpacePages> {
        let spaces = self.spaces.iter();
        let guarded =
            spaces.map(|space| AddressSpacePages { pid: space.pid, pages: space.guarded_pages(page_size) });
        guarded.filter(|space| !space.pages.is_empty()).collect()
    }

    /// True if calls that may take written bits are traced in every address space.
    pub(crate) fn observes_taken_bits(&self) -> bool {
        self.spaces.iter().all(|space| space.history.bits_taken() != BitsTaken::Unobserved)
    }

    /// True if a child whose fork was not observed was reaped since the last call.
    pub(crate) fn child_was_reaped(&mut self) -> bool {
        self.spaces.iter_mut().fold(false, |reaped, space| space.child_was_reaped() | reaped)
    }

    /// The users whose forks are observed.
    pub(crate) fn observed_users(&self) -> BTreeSet<u32> {
        let observed = self.spaces.iter().filter(|space| space.forks.is_some());
        observed.map(|space| space.held.holder().user()).collect()
    }

    /// True if forks of at least one tracked process are not counted.
    pub(crate) fn has_uncounted_forks(&self) -> bool {
        self.spaces.iter().any(|space| !space.history.is_traced())
    }

    /// True if forks of at least one tracked process are neither observed nor counted.
    pub(crate) fn has_unobserved_forks(&self) -> bool {
        self.spaces.iter().any(|space| space.forks.is_none() && !space.history.is_traced())
    }

    /// The address spaces whose forks are counted, and that may have been forked since the last call.
    pub(crate) fn take_forked(&mut self, page_size: PageSize) -> Vec<AddressSpacePages> {
        self.note_forks(page_size);
        std::mem::take(&mut self.forked)
    }

    /// True if a counted fork raised an event since the last call.
    pub(crate) fn take_fork_events_due(&mut self, page_size: PageSize) -> bool {
        self.note_forks(page_size);
        std::mem::take(&mut self.fork_events_due)
    }

    /// Notes forks of address spaces that may be dropped before the next checkpoint.
    fn note_forks(&mut self, page_size: PageSize) {
        for space in self.spaces.iter_mut().filter_map(|space| space.history.forked().then_some(space)) {
            if space.forks.is_some() {
                self.fork_events_due = true;
            } else {
                self.forked.push(AddressSpacePages { pid: space.pid, pages: space.pages(page_size) });
            }
        }
    }

    /// Fork events are late: every tracked process of this user may have forked.
    pub(crate) fn add_possible_children(&mut self, user: u32, page_size: PageSize) {
        let of_user = |space: &&TrackedAddressSpace| space.held.holder().user() == user;
        for space in self.spaces.iter().filter(|space| space.forks.is_some()).filter(of_user) {
            self.children.add(UnidentifiedChild::possible(space, page_size));
        }
    }

    pub(crate) fn add_forks(&mut self, forks: Vec<Fork>, page_size: PageSize) {
        self.children.add_forks(forks, &self.spaces, page_size);
    }

    pub(crate) const fn has_unidentified_children(&self) -> bool {
        !self.children.is_empty()
    }

    /// Identifies children among `mappers` and tracks them.
    pub(crate) fn identify_children(
        &mut self,
        sources: &EventSources,
        file: MappedFile,
        mappers: &[Mapper],
        kernel_objects: KernelObjects<'_>,
    ) -> ChildHarvest {
        let search = ChildSearch { sources, file, mappers, kernel_objects };
        self.children.identify(&mut self.spaces, &search)
    }

    /// The unidentified children that have exited, and their users.
    pub(crate) fn exited_children(&self) -> (Vec<FollowId>, BTreeSet<u32>) {
        self.children.exited()
    }

    /// Removes these children, which have exited, when the events of all their forks were processed. Returns the mappings that they
    /// had.
    pub(crate) fn remove_exited_children(&mut self, exited: &[FollowId]) -> Vec<EndedMapping> {
        self.children.remove_exited(exited)
    }

    /// Drops userfaultfds of children that have exited; `all_tracked`: no child exists that is not identified.
    pub(crate) fn drop_exited_children(&mut self, all_tracked: bool) {
        if all_tracked {
            self.children.all_exited();
        }
        self.children.drop_exited_orphaned();
    }

    /// Harvests the chosen address spaces, and drops those that have no mapping left.
    pub(crate) fn harvest(
        &mut self,
        file: MappedFile,
        chosen: impl Fn(&TrackedAddressSpace) -> bool,
    ) -> Harvest {
        self.note_forks(file.page_size);
        let mut found = Harvest::default();
        for space in self.spaces.iter_mut().filter(|space| chosen(space)) {
            let before = space.pages(file.page_size);
            let mut harvest = space.harvest(file);
            let pid = space.pid;
            match harvest.unanswered {
                None => {}
                Some(CallError::Blocked) => {
                    found.blocked.push(AddressSpacePages { pid, pages: before.clone() });
                }
                Some(error) => {
                    harvest.lost.clone_from(&before);
                    if error == CallError::Closed {
                        // The mappings are no longer registered.
                        space.mappings.clear();
                    }
                    let error = fdmap_proto::error_chain(&error);
                    tracing::warn!(pid, error, "harvest of tracked mappings failed");
                }
            }
            found.written.extend(harvest.written);
            if !harvest.guarded.is_empty() {
                found.guarded.push(AddressSpacePages { pid, pages: harvest.guarded });
            }
            match harvest.taken {
                BitsTaken::No => {}
                BitsTaken::Possibly => found.taken.push(AddressSpacePages { pid, pages: before }),
                BitsTaken::Unobserved => found.taken_unobserved = true,
            }
            found.ended.extend(harvest.lost.into_iter().map(|pages| EndedMapping { pid, pages }));
        }
        self.drop_ended();
        found
    }

    /// Notes that mappings of process `pid` are about to be checked for being read-only. Announced ends of mappings that may have
    /// become writable again are no longer trusted.
    pub(crate) fn note_read_only(&mut self, pid: u32) {
        for space in self.spaces.iter_mut().filter(|space| space.pid == pid) {
            if space.history.note_read_only() {
                space.mappings.iter_mut().for_each(|mapping| mapping.ending = Ending::Unannounced);
            }
        }
    }

    /// Records that process `pid` announced the end of mappings, which were harvested: their end loses no write. A mapping that
    /// is still writable is tracked as before, and its end is a gap.
    pub(crate) fn announce_end(&mut self, file: MappedFile, pid: u32, ids: &[MappingId]) {
        self.change_endings(|space, mapping| {
            if space.pid != pid || !ids.contains(&mapping.id) {
                return mapping.ending;
            }
            if space.history.made_writable() || space.is_writable(file, mapping) {
                tracing::debug!(pid, mapping = %mapping.id, "an untracked mapping is still writable");
                return Ending::Unannounced;
            }
            Ending::Announced
        });
    }

    /// Those of the mappings `ids` of process `pid` that are not writable.
    pub(crate) fn read_only_mappings(&self, file: MappedFile, pid: u32, ids: &[MappingId]) -> Vec<MappingId> {
        let read_only = |space: &TrackedAddressSpace, mapping: &RegisteredMapping| {
            ids.contains(&mapping.id) && !space.is_writable(file, mapping)
        };
        let of_space = |space| {
            let chosen = move |mapping: &&RegisteredMapping| read_only(space, mapping);
            space.mappings.iter().filter(chosen).map(|mapping| mapping.id)
        };
        self.of_process(pid).flat_map(of_space).collect()
    }

    /// Checks mappings that a checkpoint has found although their end was announced before.
    pub(crate) fn check_announced_ends(&mut self, file: MappedFile) {
        self.change_endings(|space, mapping| match mapping.ending {
            Ending::Unannounced => Ending::Unannounced,
            announced => announced.after_checkpoint(space.is_writable(file, mapping)),
        });
    }

    fn change_endings(&mut self, ending: impl Fn(&TrackedAddressSpace, &RegisteredMapping) -> Ending) {
        for space in &mut self.spaces {
            let endings: Vec<_> = space.mappings.iter().map(|mapping| ending(space, mapping)).collect();
            space.mappings.iter_mut().zip(endings).for_each(|(mapping, ending)| mapping.ending = ending);
        }
    }

    /// Removes mappings of process `pid` and unregisters them. Returns them.
    pub(crate) fn detach(
        &mut self,
        file: MappedFile,
        pid: u32,
        chosen: impl Fn(&RegisteredMapping) -> bool,
    ) -> Vec<RegisteredMapping> {
        let mut detached = Vec::new();
        for space in self.spaces.iter_mut().filter(|space| space.pid == pid) {
            let (removed, left): (Vec<_>, Vec<_>) =
                std::mem::take(&mut space.mappings).into_iter().partition(&chosen);
            space.mappings = left;
            // The userfaultfd of a child may be that of a sibling.
            if !space.inherited {
                removed.iter().for_each(|mapping| unregister(space, file, mapping));
            }
            detached.extend(removed);
        }
        self.drop_ended();
        detached
    }

    /// Removes extents of process `pid` that overlap `taken`, where other mappings were just registered. A range can be
    /// registered only where nothing else is: what was tracked there has ended, and its written bits are lost.
    pub(crate) fn remove_replaced(
        &mut self,
        pid: u32,
        taken: &[AddressRange],
        page_size: PageSize,
    ) -> Vec<EndedMapping> {
        self.note_forks(page_size);
        let mut ended = Vec::new();
        for space in self.spaces.iter_mut().filter(|space| space.pid == pid) {
            let made_writable = space.history.made_writable();
            for mapping in &mut space.mappings {
                let loses_writes = !mapping.ending.loses_no_write() || made_writable;
                mapping.extents.retain(|extent| {
                    let replaced = taken.iter().any(|range| !range.intersect(extent.range).is_empty());
                    if replaced && loses_writes {
                        ended.push(EndedMapping { pid, pages: extent.pages(page_size) });
                    }
                    !replaced
                });
            }
            space.mappings.retain(|mapping| !mapping.extents.is_empty());
        }
        self.drop_ended();
        ended
    }

    /// Drops address spaces without a mapping.
    fn drop_ended(&mut self) {
        let ended = self.spaces.extract_if(.., |space| space.mappings.is_empty());
        // The userfaultfd of a child may be that of a sibling that is running.
        let inherited = ended.filter(|space| space.inherited);
        self.children.hold_orphaned(inherited.filter_map(|space| {
            Some(ChildUffd { held: space.held, forks: space.forks?, charge: space.charge })
        }));
    }

    /// True if a harvest is late, or its result was not taken.
    pub(crate) fn has_late(&self) -> bool {
        self.spaces.iter().any(|space| space.late.is_some())
    }

    /// Pages of harvests that are late: their written bits are cleared, and not stamped. Normalized.
    pub(crate) fn late_pages(&self, page_size: PageSize) -> Vec<PageRange> {
        let late = self.spaces.iter().filter(|space| space.late.is_some());
        let mut pages: Vec<_> = late.flat_map(|space| space.pages(page_size)).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// True if the descriptor store holds more than the tracked address spaces need.
    pub(crate) fn has_stale_descriptors(&self) -> bool {
        let tracked: BTreeSet<u64> = self.spaces.iter().map(|space| space.key).collect();
        self.stored.keys().any(|key| !tracked.contains(key))
    }

    /// Removes the stored descriptors of address spaces that are no longer tracked, and stores those of new ones as far as there is
    /// room.
    pub(crate) fn store_descriptors(&mut self, store: &FdStore, file: FileId) {
        let spaces = &self.spaces;
        let is_stale = |key: &u64, _: &mut HeldSpace| !spaces.iter().any(|space| space.key == *key);
        for (key, held) in self.stored.extract_if(.., is_stale) {
            remove_descriptors(store, file, key, &held);
        }
        for space in &self.spaces {
            if self.stored.contains_key(&space.key) {
                continue;
            }
            let files = space.held.files();
            let has_room = space.held.with(|userfaultfd| {
                let mut descriptors = vec![(StoredFd::Userfaultfd(space.key), userfaultfd.as_fd())];
                if let Some(files) = &files {
                    descriptors.push((StoredFd::Pagemap(space.key), files.pagemap.as_fd()));
                    descriptors.push((StoredFd::Maps(space.key), files.maps.as_fd()));
                }
                store.add_space(file, &descriptors)
            });
            if has_room == Some(true) {
                self.stored.insert(space.key, space.held.clone());
            }
        }
    }

    /// Removes all descriptors from the store.
    pub(crate) fn drop_stored_descriptors(&mut self, store: &FdStore, file: FileId) {
        for (key, held) in std::mem::take(&mut self.stored) {
            remove_descriptors(store, file, key, &held);
        }
    }
}

/// Removes the descriptors of an address space from the store, which closes its copy of the userfaultfd before the holder does.
pub(crate) fn remove_descriptors(store: &FdStore, file: FileId, key: u64, held: &HeldSpace) {
    for kept in [StoredFd::Userfaultfd(key), StoredFd::Pagemap(key), StoredFd::Maps(key)] {
        store.remove(file, kept);
    }
    if let Some(barrier) = store.barrier() {
        held.close_after(barrier);
    }
}

fn unregister(space: &TrackedAddressSpace, file: MappedFile, mapping: &RegisteredMapping) {
    let unregistered = space.registered_vmas(file, &mapping.extents).and_then(|found| {
        let ranges = found.iter().flatten().map(|part| part.extent.range).collect();
        space.held.call(&SpaceCall::Unregister { ranges })
    });
    if let Err(error) = unregistered {
        let error = fdmap_proto::error_chain(&error);
        tracing::warn!(pid = space.pid, error, "unregistration of a detached mapping failed");
    }
}
