//! The write tracer: exact byte ranges of writes through descriptors, by any process. The programs of
//! `bpf/file_writes.bpf.c` run at every system call of the host and record those that write to a followed file.
//!
//! A call is in the map `in_flight` from before its first byte is written until after its record is in the ring buffer,
//! which is before the call returns. So a reader that reads `in_flight` first and the ring buffer second misses no
//! write that began before the first read: either it was in flight then, or it had ended and its record was in the ring
//! buffer.
//!
//! A range that is not known exactly is reported as a larger range: all bytes of the file while a call is in flight
//! whose range is known only at its end, or if concurrent calls made the file position ambiguous. io_uring requests and
//! calls that attach the file to a device are counted for their file. Calls that do not name their file are counted for the
//! whole host ([`HostCounters`]), and their threads are known ([`WriteTracer::other_writers_among`]).

mod call_table;
mod calls;
mod counters;
mod load;
mod other_writers;
mod pending;
mod remaps;
pub(super) mod ring;

use std::collections::HashMap;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::clock::{self, monotonic_ns};
use fdmap_sys::membarrier::wait_for_bpf_programs;
use fdmap_sys::memfd::{self, FileOrigin};
use fdmap_sys::{Errno, SyscallError};
use libbpf_rs::{Link, MapCore as _, MapHandle, Object};

use super::byte_range::{ByteRange, join};
use super::free_slots::FreeSlots;
use super::observation::Thread;
use super::task_search::{TaskSearch, Uncounted};
use super::traced_writes::{HostCounters, TracedWrites};
use crate::bpf::records::{Status, WriteControl, WriteRecord};
use crate::bpf::{
    Refusal, TraceError, attach, attach_one, load_explained, map_fd, map_handle, program_fd, run, status_text,
};
use calls::CallsInFlight;
use counters::{Counter, Counters};
use load::{MAX_FILES, RING_BYTES, load};
use other_writers::OtherWriters;
use pending::Pending;
use remaps::RemappingSpaces;
use ring::Ring;

/// The shortest time between two searches for earlier io_urings.
const RINGS_INTERVAL: Duration = Duration::from_secs(1);

/// Identifies a followed file. The low half is its slot in the map `files`; the high half makes the id unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FollowedId(u64);

impl FollowedId {
    const fn slot(self) -> usize {
        to_usize(self.0 & u32::MAX as u64)
    }
}

/// Traces the system calls of this host while any file is followed.
#[derive(Debug)]
pub struct WriteTracer {
    follow: OwnedFd,
    unfollow: OwnedFd,
    in_flight: MapHandle,
    other_writers: Mutex<OtherWriters>,
    counters: Counters,
    search: TaskSearch,
    /// Held during a search, so that further ones need not search for the same calls.
    searching: Mutex<()>,
    observes_io_uring: bool,
    /// How often threads were forgotten that made calls which do not name their file.
    forgotten: AtomicU64,
    remapping_spaces: RemappingSpaces,
    /// The program that observes io_uring requests when they are submitted, also while no file is followed.
    _submissions: Option<Link>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    object: Object,
    /// The attached programs. Empty while no file is followed.
    links: Vec<Link>,
    ring: Ring,
    files: HashMap<FollowedId, File>,
    /// Slots of the map `files`.
    free: FreeSlots,
    /// Number of `follow` calls so far: the high half of ids.
    generation: u32,
}

#[derive(Debug)]
struct File {
    /// Keeps the inode alive, whose address is the key of the file in the programs' maps.
    fd: OwnedFd,
    pending: Pending,
    /// Counter values at the last drain.
    records: u64,
    lost: u64,
    mapped: u64,
    remapped: u64,
    requests: (u64, u64),
    attached: u64,
    /// The counters of the file and of any file, when the file was followed.
    permanent_attachments: (u64, u64),
    is_segment: bool,
    is_mounted: bool,
    mappings_of_any_file: u64,
    /// Calls without room: on the file, and on any file.
    calls: Uncounted<(u64, u64)>,
    /// At the last drain, every call in progress was counted.
    were_counted: bool,
    /// An io_uring may have requests that were submitted before they were observed.
    earlier_rings: bool,
    /// The last search for it, and for calls.
    searched: Instant,
}

impl WriteTracer {
    /// Loads the programs, and attaches them once to check that the host permits it. While files are followed, every
    /// system call of the host takes slightly longer (`docs/performance.md`).
    ///
    /// # Errors
    /// [`Refusal`]: the process lacks CAP_BPF or CAP_PERFMON, the kernel lacks BTF, or its verifier refuses a program.
    pub(crate) fn start() -> Result<Self, Refusal> {
        load_explained(Self::load)
    }

    fn load() -> Result<Self, TraceError> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(TraceError::Architecture);
        }
        if !clock::is_that_of_the_host() {
            return Err(TraceError::TimeNamespace);
        }
        let (object, observes_io_uring) = load()?;
        let counters = Counters::new(&object)?;
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        let page = page.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
        let ring = Ring::new(map_fd(&object, "records")?.as_fd(), RING_BYTES, page)?;
        let in_flight = map_handle(&object, "in_flight")?;
        let other_writers = Mutex::new(OtherWriters {
            calling: map_handle(&object, "calls_on_any")?,
            requests: map_handle(&object, "requests_on_any")?,
            ended: map_handle(&object, "other_writers")?,
        });
        let remapping_spaces = RemappingSpaces::new(map_handle(&object, "remapping_spaces")?);
        let (follow, unfollow) = (program_fd(&object, "follow")?, program_fd(&object, "unfollow")?);
        drop(attach(&object)?);
        let submissions = observes_io_uring.then(|| attach_one(&object, "observe_request")).transpose()?;
        counters.set_observed_since(monotonic_ns());
        let search = TaskSearch::new(&object)?;
        let free = FreeSlots::new(MAX_FILES);
        let (links, files_followed) = (Vec::new(), HashMap::new());
        let inner = Inner { object, links, ring, files: files_followed, free, generation: 0 };
        let inner = Mutex::new(inner);
        Ok(Self {
            follow,
            unfollow,
            in_flight,
            other_writers,
            counters,
            search,
            searching: Mutex::default(),
            observes_io_uring,
            forgotten: AtomicU64::new(0),
            remapping_spaces,
            _submissions: submissions,
            inner,
        })
    }

    /// Starts following the file of `fd`. While a call may be in flight that began before, and at the drain after its end,
    /// [`TracedWrites::lost`] is set. See [`Self::find_earlier_calls`].
    ///
    /// # Errors
    /// [`TraceError`]; also if the file is already followed.
    pub fn follow(&self, fd: BorrowedFd<'_>) -> Result<FollowedId, TraceError> {
        let raw = fd.as_raw_fd();
        let refused = |why| TraceError::Refused { program: "follow", fd: raw, why };
        let fd = fd.try_clone_to_owned().map_err(|error| {
            TraceError::Syscall(SyscallError {
                call: format!("dup of descriptor {raw}"),
                errno: error.raw_os_error().map_or(Errno::EBADF, Errno::from_raw),
            })
        })?;
        let mut inner = self.lock();
        let slot =
            self.free_slot(&inner.free).ok_or_else(|| refused(status_text(Status::FDMAP_STATUS_FULL)))?;
        inner.generation = inner.generation.wrapping_add(1).max(1);
        let id = FollowedId(u64::from(inner.generation) << 32 | to_u64(slot));
        self.counters.of_file(slot, Counter::Id).store(id.0, Ordering::SeqCst);
        let now = |which| self.counters.of_file(slot, which).load(Ordering::SeqCst);
        let origin = memfd::origin(fd.as_fd()).ok();
        let file = File {
            fd,
            pending: Pending::default(),
            records: now(Counter::Records),
            lost: now(Counter::Lost),
            mapped: now(Counter::Mapped),
            remapped: now(Counter::Remapped),
            requests: (now(Counter::RequestsBegun), now(Counter::RequestsEnded)),
            attached: now(Counter::Attached),
            permanent_attachments: self.counters.permanent_attachments(slot),
            is_segment: origin.is_none_or(|origin| origin == FileOrigin::KernelMount),
            is_mounted: origin.is_none_or(|origin| origin == FileOrigin::Mounted),
            mappings_of_any_file: self.counters.mappings_of_any_file(),
            calls: Uncounted::default(),
            were_counted: false,
            earlier_rings: true,
            searched: Instant::now(),
        };
        if inner.links.is_empty() {
            self.end_unobserved_calls(&inner.free);
            inner.links = attach(&inner.object)?;
        }
        // The programs look up files only while this count is not 0, so set it before the file is added.
        self.counters.set_followed(inner.files.len() + 1);
        let mut arguments = [u64::from(file.fd.as_raw_fd().cast_unsigned()), id.0];
        let done = run(self.follow.as_fd(), &mut arguments)
            .map_err(|errno| TraceError::Run { program: "follow", fd: raw, errno })
            .and_then(|status| match Status(status.unsigned_abs()) {
                Status::FDMAP_STATUS_OK => Ok(()),
                other => Err(refused(status_text(other))),
            });
        if let Err(error) = done {
            self.detach_if_unused(&mut inner);
            return Err(error);
        }
        inner.free.take(slot);
        inner.files.insert(id, file);
        Ok(id)
    }

    /// Searches for calls that began before the file was followed. If there is none, the first drain is complete, too.
    pub(crate) fn find_earlier_calls(&self, file: FollowedId) {
        self.search_calls(file);
        if let Some(known) = self.lock().files.get_mut(&file) {
            known.were_counted = known.calls.is_excluded(&self.counters.uncounted(file.slot()));
        }
    }

    /// Stops following the file. Writes that were not drained are dropped.
    pub fn unfollow(&self, file: FollowedId) {
        let mut inner = self.lock();
        let Some(known) = inner.files.get(&file) else { return };
        let mut arguments = [u64::from(known.fd.as_raw_fd().cast_unsigned())];
        if let Err(errno) = run(self.unfollow.as_fd(), &mut arguments) {
            // The programs still have the inode as a key, so keep it open.
            tracing::warn!(%errno, "BPF_PROG_TEST_RUN of unfollow");
            return;
        }
        inner.files.remove(&file);
        inner.free.give_back(file.slot());
        self.detach_if_unused(&mut inner);
    }

    /// Returns the writes to the file since the last drain, and those in flight. Every write that began before this
    /// call is in `ended` or `in_flight`. A write that ended before this call is in `ended` of this call or of an
    /// earlier one.
    ///
    /// A write in flight is reported again when it ends. For a file that is not followed, only `lost` and `mapped` are set.
    #[must_use]
    pub fn drain(&self, file: FollowedId) -> TracedWrites {
        self.search_calls(file);
        let mut inner = self.lock();
        let Inner { ring, files, .. } = &mut *inner;
        // Read in_flight before the ring buffer: see the head of this module. The second reading adds calls that began
        // meanwhile.
        let is_segment = files.get(&file).is_none_or(|known| known.is_segment);
        let mut calls = CallsInFlight {
            mapping: self.counters.any_file_is_being_mapped(is_segment),
            ..CallsInFlight::default()
        };
        let mut complete = self.add_in_flight(file, &mut calls);
        // A record is counted after it is submitted, so counted records are in the ring buffer or were consumed.
        let made = self.counters.of_file(file.slot(), Counter::Records).load(Ordering::SeqCst);
        // A lost record was not counted. Records of other files may have filled the ring buffer.
        let lost = self.counters.of_file(file.slot(), Counter::Lost).load(Ordering::SeqCst);
        if files.get(&file).is_some_and(|known| known.records != made || known.lost != lost) {
            collect(ring, files);
        }
        complete &= self.add_in_flight(file, &mut calls);
        let CallsInFlight { ranges: mut in_flight, mut threads, mapping } = calls;
        // A call in flight may count as a request when it ends, before its entry is removed.
        let requests = self.requests(file);
        join(&mut in_flight, 0);
        let Some(known) = files.get_mut(&file) else {
            return TracedWrites { lost: true, mapped: true, remapped: true, ..TracedWrites::default() };
        };
        known.records = made;
        // A call that is not counted may have ended since the last drain, without a record of what it wrote.
        let counted = known.calls.is_excluded(&self.counters.uncounted(file.slot()));
        let were_counted = std::mem::replace(&mut known.were_counted, counted);
        let uncounted = !counted || !were_counted;
        let any_write = self.counters.any_file_is_being_written();
        let has_changed = |which, last: &mut u64| {
            let now = self.counters.of_file(file.slot(), which).load(Ordering::SeqCst);
            std::mem::replace(last, now) != now
        };
        let last_requests = std::mem::replace(&mut known.requests, requests);
        threads.append(&mut known.pending.take_threads());
        let of_any_file = self.counters.mappings_of_any_file();
        let any_mapped = std::mem::replace(&mut known.mappings_of_any_file, of_any_file) != of_any_file;
        TracedWrites {
            merged: known.pending.take_merged(),
            ended: known.pending.take(),
            in_flight,
            lost: has_changed(Counter::Lost, &mut known.lost) || !complete || uncounted || any_write,
            mapped: has_changed(Counter::Mapped, &mut known.mapped) || any_mapped || mapping || uncounted,
            remapped: has_changed(Counter::Remapped, &mut known.remapped)
                || any_mapped
                || mapping
                || uncounted,
            threads,
            requests: requests != last_requests || requests.0 != requests.1,
            attached: has_changed(Counter::Attached, &mut known.attached),
            permanently_attached: self.counters.permanent_attachments(file.slot())
                != known.permanent_attachments,
        }
    }

    /// True if a call is in progress that may write to a followed file without naming it.
    pub(crate) fn other_writer_is_calling(&self) -> bool {
        self.counters.other_file_is_being_written()
    }

    /// True if an io_uring request may be in progress that may write to any file, and whose end is not observed: it has no completion
    /// event. It may have been submitted before the file was followed.
    pub(crate) fn requests_were_skipped(&self, file: FollowedId) -> bool {
        self.counters.skipped() != 0 || self.lock().files.get(&file).is_none_or(|known| known.earlier_rings)
    }

    /// True if the file was passed to iommufd or FUSE passthrough since it is followed.
    pub(crate) fn is_permanently_attached(&self, file: FollowedId) -> bool {
        let now = self.counters.permanent_attachments(file.slot());
        self.lock().files.get(&file).is_none_or(|known| known.permanent_attachments != now)
    }

    /// The io_uring requests on a file that have begun and ended. A request that ends without a completion event
    /// (IOSQE_CQE_SKIP_SUCCESS, or a full completion queue) is in flight for ever.
    fn requests(&self, file: FollowedId) -> (u64, u64) {
        // Read in this order, a request that begins and ends meanwhile is in flight or has ended.
        let ended = self.counters.of_file(file.slot(), Counter::RequestsEnded).load(Ordering::SeqCst);
        (self.counters.of_file(file.slot(), Counter::RequestsBegun).load(Ordering::SeqCst), ended)
    }

    /// True if requests of io_uring are observed: kernels without tracepoints for them exist.
    #[must_use]
    pub const fn observes_io_uring(&self) -> bool {
        self.observes_io_uring
    }

    #[must_use]
    pub fn host_counters(&self) -> HostCounters {
        let word = |offset: usize| self.counters.of_host(offset);
        HostCounters {
            unmatched: word(offset_of!(WriteControl, unmatched))
                .wrapping_add(self.forgotten.load(Ordering::SeqCst)),
            paths: word(offset_of!(WriteControl, paths)),
            stacked: word(offset_of!(WriteControl, stacked)),
            attached: word(offset_of!(WriteControl, attached)),
            stacked_mappings: word(offset_of!(WriteControl, stacked_mappings)),
            stacked_silent: word(offset_of!(WriteControl, stacked_silent)),
        }
    }

    fn other_writers(&self) -> MutexGuard<'_, OtherWriters> {
        // The maps are the only state.
        self.other_writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Counters and ranges are independent of one another, so the state behind a poisoned lock is usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Detaches the programs if no file is followed any more.
    fn detach_if_unused(&self, inner: &mut Inner) {
        self.counters.set_followed(inner.files.len());
        if inner.files.is_empty() {
            inner.links.clear();
        }
    }

    /// A slot that has no io_uring request in progress, and whose last file had no call in progress that moves a file position.
    fn free_slot(&self, free: &FreeSlots) -> Option<usize> {
        let idle = |slot| {
            self.counters.is_balanced(slot, Counter::RequestsBegun, Counter::RequestsEnded)
                && self.counters.is_balanced(slot, Counter::MovesBegun, Counter::MovesEnded)
        };
        free.first(idle).or_else(|| {
            // Some requests never end for the programs. Those of files that are no longer followed are of no concern.
            let slot = free.first(|slot| self.counters.is_balanced(slot, Counter::Begun, Counter::Ended))?;
            wait_for_bpf_programs().ok()?;
            self.counters.balance(slot);
            Some(slot)
        })
    }

    /// Ends calls whose exit was not observed because no program was attached. All slots are free.
    fn end_unobserved_calls(&self, free: &FreeSlots) {
        if self.counters.no_call_is_in_progress() {
            return;
        }
        if let Err(error) = wait_for_bpf_programs() {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(error, "system calls that are in progress now will count as in progress for ever");
            return;
        }
        let others = self.other_writers();
        for map in [&self.in_flight, &others.calling, &others.requests] {
            for key in map.keys() {
                // Nothing else changes the map while no program runs.
                let _ = map.delete(&key);
            }
        }
        self.remapping_spaces.forget();
        self.counters.end_calls();
        free.iter().for_each(|slot| self.counters.balance(slot));
    }

    /// Searches for calls that are not counted, for all files for which that is due, if it is due for this one.
    fn search_calls(&self, file: FollowedId) {
        // It protects nothing, so that a poisoned lock is usable.
        let _searching = self.searching.lock().unwrap_or_else(PoisonError::into_inner);
        let counters = &self.counters;
        let due: Vec<_> = {
            let (inner, now) = (self.lock(), Instant::now());
            let is_due = |id: FollowedId, file: &File| {
                let rings = file.earlier_rings && now.duration_since(file.searched) >= RINGS_INTERVAL;
                rings || file.calls.is_due(&counters.uncounted(id.slot()), now)
            };
            if !inner.files.get(&file).is_some_and(|known| is_due(file, known)) {
                return;
            }
            let due = inner.files.iter().map(|(id, file)| (*id, file)).filter(|(id, file)| is_due(*id, file));
            let state = |id: FollowedId, mounted| {
                (counters.uncounted(id.slot()), counters.calling(id.slot(), mounted))
            };
            due.map(|(id, file)| (id, state(id, file.is_mounted))).collect()
        };
        let rings = counters.earlier_rings();
        let complete = self.search.run();
        let (mut inner, now) = (self.lock(), Instant::now());
        for (id, (uncounted, calling)) in due {
            if let Some(file) = inner.files.get_mut(&id) {
                let found = counters.calling(id.slot(), file.is_mounted) != calling;
                file.calls.note(uncounted, !complete || found, now);
                // Of an io_uring that is found later, all requests were observed.
                file.earlier_rings &= !complete || counters.earlier_rings() != rings;
                file.searched = now;
            }
        }
    }

    /// Adds the calls in flight on the file. Returns `false` if they cannot be read.
    fn add_in_flight(&self, file: FollowedId, out: &mut CallsInFlight) -> bool {
        // Read in this order, begun includes every call in flight and ended includes none of them.
        let ended = self.counters.of_file(file.slot(), Counter::Ended).load(Ordering::SeqCst);
        if self.counters.of_file(file.slot(), Counter::Begun).load(Ordering::SeqCst) == ended {
            return true;
        }
        calls::add(self.in_flight.as_fd(), file.0, out)
    }
}

/// Moves all records from the ring buffer to the files.
fn collect(ring: &mut Ring, files: &mut HashMap<FollowedId, File>) {
    ring.consume(|record: WriteRecord| {
        // Records of files that are no longer followed are dropped.
        if let Some(file) = files.get_mut(&FollowedId(record.id)) {
            file.pending.add(ByteRange::new(record.offset, record.length), low_u32(record.thread));
        }
    });
}

#[cfg(test)]
mod needs_root;
