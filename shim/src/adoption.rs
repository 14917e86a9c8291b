//! Files of the program in the service: adopts memfds that the program maps and creates memfds for it.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_client::error::RefusalCode;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::file::is_invisible;
use fdmap_sys::maps::Maps;
use nix::libc;

use crate::descriptor::{device_and_inode, duplicate, link_target, stat, status_flags};
use crate::mapping_table::ShimMapping;
use crate::policy::{self, Decision, FileFacts};
use crate::session::{CallFailure, Shim, inode_name};

/// Maximum number of entries of [`Shim::known_files`].
const MAX_KNOWN_FILES: usize = 1024;

/// A memfd of the program that the configuration selects for adoption.
#[derive(Debug)]
pub struct SelectedMemfd {
    pub device: u64,
    pub inode: u64,
    /// The name passed to `memfd_create`.
    pub name: Vec<u8>,
}

impl SelectedMemfd {
    /// Inspects a descriptor; `None` if its file is not selected.
    pub fn inspect(shim: &Shim, fd: i32) -> Option<Self> {
        let mut buffer = [0_u8; 320];
        let stat = stat(fd)?;
        if stat.st_nlink != 0 {
            return None;
        }
        let facts = FileFacts {
            mode: stat.st_mode,
            links: stat.st_nlink,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            link_target: link_target(fd, &mut buffer)?,
            status_flags: status_flags(fd),
        };
        if policy::decide_adoption(&facts, &shim.config) != Decision::Serve {
            return None;
        }
        let name = policy::memfd_name(&facts)?.to_vec();
        Some(Self { device: stat.st_dev, inode: stat.st_ino, name })
    }
}

/// Passes a memfd to the service, unless the service has it.
pub fn adopt(shim: &mut Shim, fd: BorrowedFd<'_>, memfd: &SelectedMemfd) -> Result<(), CallFailure> {
    let key = (memfd.device, memfd.inode);
    if shim.known_files.contains(&key) {
        return Ok(());
    }
    let name = String::from_utf8_lossy(&memfd.name).into_owned();
    // A name in use is retried with a unique one. A file that the service already owns is refused under any name.
    let unique = unique_name(&name, memfd.inode);
    let lifetime = Some(shim.config.lifetime());
    let mut adopt_as =
        |name: &str| shim.call(|service| service.adopt_with_lifetime(fd, name, None, lifetime).map(drop));
    let mut result = adopt_as(&name);
    if let Err(Some(RefusalCode::AlreadyExists | RefusalCode::InvalidArgument)) =
        result.as_ref().map_err(CallFailure::code)
    {
        result = adopt_as(&unique);
    }
    match result {
        Ok(()) => set_coverage_policy(shim, &inode_name(memfd.device, memfd.inode)),
        Err(failure) if failure.code() == Some(RefusalCode::AlreadyExists) => {}
        Err(failure) => return Err(failure),
    }
    remember(shim, key);
    Ok(())
}

/// Records that the service has a file. A forgotten file is passed to the service again, which refuses it.
fn remember(shim: &mut Shim, key: (u64, u64)) {
    if shim.known_files.len() >= MAX_KNOWN_FILES {
        shim.known_files.clear();
    }
    shim.known_files.push(key);
}

/// Adopts the file of a mapping again after it was deleted in the service. Returns true if the service has it now.
pub fn adopt_again(shim: &mut Shim, mapping: &ShimMapping) -> bool {
    let key = (mapping.device, mapping.inode);
    shim.known_files.retain(|known| *known != key);
    let Some(fd) = open_mapped_file(mapping) else { return false };
    let memfd = SelectedMemfd::inspect(shim, fd.as_raw_fd());
    memfd.is_some_and(|memfd| adopt(shim, fd.as_fd(), &memfd).is_ok())
}

/// Makes a valid and unique name from a name that is invalid or in use.
fn unique_name(name: &str, serial: u64) -> String {
    let clean: String =
        name.chars().map(|c| if c == '/' || is_invisible(c) { '_' } else { c }).take(50).collect();
    let clean = if clean.is_empty() { "memfd".to_owned() } else { clean };
    format!("{clean}.{}.{serial}", std::process::id())
}

/// Creates a memfd in the service in place of `memfd_create(name, flags)`. The returned descriptor is close-on-exec.
pub fn create_memfd(shim: &mut Shim, name: &[u8], flags: u32) -> Option<OwnedFd> {
    let name = String::from_utf8_lossy(name).into_owned();
    let lifetime = Some(shim.config.lifetime());
    let candidates = [name.clone(), unique_name(&name, 0), unique_name(&name, next_serial())];
    for candidate in candidates {
        match shim.call(|service| service.memfd_create_with_lifetime(&candidate, &name, flags, lifetime)) {
            Ok((fd, _)) => {
                if let Some((device, inode)) = device_and_inode(fd.as_raw_fd()) {
                    set_coverage_policy(shim, &inode_name(device, inode));
                    remember(shim, (device, inode));
                }
                return Some(fd);
            }
            Err(failure)
                if matches!(
                    failure.code(),
                    Some(RefusalCode::AlreadyExists | RefusalCode::InvalidArgument)
                ) => {}
            Err(failure) => {
                shim.report_refusal(format_args!("cannot create memfd {name:?} in the service"), &failure);
                return None;
            }
        }
    }
    None
}

fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn set_coverage_policy(shim: &mut Shim, file: &FileName) {
    if let Some(policy) = shim.config.policy
        && let Err(failure) = shim.call(|service| service.set_coverage_policy(file, policy))
    {
        shim.report_refusal(format_args!("cannot set the coverage policy of {file}"), &failure);
    }
}

/// Returns a read-write descriptor of the file of a mapping: a duplicate of one that the program has open, else one opened through
/// `/proc/self/map_files`, which needs privileges.
pub fn open_mapped_file(mapping: &ShimMapping) -> Option<OwnedFd> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    let fds: Vec<i32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    let is_same_file = |fd: &i32| {
        device_and_inode(*fd) == Some((mapping.device, mapping.inode))
            && status_flags(*fd) & libc::O_ACCMODE == libc::O_RDWR
    };
    fds.iter().find(|fd| is_same_file(fd)).and_then(|fd| duplicate(*fd)).or_else(|| {
        let maps = Maps::open(std::process::id()).ok()?;
        let vma = maps.vma_at_or_after(mapping.range.start, true).ok()??;
        let path = format!("/proc/self/map_files/{:x}-{:x}", vma.range.start, vma.range.end);
        let file = File::options().read(true).write(true).open(path).ok()?;
        Some(file.into())
    })
}
