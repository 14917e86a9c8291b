//! Messages of the shim on the program's standard error.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::descriptor::device_and_inode;

/// Exit code of the program in strict mode if the shim fails.
pub const EXIT_CODE: libc::c_int = 125;

const STANDARD_ERROR: libc::c_int = 2;
/// Device and inode of standard error when the library was loaded; `None` if it was closed.
static ORIGINAL: OnceLock<Option<(u64, u64)>> = OnceLock::new();

/// Records what standard error refers to. A program that closes it may later open a file of its own under that number, which the
/// shim must not write to.
pub fn initialize() {
    ORIGINAL.get_or_init(|| device_and_inode(STANDARD_ERROR));
    // Panics of the shim are caught and print nothing. The hook affects only this library's copy of std.
    std::panic::set_hook(Box::new(|_| {}));
}

/// A kind of message that is printed at most once per process.
#[derive(Debug)]
pub struct OnceMessage(AtomicBool);

impl OnceMessage {
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Prints `text` unless a message of this kind was printed before.
    pub fn print(&self, text: fmt::Arguments<'_>) {
        if !self.0.swap(true, Ordering::Relaxed) {
            print(text);
        }
    }
}

/// Prints one line with one write, truncated to 512 bytes. Prints nothing if standard error refers to another file than when the
/// library was loaded.
pub fn print(text: fmt::Arguments<'_>) {
    let now = device_and_inode(STANDARD_ERROR);
    if now.is_none() || ORIGINAL.get() != Some(&now) {
        return;
    }
    let mut line = Line { bytes: [0; 512], len: 0 };
    // write_str never fails.
    let _ = write!(line, "fdmap shim: {text}");
    line.bytes[line.len] = b'\n';
    // SAFETY: the pointer refers to len + 1 initialized bytes. A failed write cannot be reported.
    let _ = unsafe { libc::write(STANDARD_ERROR, line.bytes.as_ptr().cast(), line.len + 1) };
}

/// Prints `text` and exits the program.
pub fn exit(text: fmt::Arguments<'_>) -> ! {
    print(text);
    // SAFETY: _exit takes an integer. It skips the program's exit handlers, which may not be safe to run at this point.
    unsafe { libc::_exit(EXIT_CODE) }
}

struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte is reserved for the line feed.
        let room = self.bytes.len() - 1 - self.len;
        let copied = text.len().min(room);
        self.bytes[self.len..self.len + copied].copy_from_slice(&text.as_bytes()[..copied]);
        self.len += copied;
        Ok(())
    }
}
