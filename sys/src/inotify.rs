//! inotify: events for writes to a file through descriptors.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::inotify::{self, AddWatchFlags, InitFlags};

use crate::error::{CallContext, SyscallError};
use crate::fd;

/// `struct inotify_event` without a name.
const EVENT_BYTES: usize = 16;

/// An inotify instance, non-blocking and close-on-exec.
///
/// A write through a descriptor that was opened by path, including `/proc/self/fd/N`, raises an event when the write ends.
/// No event is raised by writes through the descriptor that `memfd_create` returned, by writes to mappings, by native AIO and
/// by loop devices.
#[derive(Debug)]
pub struct Inotify(inotify::Inotify);

/// Identifies a watched file. The kernel does not reuse watch descriptors of the same inotify instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchDescriptor(inotify::WatchDescriptor);

/// An event read from an [`Inotify`] instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InotifyEvent {
    /// `IN_MODIFY`: the file was written or its size changed. The kernel merges consecutive equal events.
    Modified(WatchDescriptor),
    /// `IN_Q_OVERFLOW`: the queue was full and events of any watched file were lost.
    Overflow,
    /// `IN_IGNORED`: the watch ended, by [`Inotify::unwatch`] or because the file was no longer open or mapped.
    Ignored(WatchDescriptor),
}

impl Inotify {
    /// Creates an inotify instance.
    ///
    /// # Errors
    /// `inotify_init1`: `EMFILE` if the user has reached `fs.inotify.max_user_instances`.
    pub fn new() -> Result<Self, SyscallError> {
        let instance = inotify::Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .call(|| "inotify_init1(IN_NONBLOCK | IN_CLOEXEC)".to_owned())?;
        Ok(Self(instance))
    }

    /// Adds a watch on the file of `fd`. The watch does not keep the file alive, and `fd` may be closed. Watching the same file
    /// again returns the same watch descriptor.
    ///
    /// # Errors
    /// `inotify_add_watch`: `EACCES` if the inode's mode forbids reading, `ENOSPC` if the user has reached
    /// `fs.inotify.max_user_watches`.
    pub fn watch_modify(&self, fd: BorrowedFd<'_>) -> Result<WatchDescriptor, SyscallError> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let watch = self
            .0
            .add_watch(path.as_str(), AddWatchFlags::IN_MODIFY)
            .call(|| format!("inotify_add_watch(IN_MODIFY) of {path}"))?;
        Ok(WatchDescriptor(watch))
    }

    /// Removes a watch. [`InotifyEvent::Ignored`] follows its last event.
    ///
    /// # Errors
    /// `inotify_rm_watch`: `EINVAL` if the watch has ended.
    pub fn unwatch(&self, watch: WatchDescriptor) -> Result<(), SyscallError> {
        self.0.rm_watch(watch.0).call(|| format!("inotify_rm_watch of {}", watch.0.as_raw()))
    }

    /// Number of queued events.
    ///
    /// # Errors
    /// `ioctl`.
    pub fn queued(&self) -> Result<usize, SyscallError> {
        // Events of a watched file have no name.
        Ok(fd::queued_bytes(self.as_fd())?.div_ceil(EVENT_BYTES))
    }

    /// Appends all events to `out` that are queued when the call begins, and perhaps later ones.
    ///
    /// # Errors
    /// `ioctl`, `read`. Events read before the error have been appended.
    pub fn drain(&self, out: &mut Vec<InotifyEvent>) -> Result<(), SyscallError> {
        self.read(self.queued()?, out).map(drop)
    }

    /// Reads `count` queued events, the oldest first, and perhaps some more, and appends them to `out`. Returns how many: fewer only if
    /// no further one is queued.
    ///
    /// # Errors
    /// `read`. Events read before the error have been appended.
    pub fn read(&self, count: usize, out: &mut Vec<InotifyEvent>) -> Result<usize, SyscallError> {
        let mut read = 0;
        while read < count {
            let events = match self.0.read_events() {
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                other => {
                    other.call(|| format!("read of events from inotify {}", self.0.as_fd().as_raw_fd()))?
                }
            };
            read += events.len();
            out.extend(events.iter().filter_map(|event| {
                let watch = WatchDescriptor(event.wd);
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    Some(InotifyEvent::Overflow)
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    Some(InotifyEvent::Ignored(watch))
                } else if event.mask.contains(AddWatchFlags::IN_MODIFY) {
                    Some(InotifyEvent::Modified(watch))
                } else {
                    // IN_UNMOUNT, which IN_IGNORED follows.
                    None
                }
            }));
        }
        Ok(read)
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;

    fn events(inotify: &Inotify) -> Vec<InotifyEvent> {
        let mut out = Vec::new();
        inotify.drain(&mut out).unwrap();
        out
    }

    #[test]
    fn only_writes_through_reopened_descriptors_raise_events() {
        let inotify = Inotify::new().unwrap();
        let original = memfd::create("watched", None).unwrap();
        let reopened = fd::reopen(original.as_fd(), true).unwrap();
        let watch = inotify.watch_modify(original.as_fd()).unwrap();
        assert_eq!(inotify.watch_modify(reopened.as_fd()), Ok(watch), "both descriptors refer to one file");
        nix::unistd::write(&original, b"no event").unwrap();
        assert_eq!(events(&inotify), []);
        nix::unistd::write(&reopened, b"event").unwrap();
        assert_eq!(events(&inotify), [InotifyEvent::Modified(watch)]);

        drop((original, reopened));
        assert_eq!(events(&inotify), [InotifyEvent::Ignored(watch)], "a watch does not keep the file alive");
        assert_eq!(inotify.unwatch(watch).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn unwatched_file_raises_ignored_as_its_last_event() {
        let inotify = Inotify::new().unwrap();
        let original = memfd::create("unwatched", None).unwrap();
        let reopened = fd::reopen(original.as_fd(), true).unwrap();
        let watch = inotify.watch_modify(reopened.as_fd()).unwrap();
        nix::unistd::write(&reopened, b"event").unwrap();
        inotify.unwatch(watch).unwrap();
        nix::unistd::write(&reopened, b"no event").unwrap();
        assert_eq!(events(&inotify), [InotifyEvent::Modified(watch), InotifyEvent::Ignored(watch)]);
    }

    #[test]
    fn lost_events_raise_overflow() {
        let inotify = Inotify::new().unwrap();
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let files = ["one", "other"]
            .map(|name| fd::reopen(memfd::create(name, None).unwrap().as_fd(), true).unwrap());
        for file in &files {
            inotify.watch_modify(file.as_fd()).unwrap();
        }
        for nth in 0..limit + 10 {
            nix::unistd::write(&files[nth % 2], b"x").unwrap();
        }
        let all = events(&inotify);
        assert_eq!(all.last(), Some(&InotifyEvent::Overflow));
        assert_eq!(all.len(), limit + 1);
    }
}
