//! Events of tracked address spaces: calls that may take written bits, calls that may make a shared mapping writable, and forks.
//! The programs of `bpf/space_events.bpf.c` count them while an address space is followed.
//!
//! A call counts when it begins, before it changes anything, and again when it ends. So if no call was in progress before a
//! harvest, and none began until after the next one, only the service took written bits in between. A search of all tasks shows
//! whether a call is in progress that is not counted.
//!
//! `guards` serves calls that install guard regions.

mod guards;
mod load;

use std::collections::BTreeMap;
use std::fmt;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::membarrier::wait_for_bpf_programs;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle, Object};

use super::free_slots::FreeSlots;
use super::guarded_ranges::GuardedRanges;
use super::own_calls::CallCounter;
use super::space_counts::SpaceCounts;
use super::task_search::{TaskSearch, Uncounted};
use crate::bpf::records::{SpaceControl, SpaceSlot, Status};
use crate::bpf::{LoadError, TraceError, attach, map_array, map_handle, program_fd, run, status_text};
use guards::GuardServer;
use load::{MAX_SPACES, load};

/// Counters of a slot: of calls that have begun, and of those that have ended.
const SLOT_PAIRS: [(usize, usize); 2] = [
    (offset_of!(SpaceSlot, begun), offset_of!(SpaceSlot, ended)),
    (offset_of!(SpaceSlot, protect_begun), offset_of!(SpaceSlot, protect_ended)),
];

/// Counts events of the followed address spaces of this host.
pub struct SpaceTracer {
    follow: OwnedFd,
    unfollow: OwnedFd,
    search: TaskSearch,
    /// Held during a search, so that further ones need not search for the same calls.
    searching: Mutex<()>,
    /// One [`SpaceControl`].
    control: SharedMapping,
    /// [`SpaceSlot`]s by slot.
    slots: SharedMapping,
    /// Counted calls in progress: from threads to slots.
    in_flight: MapHandle,
    add_holder: OwnedFd,
    /// The names of holders by process id.
    holders: MapHandle,
    guards: GuardServer,
    inner: Mutex<Inner>,
}

struct Inner {
    object: Object,
    /// The attached programs. Empty while no address space is followed.
    links: Vec<Link>,
    followed: BTreeMap<usize, FollowedSpace>,
    /// Number of `follow` calls so far: the ids of followed address spaces.
    follows: u64,
    free: FreeSlots,
}

/// A followed address space. Mappings of several files in it share one slot.
struct FollowedSpace {
    id: u64,
    /// Keeps the memory of the mm_struct, whose address is the key in the programs' map.
    pagemap: OwnedFd,
    subscriptions: usize,
    calls: Uncounted<u64>,
}

impl SpaceTracer {
    /// Loads the programs, and attaches them once to check that the host permits it.
    ///
    /// # Errors
    /// [`TraceError`]: the process lacks CAP_BPF or CAP_PERFMON, or the kernel lacks BTF.
    pub fn start() -> Result<Arc<Self>, TraceError> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(TraceError::Architecture);
        }
        let object = load()?;
        let control = map_array::<SpaceControl>(&object, "space_control", 1, true)?;
        let slots = map_array::<SpaceSlot>(&object, "space_slots", MAX_SPACES, true)?;
        let (in_flight, holders) = (map_handle(&object, "in_flight")?, map_handle(&object, "holders")?);
        let add_holder = program_fd(&object, "add_holder")?;
        let (follow, unfollow) =
            (program_fd(&object, "follow_space")?, program_fd(&object, "unfollow_space")?);
        let (pagemap, userfaultfd) = (Pagemap::open(None)?, Userfaultfd::create()?);
        let mut arguments = [argument(pagemap.as_fd()), argument(userfaultfd.as_fd())];
        run_program(program_fd(&object, "learn")?.as_fd(), &mut arguments)
            .map_err(|failure| failure.into_error("learn", pagemap.as_fd().as_raw_fd()))?;
        drop(attach(&object)?);
        let (search, searching) = (TaskSearch::new(&object)?, Mutex::default());
        let guards = GuardServer::start(&object)?;
        let free = FreeSlots::new(MAX_SPACES);
        let inner = Inner { object, links: Vec::new(), followed: BTreeMap::new(), follows: 0, free };
        let inner = Mutex::new(inner);
        Ok(Arc::new(Self {
            follow,
            unfollow,
            search,
            searching,
            control,
            slots,
            in_flight,
            add_holder,
            holders,
            guards,
            inner,
        }))
    }

    /// Counts events of the address space of `pagemap` until the subscription is dropped. A call that is in progress counts when
    /// it ends; see [`SpaceSubscription::complete_counts`].
    ///
    /// # Errors
    /// [`TraceError`]
    pub fn follow(self: &Arc<Self>, pagemap: BorrowedFd<'_>) -> Result<SpaceSubscription, TraceError> {
        let raw = pagemap.as_raw_fd();
        let full = status_text(Status::FDMAP_STATUS_FULL);
        let duplicate = pagemap.try_clone_to_owned().map_err(LoadError::Duplicate)?;
        let mut inner = self.lock();
        let slot = inner.free.first(|slot| self.has_no_calls(slot));
        let slot = slot.ok_or(TraceError::Refused { program: "follow_space", fd: raw, why: full })?;
        if inner.links.is_empty() {
            self.end_unobserved_calls(&inner.free);
            inner.links = attach(&inner.object)?;
        }
        self.set_followed(inner.followed.len() + 1);
        let mut arguments = [argument(pagemap), to_u64(slot)];
        let followed = match run_program(self.follow.as_fd(), &mut arguments) {
            Ok(()) => {
                inner.free.take(slot);
                inner.follows += 1;
                let (id, calls) = (inner.follows, Uncounted::default());
                inner
                    .followed
                    .insert(slot, FollowedSpace { id, pagemap: duplicate, subscriptions: 1, calls });
                Ok(slot)
            }
            Err(Failure::Status(Status::FDMAP_STATUS_TWICE)) => {
                let known = to_usize(self.word(offset_of!(SpaceControl, found)));
                if let Some(followed) = inner.followed.get_mut(&known) {
                    followed.subscriptions += 1;
                }
                Ok(known)
            }
            Err(failure) => Err(failure.into_error("follow_space", raw)),
        };
        self.detach_if_unused(&mut inner);
        followed.map(|slot| SpaceSubscription { tracer: Arc::clone(self), slot, guards: None })
    }

    fn unfollow(&self, slot: usize) {
        let mut inner = self.lock();
        let Some(followed) = inner.followed.get_mut(&slot) else { return };
        followed.subscriptions -= 1;
        if followed.subscriptions > 0 {
            return;
        }
        let pagemap = followed.pagemap.as_fd();
        let mut arguments = [argument(pagemap)];
        if let Err(failure) = run_program(self.unfollow.as_fd(), &mut arguments) {
            // The programs still have the mm_struct as a key, so keep its memory.
            let error = failure.into_error("unfollow_space", pagemap.as_raw_fd());
            tracing::warn!(error = fdmap_proto::error_chain(&error), "an address space is still followed");
            return;
        }
        inner.followed.remove(&slot);
        inner.free.give_back(slot);
        self.detach_if_unused(&mut inner);
    }

    /// Detaches the programs if no address space is followed any more.
    fn detach_if_unused(&self, inner: &mut Inner) {
        self.set_followed(inner.followed.len());
        if inner.followed.is_empty() {
            inner.links.clear();
        }
    }

    fn set_followed(&self, spaces: usize) {
        let offset = offset_of!(SpaceControl, followed);
        self.control.atomic_u64s(offset, 1)[0].store(to_u64(spaces), Ordering::SeqCst);
    }

    /// Searches for calls that are not counted, for all address spaces for which that is due, if it is due for this one.
    fn search_calls(&self, slot: usize) {
        // It protects nothing, so that a poisoned lock is usable.
        let _searching = self.searching.lock().unwrap_or_else(PoisonError::into_inner);
        let state = |slot: usize| {
            let calling = self.slot_word(slot, offset_of!(SpaceSlot, calling));
            let of_any = self.word(offset_of!(SpaceControl, calling));
            [self.slot_word(slot, offset_of!(SpaceSlot, uncounted)), calling.wrapping_add(of_any)]
        };
        let due: Vec<_> = {
            let (inner, now) = (self.lock(), Instant::now());
            let is_due = |slot: usize, space: &FollowedSpace| space.calls.is_due(&state(slot)[0], now);
            if !inner.followed.get(&slot).is_some_and(|space| is_due(slot, space)) {
                return;
            }
            let due = inner.followed.iter().filter(|(slot, space)| is_due(**slot, space));
            due.map(|(slot, space)| (*slot, space.id, state(*slot))).collect()
        };
        let complete = self.search.run();
        let (mut inner, now) = (self.lock(), Instant::now());
        for (slot, id, [uncounted, calling]) in due {
            // Another address space may have the slot by now.
            if let Some(space) = inner.followed.get_mut(&slot).filter(|space| space.id == id) {
                space.calls.note(uncounted, !complete || state(slot)[1] != calling, now);
            }
        }
    }

    /// True if every call of the address space that is in progress is counted.
    fn counts_all(&self, slot: usize) -> bool {
        let uncounted = self.slot_word(slot, offset_of!(SpaceSlot, uncounted));
        self.lock().followed.get(&slot).is_some_and(|space| space.calls.is_excluded(&uncounted))
    }

    fn slot_word(&self, slot: usize, member: usize) -> u64 {
        self.counter(slot, member).load(Ordering::SeqCst)
    }

    fn counter(&self, slot: usize, member: usize) -> &AtomicU64 {
        &self.slots.atomic_u64s(slot * size_of::<SpaceSlot>() + member, 1)[0]
    }

    /// True if no call is in progress that was counted in the slot.
    fn has_no_calls(&self, slot: usize) -> bool {
        // Read in this order, begun includes every call in progress and ended includes none of them.
        SLOT_PAIRS.iter().all(|(begun, ended)| {
            let ended = self.slot_word(slot, *ended);
            self.slot_word(slot, *begun) == ended
        })
    }

    /// Ends calls whose exit was not observed because no program was attached. All slots are free.
    fn end_unobserved_calls(&self, free: &FreeSlots) {
        let (begun, ended) = (offset_of!(SpaceControl, begun), offset_of!(SpaceControl, ended));
        if self.word(begun) == self.word(ended) {
            return;
        }
        if let Err(error) = wait_for_bpf_programs() {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(error, "system calls that are in progress now will count as in progress for ever");
            return;
        }
        for thread in self.in_flight.keys() {
            // Nothing else changes the map while no program runs.
            let _ = self.in_flight.delete(&thread);
        }
        self.control.atomic_u64s(ended, 1)[0].store(self.word(begun), Ordering::SeqCst);
        for slot in free.iter() {
            for (begun, ended) in SLOT_PAIRS {
                self.counter(slot, ended).store(self.slot_word(slot, begun), Ordering::SeqCst);
            }
        }
    }

    fn word(&self, offset: usize) -> u64 {
        self.control.atomic_u64s(offset, 1)[0].load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Slots are independent of one another, so the state behind a poisoned lock is usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallCounter for SpaceTracer {
    fn add_holder(&self) -> BorrowedFd<'_> {
        self.add_holder.as_fd()
    }

    fn remove_holder(&self, name: u64) {
        let is_named = |process: &Vec<u8>| {
            let found = self.holders.lookup(process, MapFlags::ANY).ok().flatten();
            found.is_some_and(|found| found == name.to_ne_bytes())
        };
        for process in self.holders.keys().filter(is_named) {
            // It has been deleted already, if this fails.
            let _ = self.holders.delete(&process);
        }
    }
}

impl fmt::Debug for SpaceTracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpaceTracer").finish_non_exhaustive()
    }
}

/// Keeps an address space followed.
#[derive(Debug)]
pub struct SpaceSubscription {
    tracer: Arc<SpaceTracer>,
    slot: usize,
    guards: Option<GuardedRanges>,
}

impl SpaceSubscription {
    /// Lets calls return that install guard regions in these ranges.
    pub fn serve_guards(&mut self, ranges: GuardedRanges) {
        self.tracer.guards.add(self.slot, ranges.clone());
        self.guards = Some(ranges);
    }

    /// Removes the write protection of a guarded range once more, on another thread.
    pub fn unprotect_again(&self, range: AddressRange) {
        self.tracer.guards.serve_again(self.slot, range);
    }

    /// The events so far. `None`: a call that is not counted may be in progress. It began before the address space was followed, or
    /// there was no room for it.
    #[must_use]
    pub fn complete_counts(&self) -> Option<SpaceCounts> {
        if !self.tracer.counts_all(self.slot) {
            self.tracer.search_calls(self.slot);
        }
        // In this order: a call without room is counted as such before it counts as ended.
        let counts = self.counts();
        self.tracer.counts_all(self.slot).then_some(counts)
    }

    /// The events of the address space so far.
    #[must_use]
    pub fn counts(&self) -> SpaceCounts {
        let counter = |member: usize| self.tracer.slot_word(self.slot, member);
        // Read in this order: if both are equal, no call was in progress when the first was read.
        let ended = counter(offset_of!(SpaceSlot, ended));
        let begun = counter(offset_of!(SpaceSlot, begun));
        let protect_ended = counter(offset_of!(SpaceSlot, protect_ended));
        let protect_begun = counter(offset_of!(SpaceSlot, protect_begun));
        let copies = counter(offset_of!(SpaceSlot, copies));
        SpaceCounts { begun, ended, copies, protect_begun, protect_ended }
    }
}

impl Drop for SpaceSubscription {
    fn drop(&mut self) {
        if let Some(guards) = &self.guards {
            self.tracer.guards.remove(self.slot, guards);
        }
        self.tracer.unfollow(self.slot);
    }
}

/// Why a program that runs on demand did not do its work.
enum Failure {
    Run(Errno),
    Status(Status),
}

impl Failure {
    const fn into_error(self, program: &'static str, fd: i32) -> TraceError {
        match self {
            Self::Run(errno) => TraceError::Run { program, fd, errno },
            Self::Status(status) => TraceError::Refused { program, fd, why: status_text(status) },
        }
    }
}

fn run_program(program: BorrowedFd<'_>, arguments: &mut [u64]) -> Result<(), Failure> {
    match Status(run(program, arguments).map_err(Failure::Run)?.unsigned_abs()) {
        Status::FDMAP_STATUS_OK => Ok(()),
        other => Err(Failure::Status(other)),
    }
}

fn argument(fd: BorrowedFd<'_>) -> u64 {
    u64::from(fd.as_raw_fd().cast_unsigned())
}

#[cfg(test)]
mod needs_root;
