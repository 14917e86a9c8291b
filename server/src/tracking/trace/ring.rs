//! Reads a BPF ring buffer (`kernel/bpf/ringbuf.c`) in which nobody waits for anybody, up to what was in it when it was
//! asked. libbpf's reader stops at a record that another processor is still writing, also before finished ones.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Pod;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::SyscallError;
use fdmap_sys::mapping::SharedMapping;

/// Bits of a record's header (`linux/bpf.h`): it is being written; it is to be skipped.
const BUSY: u32 = 1 << 31;
const DISCARD: u32 = 1 << 30;
/// Bytes of a header: length and flags, then what only the kernel needs.
const HEADER: u64 = 8;

/// A ring buffer with one reader.
#[derive(Debug)]
pub(super) struct Ring {
    /// One page, with how far was read.
    consumer: SharedMapping,
    /// One page, with how far was written, and then the data twice, so that no record is cut.
    producer: SharedMapping,
    /// Bytes; a power of two.
    size: u64,
    /// Where the data begin.
    data: usize,
}

impl Ring {
    /// Of a map of type RINGBUF of `size` bytes. Nobody else may read it.
    pub(super) fn new(map: BorrowedFd<'_>, size: u64, page: u64) -> Result<Self, SyscallError> {
        let data = to_usize(page);
        let consumer = SharedMapping::shared(map, 0, data, true)?;
        let producer = SharedMapping::shared(map, page, data + to_usize(2 * size), false)?;
        Ok(Self { consumer, producer, size, data })
    }

    /// Takes all records that were finished before this was called, and maybe later ones. Records of another size than
    /// `T` are skipped.
    pub(super) fn take<T: Pod>(&mut self, mut each: impl FnMut(T)) {
        let end = self.written().load(Ordering::Acquire);
        let mut next = self.read().load(Ordering::Relaxed);
        let mut waited = 0_u32;
        while next < end {
            let header = self.data + to_usize(next & (self.size - 1));
            let state = low_u32(self.producer.atomic_u64s(header, 1)[0].load(Ordering::Acquire));
            if state & BUSY != 0 {
                // Whoever writes it has a few words to write, but may have been interrupted.
                waited = waited.saturating_add(1);
                wait(waited);
                continue;
            }
            let len = u64::from(state & !DISCARD);
            if state & DISCARD == 0 && len == to_u64(size_of::<T>()) {
                let mut record = T::zeroed();
                let inside =
                    self.producer.read_at(header + to_usize(HEADER), bytemuck::bytes_of_mut(&mut record));
                debug_assert!(inside, "the data are mapped twice, so a record of this size fits");
                each(record);
            }
            next += (len + HEADER).next_multiple_of(HEADER);
            self.read().store(next, Ordering::Release);
        }
    }

    fn written(&self) -> &AtomicU64 {
        &self.producer.atomic_u64s(0, 1)[0]
    }

    fn read(&self) -> &AtomicU64 {
        &self.consumer.atomic_u64s(0, 1)[0]
    }
}

fn wait(times: u32) {
    match times {
        0..100 => std::hint::spin_loop(),
        100..1000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
}
