//! madvise and process_madvise: guard regions in tracked mappings.
//!
//! `MADV_GUARD_INSTALL` of write-protected shmem never returns (`docs/kernel-reports.md`). So its range is mapped again before the
//! call, which ends its registration with the userfaultfd. That needs no service: one that is stopped or restarts delays no call.

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use nix::libc::{self, c_int, c_long, c_uint, c_void, size_t, ssize_t};

use super::mappings::page_range;
use crate::libc_next::{missing, next_functions};
use crate::{config, guard, mapping_table, memory, remapping, session};

next_functions! {
    MADVISE = c"madvise": fn(*mut c_void, size_t, c_int) -> c_int;
    SYSCALL = c"syscall": fn(c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;
}

/// `MADV_GUARD_INSTALL` of asm-generic/mman-common.h.
const MADV_GUARD_INSTALL: c_int = 102;

/// `UIO_MAXIOV` of linux/uio.h.
const MAX_VECTORS: usize = 1024;

/// madvise(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn madvise(address: *mut c_void, length: size_t, advice: c_int) -> c_int {
    let Some(next) = MADVISE.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    let call = || unsafe { next(address, length, advice) };
    if advice != MADV_GUARD_INSTALL {
        return call();
    }
    let ranges: Vec<_> = page_range(address, length).filter(is_tracked).into_iter().collect();
    c_int::try_from(install(&ranges, || call().into())).unwrap_or(-1)
}

/// process_madvise(2). The kernel installs guard regions only in the calling process, and refuses other ones.
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn process_madvise(
    pidfd: c_int,
    vectors: *const libc::iovec,
    count: size_t,
    advice: c_int,
    flags: c_uint,
) -> ssize_t {
    // By its number: a libc may lack the function.
    let Some(next) = SYSCALL.get() else { return ssize_t::try_from(missing()).unwrap_or(-1) };
    let vector = c_long::from_ne_bytes(vectors.expose_provenance().to_ne_bytes());
    let length = c_long::from_ne_bytes(count.to_ne_bytes());
    let number = libc::SYS_process_madvise;
    // SAFETY: passes on the caller's arguments.
    let call = || unsafe { next(number, pidfd.into(), vector, length, advice.into(), flags.into()) };
    // The kernel checks the process and the advice before it reads ranges, of which there are none here.
    // SAFETY: with a count of 0, the call accesses no memory.
    let is_accepted =
        || unsafe { next(number, pidfd.into(), vector, 0_i64, advice.into(), flags.into()) } == 0;
    let installs = advice == MADV_GUARD_INSTALL && is_accepted();
    let ranges = if installs { vector_ranges(vectors, count) } else { Vec::new() };
    ssize_t::try_from(install(&ranges, call)).unwrap_or(-1)
}

/// The tracked ranges among those of an array of `struct iovec`.
fn vector_ranges(vectors: *const libc::iovec, count: usize) -> Vec<AddressRange> {
    if !mapping_table::was_ever_used() {
        return Vec::new();
    }
    let range = |at: usize| {
        let mut vector = [0_usize; 2];
        memory::read(memory::address_of(vectors.wrapping_add(at)), &mut vector)?;
        page_range(std::ptr::with_exposed_provenance_mut(vector[0]), vector[1])
    };
    (0..count.min(MAX_VECTORS)).filter_map(range).filter(is_tracked).collect()
}

fn is_tracked(range: &AddressRange) -> bool {
    mapping_table::overlaps(*range) && config::active().is_some_and(|config| config.track)
}

/// Runs `call`, which installs guard regions in tracked ranges. If a range stays registered, the call fails instead.
fn install(ranges: &[AddressRange], call: impl Fn() -> c_long) -> c_long {
    if ranges.is_empty() || !ranges.iter().any(|range| is_known_advice(*range)) {
        return call();
    }
    let unprotect_and_call = || {
        ranges.iter().try_for_each(|range| remapping::unregister(*range))?;
        Errno::result(call())
    };
    // The lock excludes a thread that tracks the mappings again after a restart of the service.
    let installed = guard::run(|guard| {
        session::with_shim(guard, |_| unprotect_and_call()).or_else(|| Some(unprotect_and_call()))
    });
    match installed {
        Some(Ok(result)) => result,
        Some(Err(errno)) => {
            errno.set();
            -1
        }
        None => call(),
    }
}

/// False if the kernel has no guard regions. It checks the advice before the length.
fn is_known_advice(range: AddressRange) -> bool {
    let (Some(next), Some(start)) = (MADVISE.get(), memory::pointer_to(range.start)) else { return false };
    // SAFETY: a range of length 0 has no memory.
    unsafe { next(start, 0, MADV_GUARD_INSTALL) == 0 }
}
