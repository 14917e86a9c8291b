//! The memfds that the processes of this host have open or mapped, read from `/proc`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use fdmap_sys::maps::Maps;
use fdmap_sys::pidfd::all_processes;

/// `st_dev` and `st_ino`.
pub(super) type Inode = (u64, u64);

/// The inodes of memfds that any process has open or mapped. Ignores the processes `own`, and the descriptors (but not the mappings)
/// of `store_process`. Calls `next` before it reads a process. Returns `None` if the kernel denies a read. May wait for any
/// process.
pub(super) fn inodes_in_use(
    own: &[u32],
    store_process: u32,
    mut next: impl FnMut(u32),
) -> Option<BTreeSet<Inode>> {
    let mut in_use = BTreeSet::new();
    for pid in all_processes().ok()?.into_iter().filter(|pid| !own.contains(pid)) {
        next(pid);
        add_process(pid, store_process != pid, &mut in_use)?;
    }
    Some(in_use)
}

/// Adds the mappings of one process, and its descriptors if `descriptors`. Returns `None` if the kernel denies a read.
fn add_process(pid: u32, descriptors: bool, in_use: &mut BTreeSet<Inode>) -> Option<()> {
    add_thread(pid, descriptors, in_use)?;
    // /proc/PID shows the files of the first thread: none once that thread has exited, while other threads still run.
    if has_exited(pid) {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
        for tid in threads.filter(|tid| *tid != pid) {
            add_thread(tid, descriptors, in_use)?;
        }
    }
    Some(())
}

/// The same for one thread: the kernel has a `/proc/TID` for every thread.
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
    // Kernel threads and zombies have no mappings.
    let vmas = Maps::open(tid).and_then(|maps| maps.all()).unwrap_or_default();
    in_use.extend(vmas.into_iter().filter(|vma| vma.inode != 0).map(|vma| (vma.device, vma.inode)));
    Some(())
}

/// True for a zombie. False if the process does not exist.
fn has_exited(pid: u32) -> bool {
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the command name, which may contain parentheses itself.
    let end = stat.iter().rposition(|byte| *byte == b')');
    end.and_then(|end| stat.get(end + 2)).is_some_and(|state| matches!(state, b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use fdmap_sys::{fd, memfd};

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
        while !has_exited(pid) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut all, mut mapped) = (BTreeSet::new(), BTreeSet::new());
        let found = (has_exited(pid), add_process(pid, true, &mut all), add_process(pid, false, &mut mapped));
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
