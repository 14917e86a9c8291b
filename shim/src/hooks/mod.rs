//! The functions that stand before libc's. Each looks at most at a table of atomics before it knows that nothing of it is
//! ours, and does then what libc does.
//!
//! Variadic functions of C are defined with all the arguments that they may have: on x86-64 and aarch64 Linux those come in
//! the same registers either way (the seventh of `syscall`, on x86-64, at the same place of the stack), and what was not
//! passed is not looked at. A thread that is cancelled in one of libc's unwinds through these, hence `C-unwind`.

pub mod descriptors;
pub mod mappings;
pub mod raw;
pub mod streams;

use crate::libc_next::Resolve;

/// All functions that are looked up when the library is loaded.
pub fn all() -> impl Iterator<Item = &'static dyn Resolve> {
    [descriptors::REAL, mappings::REAL, raw::REAL, streams::REAL].into_iter().flatten().copied()
}
