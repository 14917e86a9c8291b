//! memfd_create, mmap, munmap, mremap.

use std::ffi::CStr;
use std::os::fd::IntoRawFd as _;

use fdmap_sys::address::AddressRange;
use nix::libc::{self, c_char, c_int, c_uint, c_void, off_t, size_t};

use crate::decide::{self, Decision};
use crate::memory::address_of;
use crate::real::{missing, real};
use crate::table::Entry;
use crate::{guard, register, session, table};

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
    if !name.is_null() {
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
    if decide::memfd(name, config) != Decision::Serve {
        return None;
    }
    let made = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            register::make(shim, name, flags & !libc::MFD_CLOEXEC)
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
        after_mmap(mapped, length, protection, flags, fd, offset);
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

fn after_mmap(
    mapped: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) {
    let Some(range) = pages_of(mapped, length) else { return };
    let replaced = table::overlaps(range);
    let serve = decide::mapping(flags, fd) == Decision::Serve && register::could_be_memfd(fd);
    if !replaced && !serve {
        return;
    }
    guard::work(|inside| {
        session::with(inside, |shim| {
            if replaced {
                table::cut(range);
            }
            if serve {
                shim.tend();
                register::mapped(shim, fd, &new_entry(range, offset, protection));
            }
        })
    });
}

fn new_entry(range: AddressRange, offset: off_t, protection: c_int) -> Entry {
    Entry {
        range,
        offset: u64::try_from(offset).unwrap_or(0),
        device: 0,
        inode: 0,
        protection,
        id: None,
        whole: true,
        pid: register::own_pid(),
    }
}

/// munmap(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    let Some(real) = MUNMAP.get() else { return missing() };
    let range = pages_of(address, length).filter(|range| table::overlaps(*range));
    let leaving = range.map(before_munmap).unwrap_or_default();
    // SAFETY: the caller's arguments.
    let done = unsafe { real(address, length) };
    if let Some(range) = range {
        guard::work(|inside| {
            session::with(inside, |_| {
                if done == 0 {
                    table::cut(range);
                } else {
                    leaving.iter().for_each(|entry| protect(entry, entry.protection));
                }
            })
        });
    }
    done
}

/// What ends as a whole has its writes taken before: nobody may write to it any more.
fn before_munmap(range: AddressRange) -> Vec<Entry> {
    let pid = register::own_pid();
    let leaving = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            let leaving: Vec<_> = table::within(range)
                .into_iter()
                .map(|(_, entry)| entry)
                .filter(|entry| {
                    entry.id.is_some() && entry.whole && entry.pid == pid && range.covers(entry.range)
                })
                .collect();
            leaving.iter().for_each(|entry| protect(entry, libc::PROT_READ));
            register::untrack(shim, &leaving);
            leaving
        })
    });
    leaving.unwrap_or_default()
}

fn protect(entry: &Entry, protection: c_int) {
    let (Some(start), Ok(len)) = (crate::memory::at(entry.range.start), usize::try_from(entry.range.len()))
    else {
        return;
    };
    // SAFETY: the program is unmapping this very range, so nothing of it is used any more; where that has failed it gets back
    // what it was mapped with.
    unsafe { libc::mprotect(start, len, protection) };
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
    let from = pages_of(old, old_length.max(1)).filter(|range| table::overlaps(*range));
    let moving = from.map(before_mremap).unwrap_or_default();
    // SAFETY: the caller's arguments.
    let moved = unsafe { real(old, old_length, length, flags, new) };
    if let Some(from) = from {
        let kept = old_length == 0 || flags & libc::MREMAP_DONTUNMAP != 0;
        let to = pages_of(moved, length).filter(|_| moved != libc::MAP_FAILED);
        after_mremap(from, to, kept, &moving);
    } else if let Some(over) =
        pages_of(moved, length).filter(|over| moved != libc::MAP_FAILED && table::overlaps(*over))
    {
        guard::work(|inside| session::with(inside, |_| table::cut(over)));
    }
    moved
}

/// What is moved is let go of before, since it would lose its userfaultfd on the way, or share it with what it grows by. It
/// may be written all the while: tracking it anew tells all that it holds then as written.
fn before_mremap(from: AddressRange) -> Vec<(usize, Entry)> {
    let pid = register::own_pid();
    let moving = guard::work(|inside| {
        session::with(inside, |shim| {
            shim.tend();
            let moving: Vec<_> =
                table::within(from).into_iter().filter(|(_, entry)| entry.pid == pid).collect();
            let entries: Vec<_> = moving.iter().map(|(_, entry)| *entry).collect();
            register::release(shim, &entries);
            moving
        })
    });
    moving.unwrap_or_default()
}

fn after_mremap(from: AddressRange, to: Option<AddressRange>, kept: bool, moving: &[(usize, Entry)]) {
    guard::work(|inside| {
        session::with(inside, |shim| {
            let mut anew = Vec::new();
            if let Some(to) = to {
                if !kept {
                    table::cut(from);
                }
                table::cut(to);
                if let Some((_, entry)) =
                    moving.iter().find(|(_, entry)| entry.range.covers(first_page(from)))
                {
                    let offset = entry.offset + (from.start - entry.range.start);
                    let entry = Entry { range: to, offset, id: None, whole: true, ..*entry };
                    anew.extend(table::add(&entry).map(|slot| (slot, entry)));
                }
            }
            // What is left of the others where they were: all of them if nothing was moved.
            for (slot, entry) in table::all() {
                if moving.iter().any(|(_, old)| old.id.is_some() && old.id == entry.id) {
                    table::set_id(slot, None);
                    anew.push((slot, Entry { id: None, ..entry }));
                }
            }
            if shim.config.track {
                register::track_each(shim, &anew);
            }
        })
    });
}

const fn first_page(range: AddressRange) -> AddressRange {
    AddressRange { start: range.start, end: range.start + 1 }
}

/// The pages that a range of the program lies in.
fn pages_of(start: *mut c_void, length: size_t) -> Option<AddressRange> {
    let start = address_of(start);
    let end = start.checked_add(u64::try_from(length).ok()?)?.checked_next_multiple_of(4096)?;
    (end > start).then_some(AddressRange { start, end })
}
