//! Recovery: a tracker continues where another process of the service ended.
//!
//! The written bits of page tables survived, because the descriptor store held the userfaultfds. Stamps and generations are in
//! the journal. Lost are signals of writes through descriptors, mappings that came and went, and forks. So the first generation
//! is conservative, unless the writers were sealed and all mappings were tracked.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::GapKind;
use fdmap_proto::units::{FileId, PageRange, PageSize};
use fdmap_sys::maps::Maps;
use fdmap_sys::ownership::Ownership;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;

use super::baseline::UnnotifiedWrites;
use super::classify;
use super::create::TrackerOptions;
use super::cursors::Cursors;
use super::error::TrackingError;
use super::generations::{Generations, LastCheckpoint};
use super::journal::{Journal, JournalError, RecoveredJournal};
use super::mapping::MappingExtent;
use super::observe::holder::{HeldSpace, SpaceOwner};
use super::observe::{
    Charge, EventSources, SpaceHistory, SpaceIdentity, TrackedAddressSpace, remove_descriptors,
};
use super::ranges::{self, ALL_PAGES};
use super::record::{AddressSpaceRecord, Record, RecordError};
use super::redirty::RedirtySet;
use super::state::State;
use super::tracker::Tracker;
use crate::store::StoredFd;

/// A file whose descriptors were stored by the previous process of the service.
#[derive(Debug)]
pub struct RecoveredFile {
    /// The memfd.
    pub file: OwnedFd,
    pub info: FileInfo,
    journal: Journal,
    recovered: RecoveredJournal,
    record: Record,
    /// By the keys of their address spaces. Whatever becomes of the file, they are not closed here: the last close may block.
    userfaultfds: BTreeMap<u64, HeldSpace>,
    /// The other stored descriptors.
    descriptors: BTreeMap<StoredFd, OwnedFd>,
}

/// An address space that is tracked again.
#[derive(Debug)]
pub struct RecoveredSpace<'a> {
    /// The user who was charged for it.
    pub user: u32,
    /// The mappings.
    pub extents: Vec<&'a MappingExtent>,
}

/// Why stored descriptors cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    #[error("the stored descriptors lack the {0}")]
    Missing(&'static str),
    #[error("read of the stored journal")]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the stored journal belongs to file {0}")]
    OtherFile(FileId),
}

impl RecoveredFile {
    /// Reads the journal among the stored descriptors of file `id`.
    ///
    /// # Errors
    /// [`RecoveryError`]
    pub fn new(
        id: FileId,
        mut descriptors: BTreeMap<StoredFd, OwnedFd>,
        page_size: PageSize,
        sources: &EventSources,
    ) -> Result<Self, RecoveryError> {
        let holder = sources.holders().of_user(0);
        let is_userfaultfd = |role: &StoredFd, _: &mut OwnedFd| matches!(role, StoredFd::Userfaultfd(_));
        let userfaultfds = descriptors.extract_if(.., is_userfaultfd).filter_map(|(role, fd)| {
            let StoredFd::Userfaultfd(key) = role else { return None };
            Some((key, HeldSpace::new(Userfaultfd::from_fd(fd).ok()?, Arc::clone(&holder))))
        });
        let userfaultfds = userfaultfds.collect();
        let file = descriptors.remove(&StoredFd::File).ok_or(RecoveryError::Missing("memfd"))?;
        let journal = descriptors.remove(&StoredFd::Journal).ok_or(RecoveryError::Missing("journal"))?;
        let (journal, recovered) = Journal::open(journal, page_size)?;
        let record = Record::decode(&recovered.record)?;
        let info = record.file.clone();
        if info.id != id {
            return Err(RecoveryError::OtherFile(info.id));
        }
        Ok(Self { file, info, journal, recovered, record, userfaultfds, descriptors })
    }

    /// Owner and mode of the inode before the file was adopted.
    #[must_use]
    pub const fn original_owner(&self) -> Option<Ownership> {
        self.record.original_owner
    }
}

impl Tracker {
    /// Continues with the generations of a recovered file. `charge`: charges for a tracked address space.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn recover(
        options: TrackerOptions,
        recovered: RecoveredFile,
        charge: &dyn Fn(&RecoveredSpace<'_>) -> Charge,
    ) -> Result<Arc<Self>, TrackingError> {
        let RecoveredFile { journal, recovered, record, mut userfaultfds, mut descriptors, .. } = recovered;
        let Record { policy, cursors, spaces, .. } = record;
        let charges = Arc::clone(&options.stamp_charges);
        let (observer, settings) = options.observe(policy, Cursors::restore(cursors))?;
        let (generations, last) = Generations::recover(journal, recovered, charges);
        let mut state = State::new(settings, generations, observer.initial_history(true));
        // Address spaces mapped the file that may have ended.
        state.history.remaps.add(None);
        restore_last_checkpoint(&mut state, last);
        let page_size = observer.file().page_size;
        for record in spaces {
            let pages = pages_of(&record, page_size);
            let userfaultfd = userfaultfds.remove(&record.key);
            match userfaultfd
                .and_then(|held| address_space(record, held, &mut descriptors, observer.sources(), charge))
            {
                Some(mut space) => {
                    if let Some(files) = space.held.files() {
                        let objects = observer.kernel_objects();
                        space.identity = objects.identity(&files.pagemap, &space.held);
                        if objects.is_userfaultfd_of(&space.held, space.identity.mm) == Some(true) {
                            space.charge.set_address_space(Arc::clone(&files.pagemap));
                        }
                    }
                    state.spaces.add_stored(space);
                }
                // The last descriptor was closed, and the written bits are lost. The header reports that to a process that recovers the
                // file before the next checkpoint.
                None => {
                    state.untracked.pages.extend(&pages);
                    state.spaces.add_lost_child(0, pages);
                }
            }
        }
        ranges::normalize(&mut state.untracked.pages);
        observer.lose_signals();
        if let Some(store) = observer.sources().store() {
            // The previous process ended before it recorded the mappings of these descriptors.
            let file = state.settings.file.id;
            descriptors.keys().for_each(|kept| store.remove(file, *kept));
            userfaultfds.iter().for_each(|(key, held)| remove_descriptors(store, file, *key, held));
        }
        let tracker = Self::new(observer, state);
        tracker.stamp_intended(last)?;
        Ok(tracker)
    }

    /// Stamps the pages that the previous process was harvesting, or all data if it opened no generation.
    fn stamp_intended(&self, last: LastCheckpoint) -> Result<(), TrackingError> {
        let state = &mut *self.lock();
        let mut suspect = Vec::from_iter(last.intent);
        if !last.initialized {
            suspect.push(PageRange::first(self.observer.inode()?.pages));
        }
        let pages = self.suspect_pages(state, suspect)?;
        state.generations.stamp_conservative(&pages)?;
        state.generations.settle();
        state.write_header();
        self.save_record(state)?;
        self.publish(state);
        Ok(())
    }
}

fn restore_last_checkpoint(state: &mut State, last: LastCheckpoint) {
    state.baseline = last.baseline;
    state.untracked.unknown = last.untracked || !last.initialized;
    if !last.baseline.writers_sealed && last.baseline.changed_recently() {
        // An unnotified write may have begun before the last checkpoint, and may still be in progress.
        state.unnotified_writes = UnnotifiedWrites::begun(Instant::now(), false);
    }
    if let Some(range) = last.intent {
        let detail = "the service ended while it harvested these pages";
        state.generations.add_gaps([classify::gap(GapKind::LostEvents, None, Some(range), detail)]);
    }
    // Pages with a stamp of the open generation were in the redirty set, and may still be pinned.
    let ahead = state.generations.stamps().changed(state.generations.closed(), ALL_PAGES);
    state.redirty = RedirtySet::of_pinned(ahead.map(|run| run.range).collect());
}

fn pages_of(record: &AddressSpaceRecord, page_size: PageSize) -> Vec<PageRange> {
    let extents = record.mappings.iter().flat_map(|mapping| &mapping.extents);
    let mut pages: Vec<_> = extents.map(|extent| extent.pages(page_size)).collect();
    ranges::normalize(&mut pages);
    pages
}

/// The address space without its identity. `None` if a descriptor is missing or has the wrong type.
fn address_space(
    record: AddressSpaceRecord,
    userfaultfd: HeldSpace,
    stored: &mut BTreeMap<StoredFd, OwnedFd>,
    sources: &EventSources,
    charge: &dyn Fn(&RecoveredSpace<'_>) -> Charge,
) -> Option<TrackedAddressSpace> {
    let AddressSpaceRecord { key, pid, user, charged, mappings } = record;
    let (pagemap, maps) = (stored.remove(&StoredFd::Pagemap(key))?, stored.remove(&StoredFd::Maps(key))?);
    let (pagemap, maps) = (Pagemap::from_fd(pagemap).ok()?, Maps::from_fd(maps).ok()?);
    // Calls were not traced while the service was not running.
    let mut history = SpaceHistory::unknown_until_now(sources.follow_space(pagemap.as_fd()));
    let held = userfaultfd.given_to(sources.holders().of_user(user))?;
    let extents = mappings.iter().flat_map(|mapping| &mapping.extents).collect();
    let charge = charge(&RecoveredSpace { user: charged, extents });
    held.set_charge(Arc::clone(&charge));
    held.set_files(SpaceOwner { pid, mm: None }, Arc::new(pagemap), maps);
    let extents = mappings.iter().flat_map(|mapping| &mapping.extents);
    history.serve_guards(&held, extents.map(|extent| extent.range).collect());
    Some(TrackedAddressSpace {
        key,
        pid,
        identity: SpaceIdentity::default(),
        held,
        late: None,
        mappings,
        inherited: false,
        forks: None,
        // Differs from every count: children that were reaped while the service was not running count.
        reaped_child_faults: None,
        history,
        charge,
    })
}
