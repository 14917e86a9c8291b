//! Page faults that are not served yet. Pure.

use std::collections::{BTreeSet, VecDeque};

use super::super::PAGE_BYTES;

/// Addresses of page faults. Those of one page count as one: what fills the page wakes all threads that wait for it.
#[derive(Debug, Default)]
pub(super) struct FaultQueue {
    /// To be served now, in the order of arrival.
    due: VecDeque<u64>,
    /// Served once their content is read.
    waiting: VecDeque<u64>,
    /// All of both.
    known: BTreeSet<u64>,
}

impl FaultQueue {
    pub(super) fn push(&mut self, address: u64) {
        let page = address - address % PAGE_BYTES;
        if self.known.insert(page) {
            self.due.push_back(page);
        }
    }

    /// Takes the next address.
    pub(super) fn pop(&mut self) -> Option<u64> {
        let address = self.due.pop_front()?;
        self.known.remove(&address);
        Some(address)
    }

    /// The content is not read yet.
    pub(super) fn wait(&mut self, address: u64) {
        if self.known.insert(address) {
            self.waiting.push_back(address);
        }
    }

    /// Content was read, or pages changed: all are due again.
    pub(super) fn retry(&mut self) {
        self.due.append(&mut self.waiting);
    }

    /// True if an address is due.
    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_one_page_are_one_until_it_is_taken() {
        let mut faults = FaultQueue::default();
        [0x1000, 0x3000, 0x1008, 0x1fff].into_iter().for_each(|address| faults.push(address));
        assert_eq!(faults.pop(), Some(0x1000));
        faults.wait(0x1000);
        faults.push(0x1234);
        assert_eq!(faults.pop(), Some(0x3000));
        // A fault that arrives while this one is served is served by itself.
        faults.push(0x3000);
        assert_eq!((faults.pop(), faults.pop()), (Some(0x3000), None));
        assert!(!faults.is_due());
        faults.push(0x5000);
        faults.retry();
        assert!(faults.is_due());
        assert_eq!([(); 3].map(|()| faults.pop()), [Some(0x5000), Some(0x1000), None]);
    }
}
