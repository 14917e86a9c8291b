//! Write tracking without kernel support: memory is made read-only, and a `SIGSEGV` handler makes a page writable when it is written.

use std::marker::PhantomData;

use fdmap_sys::testing::write_faults::{self, WriteFaults};
use fdmap_tests::memory::Pages;
use fdmap_tests::tracked::PAGE;

use crate::{BenchError, BenchResult};

const _: () = assert!(fdmap_proto::units::to_u64(write_faults::PAGE) == PAGE);

/// Installs the handler until dropped. Only one can exist at a time.
pub struct Protection<'a> {
    faults: WriteFaults,
    _pages: PhantomData<Pages<'a>>,
}

impl<'a> Protection<'a> {
    /// Installs the handler for `pages`, without protecting them.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn of(pages: Pages<'a>) -> BenchResult<Self> {
        // SAFETY: the pages stay mapped while they are borrowed, and are accessed only through raw pointers. The benchmark
        // maps its files writable.
        let faults = unsafe { WriteFaults::install(pages.start(), pages.len()) }?;
        Ok(Self { faults, _pages: PhantomData })
    }

    /// Protects all pages.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn arm(&self) -> BenchResult<()> {
        Ok(self.faults.arm()?)
    }

    /// Checks the number of pages written since they were protected.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if it differs from `pages`.
    pub fn expect(&self, pages: u64) -> BenchResult<()> {
        let written = self.faults.written();
        if written == pages {
            return Ok(());
        }
        Err(BenchError::Wrong(format!("{written} of {pages} writes raised SIGSEGV")))
    }
}
