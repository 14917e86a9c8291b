//! Mounts that no other process sees.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::error::{CallContext as _, SyscallError};

/// Moves the calling thread to a mount namespace of its own, whose mounts end with the thread and with the last open file on them.
///
/// # Errors
/// `unshare` or `mount`: without `CAP_SYS_ADMIN`.
pub fn make_private() -> Result<(), SyscallError> {
    unshare(CloneFlags::CLONE_NEWNS).call(|| "unshare(CLONE_NEWNS)".to_owned())?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .call(|| "mount of / as MS_PRIVATE".to_owned())
}
