//! The methods of writing. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident = $word:literal,)*) => {
        /// How a page was written.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Method {
            $($(#[$doc])* $name,)*
        }

        /// All methods. The number of a method is its index.
        pub const METHODS: &[Method] = &[$(Method::$name),*];

        impl fmt::Display for Method {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$name => $word),* })
            }
        }
    };
}

methods! {
    /// A store to a mapping.
    Store = "store",
    /// A store to a page to which another thread stores at the same moment, after a pause of all writers.
    Seldom = "seldom",
    /// A store by a forked child, through the inherited mapping.
    Fork = "fork",
    /// A store to a mapping that is continually moved, shrunk, extended and duplicated.
    Remap = "remap",
    /// A store to a tracked mapping that is then unmapped or replaced without the client library.
    Vanish = "vanish",
    /// A store to an untracked mapping that is unmapped afterwards.
    Passing = "passing",
    /// `pwrite`.
    Pwrite = "pwrite",
    /// `lseek` and `write`.
    Write = "write",
    /// `pwritev`.
    Writev = "writev",
    /// `splice` from a pipe.
    Splice = "splice",
    /// `copy_file_range` from another file.
    Copy = "copy",
    /// `sendfile` from another file.
    Sendfile = "sendfile",
    /// `IORING_OP_WRITE`.
    UringWrite = "uring-write",
    /// `io_submit` of a `PWRITE`.
    AioWrite = "aio-write",
    /// `write` to a loop device over the file.
    Device = "device",
    /// `fallocate` that punches a hole.
    Punch = "punch",
    /// `madvise(MADV_REMOVE)`.
    Remove = "remove",
    /// `madvise(MADV_PAGEOUT)`: swaps pages out. Writes nothing and logs nothing.
    PageOut = "page-out",
    /// `process_vm_writev` of another process.
    Vm = "vm",
    /// `pwrite` to `/proc/PID/mem` of another process.
    Mem = "mem",
    /// `pread` of another file into a mapping.
    Read = "read",
    /// `IORING_OP_READ` of a pipe into a mapping. The read is pending until data arrives.
    UringRead = "uring-read",
    /// `io_submit` of an `O_DIRECT` read into a mapping.
    Aio = "aio",
    /// `IORING_OP_READ` of an `O_DIRECT` file into a mapping.
    Uring = "uring",
    /// `IORING_OP_READ_FIXED` of an `O_DIRECT` file into a registered buffer in a mapping.
    UringFixed = "uring-fixed",
}

impl Method {
    /// The number of the method in a log.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The method with this number.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        METHODS.get(number as usize).copied()
    }
}

/// No method has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown method of writing {0:?}")]
pub struct NoSuchMethod(pub String);

impl FromStr for Method {
    type Err = NoSuchMethod;

    fn from_str(word: &str) -> Result<Self, NoSuchMethod> {
        METHODS
            .iter()
            .find(|method| method.to_string() == word)
            .copied()
            .ok_or_else(|| NoSuchMethod(word.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_unique_numbers_and_names() {
        for method in METHODS {
            assert_eq!(Method::of_number(method.number()), Some(*method));
            assert_eq!(method.to_string().parse(), Ok(*method));
        }
        assert_eq!(Method::of_number(10_000), None);
        assert!("nonsense".parse::<Method>().is_err());
    }
}
