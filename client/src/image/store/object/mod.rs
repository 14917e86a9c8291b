//! Images in a bucket of an object store: `s3://BUCKET/PREFIX`, with one object for each object of the image.
//!
//! ```text
//!   writer: append -> buffer of a part --full--> up to 2 parts in flight      (multipart upload)
//!                          |                             |
//!                          | finish: one part            | finish: completed | error, ^C: aborted, no object
//!                          v                             v                   v
//!                     PUT if absent                   object              nothing
//! ```
//!
//! - The calls block, and run requests on the caller's runtime, which another thread drives.
//! - A dump reserves its prefix: it creates the object `fdmap.partial` on condition that there is none. Then no other dump writes to the
//!   prefix, so that the other objects need no condition. Multipart uploads have none in all stores.
//! - The link to the parent is an object `parent` with the text of the symbolic link that a directory would have.

mod bucket;
mod explain;
mod put;
mod reader;
mod writer;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path as Key;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tokio::runtime::Handle;

use super::super::cancellation::Cancellation;
use super::super::names;
use super::{ImageStore, ObjectReader, ObjectWriter, StoreError, invalid, link, read_whole};
use bucket::Bucket;
use reader::BucketReader;
use writer::Upload;

/// A prefix of a bucket.
#[derive(Clone, Debug)]
pub struct ObjectImageStore {
    bucket: Arc<Bucket>,
    /// Without slashes at its ends; may be empty.
    prefix: Key,
}

impl ObjectImageStore {
    /// A prefix of an S3 bucket. Endpoint, region and credentials are those of the environment variables `AWS_*`. Sends no request.
    /// `runtime` runs the requests, and another thread drives it. `cancellation` ends them, but not those that remove objects.
    ///
    /// # Errors
    /// [`StoreError`] if a variable is invalid.
    pub fn s3(
        bucket: &str,
        prefix: &str,
        runtime: Handle,
        cancellation: Cancellation,
    ) -> Result<Self, StoreError> {
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let bucket = Arc::new(Bucket::s3(bucket, variables, runtime, cancellation)?);
        let prefix = bucket.key(prefix)?;
        Ok(Self { bucket, prefix })
    }

    fn object(&self, name: &str) -> Key {
        self.prefix.clone().join(name)
    }

    fn at(&self, prefix: Key) -> Arc<dyn ImageStore> {
        Arc::new(Self { bucket: Arc::clone(&self.bucket), prefix })
    }
}

impl ImageStore for ObjectImageStore {
    fn location(&self) -> String {
        self.bucket.location(&self.prefix)
    }

    fn create(&self, name: &str, max_bytes: u64) -> Result<Box<dyn ObjectWriter>, StoreError> {
        Ok(Box::new(Upload::new(&self.bucket, self.object(name), max_bytes)))
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, StoreError> {
        let reader = BucketReader::open(&self.bucket, self.object(name))?;
        Ok(reader.map(|reader| Arc::new(reader) as Arc<dyn ObjectReader>))
    }

    fn find(&self, except: Option<&str>) -> Result<Option<String>, StoreError> {
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let except = except.map(|name| self.object(name));
        let first = || async {
            let mut keys = self.bucket.objects.list(prefix).map_ok(|object| object.location);
            while let Some(key) = keys.next().await {
                let key = key?;
                // Consoles make an empty object PREFIX/ in place of a folder. It has no name below the prefix.
                let is_folder = key == self.prefix;
                if !is_folder && Some(&key) != except.as_ref() {
                    return Ok(Some(key));
                }
            }
            Ok(None)
        };
        let found = self.bucket.wait("listing", &self.prefix, self.bucket.repeat(first))?;
        let name = |key: Key| {
            let mut parts = key.prefix_match(&self.prefix)?;
            parts.next().map(|part| part.as_ref().to_owned())
        };
        Ok(found.and_then(name))
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        let key = self.object(name);
        self.bucket.clean_up("removing", &key, || self.bucket.objects.delete(&key))
    }

    fn parent(&self) -> Result<Option<Arc<dyn ImageStore>>, StoreError> {
        let Some(object) = self.open(names::PARENT)? else { return Ok(None) };
        let location = self.bucket.location(&self.object(names::PARENT));
        let bytes = read_whole(&*object, &location, link::MAX_LINK_BYTES)?;
        let prefix = link::from_content(&bytes).and_then(|link| link::resolve(self.prefix.as_ref(), link));
        let prefix = prefix.ok_or_else(|| invalid("reading", location, "no relative path to the parent"))?;
        Ok(Some(self.at(self.bucket.key(&prefix)?)))
    }

    fn parent_link(&self, parent: &dyn ImageStore) -> Result<String, StoreError> {
        let root = self.bucket.location(&Key::ROOT);
        let location = parent.location();
        match location.strip_prefix(&root).filter(|rest| rest.is_empty() || rest.starts_with('/')) {
            Some(prefix) => Ok(link::relative(self.prefix.as_ref(), prefix)),
            None => Err(invalid("linking", location, format!("the parent is not in the bucket {root}"))),
        }
    }

    fn set_parent(&self, parent: &dyn ImageStore) -> Result<(), StoreError> {
        let content = format!("{}\n", self.parent_link(parent)?);
        put::put_new(&self.bucket, &self.object(names::PARENT), &content.into())
    }

    fn child(&self, name: &str) -> Result<Arc<dyn ImageStore>, StoreError> {
        Ok(self.at(self.object(name)))
    }

    fn remove_child(&self, _: &str) -> Result<(), StoreError> {
        // A prefix without objects does not exist.
        Ok(())
    }

    fn reserve(&self) -> Result<Option<String>, StoreError> {
        let key = self.object(names::RESERVATION);
        put::put_new(&self.bucket, &key, &reservation().into())?;
        Ok(Some(names::RESERVATION.to_owned()))
    }

    fn sync(&self) -> Result<(), StoreError> {
        // A store confirms what is durable.
        Ok(())
    }
}

/// Content of a reservation. Two dumps never have the same.
fn reservation() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let serial = format!("{:?}", std::thread::current().id());
    format!(
        "fdmap dump of pid {} on host {} since {}.{:09} s after 1970, {serial}\n",
        std::process::id(),
        host.trim(),
        since_epoch.as_secs(),
        since_epoch.subsec_nanos(),
    )
}

#[cfg(test)]
mod tests;
