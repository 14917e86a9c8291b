//! Writes an object, large ones in parts.

use std::io::ErrorKind;
use std::sync::Arc;

use bytes::Bytes;
use fdmap_proto::units::{to_u64, to_usize};
use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload};
use tokio::task::JoinSet;

use super::super::{ObjectWriter, StoreError};
use super::bucket::Bucket;
use super::put::put_new;

/// Smallest part, bytes. S3 has at least 5 MiB.
const MIN_PART_BYTES: u64 = 8 << 20;
/// Most parts of an object in S3.
const MAX_PARTS: u64 = 10_000;
/// Parts that are sent at once. One more is being filled.
const MAX_PARTS_IN_FLIGHT: usize = 2;

/// Size of each part of an object but the last one, bytes. All are equal, as some stores demand.
fn part_bytes(max_bytes: u64) -> u64 {
    max_bytes.div_ceil(MAX_PARTS).next_multiple_of(1 << 20).max(MIN_PART_BYTES)
}

/// An object that is being written.
#[derive(Debug)]
pub(super) struct Upload {
    bucket: Arc<Bucket>,
    key: Key,
    part_bytes: usize,
    /// Bytes that are not in a part yet; at most one part.
    buffer: Vec<u8>,
    /// Bytes in parts.
    sent: u64,
    /// The multipart upload, until it is completed.
    parts: Option<Parts>,
    /// The object may exist, and is not finished.
    may_exist: bool,
}

#[derive(Debug)]
struct Parts {
    upload: Box<dyn MultipartUpload>,
    in_flight: JoinSet<object_store::Result<()>>,
}

impl Upload {
    pub(super) fn new(bucket: &Arc<Bucket>, key: Key, max_bytes: u64) -> Self {
        Self {
            bucket: Arc::clone(bucket),
            key,
            part_bytes: to_usize(part_bytes(max_bytes)),
            buffer: Vec::new(),
            sent: 0,
            parts: None,
            may_exist: false,
        }
    }

    /// Makes room in the buffer for `len` bytes more, never for more than a part.
    fn reserve(&mut self, len: usize) {
        let needed = self.buffer.len() + len;
        if needed > self.buffer.capacity() {
            let capacity = needed.max(2 * self.buffer.capacity()).min(self.part_bytes);
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
    }

    /// Sends the buffer as a part.
    fn send_part(&mut self) -> Result<(), StoreError> {
        let parts = match &mut self.parts {
            Some(parts) => parts,
            None => {
                self.bucket.check_cancelled("writing", &self.key)?;
                // Not cancelled: the upload is known then, and can be aborted. One whose answer broke stays, and has no parts.
                let begun = self.bucket.repeat(|| self.bucket.objects.put_multipart(&self.key));
                let upload = self.bucket.complete("beginning the upload of", &self.key, begun)?;
                self.parts.insert(Parts { upload, in_flight: JoinSet::new() })
            }
        };
        while parts.in_flight.len() >= MAX_PARTS_IN_FLIGHT {
            self.bucket.wait("writing", &self.key, joined(&mut parts.in_flight))?;
        }
        let next = Vec::with_capacity(self.part_bytes);
        let part = std::mem::replace(&mut self.buffer, next);
        self.sent += to_u64(part.len());
        parts.in_flight.spawn_on(parts.upload.put_part(PutPayload::from(part)), &self.bucket.runtime);
        Ok(())
    }

    /// Completes a multipart upload.
    fn finish_parts(&mut self) -> Result<(), StoreError> {
        self.send_part()?;
        self.buffer = Vec::new();
        let Some(parts) = &mut self.parts else { return Ok(()) };
        while !parts.in_flight.is_empty() {
            self.bucket.wait("writing", &self.key, joined(&mut parts.in_flight))?;
        }
        self.may_exist = true;
        if let Err(error) = self.bucket.complete("completing", &self.key, parts.upload.complete()) {
            // Where the answer was lost, the object exists. No other dump writes it.
            let head = self.bucket.repeat(|| self.bucket.objects.head(&self.key));
            match self.bucket.complete("completing", &self.key, head) {
                Ok(meta) if meta.size == self.sent => {}
                _ => return Err(error),
            }
        }
        self.parts = None;
        Ok(())
    }
}

/// Waits for one part.
async fn joined(in_flight: &mut JoinSet<object_store::Result<()>>) -> object_store::Result<()> {
    match in_flight.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(object_store::Error::Generic { store: "S3", source: Box::new(error) }),
        None => Ok(()),
    }
}

impl ObjectWriter for Upload {
    fn append(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            if self.buffer.len() == self.part_bytes {
                self.send_part()?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.part_bytes - self.buffer.len()));
            self.reserve(now.len());
            self.buffer.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<(), StoreError> {
        self.bucket.check_cancelled("writing", &self.key)?;
        if self.parts.is_some() {
            self.finish_parts()?;
        } else {
            let content = Bytes::from(std::mem::take(&mut self.buffer));
            self.may_exist = true;
            let created = put_new(&self.bucket, &self.key, &content);
            if let Err(error) = &created {
                // An object that exists is not the one of this dump.
                self.may_exist = error.error.kind() != ErrorKind::AlreadyExists;
            }
            created?;
        }
        self.may_exist = false;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // The error that ends the dump is reported. What stays has no inventory.
        if let Some(mut parts) = self.parts.take() {
            abort(&self.bucket, &self.key, &mut parts);
        }
        if self.may_exist {
            let _ = self.bucket.clean_up("removing", &self.key, || self.bucket.objects.delete(&self.key));
        }
    }
}

/// Ends a multipart upload without an object.
fn abort(bucket: &Bucket, key: &Key, parts: &mut Parts) {
    // A part that ends after the abort would stay.
    bucket.runtime.block_on(async {
        let drained = async { while parts.in_flight.join_next().await.is_some() {} };
        if tokio::time::timeout(Bucket::cleanup_timeout(), drained).await.is_err() {
            parts.in_flight.shutdown().await;
        }
    });
    let upload = tokio::sync::Mutex::new(&mut parts.upload);
    let _ = bucket.clean_up("aborting the upload of", key, || async { upload.lock().await.abort().await });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_objects_have_at_most_the_parts_that_s3_permits() {
        for (max_bytes, expected) in [
            (0, MIN_PART_BYTES),
            (1 << 30, MIN_PART_BYTES),
            (MIN_PART_BYTES * MAX_PARTS, MIN_PART_BYTES),
            (MIN_PART_BYTES * MAX_PARTS + 1, 9 << 20),
            (1 << 40, 105 << 20),
            (5 << 40, 525 << 20),
        ] {
            let bytes = part_bytes(max_bytes);
            assert_eq!(bytes, expected, "{max_bytes}");
            assert!(max_bytes.div_ceil(bytes) <= MAX_PARTS);
        }
    }
}
