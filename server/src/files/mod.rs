//! The memfds that the service owns: creation and adoption, access rights, quotas, retained and shared snapshots, and the events
//! of a watch. It refuses to know how page states are read, and it does not speak gRPC.

mod allocated;
mod caller;
mod ephemeral;
mod error;
mod events;
mod inode_calls;
mod keep;
mod left_page_tables;
mod limits;
mod page_tables;
mod quota;
mod registry;
mod retained;
mod service_file;
mod shared_snapshots;
mod stamp_quota;
mod subordinate;
mod usage;

pub use allocated::AllocatedLimits;
pub use caller::Caller;
pub use ephemeral::EphemeralSweep;
pub use ephemeral::search as user_search;
pub use error::{FileError, RestoreError};
pub use events::{FileEvent, FileEventKind};
pub use inode_calls::{InodeCallError, helper as inode_helper};
pub use keep::{KeepPolicy, Keeper};
pub(crate) use left_page_tables::Measure;
pub use limits::Limits;
pub use page_tables::TrackedQuota;
pub use quota::{Quota, QuotaPermit, Quotas};
pub use registry::{FileSpec, Registry};
pub use retained::{RetainedError, RetainedSnapshot, RetainedSnapshots};
pub use service_file::ServiceFile;
pub use shared_snapshots::SharedSnapshots;
