//! What the service tells of a file, and who may do what with it.

use std::fmt;
use std::time::SystemTime;

use crate::units::FileId;

/// One thing that a caller may do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Right {
    /// See that the file exists, its size and the states of its pages.
    Inspect,
    /// Get a read-only descriptor.
    Read,
    /// Get a read-write descriptor, resize, seal.
    Write,
    /// Close a generation of writes.
    Checkpoint,
    /// Push pages out of memory.
    Evict,
    /// Send the file to another service.
    Migrate,
}

impl Right {
    /// Every right.
    pub const ALL: [Self; 6] =
        [Self::Inspect, Self::Read, Self::Write, Self::Checkpoint, Self::Evict, Self::Migrate];

    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inspect => "inspect",
            Self::Read => "read",
            Self::Write => "write",
            Self::Checkpoint => "checkpoint",
            Self::Evict => "evict",
            Self::Migrate => "migrate",
        }
    }

    const fn bit(self) -> u8 {
        match self {
            Self::Inspect => 1,
            Self::Read => 2,
            Self::Write => 4,
            Self::Checkpoint => 8,
            Self::Evict => 16,
            Self::Migrate => 32,
        }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of [`Right`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// No right.
    pub const NONE: Self = Self(0);
    /// Every right.
    pub const ALL: Self = Self(0b11_1111);

    /// With `right` as well.
    #[must_use]
    pub const fn with(self, right: Right) -> Self {
        Self(self.0 | right.bit())
    }

    /// With all of `other` as well.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if `right` is in it.
    #[must_use]
    pub const fn contains(self, right: Right) -> bool {
        self.0 & right.bit() != 0
    }

    /// The rights in it.
    pub fn iter(self) -> impl Iterator<Item = Right> {
        Right::ALL.into_iter().filter(move |right| self.contains(*right))
    }

    /// What three permission bits of a mode stand for: `r` is see and read, `w` is write, checkpoint and evict, `x`
    /// is migrate.
    #[must_use]
    pub const fn from_mode_bits(rwx: u32) -> Self {
        let mut rights = Self::NONE;
        if rwx & 4 != 0 {
            rights = rights.with(Right::Inspect).with(Right::Read);
        }
        if rwx & 2 != 0 {
            rights = rights.with(Right::Write).with(Right::Checkpoint).with(Right::Evict);
        }
        if rwx & 1 != 0 {
            rights = rights.with(Right::Migrate);
        }
        rights
    }
}

impl FromIterator<Right> for Rights {
    fn from_iter<I: IntoIterator<Item = Right>>(rights: I) -> Self {
        rights.into_iter().fold(Self::NONE, Self::with)
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.pad("none");
        }
        if *self == Self::ALL {
            return f.pad("all");
        }
        let names: Vec<_> = self.iter().map(Right::name).collect();
        f.pad(&names.join(","))
    }
}

/// Who may do what with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The owner's user id.
    pub uid: u32,
    /// The group that `group` speaks of.
    pub gid: u32,
    /// Rights of the owner.
    pub owner: Rights,
    /// Rights of members of the group.
    pub group: Rights,
    /// Rights of everybody else.
    pub other: Rights,
}

impl Access {
    /// Every right for the owner and none for anybody else.
    #[must_use]
    pub const fn private(uid: u32, gid: u32) -> Self {
        Self { uid, gid, owner: Rights::ALL, group: Rights::NONE, other: Rights::NONE }
    }

    /// From an octal mode such as 0o640.
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

/// One seal of a memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Seal {
    /// `F_SEAL_SEAL`: no further seals.
    Seal,
    /// `F_SEAL_SHRINK`
    Shrink,
    /// `F_SEAL_GROW`
    Grow,
    /// `F_SEAL_WRITE`: no writes at all.
    Write,
    /// `F_SEAL_FUTURE_WRITE`: no new writable mappings and no write(2).
    FutureWrite,
    /// `F_SEAL_EXEC`: the executable bits cannot change.
    Exec,
}

impl Seal {
    /// Every seal.
    pub const ALL: [Self; 6] =
        [Self::Seal, Self::Shrink, Self::Grow, Self::Write, Self::FutureWrite, Self::Exec];

    /// The bit that `fcntl(2)` knows it by (`linux/fcntl.h`).
    #[must_use]
    pub const fn bit(self) -> u32 {
        match self {
            Self::Seal => 0x01,
            Self::Shrink => 0x02,
            Self::Grow => 0x04,
            Self::Write => 0x08,
            Self::FutureWrite => 0x10,
            Self::Exec => 0x20,
        }
    }

    /// Lower case, words joined by a hyphen.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seal => "seal",
            Self::Shrink => "shrink",
            Self::Grow => "grow",
            Self::Write => "write",
            Self::FutureWrite => "future-write",
            Self::Exec => "exec",
        }
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of [`Seal`]s, as the bits of `fcntl(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seals(u32);

impl Seals {
    /// From the bits that `fcntl(F_GET_SEALS)` gives; bits of seals that fdmap does not know are kept.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The bits that `fcntl(F_ADD_SEALS)` takes.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// True if `seal` is in it.
    #[must_use]
    pub const fn contains(self, seal: Seal) -> bool {
        self.0 & seal.bit() != 0
    }

    /// True if there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The known seals in it.
    pub fn iter(self) -> impl Iterator<Item = Seal> {
        Seal::ALL.into_iter().filter(move |seal| self.contains(*seal))
    }
}

impl FromIterator<Seal> for Seals {
    fn from_iter<I: IntoIterator<Item = Seal>>(seals: I) -> Self {
        Self(seals.into_iter().fold(0, |bits, seal| bits | seal.bit()))
    }
}

impl fmt::Display for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.pad("none");
        }
        let names: Vec<_> = self.iter().map(Seal::name).collect();
        f.pad(&names.join(","))
    }
}

/// What a file's pages are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// shmem in base pages, or what the host's defaults make of it.
    #[default]
    Shmem,
    /// shmem whose mappings are to be advised `MADV_HUGEPAGE`.
    ShmemThp,
    /// hugetlb pages of this many bytes.
    Hugetlb(u64),
}

/// How the service came by a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The service made it.
    Created,
    /// A client passed it.
    Adopted,
}

impl Origin {
    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Adopted => "adopted",
        }
    }
}

/// What the service tells of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The service's id for it.
    pub id: FileId,
    /// Its name, unique in the service.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
    /// Pages, the last one counted whole.
    pub pages: u64,
    /// What its pages are made of.
    pub backing: Backing,
    /// Its seals.
    pub seals: Seals,
    /// Who may do what.
    pub access: Access,
    /// The inode's device, as `st_dev`.
    pub device: u64,
    /// The inode's number.
    pub inode: u64,
    /// How the service came by it.
    pub origin: Origin,
    /// When.
    pub created: SystemTime,
    /// Bytes held in memory and swap together (`st_blocks`).
    pub allocated_bytes: u64,
    /// What the asking caller may do.
    pub caller_rights: Rights,
}

/// Checks a file's name.
///
/// # Errors
/// Says what is wrong with it: empty, over 249 bytes, a `/`, or a control character.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > crate::MAX_NAME_BYTES {
        return Err(NameError::TooLong(name.len()));
    }
    match name.chars().find(|c| *c == '/' || c.is_control()) {
        Some(c) => Err(NameError::Character(c)),
        None => Ok(()),
    }
}

/// Why a name is no name for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No name.
    #[error("the name is empty")]
    Empty,
    /// Longer than `memfd_create(2)` takes.
    #[error("the name has {0} bytes, more than {max}", max = crate::MAX_NAME_BYTES)]
    TooLong(usize),
    /// A slash or a control character.
    #[error("the name has the character {0:?}")]
    Character(char),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(check_name("guest ram, node 0"), Ok(()));
        assert_eq!(check_name(""), Err(NameError::Empty));
        assert_eq!(check_name("a/b"), Err(NameError::Character('/')));
        assert_eq!(check_name("a\nb"), Err(NameError::Character('\n')));
        assert_eq!(check_name(&"x".repeat(250)), Err(NameError::TooLong(250)));
        assert_eq!(check_name(&"x".repeat(249)), Ok(()));
    }

    #[test]
    fn mode_stands_for_rights() {
        let access = Access::from_mode(1, 2, 0o640);
        assert!(access.owner.contains(Right::Write) && access.owner.contains(Right::Inspect));
        assert!(!access.owner.contains(Right::Migrate));
        assert_eq!(access.group, [Right::Inspect, Right::Read].into_iter().collect());
        assert_eq!(access.other, Rights::NONE);
    }

    #[test]
    fn seal_bits_are_those_of_fcntl() {
        let seals: Seals = [Seal::Shrink, Seal::FutureWrite].into_iter().collect();
        assert_eq!(seals.bits(), 0x12);
        assert_eq!(seals.to_string(), "shrink,future-write");
        assert_eq!(Seals::from_bits(0x52).bits(), 0x52, "unknown seals are kept");
    }
}
