//! Which descriptors of clients reach the service.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use fdmap_sys::{memfd, procfile, uffd};

/// Descriptors in one packet: Track has three. The service refuses a packet with more by their number.
const MAX_DESCRIPTORS: usize = 3;

/// True if no process but the kernel can delay calls on these descriptors, and their close: they are files of shmem or hugetlb,
/// userfaultfds, and pagemaps and maps of processes.
pub(super) fn all_reach_the_service(descriptors: &[OwnedFd]) -> bool {
    descriptors.len() <= MAX_DESCRIPTORS && descriptors.iter().all(|fd| reaches_the_service(fd.as_fd()))
}

/// Each check begins with a call that no file system answers; see there.
fn reaches_the_service(fd: BorrowedFd<'_>) -> bool {
    matches!(memfd::shared_memory(fd), Ok(Some(_)))
        || uffd::is_userfaultfd(fd) == Ok(true)
        || ["pagemap", "maps"].iter().any(|name| procfile::check(fd, name).is_ok())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn only_memory_userfaultfds_and_descriptors_of_processes_reach_the_service() {
        let memfd = || memfd::create("passed", None).unwrap();
        let open = |path: &str| OwnedFd::from(File::open(path).unwrap());
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let mut good =
            vec![memfd(), named.into_file().into(), open("/proc/self/pagemap"), open("/proc/self/maps")];
        if let Ok(uffd) = uffd::Userfaultfd::create() {
            good.push(uffd.as_fd().try_clone_to_owned().unwrap());
        }
        for one in good {
            assert!(all_reach_the_service(&[one]));
        }
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let (pipe, _other_end) = nix::unistd::pipe().unwrap();
        let bad = [
            socket.into(),
            pipe,
            open("/proc/self/status"),
            open("/"),
            open("/dev/null"),
            open("/proc/self/exe"),
        ];
        for one in bad {
            assert!(!all_reach_the_service(&[memfd(), one]));
        }
        assert!(all_reach_the_service(&[memfd(), memfd(), memfd()]));
        assert!(!all_reach_the_service(&[memfd(), memfd(), memfd(), memfd()]));
        assert!(all_reach_the_service(&[]));
    }
}
