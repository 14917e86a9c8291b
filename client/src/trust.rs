//! Who answers on a socket: a process that is trusted with descriptors and memory.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use fdmap_sys::peer;

use crate::ClientError;

/// Write permission of the group or others on a directory.
const SHARED: u32 = 0o022;

/// Checks that the process which listens on a connected socket is one that the caller trusts by the choice of the path: in a directory
/// that only its owner can write to, any process; elsewhere root, the caller's user and the owner of the directory.
///
/// # Errors
/// [`ClientError::Unreachable`] if it belongs to another user, or that cannot be found out.
pub(crate) fn check_service(socket: impl AsFd, path: &Path) -> Result<(), ClientError> {
    let refused = |reason| ClientError::Unreachable { address: path.display().to_string(), reason };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let metadata = std::fs::metadata(folder)
        .map_err(|error| refused(format!("reading the owner of {}: {error}", folder.display())))?;
    if metadata.mode() & SHARED == 0 {
        return Ok(());
    }
    let service = peer::credentials(socket)?.uid;
    if is_trusted(service, nix::unistd::geteuid().as_raw(), metadata.uid()) {
        return Ok(());
    }
    Err(refused(format!(
        "user {service} listens there, and other users than its owner can write to {}",
        folder.display()
    )))
}

/// Pure.
const fn is_trusted(service: u32, own: u32, owner_of_folder: u32) -> bool {
    service == 0 || service == own || service == owner_of_folder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stranger_is_not_trusted_in_a_shared_folder() {
        for (service, own, owner, trusted) in
            [(0, 5, 7, true), (5, 5, 7, true), (7, 5, 7, true), (6, 5, 7, false), (6, 0, 0, false)]
        {
            assert_eq!(is_trusted(service, own, owner), trusted, "{service} {own} {owner}");
        }
    }
}
