//! Finds the shared memory of a process through its descriptors and its mappings.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use fdmap_proto::error_chain;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::fd::{OpenMode, link_target, open_mode, reopen, stat};
use fdmap_sys::maps::{Vma, may_write};
use fdmap_sys::memfd::shared_memory;
use nix::fcntl::OFlag;
use nix::sys::stat::SFlag;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};

use super::tracee::Tracee;
use super::{AdoptError, Problem, Selection};
use crate::ClientError;

/// `st_dev` and `st_ino`.
pub(super) type Inode = (u64, u64);

/// A file of shared memory, open for reading and writing.
#[derive(Debug)]
pub(super) struct SharedFile {
    pub(super) file: OwnedFd,
    /// Its link in `/proc/PID/fd`, such as `/memfd:ram (deleted)`.
    pub(super) target: String,
    pub(super) inode: Inode,
}

/// The files that were found, each inode once, and what could not be opened.
#[derive(Debug, Default)]
pub(super) struct Discovery {
    pub(super) files: BTreeMap<Inode, SharedFile>,
    pub(super) problems: Vec<Problem>,
}

/// Finds the selected files of a process.
pub(super) fn discover(tracee: &Tracee, selection: Selection) -> Result<Discovery, AdoptError> {
    let mut found = Discovery::default();
    match selection {
        Selection::Descriptor(number) => {
            let file = open_descriptor(tracee, number)?;
            found.files.insert(file.inode, file);
        }
        Selection::Memfds => found.add_memfds(tracee)?,
        Selection::All => {
            found.add_memfds(tracee)?;
            found.add_mappings(tracee)?;
        }
    }
    tracee.check_alive()?;
    Ok(found)
}

impl Discovery {
    /// Adds the memfds among the process's descriptors.
    fn add_memfds(&mut self, tracee: &Tracee) -> Result<(), AdoptError> {
        let directory = PathBuf::from(format!("/proc/{}/fd", tracee.pid));
        let failed = |error| ClientError::Path { what: "reading", path: directory.clone(), error };
        for entry in fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let memfd = fs::read_link(entry.path()).is_ok_and(|target| is_memfd(&target));
            let Some(number) = number.filter(|_| memfd) else { continue };
            let Ok(metadata) = fs::metadata(entry.path()) else { continue };
            if !self.files.contains_key(&(metadata.dev(), metadata.ino())) {
                self.add(format!("descriptor {number}"), open_descriptor(tracee, number));
            }
        }
        Ok(())
    }

    /// Adds the shared memory that the process can write through a mapping, with or without a descriptor of it.
    fn add_mappings(&mut self, tracee: &Tracee) -> Result<(), AdoptError> {
        let pid = tracee.pid;
        let mut vmas: BTreeMap<Inode, Vec<Vma>> = BTreeMap::new();
        for vma in tracee.shared_vmas()? {
            vmas.entry((vma.device, vma.inode)).or_default().push(vma);
        }
        for (inode, vmas) in vmas {
            if self.files.contains_key(&inode) {
                continue;
            }
            // The file of a mapping that is writable: a System V segment can have the number of another file's inode. The process
            // may unmap one in the meantime, so each is tried.
            for vma in vmas.iter().filter(|vma| may_write(pid, vma).unwrap_or(false)) {
                let subject = format!("the mapping at {:#x}", vma.range.start);
                match open_mapping(pid, vma) {
                    Ok(Mapped::Other) => continue,
                    Ok(Mapped::NoSharedMemory) => {}
                    Ok(Mapped::File(file)) => self.add(subject, open_read_write(file.as_fd())),
                    Err(reason) => self.problems.push(Problem { subject, reason }),
                }
                break;
            }
        }
        Ok(())
    }

    fn add(&mut self, subject: String, opened: Result<SharedFile, AdoptError>) {
        match opened {
            Ok(file) => {
                self.files.entry(file.inode).or_insert(file);
            }
            Err(error) => self.problems.push(Problem::new(subject, &error)),
        }
    }
}

/// Takes a descriptor of the process, or reopens its file if the descriptor is not open for reading and writing.
fn open_descriptor(tracee: &Tracee, number: i32) -> Result<SharedFile, AdoptError> {
    let file = tracee.take_descriptor(number)?;
    // Its first query, F_GET_SEALS, reaches no driver of a device and no FUSE daemon. Only the close does.
    if shared_memory(file.as_fd())?.is_none() {
        return Err(AdoptError::NotSharedMemory(number));
    }
    if open_mode(file.as_fd())? == OpenMode::ReadWrite {
        return Ok(shared_file(file)?);
    }
    // The caller may have more rights than the process, whose files these are.
    if !tracee.may_write(file.as_fd())? {
        return Err(AdoptError::NotWritable(number));
    }
    open_read_write(file.as_fd())
}

/// Reopens a file whose rights were checked. Its path in `/proc/PID` may lead to another file by now.
fn open_read_write(file: BorrowedFd<'_>) -> Result<SharedFile, AdoptError> {
    Ok(shared_file(reopen(file, true)?)?)
}

/// The file that is mapped at an address at which a mapping was found.
enum Mapped {
    File(OwnedFd),
    /// A file of neither tmpfs nor hugetlbfs.
    NoSharedMemory,
    /// Nothing, or another file, which the process may only be able to read.
    Other,
}

/// Opens the file of a mapping with `O_PATH`.
fn open_mapping(pid: u32, vma: &Vma) -> Result<Mapped, String> {
    let path = format!("/proc/{pid}/map_files/{:x}-{:x}", vma.range.start, vma.range.end);
    match open_path(&path) {
        Ok(file) => examine(file, (vma.device, vma.inode)).map_err(|error| error_chain(&error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Mapped::Other),
        Err(error) => Err(format!("open of {path}: {error} (needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN)")),
    }
}

/// Opens a file with `O_PATH`: the open of a device would have side effects.
fn open_path(path: &str) -> io::Result<OwnedFd> {
    let path_only = OFlag::O_PATH.bits();
    Ok(File::options().read(true).custom_flags(path_only).open(path)?.into())
}

fn shared_file(file: OwnedFd) -> Result<SharedFile, ClientError> {
    let stat = stat(&file)?;
    Ok(SharedFile { target: link_target(file.as_fd())?, inode: (stat.st_dev, stat.st_ino), file })
}

fn is_memfd(target: &Path) -> bool {
    target.to_str().is_some_and(|target| target.starts_with("/memfd:"))
}

/// Finds out what a file is that should be `inode`.
fn examine(file: OwnedFd, inode: Inode) -> Result<Mapped, AdoptError> {
    let found = stat(&file)?;
    if (found.st_dev, found.st_ino) != inode {
        return Ok(Mapped::Other);
    }
    if SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
        return Ok(Mapped::NoSharedMemory);
    }
    let kind = fstatfs(&file).call(|| "fstatfs".to_owned())?.filesystem_type();
    let is_shared_memory = kind == TMPFS_MAGIC || kind == HUGETLBFS_MAGIC;
    Ok(if is_shared_memory { Mapped::File(file) } else { Mapped::NoSharedMemory })
}
