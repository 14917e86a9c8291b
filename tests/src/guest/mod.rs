//! Guests: a Linux kernel and one program (`programs/guest_init.c`) in an unpatched QEMU without KVM. The memory of a
//! guest is a shared mapping of a memfd. This module is independent of the service. [`system`] runs any programs in a guest.
//!
//! A page is identified by its index in the memfd. With this amount of memory, below the hole for devices, the index
//! is also the guest-physical page number.

pub mod daemon;
pub mod disk;
pub mod initramfs;
pub mod kernel;
pub mod machine;
pub mod qmp;
pub mod serial;
pub mod system;

pub use machine::{Guest, Options, Wrapper};

use crate::HarnessResult;

/// Bytes of a page, of host and guest.
pub const PAGE: u64 = 4096;

/// Memory of a guest, in MiB: enough for the kernel, its log and the pages below.
pub const MEMORY_MIB: u64 = 256;

/// Pages of the memfd.
pub const MEMORY_PAGES: u64 = MEMORY_MIB << 20 >> 12;

/// Pages that the guest writes on command.
pub const PAGES: u64 = 24576;

/// Pages that the guest reads disks into on command.
pub const READ_PAGES: u64 = 1024;

/// Pages of a block that the guest reads continuously, as in `guest_init.c`.
pub const BLOCK_PAGES: u64 = 16;

/// The memory of the guest's program, as pages of the memfd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Pages that the guest writes on command.
    pub pages: Vec<u64>,
    /// Pages into which the guest reads disks on command.
    pub read: Vec<u64>,
    /// Pages into which the guest reads a disk continuously.
    pub busy: Vec<u64>,
}

impl Layout {
    /// Parses three lists of FIRST+COUNT, separated by bars.
    fn parse(text: &str) -> HarnessResult<Self> {
        let bad = || crate::HarnessError::Agent(format!("a layout: {text}"));
        let mut lists = text.split('|').map(runs);
        let mut next = |count: u64| {
            let list: Vec<u64> = lists.next().flatten().ok_or_else(bad)?;
            let known = |page: &u64| (1..MEMORY_PAGES).contains(page);
            if list.len() as u64 == count && list.iter().all(known) { Ok(list) } else { Err(bad()) }
        };
        Ok(Self { pages: next(PAGES)?, read: next(READ_PAGES)?, busy: next(BLOCK_PAGES)? })
    }
}

fn runs(text: &str) -> Option<Vec<u64>> {
    let mut all = Vec::new();
    for run in text.split_whitespace() {
        let (first, count) = run.split_once('+')?;
        let (first, count): (u64, u64) = (first.parse().ok()?, count.parse().ok()?);
        all.extend(first..first.checked_add(count.min(MEMORY_PAGES))?);
    }
    Some(all)
}

/// A pseudo-random choice of guest pages, which a test and the guest compute alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSelection {
    pub seed: u64,
    /// Written pages per 1000.
    pub per_mille: u64,
}

impl PageSelection {
    /// The indexes in [`Layout::pages`] of the written pages.
    pub fn places(self) -> impl Iterator<Item = usize> {
        use crate::pattern::mix;
        (0..PAGES)
            .filter(move |place| mix(self.seed ^ mix(*place)) % 1000 < self.per_mille)
            .map(|place| place as usize)
    }

    /// The first 16 bytes of the page at an index.
    #[must_use]
    pub fn content(self, place: usize) -> [u8; 16] {
        crate::pattern::Pattern { seed: self.seed, percent: 0 }.content(place as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_read_and_wrong_ones_are_refused() {
        let text = format!(" 1000+24000 40000+576 | 50000+{READ_PAGES} | 7+10 30+6");
        let layout = Layout::parse(&text).unwrap();
        assert_eq!((layout.pages[0], layout.pages[24000]), (1000, 40000));
        assert_eq!(layout.busy.last(), Some(&35));
        // Page 0 means that the guest could not find the page. No page lies past the memory.
        for wrong in ["", "1+1|2+2", &text.replace("7+", "0+"), &text.replace("50000", "65530")] {
            assert!(Layout::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sets_have_about_the_requested_share() {
        let count = PageSelection { seed: 5, per_mille: 20 }.places().count();
        assert!(count.abs_diff(491) < 100, "{count}");
        assert_eq!(PageSelection { seed: 5, per_mille: 0 }.places().count(), 0);
    }
}
