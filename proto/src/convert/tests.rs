use std::time::Duration;

use super::files::rights_from_wire;
use super::*;
use crate::attributes::PageAttributes;
use crate::file::{Access, Backing, FileInfo, Lifetime, OwnedName, Seals};
use crate::v1;

#[test]
fn unknown_and_unspecified_enums_are_rejected() {
    for value in [0, -1, 99] {
        assert!(state_from_wire(value).is_err());
        assert!(seals_from_wire(&[value]).is_err());
        assert!(AttributeSet::from_wire(&[value]).is_err());
        assert!(rights_from_wire(&[value]).is_err());
        assert!(probe_from_wire(value).is_err());
    }
}

#[test]
fn encoded_sets_are_decoded() {
    let seals = Seals::ALL;
    assert_eq!(seals_from_wire(&seals_to_wire(seals)), Ok(seals));
    assert_eq!(AttributeSet::from_wire(&AttributeSet::ALL.to_wire()), Ok(AttributeSet::ALL));
    let access = Access::from_mode(3, 4, 0o751);
    assert_eq!(Access::try_from(v1::Access::from(access)), Ok(access));
}

#[test]
fn hugetlb_page_size_requires_hugetlb_backing() {
    let hugetlb = v1::Backing::Hugetlb.into();
    assert_eq!(backing_from_wire(hugetlb, 2 << 20), Ok(Backing::Hugetlb(2 << 20)));
    assert!(backing_from_wire(hugetlb, 0).is_err());
    assert!(backing_from_wire(v1::Backing::Shmem.into(), 2 << 20).is_err());
    assert_eq!(backing_from_wire(0, 0), Ok(Backing::Shmem));
    assert!(backing_from_wire(17, 0).is_err());
}

#[test]
fn negative_durations_are_rejected() {
    let wire = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
    assert!(duration_from_wire("max_age", wire(-1, 0)).is_err());
    assert!(duration_from_wire("max_age", wire(0, -5)).is_err());
    assert!(duration_from_wire("max_age", wire(0, 1_000_000_000)).is_err());
    assert_eq!(duration_from_wire("max_age", wire(1, 5)), Ok(Duration::new(1, 5)));
    assert_eq!(duration_from_wire("max_age", None), Ok(Duration::ZERO));
}

#[test]
fn absent_attributes_stay_absent() {
    let nothing = PageAttributes::default();
    let wire = v1::PageAttributes::from(nothing);
    assert_eq!((wire.order, wire.flags, wire.map_count, wire.maybe_pinned), (None, None, None, None));
    assert_eq!(PageAttributes::try_from(wire), Ok(nothing));
}

#[test]
fn file_without_a_lifetime_is_kept() {
    let file = v1::File {
        id: 1,
        name: "ram".to_owned(),
        access: Some(Access::private(0, 0).into()),
        origin: v1::Origin::Created.into(),
        created: Some(prost_types::Timestamp::default()),
        ..v1::File::default()
    };
    let lifetime =
        |value| FileInfo::try_from(v1::File { lifetime: value, ..file.clone() }).map(|file| file.lifetime);
    assert_eq!([0, 1, 2].map(lifetime), [Lifetime::Kept, Lifetime::Ephemeral, Lifetime::Kept].map(Ok));
    assert!(lifetime(3).is_err());
    for value in [None, Some(Lifetime::Ephemeral), Some(Lifetime::Kept)] {
        assert_eq!(lifetime_from_wire(lifetime_to_wire(value)), Ok(value));
    }
}

#[test]
fn empty_file_ref_is_rejected() {
    assert!(FileName::try_from(None).is_err());
    assert!(FileName::try_from(Some(v1::FileRef { by: Some(v1::file_ref::By::Id(0)) })).is_err());
    let empty = Some(v1::FileRef { by: Some(v1::file_ref::By::Name(String::new())) });
    assert!(FileName::try_from(empty).is_err());
}

#[test]
fn file_of_another_user_is_named_with_its_owner() {
    let owned = |name: &str| FileName::Owned(OwnedName { name: name.to_owned(), uid: 1000 });
    let wire = v1::FileRef::from(owned("ram"));
    assert_eq!(FileName::try_from(Some(wire)), Ok(owned("ram")));
    for bad in ["", "1000/ram", "guest\u{202e}mar"] {
        assert!(FileName::try_from(Some(v1::FileRef::from(owned(bad)))).is_err(), "{bad:?}");
    }
}
