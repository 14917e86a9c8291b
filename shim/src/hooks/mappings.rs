//! memfd_create, mmap, munmap and mremap: creating, adopting, tracking and untracking.

use std::ffi::CStr;
use std::os::fd::IntoRawFd as _;

use fdmap_sys::address::AddressRange;
use nix::errno::Errno;
use nix::libc::{self, c_char, c_int, c_uint, c_void, off_t, size_t};

use crate::descriptor::{may_be_memfd, own_pid};
use crate::freeze::FrozenMapping;
use crate::libc_next::{missing, next_functions};
use crate::mapping_table::ShimMapping;
use crate::memory::{address_of, page_bytes};
use crate::policy::{self, Decision};
use crate::{adoption, config, guard, mapping_table, service_calls, session};

next_functions! {
    MEMFD_CREATE = c"memfd_create": fn(*const c_char, c_uint) -> c_int;
    MMAP = c"mmap": fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;
    MUNMAP = c"munmap": fn(*mut c_void, size_t) -> c_int;
    MREMAP = c"mremap": fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;
}

/// memfd_create(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn memfd_create(name: *const c_char, flags: c_uint) -> c_int {
    // Without patterns only the kernel dereferences the pointer.
    if !name.is_null() && config::active().is_some_and(|config| !config.create.is_empty()) {
        // SAFETY: the caller passes a C string.
        let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
        if let Some(fd) = create_in_service(bytes, flags) {
            return fd;
        }
    }
    let Some(next) = MEMFD_CREATE.get() else { return missing() };
    // SAFETY: passes on the caller's arguments.
    unsafe { next(name, flags) }
}

fn create_in_service(name: &[u8], flags: c_uint) -> Option<c_int> {
    let config = config::active()?;
    if policy::decide_create(name, config) != Decision::Serve {
        return None;
    }
    let created = guard::run(|guard| {
        session::with_shim(guard, |shim| {
            shim.check_session();
            adoption::create_memfd(shim, name, flags & !libc::MFD_CLOEXEC)
        })?
    })?;
    let fd = created.into_raw_fd();
    if flags & libc::MFD_CLOEXEC == 0 {
        // SAFETY: F_SETFD takes an integer and accesses no memory.
        unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
    }
    Some(fd)
}

/// mmap(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let Some(next) = MMAP.get() else {
        missing();
        return libc::MAP_FAILED;
    };
    // SAFETY: passes on the caller's arguments.
    let start = unsafe { next(address, length, protection, flags, fd, offset) };
    if start != libc::MAP_FAILED {
        after_mmap(start, length, flags, fd, offset);
    }
    start
}

/// glibc: mmap64, which equals mmap on 64-bit architectures.
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: passes on the caller's arguments.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

fn after_mmap(start: *mut c_void, length: size_t, flags: c_int, fd: c_int, offset: off_t) {
    let Some(range) = page_range(start, length) else { return };
    let replaced = mapping_table::overlaps(range);
    let serve = policy::decide_mapping(flags, fd) == Decision::Serve && may_be_memfd(fd);
    if !replaced && !serve {
        return;
    }
    guard::run(|guard| {
        session::with_shim(guard, |shim| {
            if replaced {
                mapping_table::remove_range(range);
            }
            if serve {
                shim.check_session();
                service_calls::add_mapping(shim, fd, &new_mapping(range, offset));
            }
        })
    });
}

fn new_mapping(range: AddressRange, offset: off_t) -> ShimMapping {
    ShimMapping {
        range,
        offset: u64::try_from(offset).unwrap_or(0),
        device: 0,
        inode: 0,
        id: None,
        whole: true,
        pid: own_pid(),
    }
}

/// munmap(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    let Some(next) = MUNMAP.get() else { return missing() };
    let range = page_range(address, length).filter(|range| mapping_table::overlaps(*range));
    let unmapping = range.map(before_munmap).unwrap_or_default();
    // SAFETY: passes on the caller's arguments.
    let result = unsafe { next(address, length) };
    if result != 0
        && let Some(range) = range
    {
        after_failed_munmap(range, &unmapping);
    }
    result
}

/// The mappings that a call of munmap affects.
#[derive(Default)]
struct Unmapping {
    mappings: Vec<ShimMapping>,
    frozen: Vec<FrozenMapping>,
}

/// Freezes and untracks the mappings that munmap removes as a whole, so that their last writes are harvested. If a mapping cannot be
/// frozen, the service finds it unmapped and reports all its pages as written.
///
/// The mappings leave the table before munmap: afterwards another thread may already have mapped something else there.
fn before_munmap(range: AddressRange) -> Unmapping {
    let pid = own_pid();
    let unmapping = guard::run(|guard| {
        session::with_shim(guard, |shim| {
            shim.check_session();
            let mappings = mapping_table::overlapping(range);
            let is_removed_whole = |mapping: &&ShimMapping| {
                mapping.id.is_some() && mapping.whole && mapping.pid == pid && range.covers(mapping.range)
            };
            let (untracked, frozen): (Vec<_>, _) = mappings
                .iter()
                .filter(is_removed_whole)
                .filter_map(|mapping| Some((*mapping, FrozenMapping::freeze(mapping)?)))
                .unzip();
            service_calls::untrack(shim, &untracked);
            mapping_table::remove_range(range);
            Unmapping { mappings, frozen }
        })
    });
    unmapping.unwrap_or_default()
}

/// Thaws the mappings that munmap did not remove and tracks them again. They are detached first, because the service expects no more
/// writes from them.
fn after_failed_munmap(range: AddressRange, unmapping: &Unmapping) {
    let errno = Errno::last_raw();
    unmapping.frozen.iter().for_each(FrozenMapping::thaw);
    Errno::set_raw(errno);
    guard::run(|guard| {
        session::with_shim(guard, |shim| {
            restore_to_table(range, &unmapping.mappings);
            service_calls::detach(shim, &unmapping.mappings);
            service_calls::retrack(shim, &unmapping.mappings, Vec::new());
        })
    });
}

/// Adds the parts of mappings that lie in `range` to the table again.
fn restore_to_table(range: AddressRange, mappings: &[ShimMapping]) {
    for mapping in mappings {
        let part = mapping.range.intersect(range);
        let offset = mapping.offset + (part.start - mapping.range.start);
        let whole = mapping.whole && part == mapping.range;
        // If the table is full, the mapping becomes unknown to the shim.
        let _ = mapping_table::add(&ShimMapping { range: part, offset, whole, ..*mapping });
    }
}

/// mremap(2)
///
/// # Safety
/// As for libc's function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mremap(
    old: *mut c_void,
    old_length: size_t,
    length: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let Some(next) = MREMAP.get() else {
        missing();
        return libc::MAP_FAILED;
    };
    let from = page_range(old, old_length.max(1)).filter(|range| mapping_table::overlaps(*range));
    let keeps_old = old_length == 0 || flags & libc::MREMAP_DONTUNMAP != 0;
    let moving = from.map(|from| before_mremap(from, keeps_old)).unwrap_or_default();
    // SAFETY: passes on the caller's arguments.
    let start = unsafe { next(old, old_length, length, flags, new) };
    let to = page_range(start, length).filter(|_| start != libc::MAP_FAILED);
    if let Some(from) = from {
        after_mremap(from, to, keeps_old, &moving);
    } else if let Some(replaced) = to.filter(|to| mapping_table::overlaps(*to)) {
        guard::run(|guard| session::with_shim(guard, |_| mapping_table::remove_range(replaced)));
    }
    start
}

/// Detaches the mappings that mremap moves or resizes: a moved mapping loses its userfaultfd, and a mapping that grows would extend
/// its registration. Writes during the move are not lost: tracking the mapping again reports all its pages with data as written.
///
/// As for munmap, the mappings leave the table before the call.
fn before_mremap(from: AddressRange, keeps_old: bool) -> Vec<ShimMapping> {
    let moving = guard::run(|guard| {
        session::with_shim(guard, |shim| {
            shim.check_session();
            let moving = mapping_table::overlapping(from);
            service_calls::detach(shim, &moving);
            if !keeps_old {
                mapping_table::remove_range(from);
            }
            moving
        })
    });
    moving.unwrap_or_default()
}

fn after_mremap(from: AddressRange, to: Option<AddressRange>, keeps_old: bool, moving: &[ShimMapping]) {
    let pid = own_pid();
    guard::run(|guard| {
        session::with_shim(guard, |shim| {
            let mut added = Vec::new();
            if let Some(to) = to {
                mapping_table::remove_range(to);
                if let Some(old) =
                    moving.iter().find(|old| old.pid == pid && old.range.covers(first_byte(from)))
                {
                    let offset = old.offset + (from.start - old.range.start);
                    let new = ShimMapping { range: to, offset, id: None, whole: true, ..*old };
                    added.extend(mapping_table::add(&new).map(|slot| (slot, new)));
                }
            } else if !keeps_old {
                restore_to_table(from, moving);
            }
            service_calls::retrack(shim, moving, added);
        })
    });
}

const fn first_byte(range: AddressRange) -> AddressRange {
    AddressRange { start: range.start, end: range.start + 1 }
}

/// Extends a range of the program to whole pages. Returns `None` for a range that the kernel refuses: one that is empty or does not
/// start at a page boundary.
pub(super) fn page_range(start: *mut c_void, length: size_t) -> Option<AddressRange> {
    let start = Some(address_of(start)).filter(|start| start % page_bytes() == 0)?;
    let end = start.checked_add(u64::try_from(length).ok()?)?.checked_next_multiple_of(page_bytes())?;
    (end > start).then_some(AddressRange { start, end })
}
