//! Decides whether the runs of a walk saw every VMA of a file. Pure.
//!
//! A walk holds no lock. Its first pass follows the links of the tree, its second pass reads every VMA again. It is accepted
//! only if
//!
//! - the lock of the tree was free at the beginning and at the end of every run, no node had another parent than the one from which
//!   the walk came, every VMA mapped this file and was not about to leave the tree, and neither a VMA nor the root had changed when
//!   it was read again (the program rejects the others),
//! - no VMA was found twice,
//! - the kernel's count of writable mappings was the same at the beginning and at the end of every run, and
//! - equals the number of VMAs found that this kernel counts ([`WritableCount`]).
//!
//! Then every VMA that was found was in the tree between both passes: a VMA that was in the tree at one of them and not at the
//! other has another lock sequence, and one that was in it at neither is reached by no link that both passes read. The kernel
//! counts a mapping before it adds its VMA, and as long as the VMA is in the tree. So if a VMA were missing, the count between
//! both passes would exceed the number found. Comparing the counts alone misses VMAs (57 of 1.3 million walks under load), so there
//! is no walk on kernels without per-VMA locks (`CONFIG_PER_VMA_LOCK`, since 6.4).

use fdmap_proto::units::PageIndex;
use fdmap_sys::address::AddressRange;

use crate::bpf::records::{MapperRecord, MapperRun};
use crate::probe::file_vma::{FileVma, KernelAddress};

// linux/mm.h
const VM_SHARED: u64 = 0x8;
const VM_MAYWRITE: u64 = 0x20;
const VM_UFFD_WP: u64 = 0x1000;

/// Which mappings the kernel counts as writable, in `i_mmap_writable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WritableCount {
    /// Shared mappings that are writable or can become so, since Linux 6.7 and its backports.
    MayWrite,
    /// All shared mappings.
    Shared,
}

/// What the runs of one walk have in common.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Acceptance {
    /// `i_mmap_writable`, which must not change.
    writable: Option<i32>,
}

impl Acceptance {
    /// Returns false if the walk must be rejected because of this run.
    #[must_use]
    pub(super) fn admits(&mut self, run: &MapperRun) -> bool {
        let writable = *self.writable.get_or_insert(run.writable_before);
        run.rejections == 0 && run.writable_before == writable && run.writable_after == writable
    }

    /// True if the records of all runs, which were admitted, are all VMAs of the file.
    #[must_use]
    pub(super) fn accepts(&self, records: &[MapperRecord], counts: WritableCount) -> bool {
        let flags = match counts {
            WritableCount::MayWrite => VM_SHARED | VM_MAYWRITE,
            WritableCount::Shared => VM_SHARED,
        };
        let mut nodes: Vec<_> = records.iter().map(|record| record.node).collect();
        nodes.sort_unstable();
        if nodes.windows(2).any(|pair| pair[0] == pair[1]) {
            return false;
        }
        let found = records.iter().filter(|record| record.flags & flags == flags).count();
        // A negative count means that writable mappings are denied (F_SEAL_WRITE).
        self.writable.is_some_and(|writable| usize::try_from(writable.max(0)) == Ok(found))
    }
}

/// The VMA of an accepted record; `None` if the record is inconsistent.
#[must_use]
pub(super) fn vma(record: &MapperRecord) -> Option<FileVma> {
    let range = AddressRange { start: record.start, end: record.end };
    (range.start < range.end).then_some(())?;
    Some(FileVma {
        range,
        first_page: PageIndex(record.page),
        writable: record.flags & (VM_SHARED | VM_MAYWRITE) == VM_SHARED | VM_MAYWRITE,
        mm: KernelAddress::new(record.mm)?,
        userfaultfd: KernelAddress::new(record.userfaultfd),
        write_protected: record.flags & VM_UFFD_WP != 0,
        pid: u32::try_from(record.pid).ok().filter(|pid| *pid != 0),
    })
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    fn record(flags: u64) -> MapperRecord {
        MapperRecord { start: 0x1000, end: 0x3000, page: 7, flags, mm: 0x5000, ..MapperRecord::zeroed() }
    }

    fn run(before: i32, after: i32, rejections: u32) -> MapperRun {
        MapperRun { writable_before: before, writable_after: after, rejections, ..MapperRun::zeroed() }
    }

    const WRITABLE: u64 = VM_SHARED | VM_MAYWRITE;

    #[test]
    fn walk_is_accepted_only_if_every_run_and_the_count_agree() {
        use WritableCount::{MayWrite, Shared};
        for (counts, runs, flags, accepted) in [
            (MayWrite, vec![run(0, 0, 0)], vec![], true),
            (MayWrite, vec![run(1, 1, 0)], vec![WRITABLE], true),
            (MayWrite, vec![run(1, 1, 0), run(1, 1, 0)], vec![WRITABLE, VM_MAYWRITE, 0], true),
            // F_SEAL_WRITE.
            (MayWrite, vec![run(-1, -1, 0)], vec![VM_SHARED], true),
            (Shared, vec![run(2, 2, 0)], vec![WRITABLE, VM_SHARED], true),
            (Shared, vec![run(2, 2, 0)], vec![WRITABLE], false),
            // A writable mapping is missing, beside a shared one that can never be written.
            (MayWrite, vec![run(2, 2, 0)], vec![WRITABLE, VM_SHARED], false),
            (MayWrite, vec![run(0, 0, 0)], vec![WRITABLE], false),
            (MayWrite, vec![run(1, 2, 0)], vec![WRITABLE], false),
            (MayWrite, vec![run(1, 1, 0), run(2, 2, 0)], vec![WRITABLE], false),
            (MayWrite, vec![run(1, 1, 0), run(1, 2, 0)], vec![WRITABLE], false),
            (MayWrite, vec![run(1, 1, 1)], vec![WRITABLE], false),
            (MayWrite, vec![run(1, 1, 0), run(1, 1, 16)], vec![WRITABLE], false),
            (MayWrite, vec![], vec![], false),
        ] {
            let mut acceptance = Acceptance::default();
            let admitted = runs.iter().all(|run| acceptance.admits(run));
            let at = |(node, flags): (u64, &u64)| MapperRecord { node, ..record(*flags) };
            let records: Vec<_> = (1..).zip(&flags).map(at).collect();
            assert_eq!(admitted && acceptance.accepts(&records, counts), accepted, "{flags:x?}");
        }
    }

    #[test]
    fn walk_that_found_a_vma_twice_is_rejected() {
        let found = |nodes: [u64; 2]| {
            let mut acceptance = Acceptance::default();
            assert!(acceptance.admits(&run(2, 2, 0)));
            let records = nodes.map(|node| MapperRecord { node, ..record(WRITABLE) });
            acceptance.accepts(&records, WritableCount::MayWrite)
        };
        assert_eq!((found([0x10, 0x20]), found([0x10, 0x10])), (true, false));
    }

    #[test]
    fn record_becomes_a_vma() {
        let registered = WRITABLE | VM_UFFD_WP | 3;
        let found = vma(&MapperRecord { pid: 9, userfaultfd: 0x6000, ..record(registered) }).unwrap();
        assert_eq!(found.range, AddressRange { start: 0x1000, end: 0x3000 });
        assert_eq!((found.first_page, found.writable, found.pid), (PageIndex(7), true, Some(9)));
        assert!(found.write_protected);
        assert_eq!(
            (Some(found.mm), found.userfaultfd),
            (KernelAddress::new(0x5000), KernelAddress::new(0x6000))
        );
        let found = vma(&record(VM_SHARED)).unwrap();
        assert_eq!((found.writable, found.pid, found.userfaultfd), (false, None, None));
        assert!(!found.write_protected);
        assert!(!format!("{found:?}").contains("5000"), "kernel addresses are hidden");
        for broken in [MapperRecord { mm: 0, ..record(0) }, MapperRecord { end: 0x1000, ..record(0) }] {
            assert_eq!(vma(&broken), None);
        }
    }
}
