//! Files: rights, seals, what they are made of.

use super::{ConvertError, known, timestamp_from_wire, timestamp_to_wire};
use crate::file::{Access, Backing, FileInfo, Origin, Right, Rights, Seal, Seals, check_name};
use crate::units::FileId;
use crate::v1;

pub(super) fn rights_from_wire(values: &[i32]) -> Result<Rights, ConvertError> {
    values
        .iter()
        .map(|value| {
            Ok(match known::<v1::Right>("Right", *value)? {
                v1::Right::Inspect => Right::Inspect,
                v1::Right::Read => Right::Read,
                v1::Right::Write => Right::Write,
                v1::Right::Checkpoint => Right::Checkpoint,
                v1::Right::Evict => Right::Evict,
                v1::Right::Migrate => Right::Migrate,
                v1::Right::Unspecified => {
                    return Err(ConvertError::UnknownEnum { field: "Right", value: 0 });
                }
            })
        })
        .collect()
}

fn rights_to_wire(rights: Rights) -> Vec<i32> {
    rights
        .iter()
        .map(|right| {
            i32::from(match right {
                Right::Inspect => v1::Right::Inspect,
                Right::Read => v1::Right::Read,
                Right::Write => v1::Right::Write,
                Right::Checkpoint => v1::Right::Checkpoint,
                Right::Evict => v1::Right::Evict,
                Right::Migrate => v1::Right::Migrate,
            })
        })
        .collect()
}

impl TryFrom<v1::Access> for Access {
    type Error = ConvertError;

    fn try_from(access: v1::Access) -> Result<Self, ConvertError> {
        Ok(Self {
            uid: access.uid,
            gid: access.gid,
            owner: rights_from_wire(&access.owner)?,
            group: rights_from_wire(&access.group)?,
            other: rights_from_wire(&access.other)?,
        })
    }
}

impl From<Access> for v1::Access {
    fn from(access: Access) -> Self {
        Self {
            uid: access.uid,
            gid: access.gid,
            owner: rights_to_wire(access.owner),
            group: rights_to_wire(access.group),
            other: rights_to_wire(access.other),
        }
    }
}

/// The seals of a list of enum values.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] also for "unspecified".
pub fn seals_from_wire(values: &[i32]) -> Result<Seals, ConvertError> {
    values
        .iter()
        .map(|value| {
            Ok(match known::<v1::Seal>("Seal", *value)? {
                v1::Seal::Seal => Seal::Seal,
                v1::Seal::Shrink => Seal::Shrink,
                v1::Seal::Grow => Seal::Grow,
                v1::Seal::Write => Seal::Write,
                v1::Seal::FutureWrite => Seal::FutureWrite,
                v1::Seal::Exec => Seal::Exec,
                v1::Seal::Unspecified => {
                    return Err(ConvertError::UnknownEnum { field: "Seal", value: 0 });
                }
            })
        })
        .collect()
}

/// The enum values of seals; those without a name are left out.
#[must_use]
pub fn seals_to_wire(seals: Seals) -> Vec<i32> {
    seals
        .iter()
        .map(|seal| {
            i32::from(match seal {
                Seal::Seal => v1::Seal::Seal,
                Seal::Shrink => v1::Seal::Shrink,
                Seal::Grow => v1::Seal::Grow,
                Seal::Write => v1::Seal::Write,
                Seal::FutureWrite => v1::Seal::FutureWrite,
                Seal::Exec => v1::Seal::Exec,
            })
        })
        .collect()
}

/// A backing with the hugetlb page size that goes with it; unspecified is shmem.
///
/// # Errors
/// [`ConvertError::HugetlbSize`] if one is there without the other.
pub fn backing_from_wire(backing: i32, hugetlb_page_size: u64) -> Result<Backing, ConvertError> {
    let unknown = ConvertError::UnknownEnum { field: "Backing", value: backing };
    let (backing, hugetlb) = match v1::Backing::try_from(backing).map_err(|_| unknown)? {
        v1::Backing::Unspecified | v1::Backing::Shmem => (Backing::Shmem, false),
        v1::Backing::ShmemThp => (Backing::ShmemThp, false),
        v1::Backing::Hugetlb => (Backing::Hugetlb(hugetlb_page_size), true),
    };
    if hugetlb == (hugetlb_page_size != 0) {
        Ok(backing)
    } else {
        Err(ConvertError::HugetlbSize(hugetlb_page_size))
    }
}

/// A backing as the two fields of a message.
#[must_use]
pub fn backing_to_wire(backing: Backing) -> (i32, u64) {
    match backing {
        Backing::Shmem => (v1::Backing::Shmem.into(), 0),
        Backing::ShmemThp => (v1::Backing::ShmemThp.into(), 0),
        Backing::Hugetlb(bytes) => (v1::Backing::Hugetlb.into(), bytes),
    }
}

impl From<FileInfo> for v1::File {
    fn from(file: FileInfo) -> Self {
        let (backing, hugetlb_page_size) = backing_to_wire(file.backing);
        Self {
            id: file.id.get(),
            name: file.name,
            size_bytes: file.size_bytes,
            pages: file.pages,
            backing,
            hugetlb_page_size,
            seals: seals_to_wire(file.seals),
            access: Some(file.access.into()),
            device: file.device,
            inode: file.inode,
            origin: match file.origin {
                Origin::Created => v1::Origin::Created,
                Origin::Adopted => v1::Origin::Adopted,
            }
            .into(),
            created: Some(timestamp_to_wire(file.created)),
            allocated_bytes: file.allocated_bytes,
            caller_rights: rights_to_wire(file.caller_rights),
        }
    }
}

impl TryFrom<v1::File> for FileInfo {
    type Error = ConvertError;

    fn try_from(file: v1::File) -> Result<Self, ConvertError> {
        check_name(&file.name)?;
        Ok(Self {
            id: FileId::new(file.id).ok_or(ConvertError::ZeroId("file id"))?,
            name: file.name,
            size_bytes: file.size_bytes,
            pages: file.pages,
            backing: backing_from_wire(file.backing, file.hugetlb_page_size)?,
            seals: seals_from_wire(&file.seals)?,
            access: file.access.ok_or(ConvertError::Missing("access"))?.try_into()?,
            device: file.device,
            inode: file.inode,
            origin: match known::<v1::Origin>("Origin", file.origin)? {
                v1::Origin::Adopted => Origin::Adopted,
                v1::Origin::Created | v1::Origin::Unspecified => Origin::Created,
            },
            created: timestamp_from_wire("created", file.created)?,
            allocated_bytes: file.allocated_bytes,
            caller_rights: rights_from_wire(&file.caller_rights)?,
        })
    }
}
