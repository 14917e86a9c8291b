//! Images of files in CRIU's format: dump, restore, and where they are kept.
//!
//! ```text
//!   dump:     states, changes -> plan -> content (memory, swap) -> chunks -> objects of a store
//!   restore:  objects of a store -> chain of images -> chunks -> content -> a new file of the service
//! ```
//!
//! It runs in the caller's process: the service never waits for the storage or the swap device that a caller names, and the caller's own
//! permissions and memory limits apply. `docs/images.md` describes the objects.

mod cancellation;
mod chain;
mod chunks;
pub mod dump;
mod error;
pub mod format;
pub mod lazy;
mod location;
mod names;
mod ordered;
mod progress;
mod ranges;
pub mod restore;
mod side_file;
mod store;
mod swap;

#[cfg(feature = "migration")]
pub(crate) use {chunks::digest, ordered::process, ranges::PageSet, swap::SlotAccess};

pub use cancellation::Cancellation;
pub use chain::{Image, ImageChain, ImageFile, Located};
pub use chunks::{CHUNK_PAGES, Compression};
pub use error::ImageError;
pub use location::ImageLocation;
pub use progress::{Control, PageSources, Phase, Progress};
pub use side_file::{Consistency, DumpedFile, SideFile};
#[cfg(feature = "object-store")]
pub use store::ObjectImageStore;
pub use store::{DirectoryStore, ImageStore, ObjectReader, ObjectWriter, StoreError};

/// Size of a page of the images, bytes. CRIU's format has base pages only.
pub const PAGE_BYTES: u64 = 4096;
