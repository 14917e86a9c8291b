//! Serves `madvise(MADV_GUARD_INSTALL)` of followed address spaces: see [`GuardedRanges`].
//!
//! A dispatcher reads the calls from a ring buffer. Each address space has a thread of its own while there is work for it, because
//! UFFDIO_WRITEPROTECT waits without a limit for a process whose memory map is locked, and no process may delay another one. The
//! kernel restarts a call of madvise again and again, and each restart is reported, so reports may be dropped. A call of
//! process_madvise is counted, and its report only wakes the dispatcher.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use fdmap_proto::units::to_usize;
use fdmap_sys::address::AddressRange;
use fdmap_sys::capabilities::{self, Capabilities};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::Object;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::load::{GUARD_RING_BYTES, MAX_SPACES};
use super::{SpaceSlot, TraceError};
use crate::bpf::records::GuardRecord;
use crate::bpf::{map_array, map_fd};
use crate::tracking::observe::guarded_ranges::GuardedRanges;
use crate::tracking::observe::trace::ring::Ring;

/// Calls of one address space that wait for its thread. With more, all of its ranges are served.
const MAX_PENDING: usize = 64;

/// A call whose range is unknown.
const EVERYTHING: AddressRange = AddressRange { start: 0, end: u64::MAX };

/// The dispatcher, and the address spaces that it serves.
pub(super) struct GuardServer {
    shared: Arc<Shared>,
    wake: Arc<EventFd>,
    dispatcher: Option<JoinHandle<()>>,
}

struct Shared {
    /// [`SpaceSlot`]s by slot.
    slots: SharedMapping,
    spaces: Mutex<BTreeMap<usize, Space>>,
    /// Number of address spaces so far.
    ids: AtomicU64,
}

/// The tracked mappings of one address space, each of one file, and the calls that are not served yet.
#[derive(Default)]
struct Space {
    mappings: Vec<GuardedRanges>,
    pending: Vec<AddressRange>,
    /// Distinguishes it from earlier address spaces of the slot, whose thread may still be blocked.
    id: u64,
    /// A thread serves the calls.
    served: bool,
    /// Calls of process_madvise so far.
    unranged: u64,
}

impl GuardServer {
    pub(super) fn start(object: &Object) -> Result<Self, TraceError> {
        let slots = map_array::<SpaceSlot>(object, "space_slots", MAX_SPACES, true)?;
        let records = map_fd(object, "guard_records")?;
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        let page = page.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
        let ring = Ring::new(records.as_fd(), GUARD_RING_BYTES, page)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_value_and_flags(0, flags).call(|| "eventfd".to_owned())?);
        let shared = Arc::new(Shared { slots, spaces: Mutex::default(), ids: AtomicU64::new(0) });
        let (its, waking) = (Arc::clone(&shared), Arc::clone(&wake));
        let builder = std::thread::Builder::new().name("guards".to_owned());
        let dispatcher = builder.spawn(move || {
            // It starts before the service gives up capabilities, and needs none. One that keeps them is no less right.
            let _ = capabilities::keep_only(Capabilities::empty());
            dispatch(&its, &records, ring, &waking);
        });
        let dispatcher = dispatcher.map_err(TraceError::Thread)?;
        Ok(Self { shared, wake, dispatcher: Some(dispatcher) })
    }

    /// Serves calls in the address space of `slot` that concern `mappings`.
    pub(super) fn add(&self, slot: usize, mappings: GuardedRanges) {
        let unranged = self.shared.counter(slot, std::mem::offset_of!(SpaceSlot, unranged));
        let mut spaces = self.shared.lock();
        let id = || self.shared.ids.fetch_add(1, Ordering::Relaxed);
        let space = spaces.entry(slot).or_insert_with(|| Space { unranged, id: id(), ..Space::default() });
        space.mappings.push(mappings);
    }

    /// Removes the write protection of `range` once more.
    pub(super) fn serve_again(&self, slot: usize, range: AddressRange) {
        self.shared.serve(slot, range);
    }

    pub(super) fn remove(&self, slot: usize, mappings: &GuardedRanges) {
        let mut spaces = self.shared.lock();
        let Some(space) = spaces.get_mut(&slot) else { return };
        space.mappings.retain(|known| !known.is(mappings));
        if space.mappings.is_empty() {
            spaces.remove(&slot);
        }
    }
}

impl Drop for GuardServer {
    fn drop(&mut self) {
        // Fails only if the counter is full, which wakes the thread anyway.
        let _ = self.wake.write(1);
        if let Some(dispatcher) = self.dispatcher.take() {
            // A panic of the thread was already reported.
            let _ = dispatcher.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Space>> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, slot: usize, member: usize) -> u64 {
        self.slots.atomic_u64s(slot * size_of::<SpaceSlot>() + member, 1)[0].load(Ordering::SeqCst)
    }

    /// Permits one more report of the slot.
    fn acknowledge(&self, slot: usize) {
        let offset = slot * size_of::<SpaceSlot>() + std::mem::offset_of!(SpaceSlot, guards_read);
        self.slots.atomic_u64s(offset, 1)[0].fetch_add(1, Ordering::SeqCst);
    }

    /// Calls of process_madvise since the last call of this function, whose ranges are unknown.
    fn unranged(&self) -> Vec<usize> {
        let changed = |(slot, space): (&usize, &mut Space)| {
            let now = self.counter(*slot, std::mem::offset_of!(SpaceSlot, unranged));
            (std::mem::replace(&mut space.unranged, now) != now).then_some(*slot)
        };
        self.lock().iter_mut().filter_map(changed).collect()
    }

    fn serve(self: &Arc<Self>, slot: usize, range: AddressRange) {
        let mut spaces = self.lock();
        let Some(space) = spaces.get_mut(&slot) else { return };
        if !space.mappings.iter().any(|mappings| mappings.concern(range)) {
            return;
        }
        if space.pending.len() >= MAX_PENDING {
            space.pending = vec![EVERYTHING];
        } else if !space.pending.contains(&range) {
            space.pending.push(range);
        }
        if std::mem::replace(&mut space.served, true) {
            return;
        }
        let (its, id) = (Arc::clone(self), space.id);
        let started = std::thread::Builder::new().name("guard".to_owned()).spawn(move || its.work(slot, id));
        if let Err(error) = started {
            // The next report starts one.
            space.served = false;
            tracing::warn!(error = fdmap_proto::error_chain(&error), "a guard region is not served");
        }
    }

    /// Serves calls in one address space until none is left.
    fn work(&self, slot: usize, id: u64) {
        loop {
            let (pending, mappings) = {
                let mut spaces = self.lock();
                let Some(space) = spaces.get_mut(&slot).filter(|space| space.id == id) else { return };
                if space.pending.is_empty() {
                    space.served = false;
                    return;
                }
                (std::mem::take(&mut space.pending), space.mappings.clone())
            };
            for mappings in mappings {
                pending.iter().for_each(|range| mappings.unprotect(*range));
            }
        }
    }
}

/// Runs until `wake` is written.
fn dispatch(shared: &Arc<Shared>, records: &OwnedFd, mut ring: Ring, wake: &EventFd) {
    loop {
        let mut polled =
            [PollFd::new(records.as_fd(), PollFlags::POLLIN), PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        // A failed poll was interrupted by a signal. A superfluous look is harmless.
        let _ = poll(&mut polled, PollTimeout::NONE);
        if polled[1].any().unwrap_or(false) {
            return;
        }
        let mut found = Vec::new();
        ring.consume(|record: GuardRecord| found.push(record));
        for GuardRecord { slot, start, length } in found {
            let slot = to_usize(slot);
            shared.acknowledge(slot);
            if length > 0 {
                shared.serve(slot, AddressRange { start, end: start.saturating_add(length) });
            }
        }
        for slot in shared.unranged() {
            shared.serve(slot, EVERYTHING);
        }
    }
}
