//! What is said to people, on the standard error of a program that does not know of us.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::pagemap_fds::identity;

/// The program ends with it, if it is to end where the shim cannot do its work.
pub const EXIT_CODE: libc::c_int = 125;

const STANDARD_ERROR: libc::c_int = 2;
/// What standard error was when the library was loaded: its device and inode. `None`: closed.
static LOADED_WITH: OnceLock<Option<(u64, u64)>> = OnceLock::new();

/// Looks what standard error is. A program that closes it may have a file of its own by that number later, where nothing of
/// ours is to be written.
pub fn begin() {
    LOADED_WITH.get_or_init(|| identity(STANDARD_ERROR));
    // What nobody thought of is caught, and is no message of the program's. The hook is this library's alone.
    std::panic::set_hook(Box::new(|_| {}));
}

/// Something that is said once in each process.
#[derive(Debug)]
pub struct Once(AtomicBool);

impl Once {
    /// Not said yet.
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Says it if it was not said yet.
    pub fn say(&self, text: fmt::Arguments<'_>) {
        if !self.0.swap(true, Ordering::Relaxed) {
            line(text);
        }
    }
}

/// One line, in one write. What does not fit is cut. Nothing is said where standard error is another file by now.
pub fn line(text: fmt::Arguments<'_>) {
    let now = identity(STANDARD_ERROR);
    if now.is_none() || LOADED_WITH.get() != Some(&now) {
        return;
    }
    let mut line = Line { bytes: [0; 512], len: 0 };
    // It never fails: see write_str.
    let _ = write!(line, "fdmap shim: {text}");
    line.bytes[line.len] = b'\n';
    // SAFETY: the pointer is to len + 1 initialized bytes. A standard error that is closed is nothing to tell anybody.
    let _ = unsafe { libc::write(STANDARD_ERROR, line.bytes.as_ptr().cast(), line.len + 1) };
}

/// Says why, and ends the program.
pub fn end(text: fmt::Arguments<'_>) -> ! {
    line(text);
    // SAFETY: _exit takes an integer. Handlers of the program are not run: it may be in the middle of anything.
    unsafe { libc::_exit(EXIT_CODE) }
}

struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Room is left for the line feed.
        let room = self.bytes.len() - 1 - self.len;
        let taken = text.len().min(room);
        self.bytes[self.len..self.len + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        Ok(())
    }
}
