//! Decides whether the VMAs that a walk found are those of the tracked mappings, unchanged. Pure.

use std::collections::HashMap;

use super::address_space::SpaceIdentity;
use crate::probe::{FileVma, KernelAddress};
use crate::tracking::mapping::MappingExtent;

/// The VMAs of a file by address space and start address.
#[derive(Debug)]
pub(super) struct FoundVmas<'a>(HashMap<(KernelAddress, u64), &'a FileVma>);

impl<'a> FoundVmas<'a> {
    pub(super) fn new(vmas: &'a [FileVma]) -> Self {
        Self(vmas.iter().map(|vma| ((vma.mm, vma.range.start), vma)).collect())
    }

    /// True if `extent` is exactly one VMA of the address space, shared and writable, and registered with its userfaultfd for write
    /// protection. An address space whose kernel objects are not known is not found.
    #[must_use]
    pub(super) fn has_whole(&self, identity: SpaceIdentity, extent: &MappingExtent) -> bool {
        let found = identity.mm.and_then(|mm| self.0.get(&(mm, extent.range.start)));
        found.is_some_and(|vma| {
            vma.range == extent.range
                && vma.first_page == extent.first_page
                && vma.writable
                && vma.write_protected
                && vma.userfaultfd.is_some()
                && vma.userfaultfd == identity.userfaultfd
        })
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::units::PageIndex;
    use fdmap_sys::address::AddressRange;

    use super::*;

    #[test]
    fn only_the_unchanged_vma_of_the_same_space_is_the_extent() {
        let address = KernelAddress::new;
        let range = AddressRange { start: 0x1000, end: 0x3000 };
        let extent = MappingExtent { range, first_page: PageIndex(7) };
        let identity = SpaceIdentity { mm: address(0x50), userfaultfd: address(0x60) };
        let whole = FileVma {
            range,
            first_page: PageIndex(7),
            writable: true,
            mm: address(0x50).unwrap(),
            userfaultfd: address(0x60),
            write_protected: true,
            pid: None,
        };
        let is_found = |vma: FileVma, identity| FoundVmas::new(&[vma]).has_whole(identity, &extent);
        assert!(is_found(whole, identity));
        for changed in [
            FileVma { range: AddressRange { end: 0x2000, ..range }, ..whole },
            FileVma { range: AddressRange { end: 0x4000, ..range }, ..whole },
            FileVma { range: AddressRange { start: 0, ..range }, ..whole },
            FileVma { first_page: PageIndex(8), ..whole },
            FileVma { writable: false, ..whole },
            FileVma { mm: address(0x51).unwrap(), ..whole },
            FileVma { userfaultfd: address(0x61), ..whole },
            FileVma { userfaultfd: None, ..whole },
            FileVma { write_protected: false, ..whole },
        ] {
            assert!(!is_found(changed, identity), "{changed:?}");
        }
        let unknown =
            [SpaceIdentity { mm: None, ..identity }, SpaceIdentity { userfaultfd: None, ..identity }];
        for identity in unknown {
            assert!(!is_found(whole, identity));
            assert!(!is_found(FileVma { userfaultfd: None, ..whole }, identity));
        }
        assert!(!FoundVmas::new(&[]).has_whole(identity, &extent));
    }
}
