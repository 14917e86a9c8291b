//! Reads an object by ranges.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use fdmap_proto::units::to_u64;
use futures_util::TryStreamExt as _;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, GetRange, ObjectStore as _, ObjectStoreExt as _};

use super::super::{ObjectReader, StoreError};
use super::bucket::Bucket;

/// An object as it was when it was opened.
#[derive(Debug)]
pub(super) struct BucketReader {
    bucket: Arc<Bucket>,
    key: Key,
    bytes: u64,
    e_tag: Option<String>,
}

impl BucketReader {
    /// Opens an object; `None` if there is none.
    pub(super) fn open(bucket: &Arc<Bucket>, key: Key) -> Result<Option<Self>, StoreError> {
        let head = || async {
            match bucket.objects.head(&key).await {
                Err(Error::NotFound { .. }) => Ok(None),
                other => other.map(Some),
            }
        };
        let found = bucket.wait("opening", &key, bucket.repeat(head))?;
        Ok(found.map(|meta| Self { bucket: Arc::clone(bucket), key, bytes: meta.size, e_tag: meta.e_tag }))
    }
}

impl ObjectReader for BucketReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let expected = buffer.len();
        let filled = self.bucket.wait("reading", &self.key, async {
            // A connection that breaks is continued at the last byte, as long as the object is the same.
            let options = GetOptions {
                range: Some(GetRange::Bounded(offset..offset.saturating_add(to_u64(expected)))),
                if_match: self.e_tag.clone(),
                ..GetOptions::default()
            };
            let mut stream = self.bucket.objects.get_opts(&self.key, options).await?.into_stream();
            let mut filled = 0;
            while let Some(part) = stream.try_next().await? {
                let len = part.len().min(expected - filled);
                buffer[filled..filled + len].copy_from_slice(&part[..len]);
                filled += len;
            }
            Ok(filled)
        })?;
        if filled == expected {
            return Ok(());
        }
        let reason = format!("{filled} of {expected} bytes at offset {offset}");
        let error = io::Error::new(ErrorKind::UnexpectedEof, reason);
        Err(StoreError { operation: "reading", location: self.bucket.location(&self.key), error })
    }
}
