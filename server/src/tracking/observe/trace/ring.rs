//! Reads a BPF ring buffer (`kernel/bpf/ringbuf.c`) without blocking, up to the records that it contains when the read
//! starts. This replaces libbpf's reader, which stops at a record that another CPU is still writing even if later
//! records are complete.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Pod;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::SyscallError;
use fdmap_sys::mapping::SharedMapping;

/// Header bit of a record that is being written: `BPF_RINGBUF_BUSY_BIT` of `linux/bpf.h`.
const BUSY: u32 = 1 << 31;
/// Header bit of a record to skip: `BPF_RINGBUF_DISCARD_BIT`.
const DISCARD: u32 = 1 << 30;
/// Size of a header in bytes: length and flags, then a field for the kernel.
const HEADER: u64 = 8;

/// A ring buffer with one reader.
#[derive(Debug)]
pub(in crate::tracking::observe) struct Ring {
    /// One page, which holds the read position.
    consumer: SharedMapping,
    /// One page, which holds the write position, then the data twice, so that every record is contiguous.
    producer: SharedMapping,
    /// Size of the data in bytes; a power of two.
    size: u64,
    /// Offset of the data in `producer`.
    data: usize,
}

impl Ring {
    /// Maps a BPF_MAP_TYPE_RINGBUF of `size` bytes on a host with pages of `page` bytes. It must have no other reader.
    pub(in crate::tracking::observe) fn new(
        map: BorrowedFd<'_>,
        size: u64,
        page: u64,
    ) -> Result<Self, SyscallError> {
        let data = to_usize(page);
        let consumer = SharedMapping::shared(map, 0, data, true)?;
        let producer = SharedMapping::shared(map, page, data + to_usize(2 * size), false)?;
        Ok(Self { consumer, producer, size, data })
    }

    /// Consumes all records that were complete before the call, and possibly later ones. Skips records whose size is
    /// not that of `T`.
    pub(in crate::tracking::observe) fn consume<T: Pod>(&mut self, mut each: impl FnMut(T)) {
        let end = self.produced().load(Ordering::Acquire);
        let mut next = self.consumed().load(Ordering::Relaxed);
        let mut waits = 0_u32;
        while next < end {
            let header = self.data + to_usize(next & (self.size - 1));
            let state = low_u32(self.producer.atomic_u64s(header, 1)[0].load(Ordering::Acquire));
            if state & BUSY != 0 {
                // The writer has a few words to write, but may have been interrupted.
                waits = waits.saturating_add(1);
                back_off(waits);
                continue;
            }
            let len = u64::from(state & !DISCARD);
            if state & DISCARD == 0 && len == to_u64(size_of::<T>()) {
                let mut record = T::zeroed();
                let inside =
                    self.producer.read_at(header + to_usize(HEADER), bytemuck::bytes_of_mut(&mut record));
                debug_assert!(inside, "the data are mapped twice, so a record of this size is contiguous");
                each(record);
            }
            next += (len + HEADER).next_multiple_of(HEADER);
            self.consumed().store(next, Ordering::Release);
        }
    }

    fn produced(&self) -> &AtomicU64 {
        &self.producer.atomic_u64s(0, 1)[0]
    }

    fn consumed(&self) -> &AtomicU64 {
        &self.consumer.atomic_u64s(0, 1)[0]
    }
}

fn back_off(waits: u32) {
    match waits {
        0..100 => std::hint::spin_loop(),
        100..1000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
}
