//! Generations of writes to a file: which pages were written in which of them.

mod journal;
mod split;
mod stamp;
mod stamps;

pub use journal::{ANSWERS, Answered, Hot, Journal, JournalError, MOST_RECORD_BYTES, Recovered};
pub use stamp::PageStamp;
pub use stamps::{Changed, ChangedRun, Counts, StampMap};
