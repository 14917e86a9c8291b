//! How requests find files: each user has names of its own, and no request shows that a file exists to a caller who may not know it.

use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{OwnedName, Right};

use super::super::service_file::ServiceFile;
use super::super::{Caller, FileError};
use super::Registry;

/// Owners that an error names.
const MAX_NAMED_OWNERS: usize = 4;

impl Registry {
    /// Finds a file that the caller has `right` to. A name without an owner is that of a file of the caller.
    ///
    /// # Errors
    /// [`FileError::NotFound`] or [`FileError::Denied`]
    pub fn find(
        &self,
        caller: &Caller,
        name: &FileName,
        right: Right,
    ) -> Result<Arc<ServiceFile>, FileError> {
        self.find_checked(caller, name, |file| file.require(caller, right))
    }

    /// Finds a file that the caller owns, or any file for an administrator.
    ///
    /// # Errors
    /// [`FileError::NotFound`] or [`FileError::NotOwner`]
    pub(super) fn find_owned(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, FileError> {
        self.find_checked(caller, name, |file| file.require_owner(caller))
    }

    fn find_checked(
        &self,
        caller: &Caller,
        name: &FileName,
        check: impl FnOnce(&ServiceFile) -> Result<(), FileError>,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let found = self.read().find(caller.uid, name).map(Arc::clone);
        let file = found.ok_or_else(|| self.not_found(caller, name))?;
        match check(&file) {
            Ok(()) => Ok(file),
            Err(FileError::NotFound(_)) => Err(self.not_found(caller, name)),
            Err(error) => Err(error),
        }
    }

    /// The error for a file that does not exist, or that the caller may not know. It is the same for both.
    pub(super) fn not_found(&self, caller: &Caller, name: &FileName) -> FileError {
        let (uid, name) = match name {
            FileName::Id(_) | FileName::Inode { .. } => {
                return FileError::NotFound(format!("{name} not found"));
            }
            FileName::Name(name) => (caller.uid, name),
            FileName::Owned(OwnedName { name, uid }) => (*uid, name),
        };
        let others = self.owned_by_others(caller, name);
        let others = if others.is_empty() { String::new() } else { format!("; {}", has_one(&others)) };
        FileError::NotFound(format!("no file {name:?} of user {uid}{others}"))
    }

    /// The first files of other users with this name that the caller may know.
    fn owned_by_others(&self, caller: &Caller, name: &str) -> Vec<OwnedName> {
        let index = self.read();
        let others = index.of_name(name).filter(|(name, _)| name.uid != caller.uid);
        let known = others.filter(|(_, file)| caller.knows(&file.access()));
        known.map(|(name, _)| name.clone()).take(MAX_NAMED_OWNERS).collect()
    }
}

fn has_one(files: &[OwnedName]) -> String {
    let listed: Vec<_> = files.iter().map(ToString::to_string).collect();
    let listed = listed.join(", ");
    match files {
        [file] => format!("user {} has one: {listed}", file.uid),
        _ => format!("other users have one: {listed}"),
    }
}

#[cfg(test)]
mod tests;
