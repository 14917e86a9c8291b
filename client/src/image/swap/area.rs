//! Opens the block devices of swap areas.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{SwapArea, SwapAreaKind};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::{SyscallError, fd, fiemap};
use nix::libc;
use nix::sys::stat::makedev;
use nix::sys::statfs::{EXT4_SUPER_MAGIC, FsType, fstatfs};

use super::super::PAGE_BYTES;
use super::layout::{DeviceRange, Layout};
use super::scratch::Scratch;

/// `XFS_SUPER_MAGIC` of `linux/magic.h`.
const XFS: FsType = FsType(0x5846_5342);
/// Extents of a swap file. More would be a badly fragmented one.
const MAX_EXTENTS: usize = 1 << 16;
/// The last bytes of the first page of a swap area.
const SIGNATURE: &[u8] = b"SWAPSPACE2";

/// A swap area whose slots can be read.
#[derive(Debug)]
pub(super) struct OpenArea {
    /// Open with `O_DIRECT`: the kernel writes slots past the page cache of the device.
    device: File,
    layout: Layout,
}

/// Why slots of an area cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum AreaError {
    #[error(transparent)]
    Syscall(#[from] SyscallError),
    #[error("swap area {area}: {reason}")]
    Unsupported { area: PathBuf, reason: &'static str },
}

impl OpenArea {
    /// Opens the device of an area. Only an administrator may.
    ///
    /// The device is found by its number in the kernel's swap area, and a file by its inode number: a path of `/proc/swaps` may name
    /// something else in this mount namespace.
    pub(super) fn open(area: &SwapArea, scratch: &mut Scratch) -> Result<Self, AreaError> {
        let unsupported = |reason| AreaError::Unsupported { area: area.path.clone(), reason };
        let (major, minor) = area.device;
        let number = makedev(u64::from(major), u64::from(minor));
        let (device, layout, file) = match area.kind {
            SwapAreaKind::Partition => {
                (open(&area.path, libc::O_DIRECT)?, Layout::device(area.pages + 1), None)
            }
            SwapAreaKind::File => {
                let file = open(&area.path, 0)?;
                let status = file.metadata().call(|| format!("fstat of {}", area.path.display()))?;
                if !status.is_file() || status.dev() != number || status.ino() != area.inode {
                    return Err(unsupported("the path is not that of the swap file"));
                }
                let kind = fstatfs(&file).call(|| format!("fstatfs of {}", area.path.display()))?;
                if ![EXT4_SUPER_MAGIC, XFS].contains(&kind.filesystem_type()) {
                    return Err(unsupported("the file system is neither ext4 nor XFS"));
                }
                let extents = fiemap::extents(file.as_fd(), MAX_EXTENTS)?;
                let layout = Layout::file(&extents).ok_or_else(|| {
                    unsupported("an extent does not consist of whole pages, or is shared, compressed or not allocated")
                })?;
                (open(&device_path(major, minor)?, libc::O_DIRECT)?, layout, Some(file))
            }
        };
        let status = device.metadata().call(|| format!("fstat of the device of {}", area.path.display()))?;
        if !status.file_type().is_block_device() || status.rdev() != number {
            return Err(unsupported("the path of its device is that of another one"));
        }
        let opened = Self { device, layout };
        let mut header = vec![0; to_usize(PAGE_BYTES)];
        opened
            .read(0, 1, scratch, |_, page| header.copy_from_slice(page))
            .ok_or_else(|| unsupported("its header cannot be read from the device"))?;
        let mut in_file = header.clone();
        if let Some(file) = file {
            fd::read_at(file.as_fd(), 0, &mut in_file)?;
        }
        if !header.ends_with(SIGNATURE) || in_file != header {
            return Err(unsupported("the device has no header of a swap area where the file has one"));
        }
        Ok(opened)
    }

    /// Reads consecutive slots, and passes each with its number from 0 to `take`. `None` if not all of them can be read.
    pub(super) fn read(
        &self,
        slot: u64,
        slots: u64,
        scratch: &mut Scratch,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Option<()> {
        let bytes = scratch.bytes(slots);
        let mut rest = &mut bytes[..];
        for DeviceRange { offset, pages } in self.layout.ranges(slot, slots)? {
            let part = rest.split_off_mut(..to_usize(pages * PAGE_BYTES))?;
            let read = fd::read_at(self.device.as_fd(), offset, part).ok()?;
            (read == part.len()).then_some(())?;
        }
        bytes.chunks(to_usize(PAGE_BYTES)).enumerate().for_each(|(number, page)| take(number, page));
        debug_assert_eq!(to_u64(bytes.len()), slots * PAGE_BYTES);
        Some(())
    }
}

/// Opens without waiting for a FIFO or a lease that took the place of the file.
fn open(path: &Path, flags: i32) -> Result<File, SyscallError> {
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .call(|| format!("open of {}", path.display()))
}

/// The node of a block device, as the kernel names it.
fn device_path(major: u32, minor: u32) -> Result<PathBuf, SyscallError> {
    let path = format!("/sys/dev/block/{major}:{minor}/uevent");
    let text = std::fs::read_to_string(&path).call(|| format!("read of {path}"))?;
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let name = name.ok_or(fdmap_sys::Errno::ENODEV).call(|| format!("DEVNAME in {path}"))?;
    Ok(Path::new("/dev").join(name))
}
