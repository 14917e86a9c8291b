//! Reads what the kernel shows about a process.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use fdmap_sys::memfd::{MemfdKind, kind, seals};
use fdmap_sys::pidfd::{self, PidFd};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, fd};

use super::parse::{FdInfo, SmapsEntry, seccomp, smaps};
use crate::ClientError;

/// What the kernel shows about a process. A part that cannot be read holds the reason as text.
#[derive(Clone, Debug)]
pub struct ProcessInfo {
    /// Process id.
    pub pid: u32,
    /// Whether this kernel can write-protect asynchronously ([`Userfaultfd::supports_wp_async`]).
    pub wp_async: Result<bool, String>,
    /// `/proc/PID/comm`.
    pub command: String,
    /// Whether the caller can open its pagemap.
    pub pagemap: Result<(), String>,
    /// Open descriptors, by number.
    pub descriptors: Result<Vec<ProcessDescriptor>, String>,
    /// Mappings, by address.
    pub mappings: Result<Vec<SmapsEntry>, String>,
    /// See [`seccomp`].
    pub seccomp: Option<u32>,
    /// Loop devices of the host that are in use.
    pub loops: Result<Vec<LoopDevice>, String>,
}

/// A descriptor of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessDescriptor {
    /// Descriptor number.
    pub number: i32,
    /// Target of its link in `/proc/PID/fd`.
    pub target: String,
    /// `None` if the process closed it in the meantime.
    pub info: Option<FdInfo>,
    /// Result of the probe; `None` if it was not probed, is no memfd, or the kernel does not show a difference.
    pub probed: Option<NotifyTrial>,
}

/// Whether writes through a descriptor of a memfd raise inotify events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotifyTrial {
    /// They do: open(2) made the descriptor.
    Notified,
    /// They do not: memfd_create(2) made the descriptor.
    Unnotified,
    /// A seal prevents writes.
    WriteSealed,
}

/// A loop device in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// Such as `loop0`.
    pub name: String,
    /// Backing file, such as `/memfd:ram (deleted)`.
    pub backing: String,
}

/// Reads a process. `probe_descriptors` finds out which of its memfd descriptors raise no inotify events: it sets `O_DIRECT`
/// on each and clears it again, which has no effect on shmem. If the process changes the flags in between, its change is lost.
///
/// # Errors
/// [`ClientError::Path`] if there is no such process.
pub fn read_process(pid: u32, probe_descriptors: bool) -> Result<ProcessInfo, ClientError> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let path = folder.join("status");
    let status =
        fs::read_to_string(&path).map_err(|error| ClientError::Path { what: "reading", path, error })?;
    let command = fs::read_to_string(folder.join("comm")).unwrap_or_default();
    Ok(ProcessInfo {
        pid,
        wp_async: Userfaultfd::supports_wp_async().map_err(as_text),
        command: command.trim_end().to_owned(),
        pagemap: fs::File::open(folder.join("pagemap")).map(drop).map_err(as_text),
        descriptors: descriptors(pid, probe_descriptors),
        mappings: mappings(pid),
        seccomp: seccomp(&status),
        loops: loop_devices(),
    })
}

fn as_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn mappings(pid: u32) -> Result<Vec<SmapsEntry>, String> {
    let bytes = fs::read(format!("/proc/{pid}/smaps")).map_err(as_text)?;
    smaps(&String::from_utf8_lossy(&bytes)).ok_or_else(|| "smaps has no VmFlags".to_owned())
}

fn descriptors(pid: u32, probe: bool) -> Result<Vec<ProcessDescriptor>, String> {
    // Refers to this process even if it exits and the pid is reused.
    let process = if probe { Some(pidfd::open(pid).map_err(as_text)?) } else { None };
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(as_text)? {
        let entry = entry.map_err(as_text)?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let target = match fs::read_link(entry.path()) {
            Ok(target) => target.to_string_lossy().into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(as_text(error)),
        };
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok();
        let info = info.as_deref().and_then(FdInfo::parse);
        let process = process.as_ref().filter(|_| target.starts_with("/memfd:"));
        let probed = process.and_then(|process| probe_one(process, number));
        found.push(ProcessDescriptor { number, target, info, probed });
    }
    found.sort_by_key(|descriptor| descriptor.number);
    Ok(found)
}

/// `None` if the kernel does not show a difference.
fn probe_one(process: &PidFd, number: i32) -> Option<NotifyTrial> {
    /// `F_SEAL_WRITE | F_SEAL_FUTURE_WRITE` of linux/fcntl.h
    const NO_WRITES: u32 = 0x8 | 0x10;
    let descriptor = process.descriptor(number).ok()?;
    // hugetlbfs accepts O_DIRECT on no descriptor.
    if !matches!(kind(descriptor.as_fd()), Ok(Some(MemfdKind::Shmem))) {
        return None;
    }
    if seals(descriptor.as_fd()).is_ok_and(|seals| seals & NO_WRITES != 0) {
        return Some(NotifyTrial::WriteSealed);
    }
    if fd::supports_direct_io(descriptor.as_fd()).ok()? {
        return Some(NotifyTrial::Notified);
    }
    // On a kernel whose shmem never accepts the flag, a refusal means nothing.
    let reference = fdmap_sys::memfd::create("fdmap-reference", None).ok()?;
    let reference = fd::reopen(reference.as_fd(), true).ok()?;
    fd::supports_direct_io(reference.as_fd()).ok()?.then_some(NotifyTrial::Unnotified)
}

fn loop_devices() -> Result<Vec<LoopDevice>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").map_err(as_text)? {
        let name = entry.map_err(as_text)?.file_name().to_string_lossy().into_owned();
        // A device that is not in use has no such file.
        match fs::read(format!("/sys/block/{name}/loop/backing_file")) {
            Ok(backing) => {
                let backing = String::from_utf8_lossy(&backing).trim_end_matches('\n').to_owned();
                found.push(LoopDevice { name, backing });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(Errno::ENOTDIR as i32) => {}
            Err(error) => return Err(as_text(error)),
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
        let made = memfd::create("audited", None).unwrap();
        memfd::resize(made.as_fd(), 8192).unwrap();
        let opened = fd::reopen(made.as_fd(), true).unwrap();
        let mapping = SharedMapping::shared(&made, 0, 8192, true).unwrap();
        let info = read_process(std::process::id(), true).unwrap();
        let descriptors = info.descriptors.unwrap();
        let of = |number| descriptors.iter().find(|descriptor| descriptor.number == number).unwrap();
        let (made, opened) = (of(made.as_raw_fd()), of(opened.as_raw_fd()));
        assert_eq!(made.target, "/memfd:audited (deleted)");
        assert!(made.info.unwrap().writable() && opened.info.unwrap().writable());
        if opened.probed == Some(NotifyTrial::Notified) {
            assert_eq!(made.probed, Some(NotifyTrial::Unnotified));
        } else {
            assert_eq!(
                (made.probed, opened.probed),
                (None, None),
                "kernels before 6.6 do not show a difference"
            );
        }
        let mappings = info.mappings.unwrap();
        let found = mappings.iter().find(|entry| entry.name == "/memfd:audited (deleted)").unwrap();
        assert_eq!((found.start, found.end - found.start), (mapping.as_ptr().addr() as u64, 8192));
        assert!(found.shared && found.may_write && !found.write_protect);
        assert!(info.pagemap.is_ok() && info.loops.is_ok());
    }

    #[test]
    fn tracked_mapping_is_write_protected() {
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
        let info = read_process(std::process::id(), false).unwrap();
        let mappings = info.mappings.unwrap();
        let found = mappings.iter().find(|entry| entry.start == address).unwrap();
        assert!(found.write_protect && !found.other_faults);
    }

    #[test]
    fn descriptors_are_probed_on_request_only() {
        let made = memfd::create("unprobed", None).unwrap();
        let info = read_process(std::process::id(), false).unwrap();
        let descriptors = info.descriptors.unwrap();
        let found = descriptors.iter().find(|descriptor| descriptor.number == made.as_raw_fd()).unwrap();
        assert_eq!(found.probed, None);
    }

    #[test]
    fn missing_process_is_an_error() {
        assert!(matches!(read_process(0x7fff_fff0, false), Err(ClientError::Path { .. })));
    }
}
