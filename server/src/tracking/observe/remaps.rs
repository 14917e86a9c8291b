//! Calls of mremap and remap_file_pages whose file could not be determined, because the address space of the caller was locked.
//!
//! Such a call moves, grows or duplicates a mapping that its address space has already. So it concerns a file only if that address
//! space mapped the file before: as long as all writable mappings of the file are tracked, those of its tracked address spaces, and of
//! children that these forked. The calls of each address space are counted when they begin and when they end.

use std::collections::{BTreeMap, BTreeSet};

use crate::probe::KernelAddress;

/// How many such calls of each of some address spaces have begun, and how many have ended.
pub(crate) type SpaceCalls = BTreeMap<KernelAddress, (u64, u64)>;

/// Such calls since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Remaps {
    #[default]
    None,
    /// Only by address spaces that map the file nowhere, if no mapping of the file was untracked.
    ByOthers,
    /// Perhaps by one that maps the file.
    ByMapper,
}

/// Of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemapCounts {
    /// Calls that have begun, and that have ended.
    pub(crate) calls: (u64, u64),
    /// How often the calls of all address spaces were forgotten.
    pub(crate) forgotten: u64,
}

/// What the last observation found.
#[derive(Debug, Default)]
pub(crate) struct RemapHistory {
    counts: RemapCounts,
    /// The address spaces that mapped the file then, or since; `None`: not all of them are known.
    last: Option<SpaceCalls>,
}

impl RemapHistory {
    /// No tracked address space maps the file.
    pub(crate) const fn starting_at(counts: RemapCounts) -> Self {
        Self { counts, last: Some(SpaceCalls::new()) }
    }

    /// The address spaces whose calls matter for the next judgement, in addition to those that map the file then.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = KernelAddress> {
        self.last.iter().flat_map(|last| last.keys().copied())
    }

    /// Judges the calls since the last observation. `counts`: the calls were read before `last`, the others after it; `mapping`: the address
    /// spaces that map the file now; `last`: the calls of these, and of [`Self::spaces`]. `None`: unknown.
    pub(crate) fn update(
        &mut self,
        counts: RemapCounts,
        mapping: Option<&BTreeSet<KernelAddress>>,
        last: Option<SpaceCalls>,
    ) -> Remaps {
        let before = self.last.take();
        let last_counts = std::mem::replace(&mut self.counts, counts);
        let before = before.filter(|_| counts.forgotten == last_counts.forgotten);
        // A call may be in progress all the while.
        let changed = counts != last_counts || counts.calls.0 != counts.calls.1;
        let (Some(mapping), Some(mut now)) = (mapping, last) else {
            return if changed { Remaps::ByMapper } else { Remaps::None };
        };
        // A call counts for its address space first: `counts` may not include one that is seen here, and never again. If the last calls are
        // unknown, each may be such a one.
        let known = before.as_ref();
        let differs = |space, calls: (u64, u64)| {
            let last = known.and_then(|before| before.get(space)).copied().unwrap_or_default();
            calls.0 != calls.1 || calls != last
        };
        let remapped = now.iter().any(|(space, calls)| differs(space, *calls)) || changed && known.is_none();
        now.retain(|space, _| mapping.contains(space));
        self.last = Some(now);
        match (remapped, changed) {
            (true, _) => Remaps::ByMapper,
            (false, true) => Remaps::ByOthers,
            (false, false) => Remaps::None,
        }
    }

    /// Address spaces map the file that did not at the last observation: children that were identified since. `None`: unknown ones do.
    pub(crate) fn add(&mut self, mapping: Option<BTreeSet<KernelAddress>>) {
        let (Some(last), Some(mapping)) = (&mut self.last, mapping) else {
            self.last = None;
            return;
        };
        for space in mapping {
            last.entry(space).or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(address: u64) -> KernelAddress {
        KernelAddress::new(address).unwrap()
    }

    fn calls(calls: u64) -> RemapCounts {
        RemapCounts { calls: (calls, calls), forgotten: 0 }
    }

    fn of_spaces(calls: &[(u64, (u64, u64))]) -> Option<SpaceCalls> {
        Some(calls.iter().map(|(address, calls)| (space(*address), *calls)).collect())
    }

    fn set(addresses: &[u64]) -> Option<BTreeSet<KernelAddress>> {
        Some(addresses.iter().copied().map(space).collect())
    }

    #[test]
    fn calls_of_address_spaces_that_map_the_file_matter() {
        let mut history = RemapHistory::starting_at(calls(5));
        assert_eq!(history.update(calls(5), set(&[]).as_ref(), of_spaces(&[])), Remaps::None);
        assert_eq!(history.update(calls(6), set(&[]).as_ref(), of_spaces(&[])), Remaps::ByOthers);
        // An address space maps it now. Its call may have been an earlier one.
        assert_eq!(
            history.update(calls(7), set(&[1]).as_ref(), of_spaces(&[(1, (30, 30))])),
            Remaps::ByMapper
        );
        assert_eq!(
            history.update(calls(8), set(&[1]).as_ref(), of_spaces(&[(1, (30, 30))])),
            Remaps::ByOthers
        );
        assert_eq!(
            history.update(calls(9), set(&[1]).as_ref(), of_spaces(&[(1, (31, 31))])),
            Remaps::ByMapper
        );
        // It does not map the file any more, but did after the last observation.
        assert_eq!(history.spaces().collect::<Vec<_>>(), [space(1)]);
        assert_eq!(
            history.update(calls(10), set(&[]).as_ref(), of_spaces(&[(1, (32, 32))])),
            Remaps::ByMapper
        );
        assert_eq!(history.spaces().count(), 0);
        assert_eq!(history.update(calls(11), set(&[]).as_ref(), of_spaces(&[])), Remaps::ByOthers);
    }

    #[test]
    fn call_in_progress_matters_until_it_ends() {
        let mut history = RemapHistory::starting_at(calls(0));
        let in_progress = RemapCounts { calls: (1, 0), forgotten: 0 };
        for (own, remaps) in [
            ((1, 0), Remaps::ByMapper),
            ((1, 0), Remaps::ByMapper),
            ((1, 1), Remaps::ByMapper),
            ((1, 1), Remaps::ByOthers),
        ] {
            assert_eq!(
                history.update(in_progress, set(&[1]).as_ref(), of_spaces(&[(1, own)])),
                remaps,
                "{own:?}"
            );
        }
    }

    #[test]
    fn call_matters_that_is_not_counted_for_the_host_yet() {
        let mut history = RemapHistory::starting_at(calls(0));
        assert_eq!(history.update(calls(0), set(&[1]).as_ref(), of_spaces(&[(1, (0, 0))])), Remaps::None);
        assert_eq!(history.update(calls(0), set(&[1]).as_ref(), of_spaces(&[(1, (1, 1))])), Remaps::ByMapper);
        assert_eq!(history.update(calls(1), set(&[1]).as_ref(), of_spaces(&[(1, (1, 1))])), Remaps::ByOthers);
        // The same if the last calls are unknown.
        history.add(None);
        assert_eq!(history.update(calls(1), set(&[1]).as_ref(), of_spaces(&[(1, (2, 2))])), Remaps::ByMapper);
    }

    #[test]
    fn address_spaces_that_are_found_later_matter() {
        let mut history = RemapHistory::starting_at(calls(0));
        history.update(calls(0), set(&[1]).as_ref(), of_spaces(&[(1, (0, 0))]));
        history.add(set(&[1, 2]));
        let now = of_spaces(&[(1, (0, 0)), (2, (9, 9))]);
        assert_eq!(history.update(calls(1), set(&[1]).as_ref(), now), Remaps::ByMapper);
        history.add(set(&[1, 2]));
        let now = of_spaces(&[(1, (0, 0)), (2, (0, 0))]);
        assert_eq!(history.update(calls(2), set(&[1]).as_ref(), now), Remaps::ByOthers);
    }

    #[test]
    fn unknown_address_spaces_may_have_made_each_call() {
        let mut history = RemapHistory::default();
        assert_eq!(history.update(calls(0), None, None), Remaps::None);
        assert_eq!(history.update(calls(1), None, of_spaces(&[])), Remaps::ByMapper);
        assert_eq!(history.update(calls(2), set(&[]).as_ref(), None), Remaps::ByMapper);
        // They were unknown at the last observation.
        assert_eq!(history.update(calls(3), set(&[]).as_ref(), of_spaces(&[])), Remaps::ByMapper);
        assert_eq!(history.update(calls(4), set(&[]).as_ref(), of_spaces(&[])), Remaps::ByOthers);
        let forgotten = RemapCounts { forgotten: 1, ..calls(4) };
        assert_eq!(history.update(forgotten, set(&[]).as_ref(), of_spaces(&[])), Remaps::ByMapper);
        assert_eq!(history.update(forgotten, set(&[]).as_ref(), of_spaces(&[])), Remaps::None);
        history.add(None);
        assert_eq!(history.update(calls(5), set(&[]).as_ref(), of_spaces(&[])), Remaps::ByMapper);
    }
}
