//! Reads the map of calls that are under way.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

use bytemuck::Zeroable as _;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::Errno;

use super::ByteRange;
use super::record::{InFlight, NOWHERE};

/// Calls that are looked at together; more than there can be in flight, but for those that come meanwhile.
const BATCH: usize = 1024;

/// Adds what calls may be writing to the file `id`; `false` if that cannot be told. A call that is in the map throughout is
/// always found: it stays in its bucket, and each bucket is read at one moment.
pub(super) fn add(map: BorrowedFd<'_>, id: u64, out: &mut Vec<ByteRange>) -> bool {
    let (mut keys, mut values) = (vec![0_u64; BATCH], vec![InFlight::zeroed(); BATCH]);
    // Where the next batch begins, in the kernel's words: 32 bits of it are used.
    let (mut from, mut next) = (0_u64, 0_u64);
    let mut begun = false;
    loop {
        let mut count = low_u32(to_u64(BATCH));
        let first = if begun { (&raw mut from).cast() } else { ptr::null_mut() };
        // SAFETY: keys and values have room for BATCH keys and values of the map's sizes, which are those of u64 and
        // InFlight; count, from and next outlive the call, which keeps none of them.
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
        // ENOENT: there are no more.
        let errno = (failed != 0).then(|| Errno::from_raw(failed.saturating_neg()));
        if errno.is_some_and(|errno| errno != Errno::ENOENT) {
            return false;
        }
        let found = values.iter().take(to_usize(u64::from(count)));
        let ours = found.filter(|entry| entry.id == id && entry.place != NOWHERE);
        out.extend(ours.map(|entry| ByteRange::new(entry.offset, entry.length)));
        if errno.is_some() {
            return true;
        }
        (from, begun) = (next, true);
    }
}
