//! Writes by the kernel into a mapping, of another process or of this one.

use std::fs::File;
use std::io::{IoSlice, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;

use fdmap_sys::clock::monotonic_ns;
use fdmap_tests::no_lost_writes::log::{Lane, after};
use fdmap_tests::no_lost_writes::method::Method;
use io_uring::{IoUring, opcode, types};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::{Pid, pipe};

use crate::Writer;
use crate::call::{Done, Place, error_text};
use crate::draw::{Draw, touched};

/// Maximum number of pages of one write.
pub const MAX_PAGES: u64 = 3;

/// Writes to the memory of another process.
pub struct Remote {
    pub pid: Pid,
    pub place: Place,
    /// `/proc/PID/mem` of the process. Without it, `process_vm_writev` writes.
    pub memory: Option<File>,
    pub bytes: Vec<u8>,
}

impl Writer for Remote {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (offset, len) = draw.bytes(MAX_PAGES);
        let (page, pages) = touched(offset, len);
        let address = self.place.address + offset as usize;
        let bytes = &self.bytes[..len as usize];
        if let Some(memory) = &self.memory {
            return lane
                .during(Method::Mem, page, pages, || memory.write_all_at(bytes, address as u64))
                .map_err(error_text);
        }
        let target = [RemoteIoVec { base: address, len: bytes.len() }];
        lane.during(Method::Vm, page, pages, || {
            match process_vm_writev(self.pid, &[IoSlice::new(bytes)], &target).map_err(error_text)? {
                all if all == bytes.len() => Ok(()),
                some => Err(format!("process_vm_writev wrote {some} of {len} bytes")),
            }
        })
    }
}

/// Reads a file into the mapping.
pub struct Reads {
    pub place: Place,
    pub source: OwnedFd,
}

impl Writer for Reads {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (offset, len) = draw.bytes(MAX_PAGES);
        let (page, pages) = touched(offset, len);
        let (mapping, source) = (self.place.mapping(), self.source.as_fd());
        lane.during(Method::Read, page, pages, || {
            match mapping.read_from(offset as usize, len as usize, source, Some(0)).map_err(error_text)? {
                all if all == len as usize => Ok(()),
                some => Err(format!("pread returned {some} of {len} bytes")),
            }
        })
    }
}

/// Reads from pipes into the mapping. They are pending, some of them during a checkpoint, until data arrives.
pub struct WaitingReads {
    place: Place,
    ring: IoUring,
    pipes: Vec<(OwnedFd, File)>,
}

impl WaitingReads {
    pub fn new(place: Place) -> Done<Self> {
        let pipes = (0..8).map(|_| pipe().map(|(out, into)| (out, File::from(into))));
        Ok(Self {
            place,
            ring: IoUring::new(16).map_err(error_text)?,
            pipes: pipes.collect::<Result<_, _>>().map_err(error_text)?,
        })
    }
}

impl Writer for WaitingReads {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let mut pages = Vec::new();
        for (out, _) in &self.pipes {
            let page = draw.page();
            let entry = opcode::Read::new(types::Fd(out.as_raw_fd()), self.place.page(page), 64);
            // SAFETY: the target lies in a mapping that is never unmapped and is accessed by raw addresses only.
            unsafe { self.ring.submission().push(&entry.build().user_data(pages.len() as u64)) }
                .map_err(error_text)?;
            pages.push((page, 0));
        }
        self.ring.submit().map_err(error_text)?;
        std::thread::sleep(std::time::Duration::from_micros(draw.below(3000)));
        for ((_, into), (_, begin)) in self.pipes.iter_mut().zip(&mut pages) {
            // Before this time, no data can reach the page.
            *begin = monotonic_ns();
            into.write_all(&[draw.word() as u8 | 1; 64]).map_err(error_text)?;
        }
        let mut left = pages.len();
        while left > 0 {
            self.ring.submit_and_wait(1).map_err(error_text)?;
            let end = after();
            for completed in self.ring.completion() {
                if completed.result() != 64 {
                    return Err(format!("IORING_OP_READ of 64 bytes returned {}", completed.result()));
                }
                let (page, begin) = pages[completed.user_data() as usize];
                lane.append(Method::UringRead, page, 1, begin, end);
                left -= 1;
            }
        }
        Ok(())
    }
}
