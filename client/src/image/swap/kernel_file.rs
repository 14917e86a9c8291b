//! Files of /proc and /sys that must be the kernel's own: container runtimes mount other files over some of them (lxcfs).

use std::fs::File;
use std::io::Read as _;

use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, SyscallError};
use nix::sys::statfs::{FsType, fstatfs};

pub(super) use nix::sys::statfs::{PROC_SUPER_MAGIC, SYSFS_MAGIC};

/// Opens a file of the file system `kind`.
///
/// # Errors
/// `open`, `fstatfs`; `EXDEV` if the file is on another file system.
pub(super) fn open(path: &str, kind: FsType) -> Result<File, SyscallError> {
    let file = File::open(path).call(|| format!("open of {path}"))?;
    let found = fstatfs(&file).call(|| format!("fstatfs of {path}"))?.filesystem_type();
    if found != kind {
        return Err(Errno::EXDEV).call(|| format!("check that {path} is the file of the kernel"));
    }
    Ok(file)
}

/// The text of a file of the file system `kind`.
///
/// # Errors
/// As [`open`]; `read`.
pub(super) fn read(path: &str, kind: FsType) -> Result<String, SyscallError> {
    let mut text = String::new();
    open(path, kind)?.read_to_string(&mut text).call(|| format!("read of {path}"))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_the_file_system_are_opened() {
        assert!(read("/proc/vmstat", PROC_SUPER_MAGIC).unwrap().contains("pswpout "));
        open("/proc/swaps", PROC_SUPER_MAGIC).unwrap();
        open("/sys/kernel/mm", SYSFS_MAGIC).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for (path, kind, errno) in [
            (path, PROC_SUPER_MAGIC, Errno::EXDEV),
            ("/proc/vmstat", SYSFS_MAGIC, Errno::EXDEV),
            ("/proc/nonexistent", PROC_SUPER_MAGIC, Errno::ENOENT),
        ] {
            assert_eq!(open(path, kind).unwrap_err().errno, errno, "{path}");
        }
    }
}
