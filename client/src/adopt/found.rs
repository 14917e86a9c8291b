//! The shared memory of a process, by its descriptors and by its mappings.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fdmap_sys::fd::{OpenMode, link_target, open_mode, stat};
use fdmap_sys::maps::{Maps, Vma, may_write};
use fdmap_sys::pidfd::PidFd;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};

use super::{AdoptError, Problem};
use crate::ClientError;

/// Device and number of an inode.
pub(super) type Inode = (u64, u64);

/// Shared memory, open for reading and writing.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) file: OwnedFd,
    /// What `/proc` shows for it, such as `/memfd:ram (deleted)`.
    pub(super) target: String,
    pub(super) inode: Inode,
}

/// What was found, each file once, and what could not be had.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) files: BTreeMap<Inode, Memory>,
    pub(super) problems: Vec<Problem>,
}

impl Found {
    /// The memfds among its descriptors.
    pub(super) fn descriptors(&mut self, pid: u32, process: &PidFd) -> Result<(), AdoptError> {
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let failed = |error| ClientError::Path { what: "reading", path: folder.clone(), error };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let memfd = fs::read_link(entry.path()).is_ok_and(|target| is_memfd(&target));
            let Some(number) = number.filter(|_| memfd) else { continue };
            let Ok(metadata) = fs::metadata(entry.path()) else { continue };
            if !self.files.contains_key(&(metadata.dev(), metadata.ino())) {
                let what = format!("descriptor {number}");
                let taken = descriptor(pid, process, number);
                self.add(what, taken);
            }
        }
        Ok(())
    }

    /// What it has mapped to write to, whether it still has a descriptor of it or ever had.
    pub(super) fn mappings(&mut self, pid: u32) -> Result<(), AdoptError> {
        let mut vmas: BTreeMap<Inode, Vec<Vma>> = BTreeMap::new();
        for vma in Maps::open(pid)?.all()?.into_iter().filter(|vma| vma.shared && vma.inode != 0) {
            vmas.entry((vma.device, vma.inode)).or_default().push(vma);
        }
        for (inode, vmas) in vmas {
            if self.files.contains_key(&inode) {
                continue;
            }
            let what = format!("the mapping at {:#x}", vmas[0].range.start);
            let path = format!("/proc/{pid}/map_files/{:x}-{:x}", vmas[0].range.start, vmas[0].range.end);
            match is_shared_memory(Path::new(&path)) {
                Ok(false) => continue,
                // It has gone.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    let advice = "it takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN to open it";
                    self.problems.push(Problem { what, why: format!("{advice}: {error}") });
                    continue;
                }
                Ok(true) => {}
            }
            if vmas.iter().any(|vma| may_write(pid, vma).unwrap_or(false)) {
                self.add(what, open(Path::new(&path)).map_err(AdoptError::from));
            }
        }
        Ok(())
    }

    fn add(&mut self, what: String, taken: Result<Memory, AdoptError>) {
        match taken {
            Ok(memory) => {
                self.files.entry(memory.inode).or_insert(memory);
            }
            Err(error) => self.problems.push(Problem::new(what, &error)),
        }
    }
}

/// A descriptor of a process, or what it was opened from if that cannot be written through.
pub(super) fn descriptor(pid: u32, process: &PidFd, number: i32) -> Result<Memory, AdoptError> {
    let file = process.descriptor(number)?;
    if open_mode(file.as_fd())? == OpenMode::ReadWrite {
        return Ok(memory(file)?);
    }
    Ok(open(Path::new(&format!("/proc/{pid}/fd/{number}")))?)
}

fn open(path: &Path) -> Result<Memory, ClientError> {
    let failed = |error| ClientError::Path { what: "opening", path: path.to_owned(), error };
    memory(File::options().read(true).write(true).open(path).map_err(failed)?.into())
}

fn memory(file: OwnedFd) -> Result<Memory, ClientError> {
    let stat = stat(&file)?;
    Ok(Memory { target: link_target(file.as_fd())?, inode: (stat.st_dev, stat.st_ino), file })
}

fn is_memfd(target: &Path) -> bool {
    target.to_str().is_some_and(|target| target.starts_with("/memfd:"))
}

/// A file of tmpfs or hugetlbfs, found out without opening it: a device would notice.
fn is_shared_memory(path: &Path) -> io::Result<bool> {
    if !fs::metadata(path)?.is_file() {
        return Ok(false);
    }
    let kind = statfs(path)?.filesystem_type();
    Ok(kind == TMPFS_MAGIC || kind == HUGETLBFS_MAGIC)
}
