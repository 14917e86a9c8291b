//! Writes through descriptors.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::no_lost_writes::method::Method;
use io_uring::{IoUring, opcode, types};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::uio::{pwrite, pwritev};
use nix::unistd::{pipe, write};

use crate::Writer;
use crate::aio::Aio;
use crate::call::{Done, Place, READ_WRITE, advise, copy_range, error_text, map, seek, sendfile, splice};
use crate::draw::{Draw, touched};
use crate::store::store;
use crate::writes::Tools;

/// Maximum number of pages of one write.
const MAX_PAGES: u64 = 3;

/// Writes through a descriptor by one method.
pub struct Descriptor {
    fd: OwnedFd,
    method: Method,
    /// The written data, as a file and as bytes.
    source: OwnedFd,
    bytes: Vec<u8>,
    pipe: (OwnedFd, OwnedFd),
    ring: Option<IoUring>,
    aio: Option<Aio>,
}

impl Descriptor {
    /// A writer for one of the methods of [`write`](Self::write).
    pub fn new(fd: OwnedFd, method: Method, tools: &Tools) -> Done<Self> {
        Ok(Self {
            fd,
            method,
            source: tools.constant(MAX_PAGES * 4096)?,
            bytes: vec![0x5a; MAX_PAGES as usize * 4096],
            pipe: pipe().map_err(error_text)?,
            ring: (method == Method::UringWrite).then(|| IoUring::new(4)).transpose().map_err(error_text)?,
            aio: (method == Method::AioWrite).then(|| Aio::new(4)).transpose()?,
        })
    }

    /// Writes bytes at an offset. Returns the number of bytes written.
    fn write(&mut self, offset: u64, len: usize) -> Done<usize> {
        let (fd, bytes) = (self.fd.as_fd(), &self.bytes[..len]);
        match self.method {
            Method::Pwrite => pwrite(fd, bytes, offset as i64).map_err(error_text),
            Method::Write => {
                seek(fd, offset)?;
                write(fd, bytes).map_err(error_text)
            }
            Method::Writev => {
                let (left, right) = bytes.split_at(len / 2);
                pwritev(fd, &[IoSlice::new(left), IoSlice::new(right)], offset as i64).map_err(error_text)
            }
            Method::Splice => {
                let (out, into) = &self.pipe;
                let there = write(into, bytes).map_err(error_text)?;
                let mut moved = 0;
                while moved < there {
                    moved += splice(out.as_fd(), fd, offset + moved as u64, there - moved)?;
                }
                Ok(moved)
            }
            Method::Copy => copy_range(self.source.as_fd(), fd, offset, len),
            Method::Sendfile => sendfile(self.source.as_fd(), fd, offset, len),
            Method::UringWrite => {
                let ring = self.ring.as_mut().ok_or("no ring")?;
                ring_write(ring, fd, bytes, offset)
            }
            Method::AioWrite => {
                let aio = self.aio.as_mut().ok_or("no AIO")?;
                // The operation is waited for, so the bytes outlive it.
                aio.submit(0, fd, true, bytes.as_ptr().cast_mut(), len, offset)?;
                Ok(aio.reap(1)?.iter().map(|(_, moved)| *moved).sum())
            }
            other => Err(format!("{other} is not a write through a descriptor")),
        }
    }
}

fn ring_write(ring: &mut IoUring, fd: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Done<usize> {
    let entry = opcode::Write::new(types::Fd(fd.as_raw_fd()), bytes.as_ptr(), bytes.len() as u32);
    let entry = entry.offset(offset).build();
    // SAFETY: the operation is waited for below, so the bytes outlive it.
    unsafe { ring.submission().push(&entry) }.map_err(error_text)?;
    ring.submit_and_wait(1).map_err(error_text)?;
    let completed = ring.completion().next().ok_or("no operation has completed")?;
    usize::try_from(completed.result())
        .map_err(|_| format!("IORING_OP_WRITE: {}", nix::errno::Errno::from_raw(-completed.result())))
}

impl Writer for Descriptor {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (offset, len) = draw.bytes(MAX_PAGES);
        let (page, pages) = touched(offset, len);
        let method = self.method;
        lane.during(method, page, pages, || {
            let mut done = 0;
            while done < len {
                // A call may write fewer bytes than requested.
                match self.write(offset + done, (len - done) as usize)? {
                    0 => return Err(format!("{method} of {len} bytes at {offset} ended after {done}")),
                    some => done += some as u64,
                }
            }
            Ok(())
        })
    }
}

/// Frees memory of the file: pages that held data read as zeroes afterwards.
pub struct Holes {
    pub fd: OwnedFd,
    pub place: Place,
    pub method: Method,
}

impl Writer for Holes {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (page, pages) = draw.run(8);
        // Punching a hole into a hole changes nothing and need not be reported. While only one thread punches, all of
        // these pages hold data.
        for page in page..page + pages {
            store(self.place, page, draw.word() | 1, Method::Store, lane);
        }
        std::thread::sleep(Duration::from_micros(draw.below(500)));
        self.punch(page, pages, lane)
    }
}

impl Holes {
    /// Frees these pages.
    pub fn punch(&self, page: u64, pages: u64, lane: &mut Lane<'_>) -> Done {
        lane.during(self.method, page, pages, || {
            if self.method == Method::Remove {
                return advise(self.place, page, pages, libc::MADV_REMOVE);
            }
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(&self.fd, flags, page as i64 * 4096, pages as i64 * 4096).map_err(error_text)
        })
    }
}

/// Writes to a block device over the file.
pub struct Device {
    /// The device, whose writes go to the file.
    fd: OwnedFd,
    /// Direct I/O requires memory that is aligned to the block size.
    buffer: Place,
}

impl Device {
    /// Writes to a device that is open for direct I/O.
    pub fn new(fd: OwnedFd) -> Done<Self> {
        let buffer = map(None, MAX_PAGES as usize * 4096, 0, READ_WRITE)?;
        // SAFETY: the buffer was mapped above, and there are no references to it.
        unsafe { buffer.page(0).write_bytes(0x69, buffer.len) };
        Ok(Self { fd, buffer })
    }
}

impl Writer for Device {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (page, pages) = draw.run(self.buffer.pages());
        let len = pages as usize * 4096;
        let (fd, buffer) = (&self.fd, self.buffer);
        lane.during(Method::Device, page, pages, || {
            // SAFETY: the buffer is mapped, and is only read.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.page(0), len) };
            match pwrite(fd, bytes, page as i64 * 4096).map_err(error_text)? {
                all if all == len => Ok(()),
                some => Err(format!("{some} of {len} bytes were written to the device")),
            }
        })
    }
}
