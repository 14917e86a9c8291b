//! Reads the map of calls in flight.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

use bytemuck::Zeroable as _;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::Errno;

use super::Thread;
use crate::bpf::records::{Place, WriteInFlight};
use crate::tracking::observe::byte_range::ByteRange;

/// Entries read by one system call. The map has room for no more, but entries can be added between two calls.
const BATCH: usize = 1024;

/// The calls in flight on one file.
#[derive(Debug, Default)]
pub(super) struct CallsInFlight {
    /// What they may write.
    pub(super) ranges: Vec<ByteRange>,
    pub(super) threads: BTreeSet<Thread>,
    /// A call maps the file.
    pub(super) mapping: bool,
}

/// Adds the ranges that calls in flight may write to the file `id`, their threads, and whether one of them maps the file. Returns
/// `false` if the map cannot be read.
///
/// An entry that is in the map throughout is always found: it stays in its hash bucket, and the kernel reads each bucket
/// atomically.
pub(super) fn add(map: BorrowedFd<'_>, id: u64, out: &mut CallsInFlight) -> bool {
    let (mut keys, mut values) = (vec![0_u64; BATCH], vec![WriteInFlight::zeroed(); BATCH]);
    // Position of the current and the next batch. The kernel uses 32 bits of each.
    let (mut from, mut next) = (0_u64, 0_u64);
    let mut begun = false;
    loop {
        let mut count = low_u32(to_u64(BATCH));
        let first = if begun { (&raw mut from).cast() } else { ptr::null_mut() };
        // SAFETY: keys and values have room for BATCH keys and values of the sizes of the map, u64 and WriteInFlight.
        // count, from and next outlive the call, which keeps no pointer.
        let failed = unsafe {
            libbpf_sys::bpf_map_lookup_batch(
                map.as_raw_fd(),
                first,
                (&raw mut next).cast(),
                keys.as_mut_ptr().cast(),
                values.as_mut_ptr().cast(),
                &raw mut count,
                ptr::null(),
            )
        };
        // ENOENT: this was the last batch.
        let errno = (failed != 0).then(|| Errno::from_raw(failed.saturating_neg()));
        if errno.is_some_and(|errno| errno != Errno::ENOENT) {
            return false;
        }
        let found = keys.iter().zip(&values).take(to_usize(u64::from(count)));
        for (key, entry) in found.filter(|(_, entry)| entry.write.id == id) {
            match entry.place {
                Place::FDMAP_PLACE_NOWHERE => continue,
                Place::FDMAP_PLACE_MAPPING => {
                    out.mapping = true;
                    continue;
                }
                Place::FDMAP_PLACE_INODE => {}
                _ => out.ranges.push(ByteRange::new(entry.write.offset, entry.write.length)),
            }
            out.threads.insert(low_u32(*key & u64::from(u32::MAX)));
        }
        if errno.is_some() {
            return true;
        }
        (from, begun) = (next, true);
    }
}
