//! Creates objects that are written at once.

use bytes::Bytes;
use fdmap_proto::units::to_u64;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectStore as _, PutMode, PutPayload};

use super::super::StoreError;
use super::bucket::Bucket;
use super::explain::is_transient;

/// Attempts to create an object: after the retries of a request, and after requests whose outcome is unknown.
const MAX_ATTEMPTS: u32 = 5;

/// Creates an object on condition that there is none. The error has the kind [`std::io::ErrorKind::AlreadyExists`] if there is one.
///
/// A request whose answer is lost may have created the object: an object that has this content is the one. With AWS_CONDITIONAL_PUT=disabled,
/// an existing object is replaced.
pub(super) fn put_new(bucket: &Bucket, key: &Key, content: &Bytes) -> Result<(), StoreError> {
    bucket.complete("creating", key, async {
        let mut mode = PutMode::Create;
        let mut attempt = 1;
        loop {
            let payload = PutPayload::from(content.clone());
            let error = match bucket.objects.put_opts(key, payload, mode.clone().into()).await {
                Ok(_) => return Ok(()),
                Err(Error::NotImplemented { .. }) if mode == PutMode::Create => {
                    mode = PutMode::Overwrite;
                    continue;
                }
                Err(error) => error,
            };
            let is_final = match (&error, found(bucket, key, content).await) {
                (_, Found::Same) => return Ok(()),
                (Error::AlreadyExists { .. }, Found::Other | Found::Unknown) => true,
                // Without an object, the answer "exists" is that of a conflict with a concurrent request.
                (Error::AlreadyExists { .. }, _) => false,
                (error, _) => !is_transient(error),
            };
            if is_final || attempt == MAX_ATTEMPTS || bucket.cancellation.is_cancelled() {
                return Err(error);
            }
            attempt += 1;
        }
    })
}

/// The object that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    None,
    /// With the content that is to be written.
    Same,
    Other,
    /// It cannot be read.
    Unknown,
}

async fn found(bucket: &Bucket, key: &Key, content: &Bytes) -> Found {
    let read = || async {
        let object = bucket.objects.get_opts(key, GetOptions::default()).await?;
        if object.meta.size != to_u64(content.len()) {
            return Ok(Found::Other);
        }
        let bytes = object.bytes().await?;
        Ok(if bytes == *content { Found::Same } else { Found::Other })
    };
    match bucket.repeat(read).await {
        Ok(found) => found,
        Err(Error::NotFound { .. }) => Found::None,
        Err(_) => Found::Unknown,
    }
}
