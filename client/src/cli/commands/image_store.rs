//! The store of an image, as the command line names it.

use std::path::PathBuf;
use std::sync::Arc;

use fdmap_client::image::{
    Cancellation, DirectoryStore, ImageError, ImageLocation, ImageStore, ObjectImageStore,
};
use tokio::runtime::Handle;

/// Opens the store of an existing image. Blocks.
pub(super) fn open(
    location: &ImageLocation,
    runtime: &Handle,
    cancellation: Cancellation,
) -> Result<Arc<dyn ImageStore>, ImageError> {
    match location {
        ImageLocation::Directory(path) => Ok(Arc::new(DirectoryStore::open(path)?)),
        ImageLocation::Bucket { bucket, prefix } => {
            let store = ObjectImageStore::s3(bucket, prefix, runtime.clone(), cancellation)?;
            // A missing bucket looks like a missing object to all other requests.
            if store.find(None)?.is_none() {
                return Err(ImageError::Incomplete(store.location()));
            }
            Ok(Arc::new(store))
        }
    }
}

/// The store of a new image. A directory that it made is removed on drop, if it is empty.
pub(super) struct NewStore {
    pub(super) store: Arc<dyn ImageStore>,
    made: Option<PathBuf>,
}

impl NewStore {
    pub(super) fn create(
        location: &ImageLocation,
        runtime: &Handle,
        cancellation: Cancellation,
    ) -> Result<Self, ImageError> {
        match location {
            ImageLocation::Directory(path) => {
                let made = (!path.exists()).then(|| path.clone());
                Ok(Self { store: Arc::new(DirectoryStore::create(path)?), made })
            }
            ImageLocation::Bucket { bucket, prefix } => {
                let store = ObjectImageStore::s3(bucket, prefix, runtime.clone(), cancellation)?;
                Ok(Self { store: Arc::new(store), made: None })
            }
        }
    }
}

impl Drop for NewStore {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            // Fails if it has an image.
            let _ = std::fs::remove_dir(path);
        }
    }
}
