//! Registration of mappings: from then on their writes are observed.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use fdmap_proto::units::{MappingId, PageIndex, PageRange, PageSize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::pidfd::{self, PidFd};
use fdmap_sys::{Errno, SyscallError};

use super::classify;
use super::error::TrackingError;
use super::mapping::{MappingExtent, VmaExtent};
use super::observe::holder::{CallError, HeldSpace, SpaceCall, SpaceOwner, SpaceResult};
use super::observe::{Charge, ChildCharges, Harvest, SpaceHistory, TrackedAddressSpace};
use super::ranges;
use super::state::State;
use super::tracker::Tracker;
use crate::watchdog::{self, Phase};

/// Tracked mappings of a file. Every checkpoint looks at each of them.
const MAX_MAPPINGS: usize = 4096;

/// The mappings that a client wants to have tracked, and the descriptors that it passed.
#[derive(Debug)]
pub struct Registration {
    /// The process whose mappings they are.
    pub pid: u32,
    /// The same process. The user whose holder has the userfaultfd was read while it had the pid.
    pub process: PidFd,
    pub(crate) userfaultfd: HeldSpace,
    /// Used if the service may not open the pagemap of the client; `None`: the client could not open it either.
    pub pagemap: Option<Pagemap>,
    /// Used if the service may not open the maps of the client; `None`: the client could not open them either.
    pub maps: Option<Maps>,
    pub extents: Vec<MappingExtent>,
    /// Dropped when the address space is no longer tracked. What it charges for page tables may last longer.
    pub charge: Charge,
    /// Charges the same user for children of the process.
    pub child_charges: Arc<dyn ChildCharges>,
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
        self.register(registration)
    }

    fn register(&self, registration: Registration) -> Result<Vec<MappingId>, TrackingError> {
        let state = &mut *self.lock();
        if state.spaces.mapping_count() + registration.extents.len() > MAX_MAPPINGS {
            return Err(TrackingError::TooManyMappings(MAX_MAPPINGS));
        }
        watchdog::enter(Phase::Registration);
        let (mut space, verified_pagemap) = self.new_space(registration)?;
        let extents: Vec<_> = space.extents().copied().collect();
        // Before any change: the mappings must be of this file.
        let file = self.observer.file();
        self.check_covered(&space, &extents, &space.vmas(file, &extents)?)?;
        let ids = space.mappings.iter().map(|mapping| mapping.id).collect();
        let pages = space.pages(file.page_size);
        let mut unstamped = state.spaces.late_pages(file.page_size);
        unstamped.extend(&pages);
        ranges::normalize(&mut unstamped);
        state.generations.intend(ranges::hull(&unstamped));
        let tracked = self
            .register_extents(&mut space, verified_pagemap)
            .and_then(|()| self.stamp_registered(state, &space, pages));
        if let Err(error) = tracked {
            // The client's copy of the userfaultfd would keep the ranges registered.
            let ranges = extents.iter().map(|extent| extent.range).collect();
            let _ = space.held.call(&SpaceCall::Unregister { ranges });
            self.interrupt(state);
            return Err(error);
        }
        state.spaces.add(space);
        state.settle(self.observer.file().page_size);
        self.save_record(state)?;
        self.publish(state);
        Ok(ids)
    }

    /// The address space without its mappings registered, and its pagemap if that is known to be of the address space of the userfaultfd.
    fn new_space(
        &self,
        registration: Registration,
    ) -> Result<(TrackedAddressSpace, Option<Arc<Pagemap>>), TrackingError> {
        let Registration { pid, process, userfaultfd, pagemap, maps, extents, charge, child_charges } =
            registration;
        let _waiting = watchdog::wait_for(pid);
        // The passed descriptors may be those of another process, such as the client's parent: then the harvest would miss the
        // client's writes without an error. So they are used only if the service may not open its own.
        let (pagemap, maps) = match userfaultfd.open_files(pid) {
            Err(CallError::Syscall(error)) => match (pagemap, maps) {
                (Some(pagemap), Some(maps)) => (pagemap, maps),
                _ => return Err(error.into()),
            },
            opened => opened?,
        };
        // Otherwise the files are of this process: no other one had its pid meanwhile.
        if process.exited()? {
            let call = format!("pagemap and maps of process {pid}, which has exited");
            return Err(SyscallError { call, errno: Errno::ESRCH }.into());
        }
        // Before the range is registered: no written bit exists that could be taken unnoticed.
        let events = self.observer.sources().follow_space(pagemap.as_fd());
        let (pagemap, objects) = (Arc::new(pagemap), self.observer.kernel_objects());
        let identity = objects.identity(&pagemap, &userfaultfd);
        // Otherwise page tables would be allocated in an address space that is not measured.
        let is_verified = objects.is_userfaultfd_of(&userfaultfd, identity.mm);
        if is_verified == Some(false) {
            return Err(TrackingError::OtherAddressSpace(pid));
        }
        let owner = SpaceOwner { pid, mm: identity.mm };
        if self.observer.sources().holders().has_late_call(owner) {
            return Err(CallError::Blocked.into());
        }
        let verified_pagemap = (is_verified == Some(true)).then(|| Arc::clone(&pagemap));
        userfaultfd.set_files(owner, pagemap, maps);
        let forks = self.observer.enable_uffd(&userfaultfd, child_charges)?;
        let mut history = SpaceHistory::starting_now(events);
        history.serve_guards(&userfaultfd, extents.iter().map(|extent| extent.range).collect());
        // Not read without need: a process that ends meanwhile would make this thread end its address space.
        let is_observed = forks.is_some() || history.is_traced();
        let reaped_child_faults = if is_observed { None } else { pidfd::faults_of_reaped_children(pid).ok() };
        let space = TrackedAddressSpace {
            key: TrackedAddressSpace::random_key(),
            pid,
            identity,
            held: userfaultfd,
            late: None,
            mappings: extents.iter().map(|extent| TrackedAddressSpace::new_mapping(vec![*extent])).collect(),
            inherited: false,
            forks,
            reaped_child_faults,
            history,
            charge,
        };
        Ok((space, verified_pagemap))
    }

    /// Checks that what was found of each extent covers the whole extent.
    fn check_covered(
        &self,
        space: &TrackedAddressSpace,
        extents: &[MappingExtent],
        found: &[Vec<VmaExtent>],
    ) -> Result<(), TrackingError> {
        let page_size = self.observer.file().page_size;
        for (extent, found) in extents.iter().zip(found) {
            let mut covered: Vec<_> = found.iter().map(|found| found.extent.pages(page_size)).collect();
            ranges::normalize(&mut covered);
            let pages = extent.pages(page_size);
            if !ranges::missing(pages, &covered).is_empty() {
                return Err(TrackingError::NotMapped { pid: space.pid, range: extent.range, pages });
            }
        }
        Ok(())
    }

    /// Registers and write-protects all extents, and proves that they are registered.
    fn register_extents(
        &self,
        space: &mut TrackedAddressSpace,
        pagemap: Option<Arc<Pagemap>>,
    ) -> Result<(), TrackingError> {
        let _waiting = watchdog::wait_for(space.pid);
        let extents: Vec<_> = space.extents().copied().collect();
        let ranges: Vec<_> = extents.iter().map(|extent| extent.range).collect();
        let registered = space.held.call(&SpaceCall::Register { ranges: ranges.clone() });
        if let Some(pagemap) = pagemap
            && !matches!(registered, Ok(SpaceResult::Refused { .. }))
        {
            // Page tables were allocated, or will be if the call is late.
            space.charge.set_address_space(pagemap);
        }
        match registered? {
            SpaceResult::Done => {}
            SpaceResult::Refused { at, error } => {
                let busy = ranges.get(at).filter(|_| error.errno == Errno::EBUSY);
                return Err(match busy {
                    Some(range) => TrackingError::Busy { range: *range, error },
                    None => TrackingError::NotTrackable(error),
                });
            }
            other => return Err(CallError::Result(other.name()).into()),
        }
        let found = space.registered_vmas(self.observer.file(), &extents)?;
        self.check_covered(space, &extents, &found)?;
        // A new mapping has one extent.
        for (mapping, found) in space.mappings.iter_mut().zip(found) {
            mapping.extents = found.iter().map(|part| part.extent).collect();
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
