//! memfd_create, mmap, munmap, mremap.

use std::ffi::CStr;
use std::os::fd::IntoRawFd as _;

use fdmap_sys::address::AddressRange;
use nix::errno::Errno;
use nix::libc::{self, c_char, c_int, c_uint, c_void, off_t, size_t};

use crate::freeze::Still;
use crate::libc_next::{missing, real};
use crate::mapping_table::Entry;
use crate::memory::{address_of, page_bytes};
use crate::policy::{self, Decision};
use crate::{guard, mapping_table, service_calls, session};

real! {
    MEMFD_CREATE = c"memfd_create": fn(*const c_char, c_uint) -> c_int;
    MMAP = c"mmap": fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;
    MUNMAP = c"munmap": fn(*mut c_void, size_t) -> c_int;
    MREMAP = c"mremap": fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;
}

/// memfd_create(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn memfd_create(name: *const c_char, flags: c_uint) -> c_int {
    // Where the kernel alone judges the pointer it is not looked at.
    if !name.is_null() && crate::config().is_some_and(|config| !config.make.is_empty()) {
        // SAFETY: the caller passes a C string.
        let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
        if let Some(made) = make(bytes, flags) {
            return made;
        }
    }
    let Some(real) = MEMFD_CREATE.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(name, flags) }
}

fn make(name: &[u8], flags: c_uint) -> Option<c_int> {
    let config = crate::config()?;
    if policy::memfd(name, config) != Decision::Serve {
        return None;
    }
    let made = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            service_calls::make(shim, name, flags & !libc::MFD_CLOEXEC)
        })?
    })?;
    let number = made.into_raw_fd();
    if flags & libc::MFD_CLOEXEC == 0 {
        // SAFETY: F_SETFD takes an integer and touches no memory.
        unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
    }
    Some(number)
}

/// mmap(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let Some(real) = MMAP.get() else {
        missing();
        return libc::MAP_FAILED;
    };
    // SAFETY: the caller's arguments.
    let mapped = unsafe { real(address, length, protection, flags, fd, offset) };
    if mapped != libc::MAP_FAILED {
        after_mmap(mapped, length, flags, fd, offset);
    }
    mapped
}

/// mmap64 of glibc, the same on 64-bit machines.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's arguments.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

fn after_mmap(mapped: *mut c_void, length: size_t, flags: c_int, fd: c_int, offset: off_t) {
    let Some(range) = pages_of(mapped, length) else { return };
    let replaced = mapping_table::overlaps(range);
    let serve = policy::mapping(flags, fd) == Decision::Serve && service_calls::could_be_memfd(fd);
    if !replaced && !serve {
        return;
    }
    guard::work(|inside| {
        session::with(inside, |shim| {
            if replaced {
                mapping_table::cut(range);
            }
            if serve {
                shim.tend();
                service_calls::mapped(shim, fd, &new_entry(range, offset));
            }
        })
    });
}

fn new_entry(range: AddressRange, offset: off_t) -> Entry {
    Entry {
        range,
        offset: u64::try_from(offset).unwrap_or(0),
        device: 0,
        inode: 0,
        id: None,
        whole: true,
        pid: service_calls::own_pid(),
    }
}

/// munmap(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    let Some(real) = MUNMAP.get() else { return missing() };
    let range = pages_of(address, length).filter(|range| mapping_table::overlaps(*range));
    let ending = range.map(before_munmap).unwrap_or_default();
    // SAFETY: the caller's arguments.
    let done = unsafe { real(address, length) };
    if done != 0
        && let Some(range) = range
    {
        still_mapped(range, &ending);
    }
    done
}

/// What a call of munmap is to end.
#[derive(Default)]
struct Ending {
    entries: Vec<Entry>,
    still: Vec<Still>,
}

/// What ends as a whole has its writes taken before: nobody may write to it any more. Where that cannot be made sure of, the
/// service finds that it has gone, and tells all of it.
///
/// It is taken out of the table before it ends: afterwards another thread may have mapped something else there already.
fn before_munmap(range: AddressRange) -> Ending {
    let pid = service_calls::own_pid();
    let ending = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            let entries = mapping_table::entries(range);
            let ends = |entry: &&Entry| {
                entry.id.is_some() && entry.whole && entry.pid == pid && range.covers(entry.range)
            };
            let (leaving, still): (Vec<_>, _) =
                entries.iter().filter(ends).filter_map(|entry| Some((*entry, Still::hold(entry)?))).unzip();
            service_calls::untrack(shim, &leaving);
            mapping_table::cut(range);
            Ending { entries, still }
        })
    });
    ending.unwrap_or_default()
}

/// The program goes on to use what it could not unmap: it is let go of, since the service expects nothing more of it, and
/// tracked anew.
fn still_mapped(range: AddressRange, ending: &Ending) {
    let errno = Errno::last_raw();
    ending.still.iter().for_each(Still::undo);
    Errno::set_raw(errno);
    guard::work(|inside| {
        session::with(inside, |shim| {
            put_back(range, &ending.entries);
            service_calls::release(shim, &ending.entries);
            service_calls::track_anew(shim, &ending.entries, Vec::new());
        })
    });
}

/// Puts the parts of mappings that lie in a range into the table again.
fn put_back(range: AddressRange, entries: &[Entry]) {
    for entry in entries {
        let part = entry.range.intersect(range);
        let offset = entry.offset + (part.start - entry.range.start);
        let whole = entry.whole && part == entry.range;
        // Without room it is not known any more.
        let _ = mapping_table::add(&Entry { range: part, offset, whole, ..*entry });
    }
}

/// mremap(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn mremap(
    old: *mut c_void,
    old_length: size_t,
    length: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let Some(real) = MREMAP.get() else {
        missing();
        return libc::MAP_FAILED;
    };
    let from = pages_of(old, old_length.max(1)).filter(|range| mapping_table::overlaps(*range));
    let kept = old_length == 0 || flags & libc::MREMAP_DONTUNMAP != 0;
    let moving = from.map(|from| before_mremap(from, kept)).unwrap_or_default();
    // SAFETY: the caller's arguments.
    let moved = unsafe { real(old, old_length, length, flags, new) };
    let to = pages_of(moved, length).filter(|_| moved != libc::MAP_FAILED);
    if let Some(from) = from {
        after_mremap(from, to, kept, &moving);
    } else if let Some(over) = to.filter(|over| mapping_table::overlaps(*over)) {
        guard::work(|inside| session::with(inside, |_| mapping_table::cut(over)));
    }
    moved
}

/// What is moved is let go of before, since it would lose its userfaultfd on the way, or share it with what it grows by. It
/// may be written all the while: tracking it anew tells all that it holds then as written.
///
/// As for munmap it is taken out of the table before.
fn before_mremap(from: AddressRange, kept: bool) -> Vec<Entry> {
    let moving = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            let moving = mapping_table::entries(from);
            service_calls::release(shim, &moving);
            if !kept {
                mapping_table::cut(from);
            }
            moving
        })
    });
    moving.unwrap_or_default()
}

fn after_mremap(from: AddressRange, to: Option<AddressRange>, kept: bool, moving: &[Entry]) {
    let pid = service_calls::own_pid();
    guard::work(|inside| {
        session::with(inside, |shim| {
            let mut anew = Vec::new();
            if let Some(to) = to {
                mapping_table::cut(to);
                if let Some(entry) =
                    moving.iter().find(|entry| entry.pid == pid && entry.range.covers(first_page(from)))
                {
                    let offset = entry.offset + (from.start - entry.range.start);
                    let entry = Entry { range: to, offset, id: None, whole: true, ..*entry };
                    anew.extend(mapping_table::add(&entry).map(|slot| (slot, entry)));
                }
            } else if !kept {
                put_back(from, moving);
            }
            service_calls::track_anew(shim, moving, anew);
        })
    });
}

const fn first_page(range: AddressRange) -> AddressRange {
    AddressRange { start: range.start, end: range.start + 1 }
}

/// The pages that a range of the program lies in. `None` for one that the kernel does not take: it begins within a page, or
/// is empty.
fn pages_of(start: *mut c_void, length: size_t) -> Option<AddressRange> {
    let start = Some(address_of(start)).filter(|start| start % page_bytes() == 0)?;
    let end = start.checked_add(u64::try_from(length).ok()?)?.checked_next_multiple_of(page_bytes())?;
    (end > start).then_some(AddressRange { start, end })
}
