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

/// Such files at a time: each takes descriptors of the service, and a program that makes memfds all the while is to leave some to others.
const MOST: usize = 512;
/// Where there is no room, how often is looked for some.
const OFTEN: Duration = Duration::from_secs(1);

/// `st_dev` and `st_ino`
type Inode = (u64, u64);

/// Files that were given until nobody uses them.
#[derive(Debug, Default)]
pub struct Lent {
    files: Mutex<BTreeMap<FileId, Entry>>,
    /// When was last looked for room.
    looked: Mutex<Option<Instant>>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    inode: Inode,
    /// Nobody had it when it was last looked for.
    idle: bool,
}

impl Lent {
    /// Another one.
    pub fn add(&self, file: FileId, inode: Inode) {
        self.lock().insert(file, Entry { inode, idle: false });
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

    /// Those that nobody had, neither now nor at the time before; a descriptor that is under way from one process to another
    /// is nowhere to be seen. They are told once.
    pub fn sweep(&self) -> Vec<FileId> {
        let mut files = self.lock();
        if files.is_empty() {
            return Vec::new();
        }
        // Those that came in between are not known to be idle.
        // Our parent may be who keeps our descriptors for the next process of the service.
        let own = [std::process::id(), std::os::unix::process::parent_id()];
        let Some(used) = used(&own) else { return Vec::new() };
        settle(&mut files, &used)
    }
}

/// Pure.
fn settle(files: &mut BTreeMap<FileId, Entry>, used: &BTreeSet<Inode>) -> Vec<FileId> {
    let mut over = Vec::new();
    files.retain(|file, entry| {
        let idle = !used.contains(&entry.inode);
        if idle && entry.idle {
            over.push(*file);
            return false;
        }
        entry.idle = idle;
        true
    });
    over
}

/// Inodes of memfds that processes have open or mapped, but for some. `None` if it cannot be known.
fn used(but: &[u32]) -> Option<BTreeSet<Inode>> {
    let mut used = BTreeSet::new();
    for pid in all_processes().ok()?.into_iter().filter(|pid| !but.contains(pid)) {
        let alive = || fs::exists(format!("/proc/{pid}")).unwrap_or(true);
        let Ok(folder) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            if alive() {
                return None;
            }
            continue;
        };
        for number in folder.flatten() {
            // Not every file may be looked at without waiting for whoever serves it.
            let memfd = fs::read_link(number.path())
                .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"));
            if memfd && let Ok(stat) = fs::metadata(number.path()) {
                used.insert((stat.dev(), stat.ino()));
            }
        }
        // Threads of the kernel and the dead have none.
        let vmas = Maps::open(pid).and_then(|maps| maps.all()).unwrap_or_default();
        used.extend(vmas.into_iter().filter(|vma| vma.inode != 0).map(|vma| (vma.device, vma.inode)));
    }
    Some(used)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use fdmap_sys::{fd, memfd};

    use super::*;

    #[test]
    fn file_is_over_when_nobody_had_it_twice() {
        let [mine, other] = [7, 8].map(|id| FileId::new(id).unwrap());
        let lent = Lent::default();
        lent.add(mine, (1, 10));
        lent.add(other, (1, 11));
        let mut files = lent.lock();
        let both = BTreeSet::from([(1, 10), (1, 11)]);
        let one = BTreeSet::from([(1, 11)]);
        assert_eq!(settle(&mut files, &both), []);
        assert_eq!(settle(&mut files, &one), []);
        assert_eq!(settle(&mut files, &both), [], "it was seen again");
        assert_eq!(settle(&mut files, &one), []);
        assert_eq!(settle(&mut files, &one), [mine]);
        assert_eq!(settle(&mut files, &one), []);
    }

    #[test]
    fn open_memfds_are_seen() {
        let memfd = memfd::create("lent", None).unwrap();
        let stat = fd::stat(memfd.as_fd()).unwrap();
        // Others' processes may be closed to us.
        if let Some(used) = used(&[]) {
            assert!(used.contains(&(stat.st_dev, stat.st_ino)));
        }
    }
}
