//! fanotify: events for writes to a file through descriptors, with the thread that wrote.

use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};
use crate::fd;

/// A fanotify group, non-blocking and close-on-exec, whose events name the file and the thread.
///
/// The same writes raise events as for [`Inotify`](crate::inotify::Inotify). The kernel merges equal events of one thread that
/// were not read yet, and keeps those of different threads apart. A write by the kernel itself names a kernel thread.
#[derive(Debug)]
pub struct Fanotify(std::fs::File);

/// Identifies a file in events: file system and file handle. It stays the same while the file exists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKey(Vec<u8>);

/// An event of a marked file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FanotifyEvent {
    /// `FAN_MODIFY`: `thread` wrote to the file or changed its size. 0: a thread of another pid namespace.
    Modified { file: FileKey, thread: u32 },
    /// `FAN_Q_OVERFLOW`: the queue was full and events of any marked file were lost.
    Overflow,
}

/// `struct fanotify_event_metadata`
const METADATA_BYTES: usize = 24;
/// `struct fanotify_event_info_header`
const INFO_HEADER_BYTES: usize = 4;
/// `struct fanotify_event_info_fid` up to the handle: header and file system id.
const FID_BYTES: usize = INFO_HEADER_BYTES + 8;
/// `struct file_handle` up to its bytes.
const HANDLE_HEADER_BYTES: usize = 8;
/// MAX_HANDLE_SZ of `linux/exportfs.h`.
const MAX_HANDLE_BYTES: u32 = 128;
/// Bytes that one read of the queue returns at most: some 70 events of memfds.
const BUFFER_BYTES: usize = 4096;
const _: () =
    assert!(METADATA_BYTES + FID_BYTES + HANDLE_HEADER_BYTES + MAX_HANDLE_BYTES as usize <= BUFFER_BYTES);

impl Fanotify {
    /// Creates a group. Its queue has no limit: otherwise events of one file would displace those of others.
    ///
    /// # Errors
    /// `fanotify_init`: `EPERM` without CAP_SYS_ADMIN, `ENOSYS` if the kernel lacks it, `EMFILE` if the user has too many groups.
    pub fn new() -> Result<Self, SyscallError> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_NONBLOCK
            | libc::FAN_CLOEXEC
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS
            | libc::FAN_REPORT_TID
            | libc::FAN_REPORT_FID;
        // SAFETY: fanotify_init takes two integers.
        let raw = unsafe { libc::fanotify_init(flags, 0) };
        let raw = Errno::result(raw).call(|| "fanotify_init(FAN_REPORT_TID | FAN_REPORT_FID)".to_owned())?;
        // SAFETY: fanotify_init created this descriptor just now, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }.into()))
    }

    /// Marks the file of `fd`. The mark does not keep the file alive, and `fd` may be closed.
    ///
    /// # Errors
    /// `fanotify_mark`, `name_to_handle_at`, `fstatfs`: `ENODEV`, `EOPNOTSUPP` or `EXDEV` if the file system has no file handles.
    pub fn mark(&self, fd: BorrowedFd<'_>) -> Result<FileKey, SyscallError> {
        let key = file_key(fd)?;
        self.change_mark(libc::FAN_MARK_ADD, fd)?;
        Ok(key)
    }

    /// Removes the mark of the file of `fd`.
    ///
    /// # Errors
    /// `fanotify_mark`: `ENOENT` if it has no mark.
    pub fn unmark(&self, fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
        self.change_mark(libc::FAN_MARK_REMOVE, fd)
    }

    fn change_mark(&self, change: libc::c_uint, fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
        // A memfd has no path, so the mark takes the magic link of the descriptor.
        let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
        // SAFETY: path is a C string that outlives the call.
        let marked = unsafe {
            libc::fanotify_mark(self.0.as_raw_fd(), change, libc::FAN_MODIFY, libc::AT_FDCWD, path.as_ptr())
        };
        Errno::result(marked)
            .call(|| format!("fanotify_mark({change:#x}, FAN_MODIFY) of {}", path.to_string_lossy()))?;
        Ok(())
    }

    /// Number of queued events.
    ///
    /// # Errors
    /// `ioctl`.
    pub fn queued(&self) -> Result<usize, SyscallError> {
        // The kernel counts the metadata of each event, without its information records.
        Ok(fd::queued_bytes(self.as_fd())?.div_ceil(METADATA_BYTES))
    }

    /// Appends all events to `out` that are queued when the call begins, and perhaps later ones.
    ///
    /// # Errors
    /// `ioctl`, `read`. Events read before the error have been appended.
    pub fn drain(&self, out: &mut Vec<FanotifyEvent>) -> Result<(), SyscallError> {
        self.read(self.queued()?, out).map(drop)
    }

    /// Appends `count` queued events to `out`, the oldest first, and perhaps some more. Returns how many: fewer only if no further one
    /// is queued.
    ///
    /// # Errors
    /// `read`. Events read before the error have been appended.
    pub fn read(&self, count: usize, out: &mut Vec<FanotifyEvent>) -> Result<usize, SyscallError> {
        let (mut buffer, before) = ([0; BUFFER_BYTES], out.len());
        while out.len() - before < count {
            let read = match (&self.0).read(&mut buffer) {
                Ok(read) => read,
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EAGAIN) => break,
                    Some(Errno::EINTR) => continue,
                    errno => {
                        let call = format!("read of events from fanotify {}", self.0.as_raw_fd());
                        return Err(SyscallError { call, errno: errno.unwrap_or(Errno::EIO) });
                    }
                },
            };
            if read == 0 {
                break;
            }
            parse(&buffer[..read], out);
        }
        Ok(out.len() - before)
    }
}

impl AsFd for Fanotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Appends the events in `bytes`. An event that cannot be read counts as lost.
fn parse(mut bytes: &[u8], out: &mut Vec<FanotifyEvent>) {
    while !bytes.is_empty() {
        let length = word(bytes, 0).and_then(|length| usize::try_from(length).ok());
        let Some(event) =
            length.filter(|length| *length >= METADATA_BYTES).and_then(|length| bytes.get(..length))
        else {
            out.push(FanotifyEvent::Overflow);
            return;
        };
        bytes = &bytes[event.len()..];
        out.push(event_of(event).unwrap_or(FanotifyEvent::Overflow));
    }
}

/// Reads one event: metadata with length u32, version u8, reserved u8, metadata length u16, mask u64, descriptor i32, pid i32;
/// then information records.
fn event_of(event: &[u8]) -> Option<FanotifyEvent> {
    let mask = u64::from_ne_bytes(event.get(8..16)?.try_into().ok()?);
    if mask & libc::FAN_Q_OVERFLOW != 0 {
        return Some(FanotifyEvent::Overflow);
    }
    let thread = word(event, 20)?;
    let info = usize::from(u16::from_ne_bytes(event.get(6..8)?.try_into().ok()?));
    // Header: type u8, padding u8, length u16.
    let kind = *event.get(info)?;
    let length = usize::from(u16::from_ne_bytes(event.get(info + 2..info + 4)?.try_into().ok()?));
    let record = event.get(info..info + length)?;
    let bytes = usize::try_from(word(record, FID_BYTES)?).ok()?;
    let key = record.get(INFO_HEADER_BYTES..FID_BYTES + HANDLE_HEADER_BYTES + bytes)?;
    (kind == libc::FAN_EVENT_INFO_TYPE_FID)
        .then(|| FanotifyEvent::Modified { file: FileKey(key.to_vec()), thread })
}

/// File system id, size and type of the handle, and the handle, as events have them.
fn file_key(fd: BorrowedFd<'_>) -> Result<FileKey, SyscallError> {
    #[repr(C)]
    struct Handle {
        bytes: libc::c_uint,
        kind: libc::c_int,
        handle: [u8; MAX_HANDLE_BYTES as usize],
    }
    let mut handle = Handle { bytes: MAX_HANDLE_BYTES, kind: 0, handle: [0; MAX_HANDLE_BYTES as usize] };
    let mut mount = 0;
    // SAFETY: `handle` begins as struct file_handle and has room for the number of bytes that it names; the path is empty, so
    // that the descriptor itself is meant.
    let named = unsafe {
        libc::name_to_handle_at(
            fd.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    Errno::result(named).call(|| format!("name_to_handle_at of descriptor {}", fd.as_raw_fd()))?;
    // SAFETY: all zeros is a value of struct statfs.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` has the layout of struct statfs and outlives the call.
    let got = unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut stat) };
    Errno::result(got).call(|| format!("fstatfs of descriptor {}", fd.as_raw_fd()))?;
    // SAFETY: fsid_t is two 32-bit integers.
    let fsid: [u8; 8] = unsafe { std::mem::transmute(stat.f_fsid) };
    let mut key = fsid.to_vec();
    key.extend(handle.bytes.to_ne_bytes());
    key.extend(handle.kind.to_ne_bytes());
    let bytes = usize::try_from(handle.bytes.min(MAX_HANDLE_BYTES)).unwrap_or(0);
    key.extend(&handle.handle[..bytes]);
    Ok(FileKey(key))
}

#[cfg(test)]
mod needs_root {
    use super::*;
    use crate::memfd;

    fn events(group: &Fanotify) -> Vec<FanotifyEvent> {
        let mut out = Vec::new();
        group.drain(&mut out).unwrap();
        out
    }

    fn thread_id() -> u32 {
        nix::unistd::gettid().as_raw().cast_unsigned()
    }

    #[test]
    fn events_name_the_file_and_the_thread() {
        let group = Fanotify::new().unwrap();
        let [one, other] = ["one", "other"].map(|name| memfd::create(name, None).unwrap());
        let keys = [&one, &other].map(|fd| group.mark(fd.as_fd()).unwrap());
        assert_ne!(keys[0], keys[1]);
        let [one_reopened, other_reopened] = [&one, &other].map(|fd| fd::reopen(fd.as_fd(), true).unwrap());
        nix::unistd::write(&one, b"no event").unwrap();
        assert_eq!(events(&group), []);
        nix::unistd::write(&one_reopened, b"event").unwrap();
        nix::unistd::write(&one_reopened, b"merged").unwrap();
        nix::unistd::write(&other_reopened, b"event").unwrap();
        let writer = std::thread::spawn(move || {
            nix::unistd::write(&one_reopened, b"event").unwrap();
            thread_id()
        });
        let writer = writer.join().unwrap();
        let event = |file: &FileKey, thread| FanotifyEvent::Modified { file: file.clone(), thread };
        let own = thread_id();
        assert_eq!(events(&group), [event(&keys[0], own), event(&keys[1], own), event(&keys[0], writer)]);
        group.unmark(other.as_fd()).unwrap();
        nix::unistd::write(&other_reopened, b"no event").unwrap();
        assert_eq!(events(&group), []);
    }

    #[test]
    fn events_are_counted_and_read_in_their_order() {
        const FILES: usize = 500;
        let group = Fanotify::new().unwrap();
        let files = [(); FILES].map(|()| memfd::create("counted", None).unwrap());
        let write = |file: &OwnedFd| {
            nix::unistd::write(fd::reopen(file.as_fd(), true).unwrap(), b"event").unwrap();
        };
        let keys: Vec<_> = files.iter().map(|file| group.mark(file.as_fd()).unwrap()).collect();
        assert_eq!(group.queued(), Ok(0));
        files.iter().for_each(write);
        assert_eq!(group.queued(), Ok(FILES));
        let mut out = Vec::new();
        let read = group.read(1, &mut out).unwrap();
        assert!((1..FILES).contains(&read) && out.len() == read);
        assert_eq!(group.queued(), Ok(FILES - read));
        // Those that are queued later are behind the others.
        write(&files[0]);
        group.drain(&mut out).unwrap();
        let event = |file: &FileKey| FanotifyEvent::Modified { file: file.clone(), thread: thread_id() };
        assert_eq!(out, keys.iter().chain([&keys[0]]).map(event).collect::<Vec<_>>());
        assert_eq!(group.read(1, &mut out), Ok(0));
    }

    /// By default the kernel keeps 16384 events.
    #[test]
    fn queue_of_a_group_has_no_limit() {
        const EVENTS: usize = 20_000;
        const FILES: usize = 50;
        let group = Fanotify::new().unwrap();
        let files = [(); FILES].map(|()| memfd::create("many", None).unwrap());
        let reopened: Vec<_> = files.iter().map(|file| fd::reopen(file.as_fd(), true).unwrap()).collect();
        files.iter().for_each(|file| drop(group.mark(file.as_fd()).unwrap()));
        let write_to_all = || {
            for file in &reopened {
                nix::unistd::write(file, b"x").unwrap();
            }
        };
        for _ in 0..EVENTS / FILES {
            std::thread::scope(|scope| scope.spawn(write_to_all).join().unwrap());
        }
        let mut out = Vec::new();
        group.drain(&mut out).unwrap();
        assert!(!out.contains(&FanotifyEvent::Overflow) && out.len() > 16_384, "{} events", out.len());
    }

    #[test]
    fn size_changes_by_path_raise_events() {
        let group = Fanotify::new().unwrap();
        let file = memfd::create("truncated", None).unwrap();
        let key = group.mark(file.as_fd()).unwrap();
        nix::unistd::truncate(format!("/proc/self/fd/{}", file.as_raw_fd()).as_str(), 4096).unwrap();
        assert_eq!(events(&group), [FanotifyEvent::Modified { file: key, thread: thread_id() }]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event with a file identifier of four bytes.
    fn event(mask: u64, thread: u32) -> Vec<u8> {
        let info = FID_BYTES + HANDLE_HEADER_BYTES + 4;
        let mut bytes = Vec::new();
        bytes.extend(u32::try_from(METADATA_BYTES + info).unwrap().to_ne_bytes());
        bytes.extend([3, 0]);
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend(mask.to_ne_bytes());
        bytes.extend((-1_i32).to_ne_bytes());
        bytes.extend(thread.to_ne_bytes());
        bytes.extend([libc::FAN_EVENT_INFO_TYPE_FID, 0]);
        bytes.extend(u16::try_from(info).unwrap().to_ne_bytes());
        bytes.extend([7; 8]);
        bytes.extend(4_u32.to_ne_bytes());
        bytes.extend(1_i32.to_ne_bytes());
        bytes.extend([1, 2, 3, 4]);
        bytes
    }

    #[test]
    fn truncated_or_unknown_events_count_as_lost() {
        let whole = event(libc::FAN_MODIFY, 9);
        for length in 1..whole.len() {
            let mut out = Vec::new();
            parse(&whole[..length], &mut out);
            assert_eq!(out, [FanotifyEvent::Overflow], "{length} bytes");
        }
        let mut out = Vec::new();
        parse(&[whole.clone(), event(libc::FAN_Q_OVERFLOW, 0), whole].concat(), &mut out);
        assert!(matches!(&out[0], FanotifyEvent::Modified { thread: 9, .. }));
        assert_eq!((&out[1], &out[2]), (&FanotifyEvent::Overflow, &out[0].clone()));
        let mut other = event(libc::FAN_MODIFY, 9);
        other[METADATA_BYTES] = 99;
        let mut out = Vec::new();
        parse(&other, &mut out);
        assert_eq!(out, [FanotifyEvent::Overflow]);
    }
}
