//! A bucket, and how blocking callers wait for its requests.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};
use tokio::runtime::Handle;

use super::super::super::cancellation::Cancellation;
use super::super::{StoreError, invalid};
use super::explain::{explain, is_transient, kind};

/// Bounds of the retries of one request, after connection errors and server errors.
const MAX_RETRIES: usize = 10;
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Bounds of the repetitions of a request whose answer broke, which has no retries.
const MAX_REPETITIONS: u32 = 8;
const REPETITION_TIMEOUT: Duration = Duration::from_secs(20);
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// Longest time of one request with its body, in the format of the variable AWS_TIMEOUT, which replaces it.
const REQUEST_TIMEOUT: &str = "120s";
/// Longest time that the removal of one object, or the end of one upload, gets after an error.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often waiting calls look for a cancellation.
const CANCELLATION_INTERVAL: Duration = Duration::from_millis(50);

/// A bucket.
pub(super) struct Bucket {
    pub(super) objects: Arc<dyn ObjectStore>,
    name: String,
    pub(super) runtime: Handle,
    pub(super) cancellation: Cancellation,
}

impl Bucket {
    /// An S3 bucket, with the environment variables that are named `AWS_*`.
    pub(super) fn s3(
        name: &str,
        variables: impl Iterator<Item = (String, String)>,
        runtime: Handle,
        cancellation: Cancellation,
    ) -> Result<Self, StoreError> {
        // That of gRPC over TLS. An error means that the process already has one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let backoff = BackoffConfig { init_backoff: MIN_BACKOFF, max_backoff: MAX_BACKOFF, base: 2.0 };
        let retry = RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: RETRY_TIMEOUT };
        let mut builder = AmazonS3Builder::new()
            .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
            // Objects are removed one by one, and not all stores can remove several.
            .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true")
            .with_retry(retry);
        let (mut has_tls, mut allows_http) = (true, false);
        for (variable, value) in variables.filter(|(variable, _)| variable.starts_with("AWS_")) {
            let Ok(key) = variable.to_ascii_lowercase().parse() else { continue };
            match key {
                AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint => {
                    has_tls = !value.to_ascii_lowercase().starts_with("http://");
                }
                AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp) => allows_http = is_true(&value),
                _ => {}
            }
            builder = builder.with_config(key, value);
        }
        let location = || format!("s3://{name}");
        if !has_tls && !allows_http {
            // The HTTP client would report it after all retries.
            let reason = "the endpoint has no TLS: set AWS_ALLOW_HTTP=true to permit that";
            return Err(invalid("opening", location(), reason));
        }
        let objects = builder.with_bucket_name(name).build().map_err(failed("opening", location()))?;
        Ok(Self { objects: Arc::new(objects), name: name.to_owned(), runtime, cancellation })
    }

    /// A bucket in memory.
    #[cfg(test)]
    pub(super) fn of(objects: Arc<dyn ObjectStore>, runtime: Handle, cancellation: Cancellation) -> Self {
        Self { objects, name: "memory".to_owned(), runtime, cancellation }
    }

    /// URL of a key.
    pub(super) fn location(&self, key: &Key) -> String {
        let slash = if key.as_ref().is_empty() { "" } else { "/" };
        format!("s3://{}{slash}{key}", self.name)
    }

    /// A key, if it is valid.
    pub(super) fn key(&self, text: &str) -> Result<Key, StoreError> {
        Key::parse(text)
            .map_err(|error| failed("opening", format!("s3://{}/{text}", self.name))(error.into()))
    }

    /// Waits for a request, until it ends or is cancelled.
    pub(super) fn wait<T>(
        &self,
        operation: &'static str,
        key: &Key,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        let location = self.location(key);
        self.runtime.block_on(async {
            tokio::select! {
                result = request => result.map_err(failed(operation, location)),
                () = self.cancelled() => Err(StoreError::cancelled(operation, location)),
            }
        })
    }

    /// Waits for a request whose outcome must be known, as it may make something that is to be removed. The retries bound its time.
    pub(super) fn complete<T>(
        &self,
        operation: &'static str,
        key: &Key,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        self.runtime.block_on(request).map_err(failed(operation, self.location(key)))
    }

    /// Repeats a request that removes something until it succeeds, for some time. Nothing to remove is success.
    pub(super) fn clean_up<R>(
        &self,
        operation: &'static str,
        key: &Key,
        mut request: impl FnMut() -> R,
    ) -> Result<(), StoreError>
    where
        R: Future<Output = object_store::Result<()>>,
    {
        let location = self.location(key);
        let repeated = async {
            let mut backoff = MIN_BACKOFF;
            loop {
                match request().await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(failed(operation, location.clone())(error)),
                }
                tokio::time::sleep(backoff).await;
                backoff = MAX_BACKOFF.min(backoff * 2);
            }
        };
        self.runtime.block_on(async {
            tokio::time::timeout(CLEANUP_TIMEOUT, repeated).await.unwrap_or_else(|_| {
                let error =
                    io::Error::new(ErrorKind::TimedOut, format!("not done within {CLEANUP_TIMEOUT:?}"));
                Err(StoreError { operation, location: location.clone(), error })
            })
        })
    }

    /// Fails if the operation is cancelled.
    pub(super) fn check_cancelled(&self, operation: &'static str, key: &Key) -> Result<(), StoreError> {
        match self.cancellation.is_cancelled() {
            true => Err(StoreError::cancelled(operation, self.location(key))),
            false => Ok(()),
        }
    }

    /// Makes a request again whose answer broke. It changes nothing, or what it makes is the same each time.
    pub(super) async fn repeat<T, R>(&self, mut request: impl FnMut() -> R) -> object_store::Result<T>
    where
        R: Future<Output = object_store::Result<T>>,
    {
        let begun = Instant::now();
        let mut backoff = MIN_BACKOFF;
        for _ in 0..MAX_REPETITIONS {
            match request().await {
                Err(error)
                    if is_transient(&error)
                        && begun.elapsed() < REPETITION_TIMEOUT
                        && !self.cancellation.is_cancelled() => {}
                result => return result,
            }
            tokio::time::sleep(backoff).await;
            backoff = MAX_BACKOFF.min(backoff * 2);
        }
        request().await
    }

    async fn cancelled(&self) {
        while !self.cancellation.is_cancelled() {
            tokio::time::sleep(CANCELLATION_INTERVAL).await;
        }
    }

    /// Time that the end of an upload gets after an error.
    pub(super) const fn cleanup_timeout() -> Duration {
        CLEANUP_TIMEOUT
    }
}

/// Without the configuration of the store, which has credentials.
impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("name", &self.name).finish_non_exhaustive()
    }
}

/// As the variables of the crate are read.
fn is_true(value: &str) -> bool {
    ["1", "true", "on", "yes", "y"].contains(&value.to_ascii_lowercase().as_str())
}

pub(super) fn failed(
    operation: &'static str,
    location: String,
) -> impl FnOnce(object_store::Error) -> StoreError {
    move |error| StoreError { operation, location, error: io::Error::new(kind(&error), explain(&error)) }
}
