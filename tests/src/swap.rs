//! Swap for tests: a zram device if the host has zram, else a file.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

pub use crate::swap_areas::{AreaInfo, areas};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::host::{output, read, root, write};
use crate::{HarnessError, HarnessResult};

/// The highest priority that swapon(8) accepts.
const MAX_PRIORITY: i32 = 32767;

/// A swap area. Dropping it switches the area off, which swaps its pages in.
#[derive(Debug)]
pub struct Swap {
    /// Dropped before the area.
    on: Option<CleanupGuard>,
    area: Option<Area>,
    pages: u64,
}

#[derive(Debug)]
enum Area {
    /// A zram device that this process added.
    Zram { path: PathBuf, _device: CleanupGuard },
    /// A file that this process created.
    File { path: PathBuf, _folder: CleanupGuard },
    /// A file on an ext4 file system that this process made on a loop device.
    Ext4 {
        path: PathBuf,
        /// Dropped before the folder, the device and its image.
        _mount: CleanupGuard,
        _folder: CleanupGuard,
        _device: CleanupGuard,
        _image: CleanupGuard,
    },
    /// A loop device over such a file.
    Loop { path: PathBuf, file: PathBuf, _device: CleanupGuard, _folder: CleanupGuard },
}

/// The kind of a new area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapKind {
    /// A zram device if the host has zram, else a file.
    Any,
    /// A file.
    File,
    /// A file on an ext4 file system of its own, on a loop device. The size of its blocks, in bytes.
    Ext4(u32),
    /// A loop device over a file, for [`Swap::break_it`].
    Loop,
}

impl Swap {
    /// Provides at least `bytes` of free swap: the swap of the host, or a new area with the highest priority.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without root.
    pub fn at_least(bytes: u64) -> HarnessResult<Self> {
        let free: u64 = areas()?.iter().map(|area| area.free_bytes).sum();
        if free >= bytes {
            let pages = areas()?.iter().map(|area| area.bytes / 4096).sum();
            return Ok(Self { on: None, area: None, pages });
        }
        Self::make(bytes, SwapKind::Any)
    }

    /// Creates an area of `bytes`, with a higher priority than each area of the host: the kernel fills this one first.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without root.
    pub fn make(bytes: u64, kind: SwapKind) -> HarnessResult<Self> {
        root()?;
        let area = match kind {
            SwapKind::Any => match Area::zram(bytes) {
                Err(HarnessError::Missing(_)) => Area::file(bytes)?,
                other => other?,
            },
            SwapKind::File => Area::file(bytes)?,
            SwapKind::Ext4(block) => Area::ext4(bytes, block)?,
            SwapKind::Loop => Area::loop_device(bytes)?,
        };
        let path = area.path();
        let shown = path.to_string_lossy();
        output("mkswap", &[&shown])?;
        let on = CleanupGuard::new(Cleanup::SwapOff(path.to_owned()))?;
        let highest = areas()?.iter().map(|area| area.priority).max().unwrap_or(-1);
        let priority = highest.max(-1).saturating_add(1).min(MAX_PRIORITY).to_string();
        output("swapon", &["--priority", &priority, &shown])?;
        Ok(Self { on: Some(on), pages: bytes / 4096, area: Some(area) })
    }

    /// True if this process created the area.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        self.on.is_some()
    }

    /// The device or file, for messages.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.area {
            None => "swap of the host".to_owned(),
            Some(area) => area.path().display().to_string(),
        }
    }

    /// Makes every read of a loop area fail from now on, by truncating its file.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] for other areas.
    pub fn break_it(&self) -> HarnessResult<()> {
        let Some(Area::Loop { file, .. }) = &self.area else {
            return Err(HarnessError::Missing("a loop device to break".to_owned()));
        };
        let failed = |error| HarnessError::File { what: "truncating", path: file.clone(), error };
        OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(0)).map_err(failed)
    }

    /// The size in pages.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }
}

impl Area {
    fn zram(bytes: u64) -> HarnessResult<Self> {
        // Reading hot_add adds a device and returns its number.
        let number = read("/sys/class/zram-control/hot_add")
            .map_err(|_| HarnessError::Missing("zram devices that can be added".to_owned()))?;
        let number: u32 = number
            .trim()
            .parse()
            .map_err(|_| HarnessError::Missing(format!("a zram number in {number:?}")))?;
        let device = CleanupGuard::new(Cleanup::RemoveZram(number))?;
        write(format!("/sys/block/zram{number}/disksize"), &bytes.to_string())?;
        Ok(Self::Zram { path: format!("/dev/zram{number}").into(), _device: device })
    }

    fn file(bytes: u64) -> HarnessResult<Self> {
        let (folder, guard) = crate::host::temp_dir("fdmap-swap-")?;
        let path = folder.join("swap");
        Self::write_file(&path, bytes)?;
        Ok(Self::File { path, _folder: guard })
    }

    fn write_file(path: &Path, bytes: u64) -> HarnessResult<()> {
        let failed = |error| HarnessError::File { what: "creating", path: path.to_owned(), error };
        let mut options = OpenOptions::new();
        let mut file: File = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        // Written, not fallocated: unwritten extents read back as zeroes through the file system.
        let zeroes = vec![0; 1 << 20];
        for _ in 0..bytes.div_ceil(1 << 20) {
            file.write_all(&zeroes).map_err(failed)?;
        }
        file.sync_all().map_err(failed)
    }

    fn ext4(bytes: u64, block: u32) -> HarnessResult<Self> {
        // The file system needs some space for itself.
        let Self::Loop { path: device, _device, _folder, .. } =
            Self::loop_device(bytes + bytes / 8 + (16 << 20))?
        else {
            return Err(HarnessError::Missing("a loop device".to_owned()));
        };
        let shown = device.to_string_lossy();
        output("mkfs.ext4", &["-q", "-b", &block.to_string(), "-m", "0", "-O", "^has_journal", &shown])?;
        let (folder, guard) = crate::host::temp_dir("fdmap-ext4-")?;
        output("mount", &[&shown, &folder.to_string_lossy()])?;
        let _mount = CleanupGuard::new(Cleanup::Unmount(folder.clone()))?;
        let path = folder.join("swap");
        Self::write_file(&path, bytes)?;
        Ok(Self::Ext4 { path, _mount, _device, _image: _folder, _folder: guard })
    }

    fn loop_device(bytes: u64) -> HarnessResult<Self> {
        let Self::File { path: file, _folder } = Self::file(bytes)? else {
            return Err(HarnessError::Missing("a file".to_owned()));
        };
        let device = output("losetup", &["--find", "--show", "--direct-io=on", &file.to_string_lossy()])?;
        let path = PathBuf::from(device.trim());
        let device = CleanupGuard::new(Cleanup::DetachLoop(path.clone()))?;
        Ok(Self::Loop { path, file, _device: device, _folder })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Zram { path, .. }
            | Self::File { path, .. }
            | Self::Ext4 { path, .. }
            | Self::Loop { path, .. } => path,
        }
    }
}
