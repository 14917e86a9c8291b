//! Write tracking: which pages of a file were written in which generation, and which writers were not observed.
//!
//! The folder is a pipeline. A checkpoint runs it from left to right:
//!
//! ```text
//!   observe/           ->  classify/         ->  stamps/  ->  journal/
//!   reads the kernel       what was written      memory       survives the service
//! ```
//!
//! It owns the tracked mappings, the stamps and the journal. It does not know clients or RPCs, and reads page states only
//! through `probe`.

mod baseline;
mod checkpoint;
mod classify;
mod create;
mod cursors;
mod dirty_rate;
mod dirty_stamp;
mod error;
mod gap_log;
mod generations;
mod journal;
mod mapping;
mod observe;
mod queries;
mod ranges;
mod record;
mod recover;
mod redirty;
mod register;
mod seal;
mod split;
mod stamp_budget;
mod stamping;
mod stamps;
mod state;
mod tracker;
mod untrack;
mod view;

pub use create::TrackerOptions;
pub use cursors::{CursorError, CursorUser, Cursors, FrozenSet};
pub use dirty_rate::DirtyRateWindow;
pub use dirty_stamp::DirtyStamp;
pub use error::TrackingError;
pub use mapping::MappingExtent;
pub(crate) use observe::holder::HeldSpace;
pub use observe::holder::{self, CallError};
pub use observe::loop_devices::search as loop_search;
pub use observe::mappers::search as mapper_search;
pub use observe::{
    Charge, Charged, ChildCharges, EventSources, REQUIRED_FEATURES, forks, try_writer_threads,
};
pub use recover::{RecoveredFile, RecoveredSpace, RecoveryError};
pub use register::{Registration, parse_extents};
pub use seal::WRITER_SEALS;
pub use stamp_budget::StampCharges;
pub use stamps::{Changed, Counts, StampMap};
pub use tracker::Tracker;
pub use view::View;
