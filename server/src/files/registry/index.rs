//! The index of files by id, name and inode, with reservations for files that are being created or adopted.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::units::FileId;

use super::super::FileError;
use super::super::service_file::{InodeKey, ServiceFile};
use super::Registry;

#[derive(Default)]
pub(super) struct FileIndex {
    by_id: HashMap<FileId, Arc<ServiceFile>>,
    by_name: BTreeMap<String, FileId>,
    by_inode: HashMap<InodeKey, FileId>,
    reserved_names: HashSet<String>,
    /// The inodes that are being adopted or recovered, each with the reserved name.
    reserved_inodes: HashMap<InodeKey, String>,
}

impl FileIndex {
    pub(super) fn find(&self, name: &FileName) -> Option<&Arc<ServiceFile>> {
        let id = match name {
            FileName::Id(id) => Some(id),
            FileName::Name(name) => self.by_name.get(name),
            // A memfd comes before a System V segment with the same inode number.
            FileName::Inode { device, number } => {
                let by_kind = |sysv| self.by_inode.get(&InodeKey { device: *device, number: *number, sysv });
                by_kind(false).or_else(|| by_kind(true))
            }
        };
        id.and_then(|id| self.by_id.get(id))
    }

    /// The files with names after `name`, in order of their names.
    pub(super) fn after<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Arc<ServiceFile>> + use<'a> {
        let names = self.by_name.range::<str, _>((Bound::Excluded(name), Bound::Unbounded));
        names.filter_map(|(_, id)| self.by_id.get(id))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<ServiceFile>> {
        self.by_id.values()
    }

    pub(super) fn insert(&mut self, file: &Arc<ServiceFile>) {
        let id = file.id();
        self.by_name.insert(file.name().to_owned(), id);
        self.by_inode.insert(file.inode_key(), id);
        self.by_id.insert(id, Arc::clone(file));
    }

    pub(super) fn remove(&mut self, id: FileId) -> Option<Arc<ServiceFile>> {
        let file = self.by_id.remove(&id)?;
        self.by_name.remove(file.name());
        self.by_inode.remove(&file.inode_key());
        Some(file)
    }

    fn reserve(&mut self, name: &str, inode: Option<InodeKey>) -> Result<(), FileError> {
        if self.by_name.contains_key(name) || self.reserved_names.contains(name) {
            return Err(FileError::NameTaken(name.to_owned()));
        }
        if let Some(inode) = inode {
            let owned = self.by_inode.get(&inode).and_then(|id| self.by_id.get(id));
            let owned = owned.map(|file| file.name().to_owned());
            if let Some(owner) = owned.or_else(|| self.reserved_inodes.get(&inode).cloned()) {
                return Err(FileError::AlreadyOwned(owner));
            }
            self.reserved_inodes.insert(inode, name.to_owned());
        }
        self.reserved_names.insert(name.to_owned());
        Ok(())
    }
}

/// A reserved name, and a reserved inode for a file that is adopted. The drop ends the reservation.
pub(super) struct Reservation<'a> {
    registry: &'a Registry,
    pub(super) name: String,
    inode: Option<InodeKey>,
}

impl<'a> Reservation<'a> {
    /// Reserves a name and an inode until the file is in the index.
    ///
    /// # Errors
    /// [`FileError::NameTaken`], [`FileError::AlreadyOwned`]
    pub(super) fn new(
        registry: &'a Registry,
        name: String,
        inode: Option<InodeKey>,
    ) -> Result<Self, FileError> {
        registry.write().reserve(&name, inode)?;
        Ok(Self { registry, name, inode })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut index = self.registry.write();
        index.reserved_names.remove(&self.name);
        if let Some(inode) = self.inode {
            index.reserved_inodes.remove(&inode);
        }
    }
}
