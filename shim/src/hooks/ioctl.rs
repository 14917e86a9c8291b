//! ioctl: `PAGEMAP_SCAN` on pagemaps, and `UFFDIO_REGISTER` of the program's own userfaultfds.

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::pagemap::{PAGEMAP_SCAN, PmScanArg};
use nix::libc::{c_int, c_ulong, c_void};

use crate::libc_next::{missing, next_functions};
use crate::mapping_table::ShimMapping;
use crate::{guard, mapping_table, memory, pagemap_fds, pagemap_read, service_calls, session};

next_functions! {
    IOCTL = c"ioctl": fn(c_int, c_ulong, *mut c_void) -> c_int;
}

/// `UFFDIO_REGISTER` of `linux/userfaultfd.h`. Its argument starts with a start address and a length.
const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;

/// ioctl(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(next) = IOCTL.get() else { return missing() };
    if pagemap_read::is_scan(request)
        && let Some(pid) = pagemap_fds::pid_of(fd)
        && let Some(result) = emulate_scan(fd, pid, memory::address_of(argument))
    {
        return result.unwrap_or_else(|errno| {
            errno.set();
            -1
        });
    }
    // The kernel ignores all but the low 32 bits.
    let is_register = request & 0xffff_ffff == UFFDIO_REGISTER;
    let detached = if is_register { before_register(memory::address_of(argument)) } else { Vec::new() };
    // SAFETY: passes on the caller's arguments.
    let result = unsafe { next(fd, request, argument) };
    if !detached.is_empty() {
        after_register(&detached, result == 0);
    }
    result
}

fn emulate_scan(fd: c_int, pid: c_int, argument: u64) -> Option<Result<c_int, Errno>> {
    let next = IOCTL.get()?;
    let kernel = |argument: &mut PmScanArg| {
        // SAFETY: the argument has the kernel's layout; vec is null or refers to vec_len regions of the shim or the program.
        let count = unsafe { next(fd, PAGEMAP_SCAN, std::ptr::from_mut(argument).cast()) };
        Errno::result(count).map(i64::from)
    };
    let result = guard::run(|guard| {
        session::with_shim(guard, |shim| pagemap_read::scan(shim, pid, argument, &kernel))?
    })?;
    Some(result.map(|count| c_int::try_from(count).unwrap_or(c_int::MAX)))
}

/// Detaches tracked mappings in the range that the program registers: its own userfaultfd takes precedence.
fn before_register(argument: u64) -> Vec<ShimMapping> {
    if !mapping_table::was_ever_used() {
        return Vec::new();
    }
    let detached = guard::run(|guard| {
        let (mut start, mut len) = (0_u64, 0_u64);
        memory::read(argument, &mut start)?;
        memory::read(argument + 8, &mut len)?;
        let range = AddressRange::at(start, len)?;
        session::with_shim(guard, |shim| {
            let mappings = mapping_table::overlapping(range);
            service_calls::detach(shim, &mappings);
            service_calls::detach_inherited(shim, &mappings);
            mappings
        })
    });
    detached.unwrap_or_default()
}

/// The kernel allows one userfaultfd per range. If the program's registration succeeded, the mappings leave the table; else they are
/// tracked again.
fn after_register(detached: &[ShimMapping], succeeded: bool) {
    guard::run(|guard| {
        session::with_shim(guard, |shim| {
            if succeeded {
                detached.iter().for_each(|mapping| mapping_table::remove_range(mapping.range));
            } else {
                service_calls::retrack(shim, detached, Vec::new());
            }
        })
    });
}
