//! Direct I/O from a disk into the mapping: the device writes to pinned pages, without page tables.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use fdmap_sys::clock::monotonic_ns;
use fdmap_sys::testing::aio::{Aio, Opcode};
use fdmap_tests::no_lost_writes::log::{Lane, after};
use fdmap_tests::no_lost_writes::method::Method;
use io_uring::{IoUring, opcode, types};
use nix::libc;

use crate::Writer;
use crate::call::{Done, Place, aio_result, error_text};
use crate::draw::Draw;

/// Number of reads in flight.
const DEPTH: usize = 32;
/// Maximum number of pages of one read.
const MAX_PAGES: u64 = 8;

/// The kernel interface.
enum Engine {
    Aio(Aio),
    Uring(IoUring),
    /// The mapping is a registered buffer.
    Fixed(IoUring),
}

/// Direct reads, many in flight at all times.
pub struct Direct {
    engine: Engine,
    method: Method,
    place: Place,
    source: OwnedFd,
    source_pages: u64,
    /// The reads in flight: first page, number of pages, begin.
    flights: Vec<Option<(u64, u64, u64)>>,
}

impl Direct {
    /// Reads from a file that is open for direct I/O. A registered buffer covers the pages from `first` up to `end`.
    pub fn new(method: Method, place: Place, source: OwnedFd, first: u64, end: u64) -> Done<Self> {
        let engine = match method {
            Method::Aio => Engine::Aio(Aio::new(DEPTH).map_err(error_text)?),
            Method::Uring => Engine::Uring(IoUring::new(DEPTH as u32).map_err(error_text)?),
            Method::UringFixed => {
                let ring = IoUring::new(DEPTH as u32).map_err(error_text)?;
                let buffer = libc::iovec {
                    iov_base: place.page(first).cast(),
                    iov_len: (end - first) as usize * 4096,
                };
                // SAFETY: the mapping exists longer than the ring and is accessed by raw addresses only.
                unsafe { ring.submitter().register_buffers(&[buffer]) }.map_err(error_text)?;
                Engine::Fixed(ring)
            }
            other => return Err(format!("{other} is not direct I/O")),
        };
        let bytes = fdmap_sys::fd::stat(&source).map_err(error_text)?.st_size;
        let source_pages = bytes as u64 / 4096;
        if source_pages <= MAX_PAGES {
            return Err(format!("a file of {bytes} bytes is too small to read from"));
        }
        Ok(Self { engine, method, place, source, source_pages, flights: vec![None; DEPTH] })
    }

    fn begin(&mut self, slot: usize, draw: &mut Draw) -> Done {
        let (page, pages) = draw.run(MAX_PAGES);
        let offset = draw.below(self.source_pages - pages) * 4096;
        let (memory, len) = (self.place.page(page), pages as usize * 4096);
        self.flights[slot] = Some((page, pages, monotonic_ns()));
        let fd = types::Fd(self.source.as_raw_fd());
        let (ring, entry) = match &mut self.engine {
            Engine::Aio(aio) => {
                let (fd, tag) = (self.source.as_fd(), slot as u64);
                // SAFETY: as below.
                return unsafe { aio.submit(Opcode::Pread, fd, (memory, len), offset, tag) }
                    .map_err(error_text);
            }
            Engine::Uring(ring) => (ring, opcode::Read::new(fd, memory, len as u32).offset(offset).build()),
            Engine::Fixed(ring) => {
                (ring, opcode::ReadFixed::new(fd, memory, len as u32, 0).offset(offset).build())
            }
        };
        // SAFETY: the target lies in a mapping that exists until finish() has waited for the read, and is accessed by
        // raw addresses only.
        unsafe { ring.submission().push(&entry.user_data(slot as u64)) }.map_err(error_text)?;
        ring.submit().map(drop).map_err(error_text)
    }

    /// Waits for at least one read, and logs all that have completed.
    fn end(&mut self, lane: &mut Lane<'_>) -> Done {
        let completed = match &mut self.engine {
            Engine::Aio(aio) => {
                let all = aio.wait(1, DEPTH).map_err(error_text)?;
                let all = all.into_iter().map(|(slot, result)| Ok((slot, aio_result(result)?)));
                all.collect::<Done<Vec<_>>>()?
            }
            Engine::Uring(ring) | Engine::Fixed(ring) => {
                ring.submit_and_wait(1).map_err(error_text)?;
                let result = |result: i32| {
                    usize::try_from(result)
                        .map_err(|_| format!("io_uring: {}", nix::errno::Errno::from_raw(-result)))
                };
                let all = ring.completion().map(|one| Ok((one.user_data(), result(one.result())?)));
                all.collect::<Done<Vec<_>>>()?
            }
        };
        let end = after();
        for (slot, bytes) in completed {
            let flight = self.flights[slot as usize].take();
            let (page, pages, begin) = flight.ok_or("an unknown read completed")?;
            if bytes as u64 != pages * 4096 {
                return Err(format!("{} of {pages} pages returned {bytes} bytes", self.method));
            }
            lane.append(self.method, page, pages, begin, end);
        }
        Ok(())
    }
}

impl Writer for Direct {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        for slot in 0..DEPTH {
            if self.flights[slot].is_none() {
                self.begin(slot, draw)?;
            }
        }
        self.end(lane)
    }

    fn finish(&mut self, lane: &mut Lane<'_>) -> Done {
        while self.flights.iter().any(Option::is_some) {
            self.end(lane)?;
        }
        Ok(())
    }
}
