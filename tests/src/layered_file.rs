//! A file that is written by its path, and through overlayfs.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use fdmap_sys::testing::mounts;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::{HarnessError, HarnessResult};

/// Makes a tmpfs with an overlayfs whose upper layer is in it, and a file of `size` bytes. Moves the calling thread to a mount namespace
/// of its own. Returns the file in the tmpfs, and through overlayfs.
///
/// # Errors
/// A mount, or a call on the files.
pub fn layered_file(folder: &Path, size: u64) -> HarnessResult<(File, File)> {
    mounts::make_private()?;
    open_layers(folder, size).map_err(|error| HarnessError::File {
        what: "layers in",
        path: folder.to_owned(),
        error,
    })
}

fn open_layers(folder: &Path, size: u64) -> io::Result<(File, File)> {
    mount_tmpfs(folder)?;
    let [lower, upper] = [make_layer(folder, "lower")?, make_layer(folder, "upper")?];
    let real = open(&upper.join("file"))?;
    real.set_len(size)?;
    let merged = mount_overlay(folder, &lower, &upper)?;
    let layered = open(&merged.join("file"))?;
    umount2(&merged, MntFlags::MNT_DETACH)?;
    umount2(folder, MntFlags::MNT_DETACH)?;
    Ok((real, layered))
}

/// Makes two overlayfs, one of which is the lower layer of the other, and an empty file in each. Moves the calling thread to a mount
/// namespace of its own. Returns the file of the lower one, and of the one above it.
///
/// # Errors
/// A mount, or a call on the files.
pub fn twice_layered_file(folder: &Path) -> HarnessResult<(File, File)> {
    mounts::make_private()?;
    open_twice_layered(folder).map_err(|error| HarnessError::File {
        what: "layers in",
        path: folder.to_owned(),
        error,
    })
}

fn open_twice_layered(folder: &Path) -> io::Result<(File, File)> {
    mount_tmpfs(folder)?;
    let [below, above] = [make_layer(folder, "below")?, make_layer(folder, "above")?];
    let once = mount_overlay(&below, &make_layer(&below, "lower")?, &make_layer(&below, "upper")?)?;
    let twice = mount_overlay(&above, &once, &make_layer(&above, "upper")?)?;
    let files = (open(&once.join("file"))?, open(&twice.join("other"))?);
    for mounted in [&twice, &once, folder] {
        umount2(mounted, MntFlags::MNT_DETACH)?;
    }
    Ok(files)
}

fn mount_tmpfs(folder: &Path) -> io::Result<()> {
    let none: Option<&str> = None;
    Ok(mount(Some("none"), folder, Some("tmpfs"), MsFlags::empty(), none)?)
}

fn make_layer(folder: &Path, name: &str) -> io::Result<PathBuf> {
    let layer = folder.join(name);
    fs::create_dir(&layer)?;
    Ok(layer)
}

/// Mounts an overlayfs in a new folder in `folder`, and returns its path.
fn mount_overlay(folder: &Path, lower: &Path, upper: &Path) -> io::Result<PathBuf> {
    let [work, merged] = [make_layer(folder, "work")?, make_layer(folder, "merged")?];
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?;
    Ok(merged)
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}
