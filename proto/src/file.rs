//! Files: their metadata, rights and seals.

use std::fmt;
use std::time::SystemTime;

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

pub use crate::file_name::{FileName, NameError, OwnedName, check_name, is_invisible, parse_uid};
use crate::flag_set::flag_set;
use crate::units::FileId;

/// Permission to perform one class of operations on a file.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Right {
    /// List the file; read its metadata, page states and changes.
    Inspect,
    /// Open the file read-only.
    Read,
    /// Open the file read-write, resize it, seal it, track mappings of it.
    Write,
    /// Take checkpoints and use cursors.
    Checkpoint,
    /// Reclaim pages of the file.
    Evict,
    /// Send the file to another host.
    Migrate,
}

flag_set! {
    /// A set of [`Right`]s.
    Rights: u8 of Right {
        INSPECT = 0x01 => Inspect,
        READ = 0x02 => Read,
        WRITE = 0x04 => Write,
        CHECKPOINT = 0x08 => Checkpoint,
        EVICT = 0x10 => Evict,
        MIGRATE = 0x20 => Migrate,
    }
}

impl Rights {
    /// Converts three permission bits of a mode: `r` (4) grants inspect and read, `w` (2) grants write, checkpoint and
    /// evict, `x` (1) grants migrate.
    #[must_use]
    pub const fn from_mode_bits(rwx: u32) -> Self {
        let mut rights = Self::NONE;
        if rwx & 4 != 0 {
            rights = rights.union(Self::INSPECT).union(Self::READ);
        }
        if rwx & 2 != 0 {
            rights = rights.union(Self::WRITE).union(Self::CHECKPOINT).union(Self::EVICT);
        }
        if rwx & 1 != 0 {
            rights = rights.union(Self::MIGRATE);
        }
        rights
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ALL { f.pad("all") } else { f.pad(&joined(self.elements())) }
    }
}

/// Names separated by commas; `none` for an empty list.
fn joined(elements: impl Iterator<Item = impl fmt::Display>) -> String {
    let names: Vec<_> = elements.map(|element| element.to_string()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(",") }
}

/// Ownership and rights of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Access {
    /// User id of the owner.
    pub uid: u32,
    /// Group id to which `group` applies.
    pub gid: u32,
    /// Rights of the owner.
    pub owner: Rights,
    /// Rights of group members.
    pub group: Rights,
    /// Rights of all other users.
    pub other: Rights,
}

impl Access {
    /// Grants all rights to the owner and none to others.
    #[must_use]
    pub const fn private(uid: u32, gid: u32) -> Self {
        Self { uid, gid, owner: Rights::ALL, group: Rights::NONE, other: Rights::NONE }
    }

    /// Converts an octal mode such as `0o640`; see [`Rights::from_mode_bits`].
    #[must_use]
    pub const fn from_mode(uid: u32, gid: u32, mode: u32) -> Self {
        Self {
            uid,
            gid,
            owner: Rights::from_mode_bits(mode >> 6 & 7),
            group: Rights::from_mode_bits(mode >> 3 & 7),
            other: Rights::from_mode_bits(mode & 7),
        }
    }
}

/// Memfd seal; see `F_ADD_SEALS` in fcntl(2).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Seal {
    /// `F_SEAL_SEAL`: no further seals can be added.
    Seal,
    /// `F_SEAL_SHRINK`: the file cannot shrink.
    Shrink,
    /// `F_SEAL_GROW`: the file cannot grow.
    Grow,
    /// `F_SEAL_WRITE`: the content cannot change.
    Write,
    /// `F_SEAL_FUTURE_WRITE`: no write(2) and no new writable mappings; existing mappings stay writable.
    FutureWrite,
    /// `F_SEAL_EXEC`: the executable bits cannot change.
    Exec,
}

flag_set! {
    /// A set of [`Seal`]s with the bits of `linux/fcntl.h`. [`Seals::from_bits_retain`] keeps bits of seals that fdmap
    /// does not know.
    Seals: u32 of Seal {
        SEAL = 0x01 => Seal,
        SHRINK = 0x02 => Shrink,
        GROW = 0x04 => Grow,
        WRITE = 0x08 => Write,
        FUTURE_WRITE = 0x10 => FutureWrite,
        EXEC = 0x20 => Exec,
    }
}

impl fmt::Display for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&joined(self.elements()))
    }
}

/// Memory that backs a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// shmem with the host's default page sizes.
    #[default]
    Shmem,
    /// shmem whose mappings should be advised `MADV_HUGEPAGE`.
    ShmemThp,
    /// hugetlb pages of this size in bytes.
    Hugetlb(u64),
}

impl Serialize for Backing {
    /// Serializes as two fields, `backing` and `hugetlb_page_size`; flatten it into the struct that contains it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (name, hugetlb_page_size) = match self {
            Self::Shmem => ("shmem", None),
            Self::ShmemThp => ("shmem-thp", None),
            Self::Hugetlb(bytes) => ("hugetlb", Some(bytes)),
        };
        let fields = 1 + usize::from(hugetlb_page_size.is_some());
        let mut backing = serializer.serialize_struct("Backing", fields)?;
        backing.serialize_field("backing", name)?;
        if let Some(bytes) = hugetlb_page_size {
            backing.serialize_field("hugetlb_page_size", bytes)?;
        }
        backing.end()
    }
}

/// How the service obtained a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The service created it.
    Created,
    /// A client passed it.
    Adopted,
}

/// When a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Lifetime {
    /// The service deletes the file when no other process uses it.
    Ephemeral,
    /// The file exists until it is deleted.
    Kept,
}

/// Metadata of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileInfo {
    /// Id assigned by the service.
    pub id: FileId,
    /// Unique among the files of the owner while the file exists.
    pub name: String,
    /// Size in bytes (`st_size`).
    pub size_bytes: u64,
    /// Size in base pages, rounded up.
    pub pages: u64,
    /// Memory that backs the file.
    #[serde(flatten)]
    pub backing: Backing,
    /// Current seals.
    pub seals: Seals,
    /// Owner, group and rights.
    pub access: Access,
    /// `st_dev`, encoded as in the C library.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// How the service obtained the file.
    pub origin: Origin,
    /// Time at which the service created or adopted the file.
    #[serde(serialize_with = "crate::json::rfc3339")]
    pub created: SystemTime,
    /// Bytes in memory and swap (`st_blocks * 512`).
    pub allocated_bytes: u64,
    /// Rights of the caller that requested this metadata.
    pub caller_rights: Rights,
    /// The caller that requested this metadata owns the file.
    pub owned_by_caller: bool,
    /// When the file ends.
    pub lifetime: Lifetime,
    /// Why the file is fenced: no generation of it is closed, and it is not opened for writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<String>,
}

impl FileInfo {
    /// Name and owner.
    #[must_use]
    pub fn owned_name(&self) -> OwnedName {
        OwnedName { name: self.name.clone(), uid: self.access.uid }
    }

    /// Name that identifies the file in requests of the caller that requested this metadata: `NAME` if that caller owns the file,
    /// else `UID/NAME`.
    #[must_use]
    pub fn caller_name(&self) -> String {
        if self.owned_by_caller { self.name.clone() } else { self.owned_name().to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_converts_to_rights() {
        let access = Access::from_mode(1, 2, 0o640);
        assert!(access.owner.has(Right::Write) && access.owner.has(Right::Inspect));
        assert!(!access.owner.has(Right::Migrate));
        assert_eq!(access.group, [Right::Inspect, Right::Read].into_iter().collect());
        assert_eq!(access.other, Rights::NONE);
        assert_eq!(
            (access.group.to_string(), Rights::ALL.to_string()),
            ("inspect,read".into(), "all".into())
        );
    }

    #[test]
    fn seal_bits_match_fcntl() {
        let seals: Seals = [Seal::Shrink, Seal::FutureWrite].into_iter().collect();
        assert_eq!(seals.bits(), 0x12);
        assert_eq!(seals.to_string(), "shrink,future-write");
        assert_eq!(Seals::from_bits_retain(0x52).bits(), 0x52, "unknown seals are kept");
        assert_eq!(Seals::from_bits_retain(0x52).to_string(), "shrink,future-write");
        assert_eq!(Seals::NONE.to_string(), "none");
    }

    #[test]
    fn sets_serialize_as_lists_of_names() {
        let rights = serde_json::to_value(Rights::INSPECT | Rights::READ).unwrap();
        assert_eq!(rights, serde_json::json!(["inspect", "read"]));
        assert_eq!(serde_json::to_value(Seals::FUTURE_WRITE).unwrap(), serde_json::json!(["future-write"]));
    }
}
