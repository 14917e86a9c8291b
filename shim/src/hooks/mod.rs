//! The interposed functions. A call that does not concern fdmap costs at most a lookup in a table of atomics before the libc
//! function runs.
//!
//! Variadic C functions are defined with all arguments that they can have. On x86-64 and aarch64 Linux variadic and fixed arguments
//! use the same registers (the seventh argument of `syscall`, on x86-64, the same stack slot), and an argument that was not passed is
//! not used. When a thread is cancelled inside a libc function it unwinds through these functions, hence `C-unwind`.

pub mod ioctl;
pub mod madvise;
pub mod mappings;
pub mod open;
pub mod read;
pub mod streams;
pub mod syscall;

use crate::libc_next::Resolve;

/// All libc functions to resolve when the library is loaded.
pub fn all() -> impl Iterator<Item = &'static dyn Resolve> {
    [
        ioctl::NEXT_FUNCTIONS,
        madvise::NEXT_FUNCTIONS,
        mappings::NEXT_FUNCTIONS,
        open::NEXT_FUNCTIONS,
        read::NEXT_FUNCTIONS,
        streams::NEXT_FUNCTIONS,
        syscall::NEXT_FUNCTIONS,
    ]
    .into_iter()
    .flatten()
    .copied()
}
