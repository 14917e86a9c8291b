//! The memfds that the processes of this host have open or mapped, read from `/proc`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use fdmap_sys::Errno;
use fdmap_sys::maps::Maps;
use fdmap_sys::pidfd::{all_processes, read_threads};

use crate::own_program::search_process::Inode;

/// The inodes of memfds that any process has open or mapped. Ignores the processes `own`, and the descriptors (but not the mappings)
/// of `store_process`. Calls `next` before it reads a process. Returns `None` if the kernel denies a read. May wait for any
/// process.
pub(super) fn inodes_in_use(
    own: &[u32],
    store_process: u32,
    mut next: impl FnMut(u32),
) -> Option<BTreeSet<Inode>> {
    let mut in_use = BTreeSet::new();
    let mut seen: BTreeSet<u32> = own.iter().copied().collect();
    loop {
        let listed = all_processes().ok()?;
        let unseen: Vec<_> = listed.into_iter().filter(|pid| seen.insert(*pid)).collect();
        // A process that ended or executed a program before it was read may have left its memory to one that was not listed.
        if unseen.is_empty() {
            return Some(in_use);
        }
        for pid in unseen {
            next(pid);
            read_threads(pid, |tid| add_thread(tid, store_process != pid, &mut in_use))?;
        }
    }
}

/// Adds the mappings that `/proc/TID` shows, and the descriptors if `descriptors`. Returns `None` if the kernel denies a read.
fn add_thread(tid: u32, descriptors: bool, in_use: &mut BTreeSet<Inode>) -> Option<()> {
    if descriptors {
        let alive = || fs::exists(format!("/proc/{tid}")).unwrap_or(true);
        let Ok(folder) = fs::read_dir(format!("/proc/{tid}/fd")) else {
            return (!alive()).then_some(());
        };
        for number in folder.flatten() {
            // Call stat(2) on memfds only: on a FUSE or NFS file it may block.
            let memfd = fs::read_link(number.path())
                .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"));
            if memfd && let Ok(stat) = fs::metadata(number.path()) {
                in_use.insert((stat.dev(), stat.ino()));
            }
        }
    }
    let vmas = match Maps::open(tid).and_then(|maps| maps.all()) {
        // Kernel threads have no mappings, and neither have threads that exit. A process that not even root may trace, as process 1 of
        // some hosts, counts as no user.
        Err(error) if matches!(error.errno, Errno::ENOENT | Errno::ESRCH | Errno::EACCES) => Vec::new(),
        other => other.ok()?,
    };
    in_use.extend(vmas.into_iter().filter(|vma| vma.inode != 0).map(|vma| (vma.device, vma.inode)));
    Some(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use fdmap_sys::{fd, memfd, pidfd};

    use super::*;

    #[test]
    fn open_memfd_is_in_use() {
        let memfd = memfd::create("ephemeral", None).unwrap();
        let stat = fd::stat(memfd.as_fd()).unwrap();
        // Without privileges, other users' processes are unreadable.
        let mut read = Vec::new();
        if let Some(in_use) = inodes_in_use(&[], 0, |pid| read.push(pid)) {
            assert!(read.contains(&std::process::id()));
            assert!(in_use.contains(&(stat.st_dev, stat.st_ino)));
        }
    }

    /// Maps one memfd and closes it, keeps another one open, and exits its first thread.
    const WITHOUT_FIRST_THREAD: &str = "
import ctypes, mmap, os, threading, time
mapped, opened = os.memfd_create('mapped'), os.memfd_create('opened')
os.ftruncate(mapped, 4096)
memory = mmap.mmap(mapped, 4096)
for fd in (mapped, opened):
    print(os.fstat(fd).st_dev, os.fstat(fd).st_ino, flush=True)
os.close(mapped)
threading.Thread(target=time.sleep, args=(60,)).start()
SYS_exit = 60 if os.uname().machine == 'x86_64' else 93
ctypes.CDLL(None).syscall(SYS_exit, 0)
";

    #[test]
    fn process_without_its_first_thread_is_a_user() {
        let mut python = Command::new("python3");
        python.args(["-c", WITHOUT_FIRST_THREAD]).stdout(Stdio::piped());
        let mut child = python.spawn().expect("python3 runs");
        let pid = child.id();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(2);
        let inodes: Vec<Inode> = lines
            .map(|line| {
                let line = line.unwrap();
                let (device, inode) = line.split_once(' ').unwrap();
                (device.parse().unwrap(), inode.parse().unwrap())
            })
            .collect();
        let until = Instant::now() + Duration::from_secs(20);
        let has_exited = || pidfd::has_exited(pid).unwrap();
        while !has_exited() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut all, mut mapped) = (BTreeSet::new(), BTreeSet::new());
        let add = |descriptors, in_use: &mut _| read_threads(pid, |tid| add_thread(tid, descriptors, in_use));
        let found = (has_exited(), add(true, &mut all), add(false, &mut mapped));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, (true, Some(()), Some(())));
        assert!(inodes.len() == 2 && inodes.iter().all(|inode| all.contains(inode)), "{inodes:?}");
        assert!(
            mapped.contains(&inodes[0]) && !mapped.contains(&inodes[1]),
            "without descriptors, only the mapped memfd is in use"
        );
    }
}
