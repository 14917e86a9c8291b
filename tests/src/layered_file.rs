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
    let none: Option<&str> = None;
    mount(Some("none"), folder, Some("tmpfs"), MsFlags::empty(), none)?;
    for layer in ["lower", "upper", "work", "merged"] {
        fs::create_dir(folder.join(layer))?;
    }
    let open = |path: PathBuf| File::options().read(true).write(true).create(true).truncate(false).open(path);
    let real = open(folder.join("upper/file"))?;
    real.set_len(size)?;
    let at = |layer: &str| folder.join(layer).to_string_lossy().into_owned();
    let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
    let merged = folder.join("merged");
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?;
    let layered = open(merged.join("file"))?;
    umount2(&merged, MntFlags::MNT_DETACH)?;
    umount2(folder, MntFlags::MNT_DETACH)?;
    Ok((real, layered))
}
