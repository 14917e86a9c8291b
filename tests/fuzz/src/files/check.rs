//! The rules of files.proto, and of the mappings in fdpass.proto.

use std::sync::Arc;

use fdmap_proto::MAX_NAME_BYTES;
use fdmap_proto::convert::{FileName, backing_from_wire, lifetime_from_wire, seals_from_wire};
use fdmap_proto::file::{Access, Backing, Lifetime, Origin, Right, is_invisible};
use fdmap_proto::units::{PageIndex, PageSize, to_u64};
use fdmap_proto::v1;
use fdmap_server::files::{Caller, FileError, FileSpec, Registry, ServiceFile};
use fdmap_server::tracking::{TrackingError, parse_extents};

use super::LIMITS;

/// A file that was created, and its caller.
pub(super) struct Created {
    file: Arc<ServiceFile>,
    caller: Caller,
    owner: u32,
    size_bytes: u64,
}

/// Creates a file as `rpc` does. A refused request creates none and names the first rule that it violates.
pub(super) fn create(
    registry: &Registry,
    caller: &Caller,
    request: v1::CreateRequest,
    created: &mut Vec<Created>,
) {
    let Ok(spec) = FileSpec::try_from(request.clone()) else {
        assert!(!is_well_formed(&request), "{request:?} was refused");
        return;
    };
    assert!(is_well_formed(&request), "{request:?} was accepted");
    let access = spec.access.unwrap_or(Access::private(caller.uid, caller.gid));
    let valid_name = (1..=MAX_NAME_BYTES).contains(&spec.name.len())
        && !spec.name.chars().any(|c| c == '/' || is_invisible(c));
    let owned = || created.iter().filter(|other| other.owner == access.uid);
    let taken = owned().any(|other| other.file.name() == spec.name);
    let bytes: u64 = owned().map(|other| other.size_bytes).sum();
    let owned_by_admin = access.uid == 0 || access.uid == nix::unistd::geteuid().as_raw();
    let by_default = if caller.admin && owned_by_admin { Lifetime::Kept } else { Lifetime::Ephemeral };
    let lifetime = spec.lifetime.unwrap_or(by_default);
    let is_ephemeral = |other: &&Created| other.file.lifetime() == Lifetime::Ephemeral;
    let below_limit = |files: usize| to_u64(files) < u64::from(LIMITS.files_per_user);
    let within_limits = (caller.admin
        || (below_limit(owned().count())
            && bytes.saturating_add(spec.size_bytes) <= LIMITS.bytes_per_user))
        && (lifetime == Lifetime::Kept || below_limit(owned().filter(is_ephemeral).count()));
    let allowed = valid_name
        && !taken
        && matches!(spec.backing, Backing::Shmem | Backing::ShmemThp)
        && (1..=LIMITS.file_bytes).contains(&spec.size_bytes)
        && (access.uid == caller.uid || caller.admin)
        && (spec.lifetime != Some(Lifetime::Kept) || caller.admin)
        && within_limits;
    let count = registry.all().len();
    match registry.create(caller, spec.clone()) {
        Err(error) => {
            // The kernel refuses some sets of seals.
            let by_kernel = matches!(error, FileError::Syscall(_));
            assert!(!allowed || by_kernel, "{request:?} of user {}: {error}", caller.uid);
            assert_eq!(registry.all().len(), count);
        }
        Ok(file) => {
            assert!(allowed, "{request:?} of user {} was accepted", caller.uid);
            let info = file.info(caller).unwrap();
            assert_eq!((&info.name, info.size_bytes), (&request.name, request.size_bytes));
            assert_eq!(info.pages, request.size_bytes.div_ceil(4096));
            assert_eq!((info.access, info.backing, info.origin), (access, spec.backing, Origin::Created));
            assert_eq!(info.seals & spec.seals, spec.seals, "requested seals are missing");
            assert_eq!((info.allocated_bytes, info.lifetime), (0, lifetime));
            assert_eq!(info.owned_by_caller, access.uid == caller.uid);
            let admin = Caller { admin: true, ..caller.clone() };
            for name in [FileName::Id(info.id), FileName::Owned(info.owned_name())] {
                let found = registry.find(&admin, &name, Right::Inspect);
                assert_eq!(found.unwrap().id(), info.id);
            }
            let (caller, size_bytes) = (caller.clone(), request.size_bytes);
            created.push(Created { file, caller, owner: access.uid, size_bytes });
        }
    }
}

/// The fields are values that files.proto defines.
fn is_well_formed(request: &v1::CreateRequest) -> bool {
    let access = request.access.clone().map(Access::try_from);
    backing_from_wire(request.backing, request.hugetlb_page_size).is_ok()
        && seals_from_wire(&request.seals).is_ok()
        && lifetime_from_wire(request.lifetime).is_ok()
        && access.is_none_or(|access| access.is_ok())
}

/// Each created file still exists, and can be deleted by its owner.
pub(super) fn all_deletable(registry: &Registry, created: Vec<Created>) {
    assert_eq!(registry.all().len(), created.len());
    for Created { file, caller, owner, .. } in created {
        let name = FileName::Name(file.name().to_owned());
        let owner = Caller { uid: owner, ..caller };
        registry.delete(&owner, &name).unwrap();
        let again = registry.delete(&owner, &name).err();
        assert!(matches!(again, Some(FileError::NotFound(_))), "{again:?}");
    }
    assert!(registry.all().is_empty());
}

/// Mappings are accepted exactly if all of them consist of whole pages, and lie in the address space and in 64-bit offsets, apart
/// from each other. An error names the first mapping that violates that.
pub(super) fn extents(mappings: &[(u64, u64, PageIndex)]) {
    let page_size = PageSize::new(4096).unwrap();
    let page = page_size.bytes();
    let valid = |(address, length, first): (u64, u64, PageIndex)| {
        let whole = address % page == 0 && length % page == 0 && length > 0;
        let end = first.0.checked_add(length / page).and_then(|end| end.checked_mul(page));
        whole && address.checked_add(length).is_some() && end.is_some()
    };
    let overlap = |a: &(u64, u64, PageIndex), b: &(u64, u64, PageIndex)| {
        let end = |mapping: &(u64, u64, PageIndex)| u128::from(mapping.0) + u128::from(mapping.1);
        u128::from(a.0) < end(b) && u128::from(b.0) < end(a)
    };
    let first_bad = (0..mappings.len()).find(|at| {
        !valid(mappings[*at]) || mappings[..*at].iter().any(|other| overlap(other, &mappings[*at]))
    });
    match parse_extents(mappings, page_size) {
        Ok(extents) => {
            assert_eq!(first_bad, None, "{mappings:?}");
            assert_eq!(extents.len(), mappings.len());
            for (extent, (address, length, first_page)) in extents.iter().zip(mappings) {
                assert_eq!((extent.range.start, extent.range.end), (*address, address + length));
                assert_eq!(extent.first_page, *first_page);
            }
        }
        Err(TrackingError::BadMapping { at, .. }) => assert_eq!(Some(at), first_bad, "{mappings:?}"),
        Err(error) => panic!("{error}"),
    }
}
