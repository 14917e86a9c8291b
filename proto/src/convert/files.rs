//! Files: identification, rights, seals and backing.

use super::{ConvertError, known, timestamp_from_wire, timestamp_to_wire, wire_enum};
use crate::file::{
    Access, Backing, FileInfo, FileName, Lifetime, Origin, OwnedName, Right, Rights, Seal, Seals, check_name,
};
use crate::units::FileId;
use crate::v1;

wire_enum!(Right, v1::Right, "Right", right: Inspect, Read, Write, Checkpoint, Evict, Migrate);
wire_enum!(Seal, v1::Seal, "Seal", seal: Seal, Shrink, Grow, Write, FutureWrite, Exec);

pub(super) fn rights_from_wire(values: &[i32]) -> Result<Rights, ConvertError> {
    values.iter().copied().map(right).collect()
}

fn rights_to_wire(rights: Rights) -> Vec<i32> {
    rights.elements().map(|right| v1::Right::from(right).into()).collect()
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

/// Decodes a list of seals.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] if a value is unknown or unspecified.
pub fn seals_from_wire(values: &[i32]) -> Result<Seals, ConvertError> {
    values.iter().copied().map(seal).collect()
}

/// Encodes seals as a list. Seals that fdmap does not know are omitted.
#[must_use]
pub fn seals_to_wire(seals: Seals) -> Vec<i32> {
    seals.elements().map(|seal| v1::Seal::from(seal).into()).collect()
}

/// Decodes a backing and its hugetlb page size in bytes. Unspecified is shmem.
///
/// # Errors
/// [`ConvertError::HugetlbSize`] if the page size is missing for hugetlb, or set for another backing.
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

/// Encodes a backing as the fields `backing` and `hugetlb_page_size`.
#[must_use]
pub fn backing_to_wire(backing: Backing) -> (i32, u64) {
    match backing {
        Backing::Shmem => (v1::Backing::Shmem.into(), 0),
        Backing::ShmemThp => (v1::Backing::ShmemThp.into(), 0),
        Backing::Hugetlb(bytes) => (v1::Backing::Hugetlb.into(), bytes),
    }
}

/// Decodes a lifetime. `None` if it is unspecified.
///
/// # Errors
/// [`ConvertError::UnknownEnum`]
pub fn lifetime_from_wire(value: i32) -> Result<Option<Lifetime>, ConvertError> {
    let unknown = |_| ConvertError::UnknownEnum { field: "Lifetime", value };
    Ok(match v1::Lifetime::try_from(value).map_err(unknown)? {
        v1::Lifetime::Unspecified => None,
        v1::Lifetime::Ephemeral => Some(Lifetime::Ephemeral),
        v1::Lifetime::Kept => Some(Lifetime::Kept),
    })
}

/// Encodes a lifetime; `None` is unspecified.
#[must_use]
pub fn lifetime_to_wire(lifetime: Option<Lifetime>) -> i32 {
    match lifetime {
        None => v1::Lifetime::Unspecified,
        Some(Lifetime::Ephemeral) => v1::Lifetime::Ephemeral,
        Some(Lifetime::Kept) => v1::Lifetime::Kept,
    }
    .into()
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
            owned_by_caller: file.owned_by_caller,
            lifetime: lifetime_to_wire(Some(file.lifetime)),
            fence: file.fence.unwrap_or_default(),
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
            owned_by_caller: file.owned_by_caller,
            // Services and journals that do not know the field have files that exist until they are deleted.
            lifetime: lifetime_from_wire(file.lifetime)?.unwrap_or(Lifetime::Kept),
            fence: Some(file.fence).filter(|reason| !reason.is_empty()),
        })
    }
}

impl TryFrom<Option<v1::FileRef>> for FileName {
    type Error = ConvertError;

    fn try_from(file: Option<v1::FileRef>) -> Result<Self, ConvertError> {
        match file.and_then(|file| file.by) {
            None => Err(ConvertError::Missing("file")),
            Some(v1::file_ref::By::Id(id)) => {
                FileId::new(id).map(Self::Id).ok_or(ConvertError::ZeroId("file id"))
            }
            Some(v1::file_ref::By::Name(name)) => {
                check_name(&name)?;
                Ok(Self::Name(name))
            }
            Some(v1::file_ref::By::Inode(v1::Inode { device, number })) => Ok(Self::Inode { device, number }),
            Some(v1::file_ref::By::OwnedName(v1::OwnedName { uid, name })) => {
                check_name(&name)?;
                Ok(Self::Owned(OwnedName { name, uid }))
            }
        }
    }
}

impl From<FileName> for v1::FileRef {
    fn from(name: FileName) -> Self {
        Self {
            by: Some(match name {
                FileName::Id(id) => v1::file_ref::By::Id(id.get()),
                FileName::Name(name) => v1::file_ref::By::Name(name),
                FileName::Inode { device, number } => v1::file_ref::By::Inode(v1::Inode { device, number }),
                FileName::Owned(OwnedName { name, uid }) => {
                    v1::file_ref::By::OwnedName(v1::OwnedName { uid, name })
                }
            }),
        }
    }
}
