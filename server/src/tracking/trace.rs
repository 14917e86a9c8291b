//! Exact ranges of writes through descriptors, by whatever process: `bpf/file_writes.bpf.c` hangs on all system calls of the
//! host, and tells of those that write to a followed file.
//!
//! A write is in the map of calls in flight from before its first byte until after its record is in the ring buffer, and
//! that is before the call returns. Who looks at the calls in flight first and at the ring buffer then misses no write that
//! began before the first look: it was in flight at that look, or had ended before, so that its record was there.
//!
//! What cannot be told exactly is told as more: all bytes of the file while a call is under way whose place is known at its
//! end only, or when a descriptor was used in ways that leave its position open. Writers that use no descriptor of the file
//! in a system call of their own are counted for the whole host ([`OtherWriters`]), or are not seen at all: loop devices.

mod calls;
mod load;
mod pending;
mod record;
mod ring;

pub use pending::ByteRange;

use std::collections::HashMap;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{Errno, SyscallError};
use libbpf_rs::{Link, Object};

use crate::probe::ScanError;
use crate::probe::bpf::{LoadError, map_of, program_of, run, why};
use load::{FILES, RING, attach, descriptor_of, load};
use pending::{Pending, join};
use record::{Control, FollowedFile, STATUS_FULL, STATUS_TWICE, WriteRecord};
use ring::Ring;

/// Why writes cannot be traced, or not those to this file.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The programs know the registers of x86-64 only.
    #[error("system calls can be traced on x86-64 only")]
    Architecture,
    /// The programs or their maps.
    #[error("loading the programs that trace writes")]
    Load(#[from] LoadError),
    /// A program could not be attached.
    #[error("attaching {program}: {error:#}")]
    Attach {
        /// Its name.
        program: String,
        /// What libbpf says.
        error: libbpf_rs::Error,
    },
    /// A system call.
    #[error("tracing writes")]
    Syscall(#[from] SyscallError),
    /// A program could not be run.
    #[error("following descriptor {fd}")]
    Run {
        /// The descriptor.
        fd: i32,
        /// Why not.
        #[source]
        error: ScanError,
    },
    /// A program did not do it.
    #[error("following descriptor {fd}: {why}")]
    Refused {
        /// The descriptor.
        fd: i32,
        /// What it met.
        why: &'static str,
    },
}

/// A followed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Followed(u64);

impl Followed {
    /// In the map `files`.
    const fn slot(self) -> usize {
        to_usize(self.0 & u32::MAX as u64)
    }
}

/// What was written to a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// By calls that have ended since this was asked last: bytes, in ascending order and apart from one another.
    pub ended: Vec<ByteRange>,
    /// What calls that are under way may be writing; in the same order.
    pub in_flight: Vec<ByteRange>,
    /// Something was written of which nothing more is known.
    pub lost: bool,
    /// The file was mapped, or somebody tried.
    pub mapped: bool,
}

/// Counts of what may write without a range being told, over the whole host and while any file is followed. Each counts when
/// it begins and again when it ends: who finds a count unchanged knows that nothing of that kind ended in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherWriters {
    /// io_uring requests that write, empty or punch files; `None` if this kernel does not show them. Requests that are
    /// submitted with `IOSQE_CQE_SKIP_SUCCESS` count when they begin only.
    pub io_uring: Option<u64>,
    /// Calls of `io_submit` that may write to a followed file.
    pub aio: u64,
    /// Calls of `truncate`, by path.
    pub paths: u64,
    /// Calls of `madvise(MADV_REMOVE)`.
    pub removals: u64,
}

/// The tracing of this host's system calls, while any file is followed.
#[derive(Debug)]
pub struct WriteTrace {
    follow: OwnedFd,
    unfollow: OwnedFd,
    in_flight: OwnedFd,
    /// One [`Control`].
    control: SharedMapping,
    /// [`FollowedFile`]s by slot.
    files: SharedMapping,
    sees_io_uring: bool,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    object: Object,
    /// The programs' attachments: none while nothing is followed.
    links: Vec<Link>,
    ring: Ring,
    files: HashMap<Followed, File>,
    /// Slots.
    free: Vec<usize>,
    /// Files followed so far: the upper half of the next id.
    generation: u32,
}

#[derive(Debug)]
struct File {
    /// Keeps the inode alive, by whose address the program knows it.
    fd: OwnedFd,
    pending: Pending,
    /// Counts that were dealt with.
    records: u64,
    lost: u64,
    mapped: u64,
}

impl WriteTrace {
    /// Loads the programs and tries whether they can be attached. While files are followed every system call of the host
    /// takes somewhat longer (`docs/performance.md`).
    ///
    /// # Errors
    /// [`TraceError`]: without CAP_BPF and CAP_PERFMON, without BTF.
    pub fn start() -> Result<Self, TraceError> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(TraceError::Architecture);
        }
        let (object, sees_io_uring) = load()?;
        let control = map_of::<Control>(&object, "control", 1, true)?;
        let files = map_of::<FollowedFile>(&object, "files", FILES, true)?;
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        let page = page.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
        let ring = Ring::new(descriptor_of(&object, "records")?.as_fd(), RING, page)?;
        let in_flight = descriptor_of(&object, "in_flight")?;
        let (follow, unfollow) = (program_of(&object, "follow")?, program_of(&object, "unfollow")?);
        drop(attach(&object)?);
        let free = (0..FILES).rev().collect();
        let (links, files_followed) = (Vec::new(), HashMap::new());
        let inner = Inner { object, links, ring, files: files_followed, free, generation: 0 };
        let inner = Mutex::new(inner);
        Ok(Self { follow, unfollow, in_flight, control, files, sees_io_uring, inner })
    }

    /// Follows the file of `fd` from now on. Calls that are under way now are told when they end, as having written
    /// everything; not before.
    ///
    /// # Errors
    /// [`TraceError`]; also if the file is followed already.
    pub fn follow(&self, fd: BorrowedFd<'_>) -> Result<Followed, TraceError> {
        let raw = fd.as_raw_fd();
        let refused = |why| TraceError::Refused { fd: raw, why };
        let fd = fd.try_clone_to_owned().map_err(|error| {
            TraceError::Syscall(SyscallError {
                call: format!("dup of descriptor {raw}"),
                errno: error.raw_os_error().map_or(Errno::EBADF, Errno::from_raw),
            })
        })?;
        let mut inner = self.lock();
        let slot =
            inner.free.last().copied().ok_or_else(|| refused("as many files as can be are followed"))?;
        inner.generation = inner.generation.wrapping_add(1).max(1);
        let id = Followed(u64::from(inner.generation) << 32 | to_u64(slot));
        self.counter(slot, Counter::Id).store(id.0, Ordering::SeqCst);
        let now = |which| self.counter(slot, which).load(Ordering::SeqCst);
        let file = File {
            fd,
            pending: Pending::default(),
            records: now(Counter::Records),
            lost: now(Counter::Lost),
            mapped: now(Counter::Mapped),
        };
        if inner.links.is_empty() {
            inner.links = attach(&inner.object)?;
        }
        // Before the file can be found: calls look for files only while there are any.
        self.set_followed(inner.files.len() + 1);
        let mut arguments = [u64::from(file.fd.as_raw_fd().cast_unsigned()), id.0];
        let done = run(self.follow.as_fd(), &mut arguments)
            .map_err(|error| TraceError::Run { fd: raw, error })
            .and_then(|status| match status.unsigned_abs() {
                0 => Ok(()),
                STATUS_TWICE => Err(refused("it is followed already")),
                STATUS_FULL => Err(refused("as many files as can be are followed")),
                other => Err(refused(why(other))),
            });
        if let Err(error) = done {
            self.let_go(&mut inner);
            return Err(error);
        }
        inner.free.pop();
        inner.files.insert(id, file);
        Ok(id)
    }

    /// Follows the file no longer. What was written and not asked for is forgotten.
    pub fn unfollow(&self, file: Followed) {
        let mut inner = self.lock();
        let Some(known) = inner.files.get(&file) else { return };
        let mut arguments = [u64::from(known.fd.as_raw_fd().cast_unsigned())];
        if let Err(error) = run(self.unfollow.as_fd(), &mut arguments) {
            // Its inode must live as long as the program knows it.
            tracing::warn!("a file is followed on: {}", fdmap_proto::error_chain(&error));
            return;
        }
        inner.files.remove(&file);
        inner.free.push(file.slot());
        self.let_go(&mut inner);
    }

    /// What was written to the file since this was asked last, and what is being written. Every write that began before the
    /// call is told, in `ended` or in `in_flight`; one that ended before the call is told in `ended`, of this call or an
    /// earlier one.
    ///
    /// A write in flight is told again when it ends. In a file that is followed no longer nothing is written, and `lost` is
    /// set.
    #[must_use]
    pub fn drain(&self, file: Followed) -> Traced {
        let mut inner = self.lock();
        let Inner { ring, files, .. } = &mut *inner;
        // First look, ring, second look, in this order: see the head of this module. The second look adds what began
        // meanwhile.
        let mut in_flight = Vec::new();
        let mut seen = self.add_in_flight(file, &mut in_flight);
        // What is counted is in the ring already, or was taken out of it.
        let made = self.counter(file.slot(), Counter::Records).load(Ordering::SeqCst);
        if files.get(&file).is_some_and(|known| known.records != made) {
            collect(ring, files);
        }
        seen &= self.add_in_flight(file, &mut in_flight);
        join(&mut in_flight, 0);
        let Some(known) = files.get_mut(&file) else { return Traced { lost: true, ..Traced::default() } };
        known.records = made;
        let news = |which, dealt: &mut u64| {
            let now = self.counter(file.slot(), which).load(Ordering::SeqCst);
            std::mem::replace(dealt, now) != now
        };
        Traced {
            ended: known.pending.take(),
            in_flight,
            lost: news(Counter::Lost, &mut known.lost) || !seen,
            mapped: news(Counter::Mapped, &mut known.mapped),
        }
    }

    /// Takes what was recorded for all files out of the ring buffer, which has room for 128 Ki writes: when it is full, files
    /// that are written to are `lost`. Worth calling now and then where files are seldom drained.
    pub fn collect(&self) {
        let mut inner = self.lock();
        let Inner { ring, files, .. } = &mut *inner;
        collect(ring, files);
    }

    /// What else may have written.
    #[must_use]
    pub fn other_writers(&self) -> OtherWriters {
        let word = |place: usize| self.control.atomic_u64s(place, 1)[0].load(Ordering::SeqCst);
        OtherWriters {
            io_uring: self.sees_io_uring.then(|| word(std::mem::offset_of!(Control, io_uring))),
            aio: word(std::mem::offset_of!(Control, aio)),
            paths: word(std::mem::offset_of!(Control, paths)),
            removals: word(std::mem::offset_of!(Control, removals)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Counters and ranges are changed one by one, and none is wrong without the others.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, slot: usize, which: Counter) -> &AtomicU64 {
        &self.files.atomic_u64s(slot * size_of::<FollowedFile>() + which.place(), 1)[0]
    }

    /// After a file was removed, or not added.
    fn let_go(&self, inner: &mut Inner) {
        self.set_followed(inner.files.len());
        if inner.files.is_empty() {
            inner.links.clear();
        }
    }

    fn set_followed(&self, files: usize) {
        let place = std::mem::offset_of!(Control, followed);
        self.control.atomic_u64s(place, 1)[0].store(to_u64(files), Ordering::SeqCst);
    }

    /// Adds what calls that are under way may be writing to the file; `false` if that cannot be told.
    fn add_in_flight(&self, file: Followed, out: &mut Vec<ByteRange>) -> bool {
        // In this order a call that is in flight now is among those begun and not among those ended.
        let ended = self.counter(file.slot(), Counter::Ended).load(Ordering::SeqCst);
        if self.counter(file.slot(), Counter::Begun).load(Ordering::SeqCst) == ended {
            return true;
        }
        calls::add(self.in_flight.as_fd(), file.0, out)
    }
}

/// Empties the ring buffer.
fn collect(ring: &mut Ring, files: &mut HashMap<Followed, File>) {
    ring.take(|record: WriteRecord| {
        // Others are followed no longer.
        if let Some(file) = files.get_mut(&Followed(record.id)) {
            file.pending.add(ByteRange::new(record.offset, record.length));
        }
    });
}

/// A counter of [`FollowedFile`].
#[derive(Clone, Copy, Debug)]
enum Counter {
    Id,
    Begun,
    Ended,
    Records,
    Lost,
    Mapped,
}

impl Counter {
    const fn place(self) -> usize {
        match self {
            Self::Id => std::mem::offset_of!(FollowedFile, id),
            Self::Begun => std::mem::offset_of!(FollowedFile, begun),
            Self::Ended => std::mem::offset_of!(FollowedFile, ended),
            Self::Records => std::mem::offset_of!(FollowedFile, records),
            Self::Lost => std::mem::offset_of!(FollowedFile, lost),
            Self::Mapped => std::mem::offset_of!(FollowedFile, mapped),
        }
    }
}

#[cfg(test)]
mod tests;
