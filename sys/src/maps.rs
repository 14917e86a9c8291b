//! `/proc/PID/maps`: the mappings of an address space, by `PROCMAP_QUERY` or by its text.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use nix::errno::Errno;
use nix::sys::stat::makedev;

use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};

/// The mappings of one address space: the one that the process had when it was opened.
#[derive(Debug)]
pub struct Maps {
    file: File,
    path: String,
}

/// A virtual memory area, as the kernel calls one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vma {
    /// Where it lies.
    pub range: AddressRange,
    /// The offset in the file at which it begins, bytes; 0 without a file.
    pub offset: u64,
    /// The file's device, as `st_dev` of stat(2); 0 without a file.
    pub device: u64,
    /// The file's inode number; 0 without a file.
    pub inode: u64,
    /// May be read now.
    pub readable: bool,
    /// May be written now. If not, mprotect may change that: see [`may_write`].
    pub writable: bool,
    /// May be executed now.
    pub executable: bool,
    /// `MAP_SHARED`: writes reach the file.
    pub shared: bool,
}

impl Maps {
    /// Of process `pid`.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not look into that process, `ENOENT` if there is none.
    pub fn open(pid: u32) -> Result<Self, SyscallError> {
        let path = format!("/proc/{pid}/maps");
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// Of the process that somebody opened it of. The kernel checked the rights of who opened it and asks nobody else.
    ///
    /// # Errors
    /// `EINVAL` if it is no `/proc/PID/maps`, `EBADF` if it cannot be read; else `fcntl`, `fstatfs` or `readlink`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        crate::procfile::check(fd.as_fd(), "maps")?;
        let path = format!("the maps in descriptor {}", fd.as_raw_fd());
        Ok(Self { file: fd.into(), path })
    }

    /// A second descriptor of the same.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let file = self.file.try_clone().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of {}", self.path))?;
        Ok(Self { file, path: self.path.clone() })
    }

    /// The mapping that holds `address`, or the next one after it; only those of files, shmem and hugetlb included, if
    /// `file_backed`. `None` if there is none.
    ///
    /// # Errors
    /// `PROCMAP_QUERY`: `ENOTTY` before Linux 6.11, `ESRCH` if the address space is gone, by exit or by exec.
    pub fn vma_at_or_after(&self, address: u64, file_backed: bool) -> Result<Option<Vma>, SyscallError> {
        let mut query = Query {
            size: QUERY_BYTES,
            query_flags: COVERING_OR_NEXT_VMA | if file_backed { FILE_BACKED_VMA } else { 0 },
            query_addr: address,
            ..Query::default()
        };
        // SAFETY: query is laid out as the kernel's struct procmap_query and says its size; it asks for no name and no
        // build id, so the kernel writes nowhere else.
        match unsafe { ioctls::procmap_query(self.file.as_raw_fd(), &raw mut query) } {
            Err(Errno::ENOENT) => Ok(None),
            Ok(_) => Ok(Some(query.into())),
            Err(errno) => Err(errno).call(|| format!("PROCMAP_QUERY({address:#x}) of {}", self.path)),
        }
    }

    /// All mappings, by reading the text, which works on all kernels.
    ///
    /// The text comes in pieces of about a page, between which the process may change its mappings. The kernel promises that
    /// what was mapped all the time is told, and that no address is told twice; what was mapped or unmapped meanwhile may be
    /// missing, and mappings that were split or joined meanwhile may be told in part as they were.
    ///
    /// # Errors
    /// `pread`; `ESRCH` if the address space is gone, by exit or by exec, or never was, as for threads of the kernel;
    /// `EIO` for a line that cannot be understood: others who share the descriptor can have that effect by reading too.
    pub fn all(&self) -> Result<Vec<Vma>, SyscallError> {
        const PIECE: usize = 1 << 16;
        let mut text = Vec::new();
        let mut filled = 0;
        loop {
            text.resize(filled + PIECE, 0);
            // By offset, since whoever passed the descriptor shares its position.
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
            // The kernel says nothing rather than ESRCH; a living address space has mappings.
            return Err(Errno::ESRCH).call(|| format!("pread of {}", self.path));
        }
        parse(&text).ok_or(Errno::EIO).call(|| format!("understanding {}", self.path))
    }

    /// All shared mappings of the file with this `st_dev` and inode number. What holds for [`Self::all`] while mappings
    /// change holds here.
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

/// True when process `pid` can write to the file through `vma`: now, or as soon as it calls mprotect.
///
/// Unless it is writable now, this reads `smaps` up to there, for which the kernel walks the page tables of all that comes
/// before: a millisecond for each some hundred MiB. Not the mode of `/proc/PID/map_files/START-END`, which shows how the file
/// was opened at once: it stays as it was at the first look when another file is mapped at the same addresses later.
///
/// # Errors
/// `open` or `read` of `/proc/PID/smaps`: `EACCES` if the caller may not look into that process, `ENOENT` if there is none;
/// `ENOENT` too if the mapping is not there any more as it was.
pub fn may_write(pid: u32, vma: &Vma) -> Result<bool, SyscallError> {
    if !vma.shared || vma.writable {
        return Ok(vma.shared);
    }
    let path = format!("/proc/{pid}/smaps");
    let smaps = File::open(&path).call(|| format!("open of {path}"))?;
    let may = flag_in_smaps(BufReader::new(smaps), vma, b"mw").call(|| format!("read of {path}"))?;
    may.ok_or(Errno::ENOENT).call(|| format!("looking for {} in {path}", vma.range))
}

/// Whether a mapping has one of the `VmFlags`, `mw` for `VM_MAYWRITE`; `None` if it is not there.
fn flag_in_smaps(smaps: impl BufRead, vma: &Vma, flag: &[u8]) -> io::Result<Option<bool>> {
    let place = |vma: &Vma| (vma.range, vma.offset, vma.device, vma.inode, vma.shared);
    let mut within = false;
    for line in smaps.split(b'\n') {
        let line = line?;
        if let Some(next) = parse_line(&line) {
            within = place(&next) == place(vma);
        } else if let (true, Some(flags)) = (within, line.strip_prefix(b"VmFlags:")) {
            return Ok(Some(flags.split(|byte| *byte == b' ').any(|one| one == flag)));
        }
    }
    Ok(None)
}

/// The lines of a maps file; `None` if one of them is none. Pure.
fn parse(text: &[u8]) -> Option<Vec<Vma>> {
    text.strip_suffix(b"\n")?.split(|byte| *byte == b'\n').map(parse_line).collect()
}

/// `start-end rwxp offset major:minor inode   name`; all numbers but the inode's are hexadecimal. The name is not looked at:
/// it may hold anything but a line feed, which the kernel escapes.
fn parse_line(line: &[u8]) -> Option<Vma> {
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
