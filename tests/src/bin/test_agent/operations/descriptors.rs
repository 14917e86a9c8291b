//! Operations by a descriptor.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;

use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::testing::{aio, uring};
use fdmap_sys::{fd, memfd};
use fdmap_tests::test_agent::command::Span;
use fdmap_tests::test_agent::operation::{By, DescriptorCall};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::uio::{pwrite, pwritev};
use nix::unistd::{ftruncate, pipe, truncate, write};

use super::PAGE;
use crate::call::{Done, copy_range, error_text, sendfile, splice};

/// The descriptors of the file.
pub struct OpenFile {
    /// Opened by path.
    pub path: File,
    /// The descriptor of `memfd_create`.
    pub origin: Option<File>,
    /// Operations that allocate or free pages concern multiples of so many bytes.
    pub unit: u64,
}

impl OpenFile {
    /// The size in bytes.
    pub fn bytes(&self) -> Done<u64> {
        Ok(fd::stat(&self.path).map_err(error_text)?.st_size.cast_unsigned())
    }

    pub fn descriptor(&self, by: By) -> &File {
        match by {
            By::Origin => self.origin.as_ref().unwrap_or(&self.path),
            By::Path => &self.path,
        }
    }

    /// Performs a call on `pages` pages. Returns the pages whose content may have changed.
    pub fn perform(
        &self,
        call: DescriptorCall,
        by: By,
        (page, pages): (u64, u64),
        content: &[u8],
    ) -> Done<Span> {
        let size = self.bytes()?;
        match call {
            DescriptorCall::Punch | DescriptorCall::PunchByIoctl | DescriptorCall::Allocate => {
                self.change_space(call, by, page * PAGE % size / self.unit * self.unit, pages, size)
            }
            DescriptorCall::Ftruncate | DescriptorCall::TruncatePath => {
                self.truncate(call, by, (pages * PAGE).next_multiple_of(self.unit), size)
            }
            DescriptorCall::OtherFile => other_file(content).map(|()| Span { first: 0, end: 0 }),
            _ => {
                let at = page * PAGE % size;
                let bytes = content.repeat(((size - at) / PAGE).min(pages) as usize);
                let written = self.write(call, by, at, &bytes)?;
                if written != bytes.len() {
                    return Err(format!("{call:?} wrote {written} of {} bytes", bytes.len()));
                }
                Ok(Span { first: at / PAGE, end: (at + bytes.len() as u64) / PAGE })
            }
        }
    }

    fn change_space(&self, call: DescriptorCall, by: By, at: u64, pages: u64, size: u64) -> Done<Span> {
        let (file, len) = (self.descriptor(by), (pages * PAGE).next_multiple_of(self.unit));
        let (offset, bytes) = (at.cast_signed(), len.cast_signed());
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match call {
            DescriptorCall::Punch => {
                fallocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | keep, offset, bytes)
                    .map_err(error_text)?;
            }
            DescriptorCall::PunchByIoctl => {
                space::change(file.as_fd(), SpaceCall::Unreserve, at, len).map_err(error_text)?;
            }
            _ => fallocate(file, keep, offset, bytes).map_err(error_text)?,
        }
        Ok(Span { first: at / PAGE, end: (at + len).min(size) / PAGE })
    }

    fn truncate(&self, call: DescriptorCall, by: By, len: u64, size: u64) -> Done<Span> {
        if call == DescriptorCall::Ftruncate {
            ftruncate(self.descriptor(by), len.cast_signed()).map_err(error_text)?;
        } else {
            let link = format!("/proc/self/fd/{}", self.path.as_raw_fd());
            truncate(link.as_str(), len.cast_signed()).map_err(error_text)?;
        }
        Ok(Span { first: size.min(len) / PAGE, end: size.max(len) / PAGE })
    }

    /// Writes bytes at an offset. Returns the number of bytes written.
    fn write(&self, call: DescriptorCall, by: By, at: u64, bytes: &[u8]) -> Done<usize> {
        let file = self.descriptor(by).as_fd();
        match call {
            DescriptorCall::Pwrite => pwrite(file, bytes, at.cast_signed()).map_err(error_text),
            DescriptorCall::Writev => {
                let (left, right) = bytes.split_at(bytes.len() / 2);
                pwritev(file, &[IoSlice::new(left), IoSlice::new(right)], at.cast_signed())
                    .map_err(error_text)
            }
            DescriptorCall::Splice => {
                let (out, into) = pipe().map_err(error_text)?;
                let there = write(&into, bytes).map_err(error_text)?;
                let mut moved = 0;
                while moved < there {
                    moved += splice(out.as_fd(), file, at + moved as u64, there - moved)?;
                }
                Ok(moved)
            }
            DescriptorCall::Copy => copy_range(source(bytes)?.as_fd(), file, at, bytes.len()),
            DescriptorCall::Sendfile => sendfile(source(bytes)?.as_fd(), file, at, bytes.len()),
            DescriptorCall::AioWrite => aio::write(file, bytes, at).map_err(error_text),
            DescriptorCall::UringWrite => uring::write(file, bytes, at).map_err(error_text),
            other => Err(format!("{other:?} writes no bytes")),
        }
    }
}

/// A file with this content.
fn source(bytes: &[u8]) -> Done<File> {
    let source = File::from(memfd::create("source", None).map_err(error_text)?);
    source.write_all_at(bytes, 0).map_err(error_text)?;
    Ok(source)
}

fn other_file(content: &[u8]) -> Done {
    let other = source(content)?;
    uring::write(other.as_fd(), content, 0).map_err(error_text)?;
    truncate(format!("/proc/self/fd/{}", other.as_raw_fd()).as_str(), 0).map_err(error_text)
}
