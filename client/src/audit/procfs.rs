//! What there is to know of a process.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use fdmap_sys::memfd::{MemfdKind, kind, seals};
use fdmap_sys::pidfd::{self, PidFd};
use fdmap_sys::{Errno, fd};

use super::parse::{FdInfo, SmapsEntry, seccomp, smaps};
use crate::ClientError;

/// What there is to know of a process. What could not be looked at is the reason why.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub command: String,
    /// Whether its pagemap can be opened by us.
    pub pagemap: Result<(), String>,
    /// Its descriptors.
    pub descriptors: Result<Vec<Descriptor>, String>,
    /// Its mappings.
    pub mappings: Result<Vec<SmapsEntry>, String>,
    /// Its seccomp mode.
    pub seccomp: Option<u32>,
    /// Loop devices of this host with what they are made of.
    pub loops: Result<Vec<LoopDevice>, String>,
}

/// One descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its number.
    pub number: i32,
    /// What `/proc/PID/fd` shows for it.
    pub target: String,
    /// `None` if it was closed meanwhile.
    pub info: Option<FdInfo>,
    /// Of a memfd that was tried.
    pub tried: Option<Tried>,
}

/// What trying a memfd's descriptor told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// It was opened, and reports writes.
    Opened,
    /// `memfd_create` made it, and it reports none.
    Silent,
    /// A seal forbids to write through it.
    Sealed,
}

/// A loop device in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// Such as `loop0`.
    pub name: String,
    /// The file that it is made of, such as `/memfd:ram (deleted)`.
    pub backing: String,
}

/// Looks at a process. `try_descriptors` finds out which of its memfd descriptors are silent: it sets `O_DIRECT` on each for a
/// moment, which shmem does nothing about; a change of flags that the process makes in that moment is lost.
///
/// # Errors
/// [`ClientError::Path`] if there is no such process.
pub fn gather(pid: u32, try_descriptors: bool) -> Result<Facts, ClientError> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let path = folder.join("status");
    let status =
        fs::read_to_string(&path).map_err(|error| ClientError::Path { what: "reading", path, error })?;
    let command = fs::read_to_string(folder.join("comm")).unwrap_or_default();
    Ok(Facts {
        pid,
        command: command.trim_end().to_owned(),
        pagemap: fs::File::open(folder.join("pagemap")).map(drop).map_err(words),
        descriptors: descriptors(pid, try_descriptors),
        mappings: mappings(pid),
        seccomp: seccomp(&status),
        loops: loops(),
    })
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn mappings(pid: u32) -> Result<Vec<SmapsEntry>, String> {
    let bytes = fs::read(format!("/proc/{pid}/smaps")).map_err(words)?;
    smaps(&String::from_utf8_lossy(&bytes)).ok_or_else(|| "smaps does not tell VmFlags".to_owned())
}

fn descriptors(pid: u32, tried: bool) -> Result<Vec<Descriptor>, String> {
    // It keeps its meaning should the process exit and its pid be used again.
    let process = if tried { Some(pidfd::open(pid).map_err(words)?) } else { None };
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(words)? {
        let entry = entry.map_err(words)?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let target = match fs::read_link(entry.path()) {
            Ok(target) => target.to_string_lossy().into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(words(error)),
        };
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok();
        let info = info.as_deref().and_then(FdInfo::parse);
        let tried = process.as_ref().filter(|_| target.starts_with("/memfd:"));
        let tried = tried.and_then(|process| try_one(process, number));
        found.push(Descriptor { number, target, info, tried });
    }
    found.sort_by_key(|descriptor| descriptor.number);
    Ok(found)
}

/// `None` if it does not tell.
fn try_one(process: &PidFd, number: i32) -> Option<Tried> {
    /// `F_SEAL_WRITE | F_SEAL_FUTURE_WRITE` of linux/fcntl.h
    const NO_WRITES: u32 = 0x8 | 0x10;
    let descriptor = process.descriptor(number).ok()?;
    // hugetlb takes no O_DIRECT through any descriptor.
    if !matches!(kind(descriptor.as_fd()), Ok(Some(MemfdKind::Shmem))) {
        return None;
    }
    if seals(descriptor.as_fd()).is_ok_and(|seals| seals & NO_WRITES != 0) {
        return Some(Tried::Sealed);
    }
    if fd::supports_direct_io(descriptor.as_fd()).ok()? {
        return Some(Tried::Opened);
    }
    // A shmem that takes it from nobody tells nothing.
    let reference = fdmap_sys::memfd::create("fdmap-reference", None).ok()?;
    let reference = fd::reopen(reference.as_fd(), true).ok()?;
    fd::supports_direct_io(reference.as_fd()).ok()?.then_some(Tried::Silent)
}

fn loops() -> Result<Vec<LoopDevice>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").map_err(words)? {
        let name = entry.map_err(words)?.file_name().to_string_lossy().into_owned();
        // Those that are not in use have no such file.
        match fs::read(format!("/sys/block/{name}/loop/backing_file")) {
            Ok(backing) => {
                let backing = String::from_utf8_lossy(&backing).trim_end_matches('\n').to_owned();
                found.push(LoopDevice { name, backing });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(Errno::ENOTDIR as i32) => {}
            Err(error) => return Err(words(error)),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use fdmap_sys::mapping::SharedMapping;
    use fdmap_sys::memfd;

    use super::*;

    #[test]
    fn own_descriptors_and_mappings_are_found() {
        let made = memfd::create("inspected", None).unwrap();
        memfd::resize(made.as_fd(), 8192).unwrap();
        let opened = fd::reopen(made.as_fd(), true).unwrap();
        let mapping = SharedMapping::shared(&made, 0, 8192, true).unwrap();
        let facts = gather(std::process::id(), true).unwrap();
        let descriptors = facts.descriptors.unwrap();
        let of = |number| descriptors.iter().find(|descriptor| descriptor.number == number).unwrap();
        let (made, opened) = (of(made.as_raw_fd()), of(opened.as_raw_fd()));
        assert_eq!(made.target, "/memfd:inspected (deleted)");
        assert!(made.info.unwrap().writable() && opened.info.unwrap().writable());
        if opened.tried == Some(Tried::Opened) {
            assert_eq!(made.tried, Some(Tried::Silent));
        } else {
            assert_eq!((made.tried, opened.tried), (None, None), "before Linux 6.6 it cannot be told");
        }
        let mappings = facts.mappings.unwrap();
        let found = mappings.iter().find(|entry| entry.name == "/memfd:inspected (deleted)").unwrap();
        assert_eq!((found.start, found.end - found.start), (mapping.as_ptr().addr() as u64, 8192));
        assert!(found.shared && found.may_write && !found.write_protect);
        assert!(facts.pagemap.is_ok() && facts.loops.is_ok());
    }

    #[test]
    fn mapping_that_is_tracked_says_so() {
        use fdmap_sys::address::AddressRange;
        use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
        let file = memfd::create("tracked", None).unwrap();
        memfd::resize(file.as_fd(), 8192).unwrap();
        let mapping = SharedMapping::shared(&file, 0, 8192, true).unwrap();
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(UffdFeatures::WP_ASYNC | UffdFeatures::WP_UNPOPULATED | UffdFeatures::WP_HUGETLBFS_SHMEM)
            .unwrap();
        let address = mapping.as_ptr().addr() as u64;
        uffd.register_wp(AddressRange::at(address, 8192).unwrap()).unwrap();
        let facts = gather(std::process::id(), false).unwrap();
        let mappings = facts.mappings.unwrap();
        let found = mappings.iter().find(|entry| entry.start == address).unwrap();
        assert!(found.write_protect && !found.other_faults);
    }

    #[test]
    fn descriptors_are_left_alone_unless_they_are_to_be_tried() {
        let made = memfd::create("untried", None).unwrap();
        let facts = gather(std::process::id(), false).unwrap();
        let descriptors = facts.descriptors.unwrap();
        let found = descriptors.iter().find(|descriptor| descriptor.number == made.as_raw_fd()).unwrap();
        assert_eq!(found.tried, None);
    }

    #[test]
    fn process_that_is_not_there_is_an_error() {
        assert!(matches!(gather(0x7fff_fff0, false), Err(ClientError::Path { .. })));
    }
}
