//! The store of an image, as the command line names it.

use std::path::{Path, PathBuf};
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

/// The store of a new image. The directories that it made are removed on drop, if they are empty.
pub(super) struct NewStore {
    pub(super) store: Arc<dyn ImageStore>,
    /// The deepest first.
    made: Vec<PathBuf>,
}

impl NewStore {
    pub(super) fn create(
        location: &ImageLocation,
        runtime: &Handle,
        cancellation: Cancellation,
    ) -> Result<Self, ImageError> {
        match location {
            ImageLocation::Directory(path) => {
                let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
                let made: Vec<_> = path.ancestors().take_while(is_missing).map(Path::to_owned).collect();
                let store = DirectoryStore::create(path).inspect_err(|_| remove_empty(&made))?;
                Ok(Self { store: Arc::new(store), made })
            }
            ImageLocation::Bucket { bucket, prefix } => {
                let store = ObjectImageStore::s3(bucket, prefix, runtime.clone(), cancellation)?;
                Ok(Self { store: Arc::new(store), made: Vec::new() })
            }
        }
    }
}

impl Drop for NewStore {
    fn drop(&mut self) {
        remove_empty(&self.made);
    }
}

fn remove_empty(made: &[PathBuf]) {
    for path in made {
        // Fails if it has an image.
        let _ = std::fs::remove_dir(path);
    }
}
