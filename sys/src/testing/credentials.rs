//! Credentials of a single thread.

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext as _, SyscallError};

/// Makes the calling thread, and no other, one of the given user with this group and no supplementary ones, for good. In the kernel
/// credentials belong to threads: the functions of the C library change those of all threads, these raw system calls do not. Threads
/// that this one creates inherit them.
///
/// # Errors
/// `setgroups`, `setresgid` or `setresuid`: `EPERM` without `CAP_SETGID` and `CAP_SETUID`.
pub fn become_user(uid: u32, gid: u32) -> Result<(), SyscallError> {
    // SAFETY: a list of no groups is not read, so its address may be null.
    let cleared = unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) };
    Errno::result(cleared).call(|| "setgroups of none".to_owned())?;
    // SAFETY: the call takes three integers. It changes no memory of the process.
    let set = unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) };
    Errno::result(set).call(|| format!("setresgid to {gid}"))?;
    // SAFETY: as above.
    let set = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
    Errno::result(set).map(drop).call(|| format!("setresuid to {uid}"))
}

#[cfg(test)]
mod tests {
    mod needs_root {
        use nix::unistd::{geteuid, getgroups};

        use super::super::become_user;

        #[test]
        fn other_threads_keep_their_user() {
            let inherited = std::thread::spawn(|| {
                become_user(20_001, 65_534).unwrap();
                std::thread::spawn(|| (geteuid().as_raw(), getgroups().unwrap().len())).join().unwrap()
            });
            assert_eq!(inherited.join().unwrap(), (20_001, 0));
            assert!(geteuid().is_root());
        }
    }
}
