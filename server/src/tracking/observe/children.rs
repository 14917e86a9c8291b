//! Forked children of tracked processes.
//!
//! A fork event carries the child's userfaultfd, but no pid. The child is identified later among the processes that map the
//! file: its VMAs are registered with that userfaultfd. Where this cannot be read, a descendant of the same process is taken for
//! it. Until then the pages that it can write count as written.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use fdmap_proto::units::{PageRange, PageSize};
use fdmap_sys::pidfd::parent_of;

use super::address_space::{SpaceHarvest, SpaceIdentity, TrackedAddressSpace};
use super::event_sources::EventSources;
use super::fork_events::{ChildUffd, Fork};
use super::forks::{FollowId, ForkSubscription};
use super::holder::SpaceOwner;
use super::kernel_objects::KernelObjects;
use super::observation::{AddressSpacePages, ChildHarvest, EndedMapping, Mapper};
use super::space_history::{BitsTaken, SpaceHistory};
use crate::probe::KernelAddress;
use crate::tracking::mapping::{MappedFile, MappingExtent};
use crate::tracking::ranges::ALL_PAGES;

/// How many ancestors of a process are looked up.
const MAX_ANCESTORS: usize = 64;

/// Unidentified children whose userfaultfds are held.
const MAX_CHILDREN: usize = 1024;

/// Userfaultfds that are held although their process is unknown.
const MAX_ORPHANED_UFFDS: usize = 1024;

/// A forked child that is not identified yet.
#[derive(Debug)]
pub(crate) struct UnidentifiedChild {
    /// The tracked process from which it descends; 0: unknown.
    pub(crate) ancestor: u32,
    /// Where the file was mapped at the time of the fork; empty if unknown.
    pub(crate) extents: Vec<MappingExtent>,
    /// The pages that the child can write.
    pub(crate) pages: Vec<PageRange>,
    /// While it is open, the kernel sets written bits in the child; `None`: it was lost.
    pub(crate) userfaultfd: Option<ChildUffd>,
}

impl UnidentifiedChild {
    /// A child that may exist, and whose written bits are lost.
    pub(crate) const fn lost(ancestor: u32, pages: Vec<PageRange>) -> Self {
        Self { ancestor, extents: Vec::new(), pages, userfaultfd: None }
    }

    /// A child of `parent` that may exist.
    pub(crate) fn possible(parent: &TrackedAddressSpace, page_size: PageSize) -> Self {
        Self::lost(parent.pid, parent.pages(page_size))
    }

    /// Its mappings, if it has exited.
    fn ended(&self) -> impl Iterator<Item = EndedMapping> {
        self.pages.iter().map(|pages| EndedMapping { pid: self.ancestor, pages: *pages })
    }
}

/// The children of the tracked processes of one file.
#[derive(Debug, Default)]
pub(crate) struct ForkedChildren {
    unidentified: Vec<UnidentifiedChild>,
    /// A child was identified by its ancestor: the userfaultfds of the others may be those of their siblings.
    by_ancestor: bool,
    /// Userfaultfds of unknown children. Each may be that of a sibling that was identified.
    orphaned: Vec<ChildUffd>,
}

impl ForkedChildren {
    /// True if every known child is identified.
    pub(crate) const fn is_empty(&self) -> bool {
        self.unidentified.is_empty()
    }

    /// Adds a child. Of children without a userfaultfd, one with the same ancestor and pages stands for all.
    pub(crate) fn add(&mut self, child: UnidentifiedChild) {
        let same = |other: &UnidentifiedChild| {
            other.userfaultfd.is_none() && other.ancestor == child.ancestor && other.pages == child.pages
        };
        if child.userfaultfd.is_some() || !self.unidentified.iter().any(same) {
            self.unidentified.push(child);
        }
    }

    /// Adds the children of forks by tracked processes, or by their children.
    pub(crate) fn add_forks(
        &mut self,
        forks: Vec<Fork>,
        spaces: &[TrackedAddressSpace],
        page_size: PageSize,
    ) {
        for fork in forks {
            let mut child = self.child_of(fork.parent, spaces, page_size);
            child.userfaultfd = fork.child.filter(|_| self.unidentified.len() < MAX_CHILDREN);
            self.add(child);
        }
    }

    /// A child of the process whose forks `parent` reports.
    fn child_of(
        &self,
        parent: FollowId,
        spaces: &[TrackedAddressSpace],
        page_size: PageSize,
    ) -> UnidentifiedChild {
        let is = |subscription: &ForkSubscription| subscription.id() == parent;
        let space = spaces.iter().find(|space| space.forks.as_ref().is_some_and(is));
        if let Some(space) = space {
            let extents = space.extents().copied().collect();
            return UnidentifiedChild { extents, ..UnidentifiedChild::possible(space, page_size) };
        }
        let mut children = self.unidentified.iter();
        let child = children.find(|child| child.userfaultfd.as_ref().is_some_and(|own| is(&own.forks)));
        // The parent may have been detached meanwhile: then the child is of an unknown process.
        child.map_or_else(
            || UnidentifiedChild::lost(0, vec![ALL_PAGES]),
            |child| UnidentifiedChild {
                extents: child.extents.clone(),
                ..UnidentifiedChild::lost(child.ancestor, child.pages.clone())
            },
        )
    }

    /// Identifies children and harvests them. Identified children are added to `spaces`.
    pub(crate) fn identify(
        &mut self,
        spaces: &mut Vec<TrackedAddressSpace>,
        search: &ChildSearch<'_>,
    ) -> ChildHarvest {
        let mut found = ChildHarvest::default();
        for candidate in search.candidates(spaces) {
            let Some(at) = search.child_at(&self.unidentified, candidate) else { continue };
            let child = &mut self.unidentified[at];
            if let Some(space) = search.harvest_child(child, candidate, &mut found) {
                tracing::debug!(pid = space.pid, "a child is tracked");
                self.by_ancestor |= candidate.objects.is_none();
                spaces.push(space);
                self.unidentified.remove(at);
            }
        }
        found.unidentified = self.unidentified.iter().flat_map(UnidentifiedChild::ended).collect();
        found
    }

    /// The unidentified children whose address space has ended, and their users.
    pub(crate) fn exited(&self) -> (Vec<FollowId>, BTreeSet<u32>) {
        let uffds = self.unidentified.iter().filter_map(|child| child.userfaultfd.as_ref());
        let exited = uffds.filter(|child| child.held.has_ended());
        exited.map(|child| (child.forks.id(), child.held.holder().user())).unzip()
    }

    /// Drops the userfaultfds of unidentified children that have exited. Returns the mappings of these children, unless the
    /// userfaultfd may be that of a sibling: then the child is lost.
    pub(crate) fn remove_exited(&mut self, exited: &[FollowId]) -> Vec<EndedMapping> {
        let has_exited = |child: &mut UnidentifiedChild| {
            child.userfaultfd.as_ref().is_some_and(|own| exited.contains(&own.forks.id()))
        };
        let removed: Vec<_> = self.unidentified.extract_if(.., has_exited).collect();
        if self.by_ancestor {
            for child in removed {
                self.add(UnidentifiedChild::lost(child.ancestor, child.pages));
            }
            return Vec::new();
        }
        removed.iter().flat_map(UnidentifiedChild::ended).collect()
    }

    /// All writable mappings are tracked: children that were not identified have exited.
    pub(crate) fn all_exited(&mut self) {
        self.by_ancestor = false;
        let userfaultfds = self.unidentified.drain(..).filter_map(|child| child.userfaultfd);
        self.orphaned.extend(userfaultfds);
    }

    /// Holds userfaultfds that may belong to siblings of the process to which they were attributed.
    pub(crate) fn hold_orphaned(&mut self, userfaultfds: impl IntoIterator<Item = ChildUffd>) {
        self.orphaned.extend(userfaultfds);
    }

    /// Drops held userfaultfds whose process has exited, and the oldest ones above the limit.
    pub(crate) fn drop_exited_orphaned(&mut self) {
        self.orphaned.retain(|child| child.held.is_alive());
        let excess = self.orphaned.len().saturating_sub(MAX_ORPHANED_UFFDS);
        // One of these may be that of a child that is running: then its mapping counts as ended.
        self.orphaned.drain(..excess);
    }
}

/// A search for children among the processes that map the file.
pub(crate) struct ChildSearch<'a> {
    pub(crate) sources: &'a EventSources,
    pub(crate) file: MappedFile,
    pub(crate) mappers: &'a [Mapper],
    pub(crate) kernel_objects: KernelObjects<'a>,
}

/// A process that may be a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ChildCandidate {
    pid: u32,
    /// Its address space and its userfaultfd; `None`: it was found in `/proc`.
    objects: Option<(KernelAddress, KernelAddress)>,
}

impl ChildSearch<'_> {
    /// The processes that are not tracked. A VMA of a child is registered with the userfaultfd of the fork event.
    fn candidates(&self, spaces: &[TrackedAddressSpace]) -> Vec<ChildCandidate> {
        let candidate = |mapper: &Mapper| {
            let pid = mapper.pid?;
            let known = |space: &TrackedAddressSpace| match mapper.mm {
                Some(_) => space.identity.recognizes(mapper),
                None => space.pid == pid,
            };
            let objects = mapper.mm.map(|mm| mapper.userfaultfd.map(|userfaultfd| (mm, userfaultfd)));
            let unregistered = objects == Some(None);
            (!unregistered && !spaces.iter().any(known))
                .then_some(ChildCandidate { pid, objects: objects.flatten() })
        };
        let mut candidates: Vec<_> = self.mappers.iter().filter_map(candidate).collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates
    }

    /// The child that `candidate` is. Without a known userfaultfd, a descendant of the same process is taken for it, if possible the one
    /// whose userfaultfd is of the address space of the candidate.
    fn child_at(&self, children: &[UnidentifiedChild], candidate: ChildCandidate) -> Option<usize> {
        let has = |child: &UnidentifiedChild, object| {
            child
                .userfaultfd
                .as_ref()?
                .held
                .with(|own| self.kernel_objects.behind(own.as_fd()) == Some(object))
        };
        match candidate.objects {
            Some((_, object)) => children.iter().position(|child| has(child, object).unwrap_or(false)),
            None => {
                let ancestors = ancestors(candidate.pid);
                let related = children.iter().enumerate().filter_map(|(at, child)| {
                    let own = child.userfaultfd.as_ref()?;
                    ancestors.contains(&child.ancestor).then_some((at, &own.held))
                });
                let related: Vec<_> = related.collect();
                let (first, held) = related.first()?;
                if related.len() == 1 {
                    return Some(*first);
                }
                let (pagemap, _) = held.open_files(candidate.pid).ok()?;
                let mm = self.kernel_objects.behind(pagemap.as_fd());
                let rank = |held| match self.kernel_objects.is_userfaultfd_of(held, mm) {
                    Some(true) => 0,
                    None => 1,
                    Some(false) => 2,
                };
                related.iter().min_by_key(|(_, held)| rank(held)).map(|(at, _)| *at)
            }
        }
    }

    /// Harvests a process as `child`. `None` if the process is not that child, or has exited; then the child keeps its
    /// userfaultfd.
    fn harvest_child(
        &self,
        child: &mut UnidentifiedChild,
        candidate: ChildCandidate,
        found: &mut ChildHarvest,
    ) -> Option<TrackedAddressSpace> {
        let ChildCandidate { pid, objects } = candidate;
        let (pagemap, maps) = child.userfaultfd.as_ref()?.held.open_files(pid).ok()?;
        let mm = self.kernel_objects.behind(pagemap.as_fd());
        let is_verified = self.kernel_objects.is_userfaultfd_of(&child.userfaultfd.as_ref()?.held, mm);
        if objects.is_some_and(|(expected, _)| mm != Some(expected)) || is_verified == Some(false) {
            // The pid is that of another process: the parent, a sibling, or one that has the pid by now.
            return None;
        }
        let mut history = SpaceHistory::unknown_until_now(self.sources.follow_space(pagemap.as_fd()));
        let ChildUffd { held, forks, charge } = child.userfaultfd.take()?;
        // A child has the mappings of the fork at the same addresses. What it unmapped since is lost.
        let extents =
            if child.extents.is_empty() { self.extents_of(candidate) } else { child.extents.clone() };
        let pagemap = Arc::new(pagemap);
        if is_verified == Some(true) {
            charge.set_address_space(Arc::clone(&pagemap));
        }
        held.set_files(SpaceOwner { pid, mm }, pagemap, maps);
        history.serve_guards(&held, extents.iter().map(|extent| extent.range).collect());
        let mut space = TrackedAddressSpace {
            key: TrackedAddressSpace::random_key(),
            pid,
            identity: SpaceIdentity { mm, userfaultfd: objects.map(|(_, userfaultfd)| userfaultfd) },
            held,
            late: None,
            mappings: vec![TrackedAddressSpace::new_mapping(extents)],
            inherited: true,
            forks: None,
            reaped_child_faults: Some(0),
            history,
            charge,
        };
        let pages = space.pages(self.file.page_size);
        // Guard regions are among the pages of `taken`: calls were not traced before.
        let SpaceHarvest { written, lost, taken, guarded: _, unanswered } = space.harvest(self.file);
        if let Some(error) = unanswered {
            tracing::debug!(pid, error = fdmap_proto::error_chain(&error), "a child could not be harvested");
            found.written.extend(written);
            child.userfaultfd = Some(ChildUffd { held: space.held, forks, charge: space.charge });
            return None;
        }
        found.written.extend(written);
        if space.pages(self.file.page_size).is_empty() {
            child.userfaultfd = Some(ChildUffd { held: space.held, forks, charge: space.charge });
            return None;
        }
        if taken == BitsTaken::Possibly {
            found.taken.push(AddressSpacePages { pid, pages });
        }
        found.ended.extend(lost.into_iter().map(|pages| EndedMapping { pid, pages }));
        space.forks = Some(forks);
        Some(space)
    }

    /// Where the candidate maps the file.
    fn extents_of(&self, candidate: ChildCandidate) -> Vec<MappingExtent> {
        let mm = candidate.objects.map(|(mm, _)| mm);
        let own = self.mappers.iter().filter(|mapper| mapper.pid == Some(candidate.pid) && mapper.mm == mm);
        own.map(|mapper| MappingExtent { range: mapper.range, first_page: mapper.pages.start() }).collect()
    }
}

/// The ancestors of a process, without the init process.
fn ancestors(pid: u32) -> Vec<u32> {
    let parents = std::iter::successors(parent_of(pid).ok(), |pid| parent_of(*pid).ok());
    parents.take_while(|pid| *pid > 1).take(MAX_ANCESTORS).collect()
}
