//! Registration of mappings: from then on their writes are observed.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_proto::units::{MappingId, PageIndex, PageRange, PageSize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError, pidfd};

use super::classify;
use super::error::TrackingError;
use super::mapping::{MappingExtent, VmaExtent};
use super::observe::{Charge, Harvest, RevocableUffd, SpaceHistory, TrackedAddressSpace};
use super::ranges;
use super::state::State;
use super::tracker::Tracker;
use crate::watchdog::{self, Phase};

/// Tracked mappings of a file. Every checkpoint looks at each of them.
const MAX_MAPPINGS: usize = 4096;

/// UFFDIO_WRITEPROTECT fails while the process forks, for at most this long.
const FORK_TIMEOUT: Duration = Duration::from_secs(1);

/// The mappings that a client wants to have tracked, and the descriptors that it passed.
#[derive(Debug)]
pub struct Registration {
    /// The client, from the peer credentials of its socket.
    pub pid: u32,
    pub userfaultfd: Userfaultfd,
    /// Used if the service may not open the pagemap of the client; `None`: the client could not open it either.
    pub pagemap: Option<Pagemap>,
    /// Used if the service may not open the maps of the client; `None`: the client could not open them either.
    pub maps: Option<Maps>,
    pub extents: Vec<MappingExtent>,
    /// Dropped when the address space is no longer tracked.
    pub charge: Charge,
}

/// Checks mappings that a client named: whole pages, not empty, not overlapping, within the address space and the largest file.
/// Each mapping is an address, a length in bytes and the first page of the file.
///
/// # Errors
/// [`TrackingError::BadMapping`]
pub fn parse_extents(
    mappings: &[(u64, u64, PageIndex)],
    page_size: PageSize,
) -> Result<Vec<MappingExtent>, TrackingError> {
    let bad = |at: usize, what| TrackingError::BadMapping { at, what };
    let mut extents: Vec<MappingExtent> = Vec::with_capacity(mappings.len());
    for (at, (address, length, first_page)) in mappings.iter().enumerate() {
        let aligned = address.is_multiple_of(page_size.bytes()) && length.is_multiple_of(page_size.bytes());
        if !aligned || *length == 0 {
            return Err(bad(at, "does not consist of whole pages"));
        }
        let end = address.checked_add(*length).ok_or_else(|| bad(at, "exceeds the address space"))?;
        let last = first_page.0.checked_add(length / page_size.bytes());
        if last.and_then(|last| page_size.offset_of(PageIndex(last))).is_none() {
            return Err(bad(at, "exceeds the largest file size"));
        }
        let range = AddressRange { start: *address, end };
        if extents.iter().any(|extent| !extent.range.intersect(range).is_empty()) {
            return Err(bad(at, "overlaps another mapping"));
        }
        extents.push(MappingExtent { range, first_page: *first_page });
    }
    Ok(extents)
}

impl Tracker {
    /// Tracks mappings from now on. The data of their pages counts as written in the open generation. Returns the ids of the
    /// mappings, in the order of the extents.
    ///
    /// # Errors
    /// [`TrackingError`]; no mapping is tracked then.
    pub fn track(self: &Arc<Self>, registration: Registration) -> Result<Vec<MappingId>, TrackingError> {
        let _operation = self.begin("Track");
        let tracked = self.register(registration);
        // Closes the userfaultfd of a refused registration.
        self.observer.close_unused_uffds();
        tracked
    }

    fn register(&self, registration: Registration) -> Result<Vec<MappingId>, TrackingError> {
        let state = &mut *self.lock();
        if state.spaces.mapping_count() + registration.extents.len() > MAX_MAPPINGS {
            return Err(TrackingError::TooManyMappings(MAX_MAPPINGS));
        }
        watchdog::enter(Phase::Registration);
        let mut space = self.new_space(registration)?;
        let extents: Vec<_> = space.extents().copied().collect();
        // Before any change: the mappings must be of this file.
        for extent in &extents {
            self.check_mapped(&space, extent)?;
        }
        let ids = space.mappings.iter().map(|mapping| mapping.id).collect();
        let pages = space.pages(self.observer.file().page_size);
        state.generations.intend(ranges::hull(&pages));
        let mut registered = 0;
        let tracked = self
            .register_extents(&mut space, &mut registered)
            .and_then(|()| self.stamp_registered(state, &space, pages));
        if let Err(error) = tracked {
            for extent in &extents[..registered] {
                // The client's copy of the userfaultfd would keep the range registered.
                let _ = space.userfaultfd.unregister(extent.range);
            }
            self.interrupt(state);
            return Err(error);
        }
        state.spaces.add(space);
        state.generations.settle();
        self.save_record(state)?;
        self.publish(state);
        Ok(ids)
    }

    fn new_space(&self, registration: Registration) -> Result<TrackedAddressSpace, TrackingError> {
        let Registration { pid, userfaultfd, pagemap, maps, extents, charge } = registration;
        let _waiting = watchdog::wait_for(pid);
        // The passed descriptors may be those of another process, such as the client's parent: then the harvest would miss the
        // client's writes without an error. So they are used only if the service may not open its own.
        let pagemap = Pagemap::open(Some(pid)).or_else(|error| pagemap.ok_or(error))?;
        let maps = Maps::open(pid).or_else(|error| maps.ok_or(error))?;
        // Before the range is registered: no written bit exists that could be taken unnoticed.
        let events = self.observer.sources().follow_space(pagemap.as_fd());
        let (userfaultfd, forks) = self.observer.enable_uffd(userfaultfd)?;
        let mut history = SpaceHistory::starting_now(events);
        history.serve_guards(&userfaultfd, extents.iter().map(|extent| extent.range).collect());
        let identity = self.observer.identity(&pagemap, &userfaultfd);
        Ok(TrackedAddressSpace {
            key: TrackedAddressSpace::random_key(),
            pid,
            identity,
            pagemap,
            maps,
            userfaultfd,
            mappings: extents.iter().map(|extent| TrackedAddressSpace::new_mapping(vec![*extent])).collect(),
            inherited: false,
            forks,
            reaped_child_faults: pidfd::faults_of_reaped_children(pid).unwrap_or(0),
            history,
            _charge: Some(charge),
        })
    }

    /// Checks that shared mappings of the file cover the whole extent.
    fn check_mapped(&self, space: &TrackedAddressSpace, extent: &MappingExtent) -> Result<(), TrackingError> {
        self.check_covered(space, extent, &space.vmas(self.observer.file(), extent)?)
    }

    fn check_covered(
        &self,
        space: &TrackedAddressSpace,
        extent: &MappingExtent,
        found: &[VmaExtent],
    ) -> Result<(), TrackingError> {
        let page_size = self.observer.file().page_size;
        let mut covered: Vec<_> = found.iter().map(|found| found.extent.pages(page_size)).collect();
        ranges::normalize(&mut covered);
        let pages = extent.pages(page_size);
        if ranges::missing(pages, &covered).is_empty() {
            return Ok(());
        }
        Err(TrackingError::NotMapped { pid: space.pid, range: extent.range, pages })
    }

    /// Registers and write-protects all extents, and proves that they are registered. `registered` counts the extents for which
    /// UFFDIO_REGISTER succeeded.
    fn register_extents(
        &self,
        space: &mut TrackedAddressSpace,
        registered: &mut usize,
    ) -> Result<(), TrackingError> {
        let _waiting = watchdog::wait_for(space.pid);
        for extent in space.extents() {
            let result = space.userfaultfd.with(|userfaultfd| userfaultfd.register_wp(extent.range));
            result.unwrap_or_else(|| Err(revoked())).map_err(|error| match error.errno {
                Errno::EBUSY => TrackingError::Busy { range: extent.range, error },
                _ => TrackingError::NotTrackable(error),
            })?;
            *registered += 1;
        }
        for extent in space.extents() {
            // Pages that were never protected look written, or clean in hugetlb files: their data is stamped in any case. A scan
            // cannot arm them, since it skips untouched pages of hugetlb files.
            write_protect(&space.userfaultfd, extent.range)?;
        }
        let mut mapped = Vec::new();
        for mapping in &space.mappings {
            let mut extents = Vec::new();
            for extent in &mapping.extents {
                let found = space.registered_vmas(self.observer.file(), extent)?;
                self.check_covered(space, extent, &found)?;
                extents.extend(found.iter().map(|part| part.extent));
            }
            mapped.push(extents);
        }
        for (mapping, extents) in space.mappings.iter_mut().zip(mapped) {
            mapping.extents = extents;
        }
        Ok(())
    }

    /// Stamps what was written before the registration, through these mappings or through tracked ones that they replaced.
    fn stamp_registered(
        &self,
        state: &mut State,
        new: &TrackedAddressSpace,
        pages: Vec<PageRange>,
    ) -> Result<(), TrackingError> {
        let taken: Vec<AddressRange> = new.extents().map(|extent| extent.range).collect();
        let page_size = self.observer.file().page_size;
        // A replaced mapping would look as if it still existed.
        let ended = state.spaces.remove_replaced(new.pid, &taken, page_size);
        let mut findings = classify::harvested(Harvest { ended, ..Harvest::default() });
        state.generations.add_gaps(std::mem::take(&mut findings.gaps));
        findings.suspect.extend(pages);
        self.stamp_between_checkpoints(state, findings)
    }
}

/// UFFDIO_WRITEPROTECT, repeated while the process forks.
fn write_protect(userfaultfd: &RevocableUffd, range: AddressRange) -> Result<(), TrackingError> {
    let began = Instant::now();
    loop {
        let protected = userfaultfd.with(|userfaultfd| userfaultfd.write_protect(range, true));
        match protected.unwrap_or_else(|| Err(revoked())) {
            Err(SyscallError { errno: Errno::EAGAIN, .. }) if began.elapsed() < FORK_TIMEOUT => {
                std::thread::yield_now();
            }
            other => return Ok(other?),
        }
    }
}

/// The error of a userfaultfd that was closed because its fork events cannot be read.
fn revoked() -> SyscallError {
    SyscallError {
        call: "use of a userfaultfd whose fork events cannot be read".to_owned(),
        errno: Errno::EBADF,
    }
}
