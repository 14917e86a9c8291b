//! Loop devices: which files they have open.

use std::fs;

/// True if a loop device has the file open, or that cannot be told.
#[must_use]
pub fn any_on(device: u64, inode: u64) -> bool {
    let Ok(entries) = fs::read_dir("/sys/block") else { return true };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let is_loop = name.to_str().is_some_and(|name| name.starts_with("loop"));
        // A device without a file has no such folder.
        is_loop && entry.path().join("loop").exists() && may_back(&name.to_string_lossy(), device, inode)
    })
}

/// Without a look at the device, which takes the right to open it, all that is known is that it has some file.
fn may_back(name: &str, device: u64, inode: u64) -> bool {
    fdmap_sys::loop_device::backing_inode(&format!("/dev/{name}"))
        .map_or(true, |backing| backing == (device, inode))
}
