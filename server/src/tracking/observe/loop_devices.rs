//! Loop devices: their backing files.
//!
//! The kernel asks the file system of a loop device for the inode of its file (LOOP_GET_STATUS64), and that can be a FUSE daemon which
//! never answers. So the service reads the names of the files in sysfs, and a process of its own asks for their inodes: [`search`].

pub mod search;

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use std::{fs, io};

use fdmap_sys::address::AddressRange;
use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::pagemap::{Pagemap, ScanFlags};
use fdmap_sys::{Errno, SyscallError};

use super::holder::Worker;
use crate::own_program::search_process::{self, Inode, SearchProcesses};
use crate::own_program::search_turns::SearchLimits;

/// For a search, which takes some milliseconds, and for the end of another one before.
const SEARCH_TIMEOUT: Duration = Duration::from_millis(300);

/// After a failed search, so that a file system that does not answer delays few checkpoints.
const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Finds the backing files of loop devices.
#[derive(Debug)]
pub(super) struct LoopDevices {
    worker: Worker,
    /// One at a time: each may wait for the same file system.
    search: SearchProcesses,
    overlayfs_raises_events: bool,
}

impl LoopDevices {
    pub(super) fn new(worker: Worker) -> Self {
        let search = SearchProcesses::new(
            "the backing files of loop devices",
            Capabilities::empty(),
            SearchLimits { all: 1, per_owner: 1 },
            MIN_RETRY_INTERVAL,
        );
        let scan = |pagemap: Pagemap| pagemap.scan(AddressRange::default(), ScanFlags::empty(), &mut []);
        Self { worker, search, overlayfs_raises_events: Pagemap::open(None).and_then(scan).is_ok() }
    }

    /// True if a loop device has the file open, or if this is unknown. A loop device writes through a descriptor of its own, and
    /// raises no event. `inode`: that of the file.
    pub(super) fn any_has_open(&self, fd: BorrowedFd<'_>, inode: Inode) -> bool {
        let Ok(names) = backing_files() else { return true };
        if names.is_empty() {
            return false;
        }
        match memfd_name(fd) {
            Ok(Some(name)) if !names.contains(&name) => false,
            Ok(None) if !self.overlayfs_raises_events() => true,
            Ok(_) => self.backing_inodes().is_none_or(|inodes| inodes.contains(&inode)),
            Err(_) => true,
        }
    }

    /// True if writes to a file of overlayfs raise events on the file behind it (Linux 6.5). To try that takes a mount, so PAGEMAP_SCAN
    /// is tried, which Linux has since 6.7.
    pub(super) const fn overlayfs_raises_events(&self) -> bool {
        self.overlayfs_raises_events
    }

    /// `None`: unknown.
    fn backing_inodes(&self) -> Option<BTreeSet<Inode>> {
        if self.worker == Worker::Thread {
            return None;
        }
        let arguments = [search::ARGUMENT, &std::process::id().to_string()];
        // Each one reads all devices, for all who wait.
        self.search.search(0, arguments, SEARCH_TIMEOUT, search_process::inodes_of)
    }
}

/// As in `/proc/self/fd`. `None` for a file that is not a memfd, whose name can change, and differ between its openers.
fn memfd_name(fd: BorrowedFd<'_>) -> Result<Option<String>, SyscallError> {
    let is_memfd = fdmap_sys::memfd::kind(fd)?.is_some();
    is_memfd.then(|| fdmap_sys::fd::link_target(fd)).transpose()
}

/// The numbers of loop devices that have a file.
fn attached() -> io::Result<Vec<u32>> {
    let mut attached = Vec::new();
    for device in fs::read_dir("/sys/block")? {
        let name = device?.file_name();
        let Some(number) = name.to_str().and_then(|name| name.strip_prefix("loop")) else { continue };
        let number = number.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        if has_file(number)? {
            attached.push(number);
        }
    }
    Ok(attached)
}

/// A loop device that may still write has this folder.
fn has_file(number: u32) -> io::Result<bool> {
    fs::exists(format!("/sys/block/loop{number}/loop"))
}

/// Reads each loop device that has a file. One that was detached meanwhile is left out.
fn of_attached<T>(read: impl Fn(u32) -> io::Result<T>) -> io::Result<Vec<T>> {
    let mut all = Vec::new();
    for number in attached()? {
        match read(number) {
            Ok(value) => all.push(value),
            Err(_) if !has_file(number)? => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

/// The names of the files of all loop devices.
fn backing_files() -> io::Result<Vec<String>> {
    of_attached(|number| match fs::read(format!("/sys/block/loop{number}/loop/backing_file")) {
        Ok(name) => {
            let name = name.strip_suffix(b"\n").ok_or(io::ErrorKind::InvalidData)?;
            Ok(String::from_utf8_lossy(name).into_owned())
        }
        // Longer than the name of any memfd.
        Err(error) if error.raw_os_error() == Some(Errno::ENAMETOOLONG as i32) => Ok(String::new()),
        Err(error) => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn only_a_memfd_has_a_name_that_excludes_others() {
        let memfd = fdmap_sys::memfd::create("ram", None).unwrap();
        assert_eq!(memfd_name(memfd.as_fd()).unwrap(), Some("/memfd:ram (deleted)".to_owned()));
        let file = fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(memfd_name(file.as_fd()).unwrap(), None);
    }
}
