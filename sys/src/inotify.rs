//! inotify: that a file was written through a descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify as Queue, WatchDescriptor};

use crate::error::{Call, SyscallError};

/// A queue of events, non-blocking and close-on-exec.
///
/// It sees what is written through descriptors that were opened by a path, if only `/proc/self/fd/N`, when the write is done.
/// It does not see writes through a descriptor of `memfd_create` itself, writes to mappings, native AIO and loop devices.
#[derive(Debug)]
pub struct Inotify(Queue);

/// One watched file. The number is not used again while the queue lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watch(WatchDescriptor);

/// What was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// `IN_MODIFY`: it was written or changed its size. Events that are alike and follow one another are told once.
    Modified(Watch),
    /// `IN_Q_OVERFLOW`: events were lost, of any of the files.
    Overflow,
    /// `IN_IGNORED`: it is watched no more; it was unwatched, or nobody had the file open or mapped any longer.
    Gone(Watch),
}

impl Inotify {
    /// An empty queue.
    ///
    /// # Errors
    /// `inotify_init1`: `EMFILE` if the user has too many (`fs.inotify.max_user_instances`).
    pub fn new() -> Result<Self, SyscallError> {
        let queue = Queue::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .call(|| "inotify_init1(IN_NONBLOCK | IN_CLOEXEC)".to_owned())?;
        Ok(Self(queue))
    }

    /// Watches the file of `fd`, which may be closed then: a watch does not keep a file. A file that is watched already
    /// gives the same watch again.
    ///
    /// # Errors
    /// `inotify_add_watch`: `EACCES` if the inode's mode forbids reading, `ENOSPC` if the user has too many
    /// (`fs.inotify.max_user_watches`).
    pub fn watch_modify(&self, fd: BorrowedFd<'_>) -> Result<Watch, SyscallError> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let watch = self
            .0
            .add_watch(path.as_str(), AddWatchFlags::IN_MODIFY)
            .call(|| format!("inotify_add_watch(IN_MODIFY) of {path}"))?;
        Ok(Watch(watch))
    }

    /// Ends a watch. [`Seen::Gone`] follows what was seen until then.
    ///
    /// # Errors
    /// `inotify_rm_watch`: `EINVAL` if it has ended already.
    pub fn unwatch(&self, watch: Watch) -> Result<(), SyscallError> {
        self.0.rm_watch(watch.0).call(|| format!("inotify_rm_watch of {}", watch.0.as_raw()))
    }

    /// Appends all that was seen since the last call.
    ///
    /// # Errors
    /// `read`. What was read until then has been appended.
    pub fn drain(&self, out: &mut Vec<Seen>) -> Result<(), SyscallError> {
        loop {
            let events = match self.0.read_events() {
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                other => {
                    other.call(|| format!("read of events from inotify {}", self.0.as_fd().as_raw_fd()))?
                }
            };
            out.extend(events.iter().filter_map(|event| {
                let watch = Watch(event.wd);
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    Some(Seen::Overflow)
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    Some(Seen::Gone(watch))
                } else if event.mask.contains(AddWatchFlags::IN_MODIFY) {
                    Some(Seen::Modified(watch))
                } else {
                    // IN_UNMOUNT; IN_IGNORED follows.
                    None
                }
            }));
        }
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
    use crate::{fd, memfd};

    fn seen(inotify: &Inotify) -> Vec<Seen> {
        let mut out = Vec::new();
        inotify.drain(&mut out).unwrap();
        out
    }

    #[test]
    fn writes_through_reopened_descriptors_are_seen() {
        let inotify = Inotify::new().unwrap();
        let original = memfd::create("watched", None).unwrap();
        let reopened = fd::reopen(original.as_fd(), true).unwrap();
        let watch = inotify.watch_modify(original.as_fd()).unwrap();
        assert_eq!(inotify.watch_modify(reopened.as_fd()), Ok(watch), "it is one file");
        nix::unistd::write(&original, b"silent").unwrap();
        assert_eq!(seen(&inotify), []);
        nix::unistd::write(&reopened, b"told").unwrap();
        assert_eq!(seen(&inotify), [Seen::Modified(watch)]);

        drop((original, reopened));
        assert_eq!(seen(&inotify), [Seen::Gone(watch)], "the watch does not keep the file");
        assert_eq!(inotify.unwatch(watch).unwrap_err().errno, Errno::EINVAL);
    }

    #[test]
    fn unwatched_file_is_gone() {
        let inotify = Inotify::new().unwrap();
        let original = memfd::create("unwatched", None).unwrap();
        let reopened = fd::reopen(original.as_fd(), true).unwrap();
        let watch = inotify.watch_modify(reopened.as_fd()).unwrap();
        nix::unistd::write(&reopened, b"told").unwrap();
        inotify.unwatch(watch).unwrap();
        nix::unistd::write(&reopened, b"not told").unwrap();
        assert_eq!(seen(&inotify), [Seen::Modified(watch), Seen::Gone(watch)]);
    }

    #[test]
    fn lost_events_are_told() {
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
        let all = seen(&inotify);
        assert_eq!(all.last(), Some(&Seen::Overflow));
        assert_eq!(all.len(), limit + 1);
    }
}
