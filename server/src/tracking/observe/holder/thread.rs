//! The threads of a holder.

use std::io;
use std::thread::Builder;

/// Bytes of the stack of a thread.
const STACK_BYTES: usize = 256 << 10;

/// Runs `work` on a thread of its own.
///
/// # Errors
/// `clone`. `work` is dropped then.
pub(super) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(work).map(drop)
}
