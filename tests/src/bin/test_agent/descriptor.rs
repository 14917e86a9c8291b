//! Writes through descriptors.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use fdmap_sys::testing::aio::{MappedAio, Opcode};
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::testing::uring::{Ring, Target};
use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::no_lost_writes::method::Method;
use io_uring::squeue::Flags;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::uio::{pwrite, pwritev};
use nix::unistd::{pipe, write};

use crate::Writer;
use crate::call::{Done, Place, advise, aio_result, copy_range, error_text, seek, sendfile, splice};
use crate::draw::{Draw, touched};
use crate::store::store;
use crate::writes::Tools;

/// Maximum number of pages of one write.
const MAX_PAGES: u64 = 3;
const MAX_BYTES: usize = MAX_PAGES as usize * 4096;

/// The bytes that descriptors write.
static BYTES: [u8; MAX_BYTES] = [0x5a; MAX_BYTES];

/// Writes through a descriptor by one method.
pub struct Descriptor {
    fd: OwnedFd,
    method: Method,
    /// The written data as a file.
    source: OwnedFd,
    pipe: (OwnedFd, OwnedFd),
    ring: Option<Ring>,
    aio: Option<MappedAio>,
}

impl Descriptor {
    /// A writer for one of the methods of [`write`](Self::write).
    pub fn new(fd: OwnedFd, method: Method, tools: &Tools) -> Done<Self> {
        Ok(Self {
            fd,
            method,
            source: tools.constant(MAX_PAGES * 4096)?,
            pipe: pipe().map_err(error_text)?,
            ring: (method == Method::UringWrite).then(Ring::new).transpose().map_err(error_text)?,
            aio: (method == Method::AioWrite).then(aio).transpose()?,
        })
    }

    /// Writes bytes at an offset. Returns the number of bytes written.
    fn write(&mut self, offset: u64, len: usize) -> Done<usize> {
        let (fd, bytes) = (self.fd.as_fd(), &BYTES[..len]);
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
                let target = Target::Descriptor(fd);
                ring.submit_write(target, bytes, offset, Flags::empty()).map_err(error_text)?;
                let result = ring.wait().map_err(error_text)?;
                usize::try_from(result)
                    .map_err(|_| format!("IORING_OP_WRITE: {}", nix::errno::Errno::from_raw(-result)))
            }
            Method::AioWrite => {
                let aio = self.aio.as_mut().ok_or("no AIO")?;
                aio.submit(Opcode::Pwrite, fd, (0, len), offset, 0).map_err(error_text)?;
                let written = aio.wait(1, 1).map_err(error_text)?;
                written.into_iter().map(|(_, result)| aio_result(result)).sum()
            }
            other => Err(format!("{other} is not a write through a descriptor")),
        }
    }
}

/// Native AIO that writes from memory with the content of [`BYTES`].
fn aio() -> Done<MappedAio> {
    let memory = RawMapping::anonymous(MAX_BYTES).map_err(error_text)?;
    memory.write_all(0, &BYTES).map_err(error_text)?;
    MappedAio::new(4, memory).map_err(error_text)
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

/// Bytes that are aligned to pages.
#[repr(align(4096))]
struct Aligned([u8; MAX_BYTES]);

/// Writes to a block device over the file.
pub struct Device {
    /// The device, whose writes go to the file. It is open for direct I/O.
    pub fd: OwnedFd,
}

impl Writer for Device {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        // Direct I/O requires memory that is aligned to the block size.
        static BUFFER: Aligned = Aligned([0x69; MAX_BYTES]);
        let (page, pages) = draw.run(MAX_PAGES);
        let len = pages as usize * 4096;
        let fd = &self.fd;
        lane.during(Method::Device, page, pages, || {
            match pwrite(fd, &BUFFER.0[..len], page as i64 * 4096).map_err(error_text)? {
                all if all == len => Ok(()),
                some => Err(format!("{some} of {len} bytes were written to the device")),
            }
        })
    }
}
