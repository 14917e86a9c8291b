//! Mappings that begin to be tracked, and that are let go of.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_proto::tracking::GapKind;
use fdmap_proto::units::{MappingId, PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{Errno, SyscallError, pidfd};

use super::TrackingError;
use super::collect::missed;
use super::forked::Held;
use super::forks::ForkSubscription;
use super::observed::{Mapping, MappingExtent, Observed};
use super::ranges;
use super::stamp::PageStamp;
use super::state::State;
use super::tracker::Tracker;
use crate::random::random_id;

/// Mappings that a file can have tracked: each is looked at by every checkpoint.
const MOST: usize = 4096;

/// How long a fork may stand in the way.
const FORK: Duration = Duration::from_secs(1);

/// What every tracking needs of the kernel.
pub const REQUIRED_FEATURES: UffdFeatures =
    UffdFeatures::WP_ASYNC.union(UffdFeatures::WP_UNPOPULATED).union(UffdFeatures::WP_HUGETLBFS_SHMEM);

/// What a client passed to have its mappings tracked.
#[derive(Debug)]
pub struct Registration {
    /// The client, as the kernel vouches for it.
    pub pid: u32,
    /// Its userfaultfd.
    pub userfaultfd: Userfaultfd,
    /// Its page tables, should the service not be let to open them; `None`: it could not open them.
    pub pagemap: Option<Pagemap>,
    /// Its VMAs, likewise.
    pub maps: Option<Maps>,
    /// Its mappings.
    pub extents: Vec<MappingExtent>,
}

impl Tracker {
    /// Tracks mappings from now on. What their pages hold counts as written in the open generation.
    ///
    /// # Errors
    /// [`TrackingError`]; nothing is tracked then.
    pub fn track(self: &Arc<Self>, tracking: Registration) -> Result<Vec<MappingId>, TrackingError> {
        let tracked = self.track_them(tracking);
        // What was refused is not held on.
        self.forked.sweep();
        tracked
    }

    fn track_them(&self, tracking: Registration) -> Result<Vec<MappingId>, TrackingError> {
        let Registration { pid, userfaultfd, pagemap, maps, extents: pieces } = tracking;
        let mut state = self.lock();
        if state.observed.iter().map(|observed| observed.mappings.len()).sum::<usize>() + pieces.len() > MOST
        {
            return Err(TrackingError::TooManyMappings(MOST));
        }
        // What came along may be another process's, such as that of the client's parent: its marks would not tell of the client's
        // writes, and nothing would be amiss. So it counts only where the service may not look for itself.
        let pagemap = Pagemap::open(Some(pid)).or_else(|error| pagemap.ok_or(error))?;
        let maps = Maps::open(pid).or_else(|error| maps.ok_or(error))?;
        let (userfaultfd, forks) = self.initialize(userfaultfd)?;
        let mappings = pieces
            .iter()
            .map(|piece| Mapping { id: random_id(MappingId::new), pieces: vec![*piece], leaving: false })
            .collect();
        let mut observed = Observed {
            key: random_id(|key| (key != 0).then_some(key)),
            pid,
            pagemap,
            maps,
            userfaultfd,
            mappings,
            inherited: false,
            forks,
            reaped: pidfd::faults_of_reaped_children(pid).unwrap_or(0),
        };
        // Looked at before anything is done to them: they must be of this file.
        for piece in &pieces {
            self.check(&observed, piece)?;
        }
        let ids = observed.mappings.iter().map(|mapping| mapping.id).collect();
        let pages = observed.pages(self.mapped.page_size);
        let hull = ranges::hull(&pages);
        let open = state.open;
        state.journal.intend(hull, open);
        let mut done = 0;
        let registered =
            self.register(&mut observed, &mut done).and_then(|()| self.begin(&mut state, &observed, pages));
        if let Err(error) = registered {
            for piece in &pieces[..done] {
                // The client's copy would keep it registered. What is another userfaultfd's stays.
                let _ = observed.userfaultfd.unregister(piece.range);
            }
            self.doubt(&mut state);
            return Err(error);
        }
        state.observed.push(observed);
        state.journal.settle();
        self.save_record(&mut state)?;
        self.publish(&state);
        Ok(ids)
    }

    /// UFFDIO_API. From here on forks are told, if they can be: nobody who forks is to wait.
    ///
    /// Forks of who maps hugetlb files are not asked for: should the last descriptor be closed while one of them is not read
    /// yet (the service is killed with all that is its own), the kernel lets the child fault on protected huge pages forever.
    fn initialize(
        &self,
        userfaultfd: Userfaultfd,
    ) -> Result<(Held, Option<ForkSubscription>), TrackingError> {
        let small = self.scans.source().hugetlb_order.is_none();
        if let Some(forks) = self.event_sources.forks().filter(|_| small) {
            match userfaultfd.api(REQUIRED_FEATURES | UffdFeatures::EVENT_FORK) {
                Ok(_) => {
                    let held = Held::new(userfaultfd);
                    let following = held.with(|userfaultfd| forks.follow(userfaultfd, self.forked.sink()));
                    let following = following.transpose()?;
                    if let Some(following) = &following {
                        self.forked.hold(following.id(), &held);
                    }
                    return Ok((held, following));
                }
                // It takes CAP_SYS_PTRACE.
                Err(SyscallError { errno: Errno::EPERM, .. }) => {}
                Err(error) => return Err(TrackingError::NotTrackable(error)),
            }
        }
        userfaultfd.api(REQUIRED_FEATURES).map_err(TrackingError::NotTrackable)?;
        Ok((Held::new(userfaultfd), None))
    }

    /// The range must be mapped from the file, all of it, and for all to see.
    fn check(&self, observed: &Observed, piece: &MappingExtent) -> Result<(), TrackingError> {
        let vmas = observed.vmas(self.mapped, piece)?;
        let mut covered: Vec<PageRange> =
            vmas.iter().map(|part| part.piece.pages(self.mapped.page_size)).collect();
        ranges::normalize(&mut covered);
        let whole = piece.pages(self.mapped.page_size);
        if ranges::missing(whole, &covered).is_empty() {
            return Ok(());
        }
        Err(TrackingError::NotMapped { pid: observed.pid, range: piece.range, pages: whole })
    }

    /// Registers and protects all pieces, and proves it.
    fn register(&self, observed: &mut Observed, done: &mut usize) -> Result<(), TrackingError> {
        for mapping in &mut observed.mappings {
            for piece in &mapping.pieces {
                let registered =
                    observed.userfaultfd.with(|userfaultfd| userfaultfd.register_wp(piece.range));
                registered.unwrap_or_else(|| Err(closed())).map_err(|error| match error.errno {
                    Errno::EBUSY => TrackingError::Busy { range: piece.range, error },
                    _ => TrackingError::NotTrackable(error),
                })?;
                *done += 1;
            }
        }
        for piece in observed.pieces() {
            // What was never protected looks written, or in hugetlb files clean: what the pages hold is stamped anyway. A scan would
            // leave untouched pages of hugetlb files as they are.
            self.protect(&observed.userfaultfd, piece.range)?;
        }
        let mut standing = Vec::new();
        for mapping in &observed.mappings {
            let mut pieces = Vec::new();
            for piece in &mapping.pieces {
                let found = observed.standing(self.mapped, piece)?.parts;
                let mut pages: Vec<_> =
                    found.iter().map(|found| found.piece.pages(self.mapped.page_size)).collect();
                ranges::normalize(&mut pages);
                let whole = piece.pages(self.mapped.page_size);
                if !ranges::missing(whole, &pages).is_empty() {
                    return Err(TrackingError::NotMapped {
                        pid: observed.pid,
                        range: piece.range,
                        pages: whole,
                    });
                }
                pieces.extend(found.iter().map(|part| part.piece));
            }
            standing.push(pieces);
        }
        for (mapping, pieces) in observed.mappings.iter_mut().zip(standing) {
            mapping.pieces = pieces;
        }
        Ok(())
    }

    /// UFFDIO_WRITEPROTECT, which fails while somebody forks.
    fn protect(&self, userfaultfd: &Held, range: AddressRange) -> Result<(), TrackingError> {
        let began = Instant::now();
        loop {
            let protected = userfaultfd.with(|userfaultfd| userfaultfd.write_protect(range, true));
            match protected.unwrap_or_else(|| Err(closed())) {
                Err(SyscallError { errno: Errno::EAGAIN, .. }) if began.elapsed() < FORK => {
                    std::thread::yield_now();
                }
                other => return Ok(other?),
            }
        }
    }

    /// Stamps what was written before the tracking began, through these mappings or others that they replace.
    fn begin(&self, state: &mut State, new: &Observed, pages: Vec<PageRange>) -> Result<(), TrackingError> {
        let mut suspect = pages;
        self.end_replaced(state, new, &mut suspect);
        let stamped = self.doubtful_pages(state, &mut suspect)?;
        state.stamp(&stamped, PageStamp::new(state.open, true))?;
        let mut gaps = Vec::new();
        let size = self.marks()?.pages;
        self.judge_pins(state, size, Instant::now(), &stamped, &mut gaps)?;
        state.open_gaps.append(&mut gaps);
        Ok(())
    }

    /// A mapping can be registered only where no other one is: what was tracked there has ended, and its marks are lost. Now it
    /// would look as if it still stood.
    fn end_replaced(&self, state: &mut State, new: &Observed, suspect: &mut Vec<PageRange>) {
        let taken: Vec<AddressRange> =
            new.mappings.iter().flat_map(|mapping| &mapping.pieces).map(|piece| piece.range).collect();
        let mut ended = Vec::new();
        for observed in state.observed.iter_mut().filter(|observed| observed.pid == new.pid) {
            for mapping in &mut observed.mappings {
                let leaving = mapping.leaving;
                mapping.pieces.retain(|piece| {
                    let replaced = taken.iter().any(|range| !range.intersect(piece.range).is_empty());
                    if replaced && !leaving {
                        let pages = piece.pages(self.mapped.page_size);
                        let detail = "a tracked mapping ended before it was harvested";
                        ended.push(missed(GapKind::EndedMapping, Some(new.pid), Some(pages), detail));
                        suspect.push(pages);
                    }
                    !replaced
                });
            }
            observed.mappings.retain(|mapping| !mapping.pieces.is_empty());
        }
        state.drop_ended();
        state.open_gaps.append(&mut ended);
    }

    /// Takes what was written through mappings that are about to end, and expects nothing more of them. Only their own process
    /// may say so.
    ///
    /// # Errors
    /// [`TrackingError::NoMapping`] for an id that is none of that process's; [`TrackingError`]
    pub fn untrack(&self, pid: u32, ids: &[MappingId]) -> Result<(), TrackingError> {
        let mut state = self.lock();
        let known = |id: &MappingId| {
            let own = state.observed.iter().filter(|observed| observed.pid == pid);
            own.flat_map(|observed| &observed.mappings).any(|mapping| mapping.id == *id)
        };
        if let Some(unknown) = ids.iter().find(|id| !known(id)) {
            return Err(TrackingError::NoMapping { id: *unknown, pid });
        }
        self.harvest_one(&mut state, pid)?;
        let own = state.observed.iter_mut().filter(|observed| observed.pid == pid);
        for mapping in own.flat_map(|observed| &mut observed.mappings) {
            mapping.leaving |= ids.contains(&mapping.id);
        }
        state.journal.settle();
        self.save_record(&mut state)?;
        self.publish(&state);
        Ok(())
    }
}

impl Tracker {
    /// Takes what was written through mappings of one process, all of them if `ids` names none, and lets go of them. Gives how
    /// many there were. They are untracked mappings from then on.
    ///
    /// # Errors
    /// As [`Self::untrack`].
    pub fn detach(&self, pid: u32, ids: &[MappingId]) -> Result<usize, TrackingError> {
        let released = self.detach_mappings(pid, ids);
        // Nobody reads the forks of what was let go of: whoever forks just now waits until it is closed.
        self.forked.sweep();
        released
    }

    fn detach_mappings(&self, pid: u32, ids: &[MappingId]) -> Result<usize, TrackingError> {
        let mut state = self.lock();
        let chosen = |mapping: &Mapping| ids.is_empty() || ids.contains(&mapping.id);
        let own = state.observed.iter().filter(|observed| observed.pid == pid);
        let known: Vec<_> = own.flat_map(|observed| &observed.mappings).map(|mapping| mapping.id).collect();
        if let Some(unknown) = ids.iter().find(|id| !known.contains(id)) {
            return Err(TrackingError::NoMapping { id: *unknown, pid });
        }
        // Children of its own are to be found later by what it has mapped now.
        self.wait_for_forks(&mut state);
        self.hear_of_forks(&mut state);
        self.harvest_one(&mut state, pid)?;
        let (mut released, mut pages) = (0, Vec::new());
        for observed in state.observed.iter_mut().filter(|observed| observed.pid == pid) {
            let (gone, kept): (Vec<_>, Vec<_>) =
                std::mem::take(&mut observed.mappings).into_iter().partition(chosen);
            observed.mappings = kept;
            for mapping in gone {
                // Whose userfaultfd is whose is not known of children: it may be a brother's.
                if !observed.inherited {
                    self.unregister(observed, &mapping);
                }
                released += 1;
                pages.extend(mapping.pieces.iter().map(|piece| piece.pages(self.mapped.page_size)));
            }
        }
        state.drop_ended();
        // What was written after the harvest left no mark, and nothing is seen of what is written from now on.
        state.untracked.pages.append(&mut pages);
        ranges::normalize(&mut state.untracked.pages);
        state.save();
        state.journal.settle();
        self.save_record(&mut state)?;
        self.publish(&state);
        Ok(released)
    }

    fn unregister(&self, observed: &Observed, mapping: &Mapping) {
        let unregistered = mapping.pieces.iter().try_for_each(|piece| {
            let standing = observed.standing(self.mapped, piece)?;
            let mut ranges = standing.parts.iter().map(|part| part.piece.range);
            ranges.try_for_each(|range| observed.userfaultfd.unregister(range))
        });
        if let Err(error) = unregistered {
            tracing::warn!(
                pid = observed.pid,
                error = fdmap_proto::error_chain(&error),
                "letting go of a mapping"
            );
        }
    }

    /// Takes what one process wrote, between checkpoints. The journal is to be settled after.
    fn harvest_one(&self, state: &mut State, pid: u32) -> Result<(), TrackingError> {
        let hull = ranges::hull(&state.observed_pages(self.mapped.page_size));
        let open = state.open;
        state.journal.intend(hull, open);
        let mut found = super::collect::Found::default();
        // All of that process's: a harvest takes an address space as a whole.
        self.harvest(state, &mut found, |observed| observed.pid == pid);
        let stamped = self.stamp_harvest(state, found);
        if stamped.is_err() {
            self.doubt(state);
        }
        stamped
    }

    /// Stamps what a harvest between checkpoints brought.
    fn stamp_harvest(
        &self,
        state: &mut State,
        mut found: super::collect::Found,
    ) -> Result<(), TrackingError> {
        let open = state.open;
        state.stamp(&found.exact, PageStamp::new(open, false))?;
        let conservative = self.doubtful_pages(state, &mut found.suspect)?;
        state.stamp(&conservative, PageStamp::new(open, true))?;
        let size = self.marks()?.pages;
        let mut candidates = found.exact;
        candidates.extend(conservative);
        self.judge_pins(state, size, Instant::now(), &candidates, &mut found.missed)?;
        state.open_gaps.append(&mut found.missed);
        Ok(())
    }

    /// Marks were taken and not stamped: the next checkpoint shall rely on nothing.
    pub(super) fn doubt(&self, state: &mut State) {
        self.signals.put_back((true, true));
        state.untracked.unknown = true;
        state.doubt = true;
    }
}

/// What is said of a userfaultfd that had to be closed.
fn closed() -> SyscallError {
    SyscallError {
        call: "use of a userfaultfd that nobody reads the forks of".to_owned(),
        errno: Errno::EBADF,
    }
}

/// Checks mappings that a client named: aligned, not empty, not overlapping, within the address space.
///
/// # Errors
/// What is wrong with them.
pub fn parse_extents(
    mappings: &[(u64, u64, PageIndex)],
    page_size: fdmap_proto::units::PageSize,
) -> Result<Vec<MappingExtent>, TrackingError> {
    let bad = |at: usize, what| TrackingError::BadMapping { at, what };
    let mut pieces: Vec<MappingExtent> = Vec::with_capacity(mappings.len());
    for (at, (address, length, first_page)) in mappings.iter().enumerate() {
        let aligned = address.is_multiple_of(page_size.bytes()) && length.is_multiple_of(page_size.bytes());
        if !aligned || *length == 0 {
            return Err(bad(at, "is not made of whole pages"));
        }
        let end = address.checked_add(*length).ok_or_else(|| bad(at, "goes beyond the address space"))?;
        let last = first_page.0.checked_add(length / page_size.bytes());
        if last.and_then(|last| page_size.offset_of(PageIndex(last))).is_none() {
            return Err(bad(at, "goes beyond any file"));
        }
        let range = AddressRange { start: *address, end };
        if pieces.iter().any(|piece| !piece.range.intersect(range).is_empty()) {
            return Err(bad(at, "overlaps another one"));
        }
        pieces.push(MappingExtent { range, first_page: *first_page });
    }
    Ok(pieces)
}
