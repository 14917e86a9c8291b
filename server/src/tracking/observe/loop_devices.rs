//! Loop devices: which files they have open.

use std::fs;

/// True if a loop device has the file open, or if this is unknown. A loop device writes through a descriptor of its own, and
/// raises no event.
pub(crate) fn any_has_open(device: u64, inode: u64) -> bool {
    let Ok(entries) = fs::read_dir("/sys/block") else { return true };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let is_loop = name.to_str().is_some_and(|name| name.starts_with("loop"));
        // A loop device without a file has no such folder.
        is_loop && entry.path().join("loop").exists() && may_have_open(&name.to_string_lossy(), device, inode)
    })
}

/// To read the backing file takes the right to open the device. Without it the device may have any file open.
fn may_have_open(name: &str, device: u64, inode: u64) -> bool {
    fdmap_sys::loop_device::backing_inode(&format!("/dev/{name}"))
        .map_or(true, |backing| backing == (device, inode))
}
