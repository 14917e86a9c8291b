//! Operations through a mapping.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

use fdmap_client::MappedFile;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_tests::memory::pages_of;
use fdmap_tests::test_agent::command::Span;
use fdmap_tests::test_agent::operation::MappingCall;
use nix::libc;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use super::{PAGE, PAGE_BYTES};
use crate::call::{Done, error_text};

/// How the process mapped the file.
pub enum Mapped {
    /// By the client library, which tracks it.
    Library(Box<MappedFile>),
    /// By `mmap` alone.
    Plain(SharedMapping),
}

/// A mapping of the whole file at its size at that time.
pub struct Mapping {
    mapped: Mapped,
    /// Pages that were unmapped without the library. Access to them raises SIGSEGV.
    torn: BTreeSet<u64>,
}

/// The pages of `len` bytes at an offset.
fn span(at: usize, len: u64) -> Span {
    let first = at as u64 / PAGE;
    Span { first, end: first + len / PAGE }
}

const NOTHING: Span = Span { first: 0, end: 0 };

impl Mapping {
    pub const fn new(mapped: Mapped) -> Self {
        Self { mapped, torn: BTreeSet::new() }
    }

    /// The whole range, of which the torn pages must not be used.
    pub fn range(&self) -> BorrowedMapping<'_> {
        match &self.mapped {
            Mapped::Library(mapped) => pages_of(mapped).mapping(),
            Mapped::Plain(mapping) => BorrowedMapping::of(mapping),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.range().len()
    }

    /// The offset of the unit that contains the page which `page` selects; `None` if that was unmapped, or all of the mapping
    /// is beyond the end of the file.
    pub fn offset(&self, page: u64, file_bytes: u64, unit: u64) -> Option<usize> {
        let page = page.checked_rem((self.len() as u64).min(file_bytes) / PAGE)?;
        let at = page * PAGE / unit * unit;
        (!self.torn.contains(&page)).then_some(at as usize)
    }

    /// Performs a call for a file of this size, with pages of `unit` bytes. Returns the pages whose content may have changed.
    pub fn perform(
        &mut self,
        call: MappingCall,
        page: u64,
        (bytes, unit): (u64, u64),
        content: &[u8],
    ) -> Done<Span> {
        let unit = match call {
            MappingCall::Remove | MappingCall::Zap | MappingCall::Tear => unit,
            _ => PAGE,
        };
        let Some(at) = self.offset(page, bytes, unit) else { return Ok(NOTHING) };
        let (range, len) = (self.range(), unit as usize);
        match call {
            MappingCall::Store => range.write_all(at, content).map_err(error_text)?,
            MappingCall::StoreInChild => store_in_child(&range, at, content)?,
            MappingCall::StoreToDuplicate => {
                let duplicate = range.duplicate(at, PAGE_BYTES).map_err(error_text)?;
                duplicate.write_all(0, content).map_err(error_text)?;
            }
            MappingCall::Read => {
                let source = File::from(memfd::create("source", None).map_err(error_text)?);
                source.write_all_at(content, 0).map_err(error_text)?;
                let read = range.read_from(at, PAGE_BYTES, source.as_fd(), Some(0)).map_err(error_text)?;
                if read != PAGE_BYTES {
                    return Err(format!("pread into a mapping returned {read}"));
                }
            }
            MappingCall::Remove => range.advise(at, len, libc::MADV_REMOVE).map_err(error_text)?,
            MappingCall::Zap => {
                range.advise(at, len, libc::MADV_DONTNEED).map_err(error_text)?;
                return Ok(NOTHING);
            }
            MappingCall::PageOut => {
                range.advise(at, self.len() - at, libc::MADV_PAGEOUT).map_err(error_text)?;
                return Ok(NOTHING);
            }
            MappingCall::Tear => {
                // Another mapping in the hole would end with this one.
                range.unmap_and_reserve(at, len).map_err(error_text)?;
                self.torn.extend(span(at, unit).range());
                return Ok(NOTHING);
            }
            // The caller drops the mapping.
            MappingCall::Unmap => return Ok(NOTHING),
        }
        Ok(span(at, unit))
    }
}

fn store_in_child(range: &BorrowedMapping<'_>, at: usize, content: &[u8]) -> Done {
    // SAFETY: the child stores to memory that is mapped, and exits.
    match unsafe { fork() }.map_err(error_text)? {
        ForkResult::Child => {
            let failed = range.write_all(at, content).is_err();
            // SAFETY: _exit runs no code of this process.
            unsafe { libc::_exit(i32::from(failed)) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).map_err(error_text)? {
            WaitStatus::Exited(_, 0) => Ok(()),
            other => Err(format!("a child that stores ended with {other:?}")),
        },
    }
}
