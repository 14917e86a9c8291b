//! Where images are kept: a flat set of named objects.
//!
//! Owns the bytes of objects and the link to the parent image. Knows nothing of their content.

mod directory;
mod link;
#[cfg(feature = "object-store")]
mod object;

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use fdmap_proto::units::{to_u64, to_usize};

use super::cancellation::Cancelled;
pub use directory::DirectoryStore;
#[cfg(feature = "object-store")]
pub use object::ObjectImageStore;

/// An operation on a store failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {location}")]
pub struct StoreError {
    /// Operation, such as "creating".
    pub operation: &'static str,
    /// Operand.
    pub location: String,
    /// Cause.
    #[source]
    pub error: io::Error,
}

impl StoreError {
    /// The operation was cancelled before its end. Its kind is not `Interrupted`: readers would try again.
    #[cfg(feature = "object-store")]
    fn cancelled(operation: &'static str, location: String) -> Self {
        Self { operation, location, error: io::Error::other(Cancelled) }
    }

    /// True if the operation may succeed later, as after broken connections and server errors: nothing is known to be wrong with the object.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        is_transient(self.error.kind())
    }

    /// True if the operation was cancelled before its end, also inside of another one.
    pub(super) fn is_cancelled(&self) -> bool {
        self.error.get_ref().is_some_and(|error| {
            error.is::<Cancelled>() || error.downcast_ref::<Self>().is_some_and(Self::is_cancelled)
        })
    }
}

/// True for the kinds of errors that say nothing of the object: a later read may succeed.
const fn is_transient(kind: io::ErrorKind) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        kind,
        Kind::TimedOut
            | Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::NotConnected
            | Kind::BrokenPipe
            | Kind::NetworkDown
            | Kind::NetworkUnreachable
            | Kind::HostUnreachable
            | Kind::Interrupted
            | Kind::WouldBlock
            | Kind::ResourceBusy
            | Kind::OutOfMemory
    )
}

/// The error of content or an operand that is invalid.
fn invalid(operation: &'static str, location: String, reason: impl Into<String>) -> StoreError {
    let error = io::Error::new(io::ErrorKind::InvalidData, reason.into());
    StoreError { operation, location, error }
}

/// Objects of one image. Calls block: do not call them on a thread of an async runtime.
pub trait ImageStore: fmt::Debug + Send + Sync {
    /// Path or URL, for messages. Equal for equal stores.
    fn location(&self) -> String;

    /// Starts a new object of at most `max_bytes`. It exists under its name once it is finished.
    ///
    /// # Errors
    /// [`StoreError`], also if the object exists; some stores find it when the object is finished.
    fn create(&self, name: &str, max_bytes: u64) -> Result<Box<dyn ObjectWriter>, StoreError>;

    /// Opens an object; `None` if there is none of that name.
    ///
    /// # Errors
    /// [`StoreError`]
    fn open(&self, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, StoreError>;

    /// Name of any object, or of an image inside, other than `except`.
    ///
    /// # Errors
    /// [`StoreError`]
    fn find(&self, except: Option<&str>) -> Result<Option<String>, StoreError>;

    /// Removes an object, if it exists.
    ///
    /// # Errors
    /// [`StoreError`]
    fn remove(&self, name: &str) -> Result<(), StoreError>;

    /// The store of the parent image, if the image has one.
    ///
    /// # Errors
    /// [`StoreError`]
    fn parent(&self) -> Result<Option<Arc<dyn ImageStore>>, StoreError>;

    /// The text of a link to the parent: a relative path.
    ///
    /// # Errors
    /// [`StoreError`] if no link can lead there.
    fn parent_link(&self, parent: &dyn ImageStore) -> Result<String, StoreError>;

    /// Links the image to its parent.
    ///
    /// # Errors
    /// [`StoreError`]
    fn set_parent(&self, parent: &dyn ImageStore) -> Result<(), StoreError>;

    /// A store for another image inside this one.
    ///
    /// # Errors
    /// [`StoreError`]
    fn child(&self, name: &str) -> Result<Arc<dyn ImageStore>, StoreError>;

    /// Removes an image inside this one that has no objects.
    ///
    /// # Errors
    /// [`StoreError`], also if it has objects.
    fn remove_child(&self, name: &str) -> Result<(), StoreError>;

    /// Reserves the store for one dump, where the store needs that. Returns the name of the object that does it; its removal ends the
    /// reservation.
    ///
    /// # Errors
    /// [`StoreError`] of the kind [`io::ErrorKind::AlreadyExists`] if another dump has it.
    fn reserve(&self) -> Result<Option<String>, StoreError>;

    /// Makes all finished objects and the link durable.
    ///
    /// # Errors
    /// [`StoreError`]
    fn sync(&self) -> Result<(), StoreError>;
}

/// A new object. Dropped without [`Self::finish`], it is removed.
pub trait ObjectWriter: fmt::Debug + Send {
    /// Appends bytes.
    ///
    /// # Errors
    /// [`StoreError`]
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError>;

    /// Completes the object.
    ///
    /// # Errors
    /// [`StoreError`]
    fn finish(self: Box<Self>) -> Result<(), StoreError>;
}

/// An object to read.
pub trait ObjectReader: fmt::Debug + Send + Sync {
    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// Fills the buffer from `offset` on.
    ///
    /// # Errors
    /// [`StoreError`], also if the object ends before.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError>;
}

/// Reads an object from its start, through a buffer.
#[derive(Debug)]
pub struct Sequential {
    object: Arc<dyn ObjectReader>,
    /// Offset of the first byte that is not in the buffer.
    next: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are consumed.
    consumed: usize,
}

impl Sequential {
    const BUFFER_BYTES: u64 = 1 << 18;

    #[must_use]
    pub const fn new(object: Arc<dyn ObjectReader>) -> Self {
        Self { object, next: 0, buffer: Vec::new(), consumed: 0 }
    }
}

impl Read for Sequential {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.consumed == self.buffer.len() {
            let bytes = self.object.bytes().saturating_sub(self.next).min(Self::BUFFER_BYTES);
            self.buffer.resize(to_usize(bytes), 0);
            self.consumed = 0;
            self.object
                .read_at(self.next, &mut self.buffer)
                .map_err(|error| io::Error::new(error.error.kind(), error))?;
            self.next += bytes;
        }
        let rest = &self.buffer[self.consumed..];
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        self.consumed += len;
        Ok(len)
    }
}

/// Reads a whole object of at most `max_bytes`.
///
/// # Errors
/// [`StoreError`] of kind [`io::ErrorKind::InvalidData`] if it is larger.
pub fn read_whole(object: &dyn ObjectReader, location: &str, max_bytes: u64) -> Result<Vec<u8>, StoreError> {
    if object.bytes() > max_bytes {
        let reason = format!("{} bytes, of at most {max_bytes}", object.bytes());
        let error = io::Error::new(io::ErrorKind::InvalidData, reason);
        return Err(StoreError { operation: "reading", location: location.to_owned(), error });
    }
    let mut bytes = vec![0; to_usize(object.bytes())];
    object.read_at(0, &mut bytes)?;
    debug_assert_eq!(to_u64(bytes.len()), object.bytes());
    Ok(bytes)
}
