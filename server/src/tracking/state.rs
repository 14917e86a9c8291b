//! The state of one tracked file. Each part owns its mutators; the tracker's lock guards all of them.

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::PageSize;
use fdmap_sys::ownership::Ownership;

use super::baseline::{InodeBaseline, UnnotifiedWrites};
use super::classify::UntrackedMappings;
use super::cursors::Cursors;
use super::generations::Generations;
use super::observe::{AddressSpaces, SignalHistory};
use super::ranges;
use super::record::Record;
use super::redirty::RedirtySet;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: FileSettings,
    pub(crate) generations: Generations,
    pub(crate) spaces: AddressSpaces,
    pub(crate) redirty: RedirtySet,
    /// The inode before the last harvest.
    pub(crate) baseline: InodeBaseline,
    pub(crate) unnotified_writes: UnnotifiedWrites,
    /// Untracked mappings at the last checkpoint, or detached since.
    pub(crate) untracked: UntrackedMappings,
    pub(crate) history: SignalHistory,
    /// A harvest since the last checkpoint found pages that were written through mappings.
    harvested_writes: bool,
    /// Written bits were cleared and not stamped.
    interrupted: bool,
}

/// What clients set. It changes rarely.
#[derive(Debug)]
pub(crate) struct FileSettings {
    pub(crate) file: FileInfo,
    /// Owner and mode of the inode before the file was adopted.
    pub(crate) original_owner: Option<Ownership>,
    pub(crate) policy: CoveragePolicy,
    pub(crate) cursors: Cursors,
}

impl State {
    /// A state without mappings, baseline or coverage gaps.
    pub(crate) fn new(settings: FileSettings, generations: Generations, history: SignalHistory) -> Self {
        Self {
            settings,
            generations,
            spaces: AddressSpaces::default(),
            redirty: RedirtySet::default(),
            baseline: InodeBaseline::default(),
            unnotified_writes: UnnotifiedWrites::default(),
            untracked: UntrackedMappings::default(),
            history,
            harvested_writes: false,
            interrupted: false,
        }
    }

    /// Written bits may have been cleared without a stamp: the next checkpoint relies on no signal.
    pub(crate) const fn set_interrupted(&mut self) {
        self.untracked.unknown = true;
        self.interrupted = true;
    }

    /// A harvest between two checkpoints found pages that were written through mappings.
    pub(crate) const fn note_harvested_writes(&mut self) {
        self.harvested_writes = true;
    }

    pub(crate) const fn take_harvested_writes(&mut self) -> bool {
        std::mem::replace(&mut self.harvested_writes, false)
    }

    pub(crate) const fn take_interrupted(&mut self) -> bool {
        std::mem::replace(&mut self.interrupted, false)
    }

    /// Everything that was harvested is stamped, except what late harvests collect.
    pub(crate) fn settle(&mut self, page_size: PageSize) {
        let late = self.spaces.late_pages(page_size);
        if late.is_empty() {
            self.generations.settle();
        } else {
            self.generations.intend(ranges::hull(&late));
        }
    }

    /// Writes what changes at every checkpoint to the journal.
    pub(crate) fn write_header(&mut self) {
        self.generations.write_header(&self.baseline, !self.untracked.is_empty());
    }

    /// What changes rarely, for the journal. Without a descriptor store, a mapping cannot be recovered, and is not recorded.
    pub(crate) fn record(&self, has_store: bool) -> Record {
        let FileSettings { file, original_owner, policy, cursors } = &self.settings;
        Record {
            file: file.clone(),
            original_owner: *original_owner,
            policy: *policy,
            cursors: cursors.all(),
            spaces: if has_store { self.spaces.records() } else { Vec::new() },
        }
    }
}
