//! `/proc/PID/maps`: the mappings of an address space, through `PROCMAP_QUERY` or as text.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use nix::errno::Errno;
use nix::sys::stat::makedev;

use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};

/// The mappings of one address space: that of the process at the time of the open.
#[derive(Debug)]
pub struct Maps {
    file: File,
    path: String,
}

/// A virtual memory area: one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vma {
    pub range: AddressRange,
    /// File offset of the first byte; 0 without a file.
    pub offset: u64,
    /// Device of the file, as `st_dev` of stat(2); 0 without a file.
    pub device: u64,
    /// Inode number of the file. 0 without a file, and for the first System V segment of an IPC namespace.
    pub inode: u64,
    pub readable: bool,
    /// Writable now. mprotect(2) may make others writable: see [`may_write`].
    pub writable: bool,
    pub executable: bool,
    /// `MAP_SHARED`: writes reach the file.
    pub shared: bool,
}

impl Maps {
    /// Opens the maps of process `pid`.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not read the process, `ENOENT` if there is none.
    pub fn open(pid: u32) -> Result<Self, SyscallError> {
        let path = format!("/proc/{pid}/maps");
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// Takes an open `/proc/PID/maps`. The kernel checked the rights of the process that opened it, and checks no others.
    ///
    /// # Errors
    /// `EINVAL` if `fd` is not a `/proc/PID/maps`, `EBADF` if it is not readable; else `fcntl`, `fstatfs` or `readlink`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        crate::procfile::check(fd.as_fd(), "maps")?;
        let path = format!("the maps in descriptor {}", fd.as_raw_fd());
        Ok(Self { file: fd.into(), path })
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let file = self.file.try_clone().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of {}", self.path))?;
        Ok(Self { file, path: self.path.clone() })
    }

    /// The mapping that contains `address`, or the next one after it. `file_backed` restricts the search to mappings of files,
    /// which include shmem and hugetlb. `None` if there is none.
    ///
    /// # Errors
    /// `PROCMAP_QUERY`: `ENOTTY` before Linux 6.11, `ESRCH` if the address space no longer exists, after an exit or execve.
    pub fn vma_at_or_after(&self, address: u64, file_backed: bool) -> Result<Option<Vma>, SyscallError> {
        let mut query = Query {
            size: QUERY_BYTES,
            query_flags: COVERING_OR_NEXT_VMA | if file_backed { FILE_BACKED_VMA } else { 0 },
            query_addr: address,
            ..Query::default()
        };
        // SAFETY: query has the layout and carries the size of the kernel's struct procmap_query. It requests no name and no build
        // id, so the kernel writes nowhere else.
        match unsafe { ioctls::procmap_query(self.file.as_raw_fd(), &raw mut query) } {
            Err(Errno::ENOENT) => Ok(None),
            Ok(_) => Ok(Some(query.into())),
            Err(errno) => Err(errno).call(|| format!("PROCMAP_QUERY({address:#x}) of {}", self.path)),
        }
    }

    /// All mappings, read as text, which works on all kernels.
    ///
    /// The kernel produces the text in pieces of about a page, between which the process may change its mappings. It guarantees
    /// that mappings that exist throughout are listed and that no address is listed twice. Mappings that are created or removed
    /// during the call may be missing, and those that are split or merged may be listed partly in their former shape.
    ///
    /// # Errors
    /// `pread`; `ESRCH` if the address space no longer exists, after an exit or execve, or for a kernel thread; `EIO` for a line
    /// that cannot be parsed.
    pub fn all(&self) -> Result<Vec<Vma>, SyscallError> {
        const READ_BYTES: usize = 1 << 16;
        let mut text = Vec::new();
        let mut filled = 0;
        loop {
            text.resize(filled + READ_BYTES, 0);
            // pread: the process that passed the descriptor shares its file position.
            let offset = u64::try_from(filled).unwrap_or(u64::MAX);
            let got = self
                .file
                .read_at(&mut text[filled..], offset)
                .call(|| format!("pread at {offset} of {}", self.path))?;
            if got == 0 {
                break;
            }
            filled += got;
        }
        text.truncate(filled);
        if text.is_empty() {
            // The kernel returns end of file instead of ESRCH. A live address space has mappings.
            return Err(Errno::ESRCH).call(|| format!("pread of {}", self.path));
        }
        parse(&text).ok_or(Errno::EIO).call(|| format!("parse of {}", self.path))
    }

    /// All shared mappings of the file with this `st_dev` and inode number. Concurrent changes have the same effects as in
    /// [`Self::all`].
    ///
    /// # Errors
    /// As [`Self::vma_at_or_after`], or as [`Self::all`] where the kernel lacks `PROCMAP_QUERY`.
    pub fn shared_of(&self, device: u64, inode: u64) -> Result<Vec<Vma>, SyscallError> {
        let wanted = |vma: &Vma| vma.shared && vma.device == device && vma.inode == inode;
        let mut found = Vec::new();
        let mut address = 0;
        loop {
            match self.vma_at_or_after(address, true) {
                Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                    return Ok(self.all()?.into_iter().filter(wanted).collect());
                }
                Err(error) => return Err(error),
                Ok(None) => return Ok(found),
                Ok(Some(vma)) => {
                    address = vma.range.end;
                    found.extend(Some(vma).filter(wanted));
                }
            }
        }
    }
}

impl AsFd for Maps {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// True if process `pid` can write to the file through `vma`, now or after an mprotect(2).
///
/// If `vma` is not writable now, this reads `smaps` up to that mapping, for which the kernel walks the page tables of all
/// mappings before it: about a millisecond per some hundred MiB. The mode of `/proc/PID/map_files/START-END` is no substitute: it
/// shows how the file was opened, but the kernel caches it, and it becomes wrong when another file is mapped at the same addresses.
///
/// # Errors
/// `open` or `read` of `/proc/PID/smaps`: `EACCES` if the caller may not read the process, `ENOENT` if there is none, or
/// if the mapping changed or was removed.
pub fn may_write(pid: u32, vma: &Vma) -> Result<bool, SyscallError> {
    if !vma.shared || vma.writable {
        return Ok(vma.shared);
    }
    let path = format!("/proc/{pid}/smaps");
    let smaps = File::open(&path).call(|| format!("open of {path}"))?;
    let may = flag_in_smaps(BufReader::new(smaps), vma, b"mw").call(|| format!("read of {path}"))?;
    may.ok_or(Errno::ENOENT).call(|| format!("search for {} in {path}", vma.range))
}

/// True if the mapping has this flag among its `VmFlags`; `mw` is `VM_MAYWRITE`. `None` if the mapping is not listed.
fn flag_in_smaps(smaps: impl BufRead, vma: &Vma, flag: &[u8]) -> io::Result<Option<bool>> {
    let identity = |vma: &Vma| (vma.range, vma.offset, vma.device, vma.inode, vma.shared);
    let mut within = false;
    for line in smaps.split(b'\n') {
        let line = line?;
        if let Some(next) = parse_line(&line) {
            within = identity(&next) == identity(vma);
        } else if let (true, Some(flags)) = (within, line.strip_prefix(b"VmFlags:")) {
            return Ok(Some(flags.split(|byte| *byte == b' ').any(|one| one == flag)));
        }
    }
    Ok(None)
}

/// Parses the text of a maps file; `None` if a line is malformed. Pure.
#[must_use]
pub fn parse(text: &[u8]) -> Option<Vec<Vma>> {
    text.strip_suffix(b"\n")?.split(|byte| *byte == b'\n').map(parse_line).collect()
}

/// Parses `start-end rwxp offset major:minor inode   name`. All numbers but the inode's are hexadecimal. The name is ignored: it
/// may contain any byte but a line feed, which the kernel escapes.
pub(crate) fn parse_line(line: &[u8]) -> Option<Vma> {
    let mut words = line.split(|byte| *byte == b' ').map(std::str::from_utf8);
    let mut word = || words.next()?.ok();
    let (range, permissions, offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
    let (start, end) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let &[r, w, x, s] = permissions.as_bytes() else { return None };
    let flag = |byte, set, unset| (byte == set || byte == unset).then_some(byte == set);
    let range = AddressRange { start: hex(start)?, end: hex(end)? };
    (!range.is_empty()).then_some(Vma {
        range,
        offset: hex(offset)?,
        device: makedev(hex(major)?, hex(minor)?),
        inode: inode.parse().ok()?,
        readable: flag(r, b'r', b'-')?,
        writable: flag(w, b'w', b'-')?,
        executable: flag(x, b'x', b'-')?,
        shared: flag(s, b's', b'p')?,
    })
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word, 16).ok()
}

// linux/fs.h
const VMA_READABLE: u64 = 0x1;
const VMA_WRITABLE: u64 = 0x2;
const VMA_EXECUTABLE: u64 = 0x4;
const VMA_SHARED: u64 = 0x8;
const COVERING_OR_NEXT_VMA: u64 = 0x10;
const FILE_BACKED_VMA: u64 = 0x20;
const QUERY_BYTES: u64 = 104;

/// `struct procmap_query` of `linux/fs.h`
#[derive(Default)]
#[repr(C)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

impl From<Query> for Vma {
    fn from(query: Query) -> Self {
        let flag = |bit| query.vma_flags & bit != 0;
        Self {
            range: AddressRange { start: query.vma_start, end: query.vma_end },
            offset: query.vma_offset,
            device: makedev(query.dev_major.into(), query.dev_minor.into()),
            inode: query.inode,
            readable: flag(VMA_READABLE),
            writable: flag(VMA_WRITABLE),
            executable: flag(VMA_EXECUTABLE),
            shared: flag(VMA_SHARED),
        }
    }
}

const _: () = assert!(size_of::<Query>() == 104);
const _: () = assert!(nix::request_code_readwrite!(b'f', 17, size_of::<Query>()) == 0xc068_6611);

#[allow(missing_docs)] // the macro leaves no room for it
mod ioctls {
    nix::ioctl_readwrite!(procmap_query, b'f', 17, super::Query);
}

#[cfg(test)]
mod tests;
