//! The index of files by id, name and inode, with reservations for files that are being created or adopted.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::OwnedName;
use fdmap_proto::units::FileId;

use super::super::inode_calls::InodeCallError;
use super::super::service_file::{InodeKey, ServiceFile};
use super::super::{Caller, FileError};
use super::Registry;

#[derive(Default)]
pub(super) struct FileIndex {
    by_id: HashMap<FileId, IndexedFile>,
    by_name: BTreeMap<OwnedName, FileId>,
    by_inode: HashMap<InodeKey, FileId>,
    reserved_names: HashSet<OwnedName>,
    /// The inodes that are being adopted, recovered or given back.
    reserved_inodes: HashMap<InodeKey, ReservedFor>,
}

/// Why an inode is reserved.
enum ReservedFor {
    /// The file of this name will have it.
    File(OwnedName),
    /// It gets its former ownership back.
    FormerOwner,
}

struct IndexedFile {
    file: Arc<ServiceFile>,
    /// The owner under whom the file is in the index of names. The owner in the file's access changes a moment later.
    uid: u32,
}

impl IndexedFile {
    fn key(&self) -> OwnedName {
        OwnedName { name: self.file.name().to_owned(), uid: self.uid }
    }
}

impl FileIndex {
    /// Finds a file. A name without an owner is that of a file of user `uid`.
    pub(super) fn find(&self, uid: u32, name: &FileName) -> Option<&Arc<ServiceFile>> {
        let id = match name {
            FileName::Id(id) => Some(id),
            FileName::Name(name) => self.by_name.get(&OwnedName { name: name.clone(), uid }),
            FileName::Owned(name) => self.by_name.get(name),
            // A memfd comes before a System V segment with the same inode number.
            FileName::Inode { device, number } => {
                let by_kind = |sysv| self.by_inode.get(&InodeKey { device: *device, number: *number, sysv });
                by_kind(false).or_else(|| by_kind(true))
            }
        };
        id.and_then(|id| self.get(*id))
    }

    fn get(&self, id: FileId) -> Option<&Arc<ServiceFile>> {
        self.by_id.get(&id).map(|indexed| &indexed.file)
    }

    /// The files after `name`, or all, in the order of [`OwnedName`].
    pub(super) fn after(
        &self,
        name: Option<&OwnedName>,
    ) -> impl Iterator<Item = (&OwnedName, &Arc<ServiceFile>)> {
        let start = name.map_or(Bound::Unbounded, Bound::Excluded);
        let names = self.by_name.range((start, Bound::Unbounded));
        names.filter_map(|(name, id)| self.get(*id).map(|file| (name, file)))
    }

    /// The files of this name, by owner.
    pub(super) fn of_name(&self, name: &str) -> impl Iterator<Item = (&OwnedName, &Arc<ServiceFile>)> {
        let owned = |uid| OwnedName { name: name.to_owned(), uid };
        let names = self.by_name.range(owned(0)..=owned(u32::MAX));
        names.filter_map(|(name, id)| self.get(*id).map(|file| (name, file)))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<ServiceFile>> {
        self.by_id.values().map(|indexed| &indexed.file)
    }

    pub(super) fn insert(&mut self, file: &Arc<ServiceFile>) {
        let indexed = IndexedFile { file: Arc::clone(file), uid: file.access().uid };
        self.by_name.insert(indexed.key(), file.id());
        self.by_inode.insert(file.inode_key(), file.id());
        self.by_id.insert(file.id(), indexed);
    }

    /// Removes a file. Its inode is reserved until [`Self::release_inode`].
    pub(super) fn remove_file(&mut self, id: FileId) -> Option<Arc<ServiceFile>> {
        let indexed = self.by_id.remove(&id)?;
        self.by_name.remove(&indexed.key());
        self.by_inode.remove(&indexed.file.inode_key());
        self.reserved_inodes.insert(indexed.file.inode_key(), ReservedFor::FormerOwner);
        Some(indexed.file)
    }

    /// The owner, to whose names that of the file belongs.
    pub(super) fn owner(&self, id: FileId) -> Option<u32> {
        self.by_id.get(&id).map(|indexed| indexed.uid)
    }

    pub(super) fn release_inode(&mut self, inode: InodeKey) {
        self.reserved_inodes.remove(&inode);
    }

    /// Moves a file to the names of another owner.
    ///
    /// # Errors
    /// [`FileError::NameTaken`], or [`FileError::NotFound`] if the file was deleted.
    pub(super) fn change_owner(&mut self, id: FileId, uid: u32) -> Result<(), FileError> {
        let Some(indexed) = self.by_id.get_mut(&id) else {
            return Err(FileError::NotFound(format!("{} not found", FileName::Id(id))));
        };
        let (before, after) = (indexed.key(), OwnedName { uid, ..indexed.key() });
        if self.by_name.contains_key(&after) || self.reserved_names.contains(&after) {
            return Err(FileError::NameTaken(after));
        }
        indexed.uid = uid;
        self.by_name.remove(&before);
        self.by_name.insert(after, id);
        Ok(())
    }

    fn reserve(
        &mut self,
        caller: &Caller,
        name: &OwnedName,
        inode: Option<InodeKey>,
    ) -> Result<(), FileError> {
        if self.by_name.contains_key(name) || self.reserved_names.contains(name) {
            return Err(FileError::NameTaken(name.clone()));
        }
        if let Some(inode) = inode {
            if let Some(file) = self.by_inode.get(&inode).and_then(|id| self.get(*id)) {
                let known = caller.knows(&file.access());
                return Err(FileError::AlreadyOwned(known.then(|| file.owned_name())));
            }
            match self.reserved_inodes.get(&inode) {
                Some(ReservedFor::File(reserved)) => {
                    let known = caller.admin || caller.uid == reserved.uid;
                    return Err(FileError::AlreadyOwned(known.then(|| reserved.clone())));
                }
                Some(ReservedFor::FormerOwner) => {
                    let operation = format!("adopt file {:?} of user {}", name.name, name.uid);
                    return Err(FileError::Inode { operation, error: InodeCallError::Earlier });
                }
                None => {}
            }
            self.reserved_inodes.insert(inode, ReservedFor::File(name.clone()));
        }
        self.reserved_names.insert(name.clone());
        Ok(())
    }
}

/// A reserved name, and a reserved inode for a file that is adopted. The drop ends the reservation.
pub(super) struct Reservation<'a> {
    registry: &'a Registry,
    pub(super) name: OwnedName,
    inode: Option<InodeKey>,
}

impl<'a> Reservation<'a> {
    /// Reserves a name and an inode until the file is in the index. The error names no file that the caller may not know.
    ///
    /// # Errors
    /// [`FileError::NameTaken`], [`FileError::AlreadyOwned`]
    pub(super) fn new(
        registry: &'a Registry,
        caller: &Caller,
        name: OwnedName,
        inode: Option<InodeKey>,
    ) -> Result<Self, FileError> {
        registry.write().reserve(caller, &name, inode)?;
        Ok(Self { registry, name, inode })
    }

    /// The drop leaves the inode reserved, for its former owner. [`FileIndex::release_inode`] ends that.
    pub(super) fn keep_inode(&mut self) {
        let Some(inode) = self.inode.take() else { return };
        // It may have been released meanwhile, and be reserved for another file.
        if let Some(reserved) = self.registry.write().reserved_inodes.get_mut(&inode)
            && matches!(&*reserved, ReservedFor::File(name) if *name == self.name)
        {
            *reserved = ReservedFor::FormerOwner;
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut index = self.registry.write();
        index.reserved_names.remove(&self.name);
        // A delete of the file may have reserved it for its former owner meanwhile.
        if let Some(inode) = self.inode
            && matches!(index.reserved_inodes.get(&inode), Some(ReservedFor::File(name)) if *name == self.name)
        {
            index.reserved_inodes.remove(&inode);
        }
    }
}
