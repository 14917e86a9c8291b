//! Generations of writes to a file: which pages were written in which of them.

mod split;
mod stamp;
mod stamps;

pub use stamp::PageStamp;
pub use stamps::{Changed, ChangedRun, Counts, StampMap};
