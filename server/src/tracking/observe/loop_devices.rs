//! Loop devices: which files they have open.
//!
//! The service reads only the name of the backing file, in sysfs. Its inode is asked of its file system (LOOP_GET_STATUS64), which can be
//! a FUSE daemon that never answers. Only the name of a memfd excludes another file: it does not change, and is the same for each opener.

use std::os::fd::BorrowedFd;
use std::{fs, io};

use fdmap_sys::{Errno, SyscallError};

/// True if a loop device may have the file open. A loop device writes through a descriptor of its own, and raises no event.
pub(crate) fn any_has_open(fd: BorrowedFd<'_>) -> bool {
    let Ok(backing_files) = backing_files() else { return true };
    if backing_files.is_empty() {
        return false;
    }
    match memfd_name(fd) {
        Ok(Some(name)) => backing_files.contains(&name),
        Ok(None) | Err(_) => true,
    }
}

/// As in `/proc/self/fd`. `None` for a file that is not a memfd.
fn memfd_name(fd: BorrowedFd<'_>) -> Result<Option<String>, SyscallError> {
    let is_memfd = fdmap_sys::memfd::kind(fd)?.is_some();
    is_memfd.then(|| fdmap_sys::fd::link_target(fd)).transpose()
}

/// The names of the files of all loop devices.
fn backing_files() -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for device in fs::read_dir("/sys/block")? {
        let device = device?;
        if !device.file_name().as_encoded_bytes().starts_with(b"loop") {
            continue;
        }
        match fs::read(device.path().join("loop/backing_file")) {
            Ok(name) => {
                let name = name.strip_suffix(b"\n").ok_or(io::ErrorKind::InvalidData)?;
                names.push(String::from_utf8_lossy(name).into_owned());
            }
            // It has no file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Longer than the name of any memfd.
            Err(error) if error.raw_os_error() == Some(Errno::ENAMETOOLONG as i32) => {
                names.push(String::new());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(names)
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
