//! Files that were given until nobody uses them: as the memfds of programs that know nothing of the service, which would
//! hold on to their memory for good.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::{FileId, to_u64};
use fdmap_sys::maps::Maps;
use fdmap_sys::pidfd::all_processes;

use crate::store::FdStore;

/// Such files at a time: each takes descriptors of the service, and a program that makes memfds all the while is to leave some to others.
const MOST: usize = 512;
/// Where there is no room, how often is looked for some.
const OFTEN: Duration = Duration::from_secs(1);

/// `st_dev` and `st_ino`
type Inode = (u64, u64);

/// Files that were given until nobody uses them.
#[derive(Debug, Default)]
pub struct EphemeralFiles {
    files: Mutex<BTreeMap<FileId, Entry>>,
    /// When was last looked for room.
    looked: Mutex<Option<Instant>>,
    /// Held for as long as a look goes on: it takes long, and two at once would be one.
    looking: Mutex<()>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    inode: Inode,
    /// Nobody had it when it was last looked for.
    idle: bool,
    /// It was handed out since the look began that goes on, which may have missed it.
    handed_out: bool,
}

impl EphemeralFiles {
    /// Another one.
    pub fn add(&self, file: FileId, inode: Inode) {
        self.lock().insert(file, Entry { inode, idle: false, handed_out: true });
    }

    /// Somebody is given a descriptor of it. Whoever gives it must look afterwards whether the file is still there.
    pub fn hand_out(&self, file: FileId) {
        if let Some(entry) = self.lock().get_mut(&file) {
            entry.handed_out = true;
        }
    }

    /// How many there may be, if there are as many.
    #[must_use]
    pub fn full(&self) -> Option<u64> {
        (self.lock().len() >= MOST).then_some(to_u64(MOST))
    }

    /// True if it is time to look whether there is room: not too often.
    #[must_use]
    pub fn may_look(&self) -> bool {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let may = looked.is_none_or(|looked| looked.elapsed() >= OFTEN);
        if may {
            *looked = Some(Instant::now());
        }
        may
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileId, Entry>> {
        // Nothing panics while it is held.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `let_go` let go of those that nobody had, neither now nor at the time before; a descriptor that is under way from one
    /// process to another is nowhere to be seen. Gives what it gave.
    pub fn sweep<T>(&self, let_go: impl FnMut(FileId) -> Option<T>) -> Vec<T> {
        let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = self.lock();
        if files.is_empty() {
            return Vec::new();
        }
        for entry in files.values_mut() {
            entry.handed_out = false;
        }
        drop(files);
        // Who keeps our descriptors for the next process of the service is our parent. Any other parent is a user as all are: a
        // shell that started the service in the background and became the program that makes files.
        let keeper = FdStore::from_env().is_some().then(std::os::unix::process::parent_id);
        let Some(used) = used(std::process::id(), keeper) else { return Vec::new() };
        // Under the lock: who is handed one before is seen here, and who comes after it finds the file gone.
        let mut files = self.lock();
        settle(&mut files, &used).into_iter().filter_map(let_go).collect()
    }
}

/// Pure.
fn settle(files: &mut BTreeMap<FileId, Entry>, used: &BTreeSet<Inode>) -> Vec<FileId> {
    let mut over = Vec::new();
    files.retain(|file, entry| {
        let idle = !entry.handed_out && !used.contains(&entry.inode);
        if idle && entry.idle {
            over.push(*file);
            return false;
        }
        entry.idle = idle;
        true
    });
    over
}

/// Inodes of memfds that processes have open or mapped, but for our own; of `keeper` only what it has mapped. `None` if it cannot
/// be known.
fn used(own: u32, keeper: Option<u32>) -> Option<BTreeSet<Inode>> {
    let mut used = BTreeSet::new();
    for pid in all_processes().ok()?.into_iter().filter(|pid| *pid != own) {
        used_by(pid, keeper != Some(pid), &mut used)?;
    }
    Some(used)
}

/// What one process has mapped, and has open if `descriptors`. `None` if it cannot be known.
fn used_by(pid: u32, descriptors: bool, used: &mut BTreeSet<Inode>) -> Option<()> {
    used_by_thread(pid, descriptors, used)?;
    // A process shows what its first thread has, which is nothing when that one has ended. The others may go on.
    if has_ended(pid) {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
        for tid in threads.filter(|tid| *tid != pid) {
            used_by_thread(tid, descriptors, used)?;
        }
    }
    Some(())
}

/// The same of a thread: the kernel has a folder of its own for each.
fn used_by_thread(tid: u32, descriptors: bool, used: &mut BTreeSet<Inode>) -> Option<()> {
    if descriptors {
        let alive = || fs::exists(format!("/proc/{tid}")).unwrap_or(true);
        let Ok(folder) = fs::read_dir(format!("/proc/{tid}/fd")) else {
            return (!alive()).then_some(());
        };
        for number in folder.flatten() {
            // Not every file may be looked at without waiting for whoever serves it.
            let memfd = fs::read_link(number.path())
                .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"));
            if memfd && let Ok(stat) = fs::metadata(number.path()) {
                used.insert((stat.dev(), stat.ino()));
            }
        }
    }
    // Threads of the kernel and the dead have none.
    let vmas = Maps::open(tid).and_then(|maps| maps.all()).unwrap_or_default();
    used.extend(vmas.into_iter().filter(|vma| vma.inode != 0).map(|vma| (vma.device, vma.inode)));
    Some(())
}

/// True for a zombie. Of one that is gone nothing is to be had either.
fn has_ended(pid: u32) -> bool {
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before may have parentheses of its own.
    let end = stat.iter().rposition(|byte| *byte == b')');
    end.and_then(|end| stat.get(end + 2)).is_some_and(|state| matches!(state, b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};

    use fdmap_sys::{fd, memfd};

    use super::*;

    #[test]
    fn file_is_over_when_nobody_had_it_twice() {
        let [mine, other] = [7, 8].map(|id| FileId::new(id).unwrap());
        let lent = EphemeralFiles::default();
        lent.add(mine, (1, 10));
        lent.add(other, (1, 11));
        assert_eq!(settle(&mut lent.lock(), &BTreeSet::new()), []);
        assert_eq!(settle(&mut lent.lock(), &BTreeSet::new()), [], "they came in while it was looked");
        let mut files = lent.lock();
        files.values_mut().for_each(|entry| entry.handed_out = false);
        let both = BTreeSet::from([(1, 10), (1, 11)]);
        let one = BTreeSet::from([(1, 11)]);
        assert_eq!(settle(&mut files, &both), []);
        assert_eq!(settle(&mut files, &one), []);
        assert_eq!(settle(&mut files, &both), [], "it was seen again");
        assert_eq!(settle(&mut files, &one), []);
        assert_eq!(settle(&mut files, &one), [mine]);
        assert_eq!(settle(&mut files, &one), []);
        drop(files);
        let none = BTreeSet::new();
        assert_eq!(settle(&mut lent.lock(), &none), []);
        lent.hand_out(other);
        assert_eq!(settle(&mut lent.lock(), &none), [], "it was handed out while it was looked");
    }

    #[test]
    fn open_memfds_are_seen() {
        let memfd = memfd::create("lent", None).unwrap();
        let stat = fd::stat(memfd.as_fd()).unwrap();
        // Others' processes may be closed to us.
        if let Some(used) = used(0, None) {
            assert!(used.contains(&(stat.st_dev, stat.st_ino)));
        }
    }

    /// Maps one memfd and closes it, has another one open, and ends its first thread.
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
    fn process_whose_first_thread_has_ended_is_a_user() {
        let mut python = Command::new("python3");
        python.args(["-c", WITHOUT_FIRST_THREAD]).stdout(Stdio::piped());
        let Ok(mut child) = python.spawn() else {
            assert!(std::env::var_os("FDMAP_REQUIRE_ALL").is_none(), "there is no python3");
            return;
        };
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
        while !has_ended(pid) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut all, mut mapped) = (BTreeSet::new(), BTreeSet::new());
        let known = (has_ended(pid), used_by(pid, true, &mut all), used_by(pid, false, &mut mapped));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(known, (true, Some(()), Some(())));
        assert!(inodes.len() == 2 && inodes.iter().all(|inode| all.contains(inode)), "{inodes:?}");
        assert!(
            mapped.contains(&inodes[0]) && !mapped.contains(&inodes[1]),
            "who keeps descriptors has none"
        );
    }
}
