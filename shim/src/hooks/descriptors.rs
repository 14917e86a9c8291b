//! open, dup, fcntl, read, ioctl: pagemaps, and userfaultfds of the program's own.

use std::ffi::CStr;

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use nix::libc::{self, c_char, c_int, c_long, c_ulong, c_void, iovec, off_t, size_t, ssize_t};

use crate::libc_next::{missing, real};
use crate::mapping_table::Entry;
use crate::{guard, mapping_table, memory, pagemap_fds, pagemap_read, policy, service_calls, session};

real! {
    OPEN = c"open": fn(*const c_char, c_int, c_int) -> c_int;
    OPENAT = c"openat": fn(c_int, *const c_char, c_int, c_int) -> c_int;
    OPEN_2 = c"__open_2": fn(*const c_char, c_int) -> c_int;
    OPENAT_2 = c"__openat_2": fn(c_int, *const c_char, c_int) -> c_int;
    DUP = c"dup": fn(c_int) -> c_int;
    DUP2 = c"dup2": fn(c_int, c_int) -> c_int;
    DUP3 = c"dup3": fn(c_int, c_int, c_int) -> c_int;
    FCNTL = c"fcntl": fn(c_int, c_int, c_long) -> c_int;
    READ = c"read": fn(c_int, *mut c_void, size_t) -> ssize_t;
    READ_CHK = c"__read_chk": fn(c_int, *mut c_void, size_t, size_t) -> ssize_t;
    PREAD = c"pread": fn(c_int, *mut c_void, size_t, off_t) -> ssize_t;
    PREAD_CHK = c"__pread_chk": fn(c_int, *mut c_void, size_t, off_t, size_t) -> ssize_t;
    READV = c"readv": fn(c_int, *const iovec, c_int) -> ssize_t;
    PREADV = c"preadv": fn(c_int, *const iovec, c_int, off_t) -> ssize_t;
    PREADV2 = c"preadv2": fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
    IOCTL = c"ioctl": fn(c_int, c_ulong, *mut c_void) -> c_int;
}

/// linux/userfaultfd.h. Its argument begins with start and length.
const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;

/// Marks a descriptor that was just opened, if it is a pagemap. Any other path costs a look at its last letters.
///
/// # Safety
/// The path is a C string.
unsafe fn opened(path: *const c_char, fd: c_int) -> c_int {
    if fd >= 0 && !path.is_null() {
        // SAFETY: the caller vouches for it, and the kernel has read it.
        let path = unsafe { CStr::from_ptr(path) };
        if path.to_bytes().ends_with(b"pagemap") {
            mark(fd);
        }
    }
    fd
}

/// Marks a descriptor if it is a pagemap, whatever path led there. Allocates nothing.
pub fn mark(fd: c_int) -> bool {
    let errno = Errno::last_raw();
    let mut room = [0; 64];
    let pid = service_calls::link_of(fd, &mut room).and_then(policy::pagemap_of);
    if let Some(pid) = pid.filter(|_| crate::config().is_some()) {
        pagemap_fds::mark(fd, pid);
    }
    Errno::set_raw(errno);
    pid.is_some()
}

macro_rules! opens {
    ($($(#[$doc:meta])* $name:ident => $real:ident($([$folder:ident])? path $(, $more:ident)*);)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As libc's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name(
                $($folder: c_int,)?
                path: *const c_char
                $(, $more: c_int)*
            ) -> c_int {
                let Some(real) = $real.get() else { return missing() };
                // SAFETY: the caller's arguments.
                let fd = unsafe { real($($folder,)? path $(, $more)*) };
                // SAFETY: the caller passes a C string.
                unsafe { opened(path, fd) }
            }
        )*
    };
}

opens! {
    /// open(2)
    open => OPEN(path, flags, mode);
    /// open64 of glibc
    open64 => OPEN(path, flags, mode);
    /// openat(2)
    openat => OPENAT([folder] path, flags, mode);
    /// openat64 of glibc
    openat64 => OPENAT([folder] path, flags, mode);
    /// open of programs that were compiled with `_FORTIFY_SOURCE`
    __open_2 => OPEN_2(path, flags);
    /// open64 of such
    __open64_2 => OPEN_2(path, flags);
    /// openat of such
    __openat_2 => OPENAT_2([folder] path, flags);
    /// openat64 of such
    __openat64_2 => OPENAT_2([folder] path, flags);
}

/// dup(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let Some(real) = DUP.get() else { return missing() };
    // SAFETY: the caller's arguments.
    copied(fd, unsafe { real(fd) })
}

/// dup2(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    let Some(real) = DUP2.get() else { return missing() };
    // SAFETY: the caller's arguments.
    copied(fd, unsafe { real(fd, to) })
}

/// dup3(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let Some(real) = DUP3.get() else { return missing() };
    // SAFETY: the caller's arguments.
    copied(fd, unsafe { real(fd, to, flags) })
}

/// fcntl(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    let Some(real) = FCNTL.get() else { return missing() };
    // SAFETY: the caller's arguments; one that was not passed the real one does not look at either.
    let done = unsafe { real(fd, command, argument) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, done),
        _ => done,
    }
}

/// fcntl64 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { fcntl(fd, command, argument) }
}

fn copied(from: c_int, to: c_int) -> c_int {
    if to >= 0 {
        pagemap_fds::copy(from, to);
    }
    to
}

/// read(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    let Some(real) = READ.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, buffer, count) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], got, None);
    got
}

/// read of programs that were compiled with `_FORTIFY_SOURCE`
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    room: size_t,
) -> ssize_t {
    let Some(real) = READ_CHK.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, buffer, count, room) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], got, None);
    got
}

/// pread(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    let Some(real) = PREAD.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, buffer, count, offset) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], got, Some(offset));
    got
}

/// pread64 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { pread(fd, buffer, count, offset) }
}

/// pread of programs that were compiled with `_FORTIFY_SOURCE`
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __pread_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    let Some(real) = PREAD_CHK.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, buffer, count, offset, room) };
    after_read(fd, &[iovec { iov_base: buffer, iov_len: count }], got, Some(offset));
    got
}

/// pread64 of such
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn __pread64_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { __pread_chk(fd, buffer, count, offset, room) }
}

/// readv(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    let Some(real) = READV.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, parts, count) };
    // SAFETY: likewise.
    unsafe { after_readv(fd, (parts, count), got, None) };
    got
}

/// preadv(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    let Some(real) = PREADV.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, parts, count, offset) };
    // SAFETY: likewise.
    unsafe { after_readv(fd, (parts, count), got, Some(offset)) };
    got
}

/// preadv64 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv64(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { preadv(fd, parts, count, offset) }
}

/// preadv2(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let Some(real) = PREADV2.get() else { return missing_read() };
    // SAFETY: the caller's arguments.
    let got = unsafe { real(fd, parts, count, offset, flags) };
    // SAFETY: likewise.
    unsafe { after_readv(fd, (parts, count), got, Some(offset).filter(|offset| *offset >= 0)) };
    got
}

/// preadv64v2 of glibc
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { preadv2(fd, parts, count, offset, flags) }
}

fn missing_read() -> ssize_t {
    missing();
    -1
}

/// # Safety
/// The parts are those of a readv that gave `got`.
unsafe fn after_readv(fd: c_int, (parts, count): (*const iovec, c_int), got: ssize_t, offset: Option<off_t>) {
    if got > 0
        && pagemap_fds::find(fd).is_some()
        && let Ok(count) = usize::try_from(count)
    {
        // SAFETY: the kernel has just read this array.
        after_read(fd, unsafe { std::slice::from_raw_parts(parts, count) }, got, offset);
    }
}

/// Lays the truth over what was read, `offset` being where; `None`: up to the position that the descriptor has now.
fn after_read(fd: c_int, parts: &[iovec], got: ssize_t, offset: Option<off_t>) {
    if got <= 0 {
        return;
    }
    let Some(pid) = pagemap_fds::find(fd) else { return };
    guard::work(|inside| {
        let began = match offset {
            Some(offset) => offset,
            // SAFETY: lseek takes integers and touches no memory.
            None => unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }.checked_sub(i64::try_from(got).ok()?)?,
        };
        let (mut offset, mut left) = (u64::try_from(began).ok()?, usize::try_from(got).ok()?);
        session::with(inside, |shim| {
            for part in parts {
                let len = part.iov_len.min(left);
                // SAFETY: the kernel has just written there, as much as it said, for the program that waits for us.
                unsafe { pagemap_read::read(shim, pid, part.iov_base.cast(), len, offset) };
                offset += u64::try_from(len).unwrap_or(0);
                left -= len;
            }
        })
    });
}

/// ioctl(2)
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(real) = IOCTL.get() else { return missing() };
    if pagemap_read::is_scan(request)
        && let Some(pid) = pagemap_fds::find(fd)
        && let Some(answer) = scan(fd, pid, memory::address_of(argument))
    {
        return answer.unwrap_or_else(|errno| {
            errno.set();
            -1
        });
    }
    // As the kernel takes it: 32 bits.
    let register = request & 0xffff_ffff == UFFDIO_REGISTER;
    let taken = if register { registering(memory::address_of(argument)) } else { Vec::new() };
    // SAFETY: the caller's arguments.
    let done = unsafe { real(fd, request, argument) };
    if !taken.is_empty() {
        registered(&taken, done == 0);
    }
    done
}

fn scan(fd: c_int, pid: c_int, argument: u64) -> Option<Result<c_int, Errno>> {
    let real = IOCTL.get()?;
    let kernel = |argument: &mut crate::scan::Argument| {
        // SAFETY: the argument is the kernel's struct; vec is null, or ours, or the program's own, and holds vec_len regions.
        let done = unsafe { real(fd, crate::scan::REQUEST, std::ptr::from_mut(argument).cast()) };
        Errno::result(done).map(i64::from)
    };
    let answer = guard::work(|inside| {
        session::with(inside, |shim| pagemap_read::scan(shim, pid, argument, &kernel))?
    })?;
    Some(answer.map(|count| c_int::try_from(count).unwrap_or(c_int::MAX)))
}

/// The program's own userfaultfd comes first: what of ours lies in its range is let go of.
fn registering(argument: u64) -> Vec<Entry> {
    if !mapping_table::any() {
        return Vec::new();
    }
    let taken = guard::work(|inside| {
        let (mut start, mut len) = (0_u64, 0_u64);
        memory::read(argument, &mut start)?;
        memory::read(argument + 8, &mut len)?;
        let range = AddressRange::at(start, len)?;
        session::with(inside, |shim| {
            let taken = mapping_table::entries(range);
            service_calls::release(shim, &taken);
            service_calls::release_inherited(shim, &taken);
            taken
        })
    });
    taken.unwrap_or_default()
}

/// The kernel lets a range have one userfaultfd only. Where it is the program's, the mappings are its own from now on, marks
/// and all; else they are ours still.
fn registered(taken: &[Entry], own: bool) {
    guard::work(|inside| {
        session::with(inside, |shim| {
            if own {
                taken.iter().for_each(|entry| mapping_table::cut(entry.range));
            } else {
                service_calls::track_anew(shim, taken, Vec::new());
            }
        })
    });
}
