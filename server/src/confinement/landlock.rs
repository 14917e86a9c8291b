//! Landlock: a thread without access to files, TCP, abstract sockets and other processes.

use std::fs::File;
use std::io::ErrorKind;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr as _, RulesetError, Scope,
};

/// The newest version whose access rights are known here. An older kernel enforces those that it knows.
const NEWEST: ABI = ABI::V6;

/// Denies all that the kernel can deny to the calling thread, and to threads that it starts. A kernel without Landlock denies
/// nothing.
pub(super) fn deny_all() {
    // Fails only if the kernel lacks memory. seccomp refuses the same calls.
    let _ = restrict();
}

/// A rule set without rules permits nothing.
fn restrict() -> Result<LandlockStatus, RulesetError> {
    let denied = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?;
    Ok(denied.create()?.restrict_self()?.landlock)
}

/// Restricts a thread, and opens a folder in it.
pub(crate) fn try_landlock() -> Result<(), String> {
    super::in_a_thread(|| {
        match restrict().map_err(|error| error.to_string())? {
            LandlockStatus::NotEnabled => {
                return Err("Landlock is not in the kernel parameter lsm=".to_owned());
            }
            LandlockStatus::NotImplemented => return Err("this kernel has no Landlock".to_owned()),
            LandlockStatus::Available { .. } => {}
        }
        match File::open("/").map_err(|error| error.kind()) {
            Err(ErrorKind::PermissionDenied) => Ok(()),
            other => Err(format!("open of a folder that Landlock denies returned {other:?}")),
        }
    })
}
