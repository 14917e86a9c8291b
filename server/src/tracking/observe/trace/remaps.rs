//! Address spaces that moved, grew or duplicated a mapping of a file that could not be determined.

use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_proto::units::to_usize;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use super::super::remaps::SpaceCalls;
use super::WriteTracer;
use crate::bpf::records::SpaceRemaps;
use crate::probe::KernelAddress;

/// The map has room for 16384 address spaces. After this number of calls, all are forgotten.
const MAX_REMEMBERED: u64 = 12288;

/// The map `remapping_spaces`, from mm_structs to [`SpaceRemaps`].
#[derive(Debug)]
pub(super) struct RemappingSpaces {
    map: MapHandle,
    /// How often address spaces were forgotten.
    forgotten: AtomicU64,
    /// Calls until then.
    forgotten_at: AtomicU64,
}

impl RemappingSpaces {
    pub(super) const fn new(map: MapHandle) -> Self {
        Self { map, forgotten: AtomicU64::new(0), forgotten_at: AtomicU64::new(0) }
    }

    /// `None`: it cannot be read.
    pub(super) fn calls_of(&self, spaces: impl Iterator<Item = KernelAddress>) -> Option<SpaceCalls> {
        let calls = |space: KernelAddress| {
            let value = self.map.lookup(&space.to_ne_bytes(), MapFlags::ANY).ok()?;
            let remaps = value.map(|value| bytemuck::try_pod_read_unaligned::<SpaceRemaps>(&value));
            let SpaceRemaps { begun, ended } = remaps.transpose().ok()?.unwrap_or_default();
            Some((space, (begun, ended)))
        };
        spaces.map(calls).collect()
    }

    /// Forgets all address spaces.
    pub(super) fn forget(&self) {
        // An entry that is removed meanwhile makes the kernel start over.
        for key in self.map.keys().take(2 * to_usize(MAX_REMEMBERED)).collect::<Vec<_>>() {
            // One that is already gone is no error.
            let _ = self.map.delete(&key);
        }
    }
}

impl WriteTracer {
    /// Calls of the host that change a mapping of an unknown file, while any file is followed: how many have begun, and how many have
    /// ended.
    pub(crate) fn remaps(&self) -> (u64, u64) {
        self.counters.remaps()
    }

    /// The calls of each of `spaces`; `None`: unknown. Each call that is counted in [`Self::remaps`] is included, unless
    /// [`Self::forgotten_remaps`] has changed meanwhile.
    pub(crate) fn remaps_of(&self, spaces: impl Iterator<Item = KernelAddress>) -> Option<SpaceCalls> {
        self.remapping_spaces.calls_of(spaces)
    }

    /// How often address spaces were forgotten.
    pub(crate) fn forgotten_remaps(&self) -> u64 {
        self.remapping_spaces.forgotten.load(Ordering::SeqCst)
    }

    /// Makes room for further address spaces, if there may be little.
    pub(crate) fn forget_remaps(&self) {
        let RemappingSpaces { forgotten, forgotten_at, .. } = &self.remapping_spaces;
        let (now, last) = (self.remaps().0, forgotten_at.load(Ordering::SeqCst));
        if now.wrapping_sub(last) > MAX_REMEMBERED
            && forgotten_at.compare_exchange(last, now, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            // A reader that finds an entry missing finds the new count after that.
            forgotten.fetch_add(1, Ordering::SeqCst);
            self.remapping_spaces.forget();
        }
    }
}
