//! Free slots of an array that BPF programs share.

use std::collections::VecDeque;

/// Free slots in the order in which they are given out: the one that was given back first is the first. So a program that still
/// has the number of a slot that was given back seldom meets a new owner.
#[derive(Debug)]
pub(super) struct FreeSlots(VecDeque<usize>);

impl FreeSlots {
    /// All slots below `slots` are free.
    pub(super) fn new(slots: usize) -> Self {
        Self((0..slots).collect())
    }

    /// The first free slot for which `is_idle` is true. It stays free until it is taken.
    pub(super) fn first(&self, is_idle: impl Fn(usize) -> bool) -> Option<usize> {
        self.0.iter().copied().find(|slot| is_idle(*slot))
    }

    pub(super) fn take(&mut self, slot: usize) {
        if let Some(position) = self.0.iter().position(|free| *free == slot) {
            self.0.remove(position);
        }
    }

    pub(super) fn give_back(&mut self, slot: usize) {
        self.0.push_back(slot);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_given_out_in_the_order_in_which_they_came_back() {
        let mut free = FreeSlots::new(3);
        let take = |free: &mut FreeSlots, is_idle: fn(usize) -> bool| {
            let slot = free.first(is_idle);
            slot.inspect(|slot| free.take(*slot))
        };
        assert_eq!(take(&mut free, |_| true), Some(0));
        free.give_back(0);
        assert_eq!(take(&mut free, |slot| slot != 1), Some(2));
        assert_eq!(free.iter().collect::<Vec<_>>(), [1, 0]);
        assert_eq!(take(&mut free, |slot| slot != 1), Some(0));
        assert_eq!(take(&mut free, |slot| slot != 1), None);
        assert_eq!(free.iter().collect::<Vec<_>>(), [1]);
    }
}
