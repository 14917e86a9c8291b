//! What is written to files, and by whom.

pub mod forks;
