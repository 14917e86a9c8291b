//! The store that a dump writes to.

use std::sync::Arc;

use super::super::error::ImageError;
use super::super::store::ImageStore;

/// An empty store that is reserved for a dump. Dropped, it is not reserved any more.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) store: Arc<dyn ImageStore>,
    /// Object that reserves the store.
    reservation: Option<String>,
}

impl Target {
    /// Reserves a store that is empty.
    pub(super) fn reserve(store: &Arc<dyn ImageStore>) -> Result<Self, ImageError> {
        // Nothing is written to a store that is in use.
        check_empty(&**store, None)?;
        let target = Self { store: Arc::clone(store), reservation: store.reserve()? };
        if let Some(name) = &target.reservation {
            // A dump that ended in between has left its image.
            check_empty(&**store, Some(name))?;
        }
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(name) = &self.reservation {
            // If it stays, further dumps to this store are refused, and the image can be read.
            let _ = self.store.remove(name);
        }
    }
}

fn check_empty(store: &dyn ImageStore, except: Option<&str>) -> Result<(), ImageError> {
    match store.find(except)? {
        Some(name) => Err(ImageError::NotEmpty(store.location(), name)),
        None => Ok(()),
    }
}

/// An image inside a store, as it is before the pause. Dropped before [`Self::keep`], it is removed.
#[derive(Debug)]
pub(super) struct PreImage<'a> {
    parent: &'a dyn ImageStore,
    name: String,
    /// Its finished objects.
    pub(super) objects: Vec<String>,
    pub(super) target: Target,
    is_kept: bool,
}

impl<'a> PreImage<'a> {
    pub(super) fn create(parent: &'a dyn ImageStore, name: String) -> Result<Self, ImageError> {
        let target = Target::reserve(&parent.child(&name)?)?;
        Ok(Self { parent, name, objects: Vec::new(), target, is_kept: false })
    }

    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for PreImage<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // The inventory first: without it there is no image. What stays has no image that refers to it.
        for name in self.objects.iter().rev() {
            let _ = self.target.store.remove(name);
        }
        let _ = self.parent.remove_child(&self.name);
    }
}
