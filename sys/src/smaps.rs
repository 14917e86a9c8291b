//! `/proc/PID/smaps`: page sizes of mappings, and how they are registered with userfaultfd.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek as _};

use nix::errno::Errno;

use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};
use crate::maps::{self, Vma};

/// The mappings of one address space: that of the process at the time of the open.
#[derive(Debug)]
pub struct Smaps {
    file: File,
    path: String,
}

/// A mapping, as far as smaps describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingDetails {
    pub vma: Vma,
    /// `KernelPageSize` in bytes: that of hugetlb pages, or of base pages.
    pub page_bytes: u64,
    /// Registered with a userfaultfd for missing pages (`um` of `VmFlags`).
    pub is_missing_registered: bool,
    /// Registered with a userfaultfd for write protection (`uw`).
    pub is_wp_registered: bool,
    /// Registered with a userfaultfd for minor faults (`ui`).
    pub is_minor_registered: bool,
}

impl Smaps {
    /// Opens the smaps of process `pid`.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not read the process, `ENOENT` if there is none.
    pub fn open(pid: u32) -> Result<Self, SyscallError> {
        let path = format!("/proc/{pid}/smaps");
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// The mappings that have addresses of `range`. The kernel walks the page tables of these and of all mappings before them: about a
    /// millisecond per some hundred MiB. Mappings that change meanwhile may be missing or have their former shape.
    ///
    /// # Errors
    /// `read`; `ESRCH` if the address space no longer exists; `EIO` if the kernel prints no `VmFlags`.
    pub fn within(&mut self, range: AddressRange) -> Result<Vec<MappingDetails>, SyscallError> {
        let Self { file, path } = self;
        file.rewind().call(|| format!("lseek of {path}"))?;
        let parsed = parse(BufReader::new(&*file), range).call(|| format!("read of {path}"))?;
        // The kernel returns end of file instead of ESRCH. A live address space has mappings.
        parsed.ok_or(Errno::ESRCH).call(|| format!("read of {path}"))
    }
}

/// The mappings of a smaps file that have addresses of `range`; `None` if the file is empty.
fn parse(text: impl BufRead, range: AddressRange) -> io::Result<Option<Vec<MappingDetails>>> {
    let (mut found, mut current, mut page_bytes, mut is_empty) = (Vec::new(), None, None, true);
    let malformed = || io::Error::from(Errno::EIO);
    for line in text.split(b'\n') {
        let line = line?;
        is_empty = false;
        if let Some(vma) = maps::parse_line(&line) {
            // VmFlags is the last line of a mapping.
            if current.is_some() {
                return Err(malformed());
            }
            if vma.range.start >= range.end {
                break;
            }
            current = Some(vma).filter(|vma| !vma.range.intersect(range).is_empty());
        } else if let Some(size) = line.strip_prefix(b"KernelPageSize:") {
            page_bytes = kilobytes(size);
        } else if let Some(flags) = line.strip_prefix(b"VmFlags:")
            && let Some(vma) = current.take()
        {
            let has = |flag: &[u8]| flags.split(|byte| *byte == b' ').any(|one| one == flag);
            found.push(MappingDetails {
                vma,
                page_bytes: page_bytes.take().ok_or_else(malformed)?,
                is_missing_registered: has(b"um"),
                is_wp_registered: has(b"uw"),
                is_minor_registered: has(b"ui"),
            });
        }
    }
    if current.is_some() {
        return Err(malformed());
    }
    Ok((!is_empty).then_some(found))
}

/// Bytes of a number like `       4 kB`.
fn kilobytes(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.trim().strip_suffix(" kB")?;
    text.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memfd;
    use crate::uffd::{UffdFeatures, Userfaultfd};

    const TEXT: &[u8] = b"\
7f0000000000-7f0000200000 rw-p 00000000 00:0f 5 /anon_hugepage (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
MMUPageSize:        2048 kB
VmFlags: rd wr mr mw me de ht um
7f0000200000-7f0000201000 rw-p 00000000 00:00 0 VmFlags: ui
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac uw um sd
7f0000201000-7f0000203000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac
";

    #[test]
    fn page_sizes_and_registrations_are_parsed() {
        let of = |start, end| {
            let range = AddressRange { start, end };
            let found = parse(TEXT, range).unwrap().unwrap();
            let short = |one: MappingDetails| {
                (one.page_bytes, one.is_missing_registered, one.is_wp_registered, one.is_minor_registered)
            };
            found.into_iter().map(short).collect::<Vec<_>>()
        };
        let (huge, both, none) =
            ((2 << 20, true, false, false), (4096, true, true, false), (4096, false, false, false));
        assert_eq!(of(0, u64::MAX), [huge, both, none]);
        assert_eq!(of(0x7f00_0020_0000, 0x7f00_0020_1000), [both]);
        assert_eq!(of(0x7f00_0020_2000, 0x7f00_0020_4000), [none]);
        assert_eq!(of(0, 4096), []);
    }

    #[test]
    fn text_without_flags_or_page_sizes_is_refused_and_an_empty_one_is_no_address_space() {
        let all = AddressRange { start: 0, end: u64::MAX };
        assert_eq!(parse(&b""[..], all).unwrap(), None);
        for text in [
            "7f0000200000-7f0000201000 rw-p 00000000 00:00 0 \nKernelPageSize:        4 kB\n",
            "7f0000200000-7f0000201000 rw-p 00000000 00:00 0 \nVmFlags: rd\n",
            "7f0000200000-7f0000201000 rw-p 00000000 00:00 0 \n7f0000201000-7f0000202000 rw-p 00000000 00:00 0 \n",
        ] {
            assert!(parse(text.as_bytes(), all).is_err(), "{text}");
        }
    }

    #[test]
    fn registration_of_an_own_mapping_is_seen() {
        let fd = memfd::create("registered", None).unwrap();
        memfd::resize(std::os::fd::AsFd::as_fd(&fd), 4 * 4096).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 4 * 4096, true).unwrap();
        let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
        let range = AddressRange::at(start, 4 * 4096).unwrap();
        let mut smaps = Smaps::open(std::process::id()).unwrap();
        let mut registered = || {
            let found = smaps.within(range).unwrap();
            assert!(found.iter().all(|one| one.page_bytes == 4096 && one.vma.shared));
            found.iter().filter(|one| one.is_missing_registered).map(|one| one.vma.range).collect::<Vec<_>>()
        };
        assert_eq!(registered(), []);
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(UffdFeatures::empty()).unwrap();
        let half = AddressRange::at(start, 2 * 4096).unwrap();
        uffd.register_missing(half).unwrap();
        assert_eq!(registered(), [half]);
        assert!(uffd.can_poison());
    }
}
