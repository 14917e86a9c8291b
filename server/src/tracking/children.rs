//! Children of tracked processes. A fork tells of itself by the child's userfaultfd, and of nothing else: whose it is has to
//! be found out.

use std::time::Duration;

use fdmap_proto::tracking::GapKind;
use fdmap_proto::units::{MappingId, PageRange};
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::pidfd::parent_of;

use super::audit::Mapper;
use super::collect::{Found, missed};
use super::forked::Held;
use super::forks::{FollowId, ForkSubscription};
use super::observed::{Harvest, Mapping, MappingExtent, Observed};
use super::ranges;
use super::state::State;
use super::tracker::{Tracker, all_pages};
use crate::random::random_id;

/// How many generations of parents are asked for.
const ANCESTORS: usize = 64;

/// How long news of forks are waited for.
const NEWS: Duration = Duration::from_millis(200);

/// Children whose userfaultfds are held.
const MOST: usize = 1024;

/// A forked child that is not found yet.
#[derive(Debug)]
pub struct Child {
    /// The tracked process that it descends from.
    pub ancestor: u32,
    /// Where it had the file mapped when it was forked; none if that is not known.
    pub pieces: Vec<MappingExtent>,
    /// The pages that it can write.
    pub pages: Vec<PageRange>,
    /// As long as it is open, the child's writes are kept. `None`: it was lost.
    pub userfaultfd: Option<(Held, ForkSubscription)>,
}

impl Tracker {
    /// Waits until forks of tracked processes are told whose children may have run. Where that takes too long, all of them may
    /// have forked.
    pub(super) fn wait_for_forks(&self, state: &mut State) {
        if !state.observed.iter().any(|observed| observed.forks.is_some()) {
            return;
        }
        if self.event_sources.forks().is_some_and(|forks| forks.wait_for_events(NEWS)) {
            return;
        }
        let followed = state.observed.iter().filter(|observed| observed.forks.is_some());
        let page_size = self.mapped.page_size;
        let maybe = followed.map(|observed| Child {
            ancestor: observed.pid,
            pieces: Vec::new(),
            pages: observed.pages(page_size),
            userfaultfd: None,
        });
        for child in maybe.collect::<Vec<_>>() {
            add(&mut state.children, child);
        }
    }

    /// Takes note of forks that were told since this was done last.
    pub(super) fn hear_of_forks(&self, state: &mut State) {
        for fork in self.forked.take() {
            let (ancestor, pieces, pages) = self.family(state, fork.parent);
            let userfaultfd = fork.child.filter(|_| state.children.len() < MOST);
            add(&mut state.children, Child { ancestor, pieces, pages, userfaultfd });
        }
        self.forked.sweep();
    }

    /// The tracked process, and the pages, that a follower's children descend from.
    fn family(&self, state: &State, id: FollowId) -> (u32, Vec<MappingExtent>, Vec<PageRange>) {
        let is = |following: &ForkSubscription| following.id() == id;
        let observed = state.observed.iter().find(|observed| observed.forks.as_ref().is_some_and(is));
        if let Some(observed) = observed {
            return (
                observed.pid,
                observed.pieces().copied().collect(),
                observed.pages(self.mapped.page_size),
            );
        }
        let child =
            state.children.iter().find(|child| child.userfaultfd.as_ref().is_some_and(|(_, own)| is(own)));
        // It may have been let go of meanwhile: then it is nobody's that is known.
        child.map_or_else(
            || (0, Vec::new(), vec![all_pages()]),
            |child| (child.ancestor, child.pieces.clone(), child.pages.clone()),
        )
    }

    /// Looks for children among those who map the file. Of those that are found the marks are taken; what the others could write
    /// counts as written.
    pub(super) fn find_children(&self, state: &mut State, mappers: &[Mapper], found: &mut Found) {
        let known = |state: &State, pid| state.observed.iter().any(|observed| observed.pid == pid);
        let mut pids: Vec<u32> =
            mappers.iter().map(|mapper| mapper.pid).filter(|pid| !known(state, *pid)).collect();
        pids.dedup();
        for pid in pids {
            let ancestors = ancestors(pid);
            let of = |child: &Child| child.userfaultfd.is_some() && ancestors.contains(&child.ancestor);
            let Some(at) = state.children.iter().position(of) else { continue };
            let pieces = mappers
                .iter()
                .filter(|mapper| mapper.pid == pid)
                .map(|mapper| MappingExtent { range: mapper.range, first_page: mapper.pages.start() });
            if let Some(observed) =
                self.adopt_child(&mut state.children[at], pid, pieces.collect(), found, &mut state.regions)
            {
                tracing::debug!(pid, "a child is tracked");
                state.observed.push(observed);
                state.children.remove(at);
            }
        }
        // Those that are not found may have written and ended.
        for child in &state.children {
            for range in &child.pages {
                let detail =
                    format!("a child of process {} that was not found, or has ended", child.ancestor);
                found.suspect(*range, missed(GapKind::EndedMapping, None, Some(*range), detail));
            }
        }
    }

    /// `None` if the process is not that child, or has gone.
    fn adopt_child(
        &self,
        child: &mut Child,
        pid: u32,
        pieces: Vec<MappingExtent>,
        found: &mut Found,
        regions: &mut super::observed::Regions,
    ) -> Option<Observed> {
        let pagemap = Pagemap::open(Some(pid)).ok()?;
        let maps = Maps::open(pid).ok()?;
        let (userfaultfd, following) = child.userfaultfd.take()?;
        // What it had when it was forked, at the same places: what it has let go of since is lost.
        let pieces = if child.pieces.is_empty() { pieces } else { child.pieces.clone() };
        let mappings = vec![Mapping { id: random_id(MappingId::new), pieces, leaving: false }];
        let mut observed = Observed {
            key: random_id(|key| (key != 0).then_some(key)),
            pid,
            pagemap,
            maps,
            userfaultfd,
            mappings,
            inherited: true,
            forks: None,
            reaped: 0,
        };
        let harvest = observed.harvest(self.mapped, regions);
        let Ok(Harvest { written, lost }) = harvest.inspect_err(|error| {
            tracing::debug!(pid, error = fdmap_proto::error_chain(error), "a child could not be harvested");
        }) else {
            child.userfaultfd = Some((observed.userfaultfd, following));
            return None;
        };
        // It has its parent's marks too, which may be of a generation before.
        found.told.extend(written);
        let mut held = observed.pages(self.mapped.page_size);
        ranges::normalize(&mut held);
        if held.is_empty() {
            child.userfaultfd = Some((observed.userfaultfd, following));
            return None;
        }
        for range in lost {
            let detail = "a child has let go of a mapping";
            found.suspect(range, missed(GapKind::EndedMapping, Some(pid), Some(range), detail));
        }
        observed.forks = Some(following);
        Some(observed)
    }
}

/// Adds a child. Of those that nothing is held of, one with the same pages says it all.
fn add(children: &mut Vec<Child>, child: Child) {
    let same = |other: &Child| {
        other.userfaultfd.is_none() && other.ancestor == child.ancestor && other.pages == child.pages
    };
    if child.userfaultfd.is_some() || !children.iter().any(same) {
        children.push(child);
    }
}

/// The process's parents, up to the first one of all.
fn ancestors(pid: u32) -> Vec<u32> {
    let parents = std::iter::successors(parent_of(pid).ok(), |pid| parent_of(*pid).ok());
    parents.take_while(|pid| *pid > 1).take(ANCESTORS).collect()
}
