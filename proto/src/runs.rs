//! Runs: consecutive pages with the same state, the same difference, or the same kind of change.

use serde::Serialize;

use crate::attributes::PageAttributes;
use crate::state::{PageState, SwapSlot};
use crate::units::{PageIndex, PageRange};

/// Consecutive pages with the same state and attributes, and with consecutive swap slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// Pages of the run; never empty.
    #[serde(flatten)]
    pub range: PageRange,
    /// State of each page.
    pub state: PageState,
    /// Swap slot of the first page, if the state has one and the probe reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<SwapSlot>,
    /// Attributes of each page, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<PageAttributes>,
}

impl Run {
    /// Swap slot of `page`; `None` if the run has no slots or does not contain the page.
    #[must_use]
    pub fn slot_of(&self, page: PageIndex) -> Option<SwapSlot> {
        if !self.range.contains(page) {
            return None;
        }
        self.slot?.plus(page.0 - self.range.start().0)
    }

    /// Appends `next` if it starts where this run ends, and is equal in everything else. Returns whether it did.
    pub fn append(&mut self, next: &Self) -> bool {
        let continues = self.range.end() == next.range.start()
            && self.state == next.state
            && self.attributes == next.attributes
            && match (self.slot, next.slot) {
                (None, None) => true,
                (Some(first), Some(then)) => first.plus(self.range.len()) == Some(then),
                _ => false,
            };
        if continues {
            self.range = PageRange::at(self.range.start(), self.range.len() + next.range.len());
        }
        continues
    }
}

/// Consecutive pages whose state or swap slot differs between two snapshots in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Pages of the run; never empty.
    #[serde(flatten)]
    pub range: PageRange,
    /// State in the older snapshot.
    pub before: PageState,
    /// Swap slot of the first page in the older snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_before: Option<SwapSlot>,
    /// State in the newer snapshot.
    pub after: PageState,
    /// Swap slot of the first page in the newer snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_after: Option<SwapSlot>,
}

/// Consecutive pages that were written, or are reported conservatively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChangedRun {
    /// Pages of the run; never empty.
    #[serde(flatten)]
    pub range: PageRange,
    /// The pages are reported although no write was observed.
    pub conservative: bool,
}

/// A changed run and the current attributes of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChangedPages {
    /// Changed pages.
    #[serde(flatten)]
    pub run: ChangedRun,
    /// Attributes of each page, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<PageAttributes>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_serializes_without_absent_fields() {
        let range = PageRange::at(PageIndex(3), 2);
        let slot = SwapSlot::new(1, 40);
        let run = Run { range, state: PageState::Swapped, slot, attributes: None };
        let expected =
            serde_json::json!({"start": 3, "end": 5, "state": "swapped", "slot": {"type": 1, "offset": 40}});
        assert_eq!(serde_json::to_value(run).unwrap(), expected);
        let changed = ChangedPages { run: ChangedRun { range, conservative: true }, attributes: None };
        let expected = serde_json::json!({"start": 3, "end": 5, "conservative": true});
        assert_eq!(serde_json::to_value(changed).unwrap(), expected);
    }
}
