//! What the kernel shows of writes and what it does not: the facts that tracking rests on, each tried on this kernel. Where
//! another kernel does otherwise, its test says so.

mod aio;
mod descriptors;
mod endings;
mod events;
mod sizes;
mod swapped;
mod times;
mod unseen;
mod writers;

/// The errno of a call that must fail.
fn errno<T: std::fmt::Debug>(result: Result<T, fdmap_sys::SyscallError>) -> fdmap_sys::Errno {
    result.unwrap_err().errno
}
