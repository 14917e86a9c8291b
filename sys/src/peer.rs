//! Credentials of the peer of a unix socket, as reported by the kernel.

use std::os::fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

use crate::error::{CallContext, SyscallError};
use crate::pidfd::{self, PidFd};

/// Credentials of the peer process at the time it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id; 0 if the process is outside the caller's pid namespace.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// Reads the credentials of the peer of a connected unix socket.
///
/// # Errors
/// `getsockopt`.
pub fn credentials(socket: impl AsFd) -> Result<PeerCredentials, SyscallError> {
    let raw = socket.as_fd().as_raw_fd();
    let peer = getsockopt(&socket, sockopt::PeerCredentials)
        .call(|| format!("getsockopt(SO_PEERCRED) of descriptor {raw}"))?;
    Ok(PeerCredentials { pid: peer.pid(), uid: peer.uid(), gid: peer.gid(), groups: groups(raw)? })
}

/// The peer process at the time it connected, also after its pid was reused. `None`: it has exited, or it is outside of the caller's
/// pid namespace.
///
/// # Errors
/// `getsockopt`, `pidfd_open`
pub fn process(socket: impl AsFd) -> Result<Option<PidFd>, SyscallError> {
    // asm-generic/socket.h, since Linux 6.5
    const SO_PEERPIDFD: nix::libc::c_int = 77;
    let raw = socket.as_fd().as_raw_fd();
    let (mut fd, mut length) = (-1_i32, 4);
    // SAFETY: the kernel writes at most `length` bytes, the size of `fd`, and updates `length`.
    let result = unsafe {
        nix::libc::getsockopt(raw, nix::libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut length)
    };
    match Errno::result(result) {
        // SAFETY: the kernel returned this new descriptor (close-on-exec), and nothing else owns it.
        Ok(_) => Ok(Some(PidFd::from(unsafe { OwnedFd::from_raw_fd(fd) }))),
        Err(Errno::ENOPROTOOPT) => {
            let peer = getsockopt(&socket, sockopt::PeerCredentials)
                .call(|| format!("getsockopt(SO_PEERCRED) of descriptor {raw}"))?;
            match u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0).map(pidfd::open) {
                None => Ok(None),
                Some(Err(error)) if error.errno == Errno::ESRCH => Ok(None),
                Some(opened) => opened.map(Some),
            }
        }
        Err(Errno::ESRCH | Errno::EINVAL | Errno::ENODATA) => Ok(None),
        Err(errno) => Err(errno).call(|| format!("getsockopt(SO_PEERPIDFD) of descriptor {raw}")),
    }
}

fn groups(socket: i32) -> Result<Vec<u32>, SyscallError> {
    let call = || format!("getsockopt(SO_PEERGROUPS) of descriptor {socket}");
    let mut groups = vec![0_u32; 32];
    loop {
        let bytes = groups.len() * size_of::<u32>();
        let mut length = nix::libc::socklen_t::try_from(bytes).map_err(|_| Errno::ERANGE).call(call)?;
        // SAFETY: the kernel writes at most `length` bytes, the size of `groups`, and updates `length`.
        let result = unsafe {
            nix::libc::getsockopt(
                socket,
                nix::libc::SOL_SOCKET,
                nix::libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let needed = usize::try_from(length).unwrap_or(0) / size_of::<u32>();
        match Errno::result(result) {
            Ok(_) => {
                groups.truncate(needed);
                return Ok(groups);
            }
            // The kernel stored the required size in `length`; NGROUPS_MAX is 65536.
            Err(Errno::ERANGE) if needed > groups.len() => groups.resize(needed, 0),
            Err(errno) => return Err(errno).call(call),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_of_an_own_socketpair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = credentials(&one).unwrap();
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(peer.pid, nix::unistd::getpid().as_raw());
        assert!(!process(&one).unwrap().unwrap().exited().unwrap());
        let mut own: Vec<_> = nix::unistd::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        let mut reported = peer.groups;
        own.sort_unstable();
        reported.sort_unstable();
        assert_eq!(reported, own);
    }
}
