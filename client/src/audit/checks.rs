//! The checks. Pure.

use fdmap_sys::uffd::WRITE_TRACKING_NEEDS;
use nix::fcntl::OFlag;

use super::Observed;
use super::parse::SmapsEntry;
use super::procfs::{NotifyTrial, ProcessDescriptor, ProcessInfo};

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Stable name, such as `direct-io`.
    pub name: &'static str,
    /// Whether all writes are observed in this respect.
    pub observed: Observed,
    /// What was found in this process.
    pub detail: String,
    /// Why it matters.
    pub reason: &'static str,
    /// What to do if the answer is not yes.
    pub remedy: &'static str,
}

/// Runs all checks. Their number and order are always the same.
#[must_use]
pub fn check_process(process: &ProcessInfo) -> Vec<Check> {
    let check = |name, (observed, detail), reason, remedy| Check { name, observed, detail, reason, remedy };
    vec![
        check(
            "kernel",
            kernel(process),
            WRITE_TRACKING_NEEDS,
            "boot a newer kernel; without write tracking all data pages of a mapping count as written",
        ),
        check(
            "visible",
            visible(process),
            "tracking a process reads its maps and its page tables",
            "run this as root or as the user of the process; a process that is not dumpable must pass its own \
             /proc/self/pagemap and maps, or the service needs CAP_SYS_PTRACE",
        ),
        check(
            "mappings",
            mappings(process),
            "writes through a mapping are observed only while it is tracked",
            "track each of the mappings below: MappedFile::track, or Track on the fdpass socket",
        ),
        check(
            "userfaultfd",
            userfaultfd(process),
            "a mapping can be registered with one userfaultfd only, so tracking fails where there is another",
            "stop using the other userfaultfd, or leave the mapping untracked: its writes are conservative then",
        ),
        check(
            "seccomp",
            seccomp(process),
            "a process that cannot create a userfaultfd cannot be tracked",
            "allow userfaultfd(2) in the filter, or track the mapping before the filter is installed",
        ),
        check(
            "direct-io",
            direct_io(process),
            "a direct read that is in flight over a checkpoint writes to a page after it was found clean",
            "open without O_DIRECT, or pause such reads during checkpoints; a service with the xarray probe \
             observes the pinned pages and reports them as conservative",
        ),
        check(
            "io-uring",
            io_uring(process),
            "registered buffers are pinned and written like those of direct reads; registered files may be \
             O_DIRECT, and no list shows them",
            "register neither buffers in tracked memory nor files opened with O_DIRECT",
        ),
        check(
            "native-aio",
            native_aio(process),
            "io_submit is used for direct I/O, and its writes to files raise no inotify event",
            "use threads, or io_uring without registered buffers",
        ),
        check(
            "dma",
            dma(process),
            "devices write to memory without using page tables",
            "unmap the buffers of the device during checkpoints, or track dirty pages by its IOMMU",
        ),
        check(
            "unnotified-descriptors",
            unnotified_descriptors(process),
            "write(2) and related calls raise no inotify event through a descriptor that memfd_create made; \
             through one that open(2) made they do",
            "reopen the memfd through /proc/self/fd/N and close the descriptor of memfd_create, let the service \
             create the file, or seal it against new writers; --try-descriptors distinguishes descriptors \
             whose flags do not",
        ),
        check(
            "loop-devices",
            loop_devices(process),
            "writes of a loop device to its backing file raise no inotify event",
            "detach the device, or seal the file against new writers",
        ),
    ]
}

fn unreadable(what: &str, why: &str) -> (Observed, String) {
    (Observed::Unknown, format!("its {what} cannot be read: {why}"))
}

fn kernel(process: &ProcessInfo) -> (Observed, String) {
    match &process.wp_async {
        Ok(true) => (Observed::Yes, "tracks writes".to_owned()),
        Ok(false) => (Observed::No, "has no asynchronous write protection".to_owned()),
        Err(why) => (Observed::Unknown, format!("a userfaultfd cannot be tried: {why}")),
    }
}

fn visible(process: &ProcessInfo) -> (Observed, String) {
    match (&process.pagemap, &process.mappings) {
        (Ok(()), Ok(_)) => (Observed::Yes, "its pagemap and maps can be opened".to_owned()),
        (Err(why), _) => (Observed::No, format!("its pagemap cannot be opened: {why}")),
        (_, Err(why)) => (Observed::No, format!("its maps cannot be read: {why}")),
    }
}

/// The mappings of shared memory that are writable, or that mprotect(2) can make so.
pub fn writable_mappings(mappings: &[SmapsEntry]) -> impl Iterator<Item = &SmapsEntry> {
    mappings.iter().filter(|entry| entry.shared && entry.may_write && entry.is_shared_memory())
}

fn mappings(process: &ProcessInfo) -> (Observed, String) {
    let all = match &process.mappings {
        Ok(all) => all,
        Err(why) => return unreadable("mappings", why),
    };
    let count = writable_mappings(all).count();
    let protected = writable_mappings(all).filter(|entry| entry.write_protect).count();
    let detail = match count {
        0 => "no writable mapping of shared memory".to_owned(),
        _ => format!("{count} of shared memory, {protected} of them write-protected by a userfaultfd now"),
    };
    (Observed::Yes, detail)
}

fn userfaultfd(process: &ProcessInfo) -> (Observed, String) {
    let all = match &process.mappings {
        Ok(all) => all,
        Err(why) => return unreadable("mappings", why),
    };
    if let Some(entry) = writable_mappings(all).find(|entry| entry.other_faults) {
        return (Observed::No, format!("one handles faults in {:#x}-{:#x}", entry.start, entry.end));
    }
    let protected = writable_mappings(all).filter(|entry| entry.write_protect).count();
    let open = match &process.descriptors {
        Ok(all) => all.iter().filter(|fd| fd.target == "anon_inode:[userfaultfd]").count(),
        Err(why) if protected > 0 => return unreadable("descriptors", why),
        Err(_) => 0,
    };
    match (protected, open) {
        (0, 0) => (Observed::Yes, "none in use".to_owned()),
        (0, _) => (Observed::Yes, format!("{open} open, none of them registered with shared memory")),
        // The client library closes its descriptor after it has passed it to the service.
        (_, 0) => (
            Observed::Yes,
            format!("{protected} mappings are tracked through one that another process holds"),
        ),
        _ => (Observed::Unknown, format!("{protected} mappings are tracked, and this process holds {open}")),
    }
}

fn seccomp(process: &ProcessInfo) -> (Observed, String) {
    match process.seccomp {
        None | Some(0) => (Observed::Yes, "no filter".to_owned()),
        Some(1) => (Observed::No, "strict mode".to_owned()),
        Some(mode) => (Observed::Unknown, format!("mode {mode}: filters, which may forbid userfaultfd(2)")),
    }
}

/// Lists the numbers and targets of the first few descriptors.
fn list<'a>(descriptors: impl Iterator<Item = &'a ProcessDescriptor>) -> String {
    const MAX_LISTED: usize = 4;
    let all: Vec<_> = descriptors.map(|fd| format!("{} ({})", fd.number, fd.target)).collect();
    let more = all.len().saturating_sub(MAX_LISTED);
    let shown = all[..all.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

fn direct_io(process: &ProcessInfo) -> (Observed, String) {
    let all = match &process.descriptors {
        Ok(all) => all,
        Err(why) => return unreadable("descriptors", why),
    };
    // For pipes the flag means packet mode; shmem accepts and ignores it.
    let direct: Vec<_> = all
        .iter()
        .filter(|fd| fd.info.is_some_and(|info| info.has(OFlag::O_DIRECT)))
        .filter(|fd| !fd.target.starts_with("pipe:") && !fd.target.starts_with("/memfd:"))
        .collect();
    if !direct.is_empty() {
        return (Observed::No, format!("open with O_DIRECT: {}", list(direct.into_iter())));
    }
    match all.iter().filter(|fd| fd.info.is_none()).count() {
        0 => (Observed::Yes, "no descriptor with O_DIRECT".to_owned()),
        unread => (Observed::Unknown, format!("the flags of {unread} descriptors cannot be read")),
    }
}

fn io_uring(process: &ProcessInfo) -> (Observed, String) {
    const RING: &str = "anon_inode:[io_uring]";
    let all = match &process.descriptors {
        Ok(all) => all,
        Err(why) => return unreadable("descriptors", why),
    };
    let rings: Vec<_> = all.iter().filter(|fd| fd.target == RING).collect();
    let pinned: u64 = rings.iter().filter_map(|fd| fd.info?.user_buffers).sum();
    if pinned > 0 {
        return (Observed::No, format!("{pinned} registered buffers: {}", list(rings.into_iter())));
    }
    // A ring whose descriptor is closed exists as long as it is mapped.
    let mapped = process.mappings.as_ref().is_ok_and(|all| all.iter().any(|entry| entry.name == RING));
    if rings.is_empty() {
        return match (mapped, &process.mappings) {
            (true, _) => (Observed::Unknown, "a ring without a descriptor is mapped".to_owned()),
            (false, Ok(_)) => (Observed::Yes, "none in use".to_owned()),
            (false, Err(why)) => unreadable("mappings", why),
        };
    }
    // The kernel omits the counts while the ring is locked.
    let clean = |fd: &&ProcessDescriptor| {
        fd.info.is_some_and(|info| info.user_buffers == Some(0) && info.user_files == Some(0))
    };
    if rings.iter().all(clean) {
        return (Observed::Yes, format!("{} rings, nothing registered", rings.len()));
    }
    (
        Observed::Unknown,
        format!("registered files, or counts that cannot be read: {}", list(rings.into_iter())),
    )
}

fn native_aio(process: &ProcessInfo) -> (Observed, String) {
    match &process.mappings {
        Err(why) => unreadable("mappings", why),
        Ok(all) => match all.iter().filter(|entry| entry.name.starts_with("/[aio]")).count() {
            0 => (Observed::Yes, "no context".to_owned()),
            contexts => (Observed::No, format!("{contexts} contexts")),
        },
    }
}

fn dma(process: &ProcessInfo) -> (Observed, String) {
    const DEVICES: [&str; 6] = [
        "/dev/vfio/",
        "/dev/iommu",
        "/dev/infiniband/",
        "/dev/vhost-vdpa",
        "anon_inode:[vfio-device]",
        "anon_inode:[iommufd]",
    ];
    let all = match &process.descriptors {
        Ok(all) => all,
        Err(why) => return unreadable("descriptors", why),
    };
    let devices: Vec<_> =
        all.iter().filter(|fd| DEVICES.iter().any(|begin| fd.target.starts_with(begin))).collect();
    if devices.is_empty() {
        return (Observed::Yes, "no VFIO, IOMMU, RDMA or vDPA device open".to_owned());
    }
    (Observed::No, list(devices.into_iter()))
}

fn unnotified_descriptors(process: &ProcessInfo) -> (Observed, String) {
    let all = match &process.descriptors {
        Ok(all) => all,
        Err(why) => return unreadable("descriptors", why),
    };
    let memfds = || all.iter().filter(|fd| fd.target.starts_with("/memfd:"));
    let unnotified: Vec<_> = memfds().filter(|fd| fd.probed == Some(NotifyTrial::Unnotified)).collect();
    if !unnotified.is_empty() {
        return (Observed::No, format!("made by memfd_create: {}", list(unnotified.into_iter())));
    }
    let unknown: Vec<_> = memfds().filter(|fd| may_be_unnotified(fd)).collect();
    if !unknown.is_empty() {
        let unknown = list(unknown.into_iter());
        return (Observed::Unknown, format!("made by memfd_create or by open, indistinguishable: {unknown}"));
    }
    match memfds().count() {
        0 => (Observed::Yes, "no descriptor of a memfd".to_owned()),
        count => {
            (Observed::Yes, format!("{count} of memfds, none of them writable and made by memfd_create"))
        }
    }
}

/// A descriptor that `memfd_create` made has the same flags as one that `open` made with `O_RDWR`. Other access modes come from
/// `open` only, and so does `O_DIRECT`, which descriptors of `memfd_create` do not accept.
fn may_be_unnotified(fd: &ProcessDescriptor) -> bool {
    if fd.probed.is_some() {
        return false;
    }
    fd.info.is_none_or(|info| info.writable() && info.has(OFlag::O_RDWR) && !info.has(OFlag::O_DIRECT))
}

fn loop_devices(process: &ProcessInfo) -> (Observed, String) {
    let loops = match &process.loops {
        Ok(loops) => loops,
        Err(why) => return (Observed::Unknown, format!("/sys/block cannot be read: {why}")),
    };
    let mut of_memfds = loops.iter().filter(|device| device.backing.starts_with("/memfd:")).peekable();
    if of_memfds.peek().is_none() {
        return (Observed::Yes, "none on this host is backed by a memfd".to_owned());
    }
    let names: Vec<&str> = match (&process.descriptors, &process.mappings) {
        (Ok(descriptors), Ok(mappings)) => {
            let descriptors = descriptors.iter().map(|fd| fd.target.as_str());
            descriptors.chain(mappings.iter().map(|entry| entry.name.as_str())).collect()
        }
        (Err(why), _) => return unreadable("descriptors", why),
        (_, Err(why)) => return unreadable("mappings", why),
    };
    // The kernel shows the name of the backing file only, and names of memfds are not unique.
    match of_memfds.find(|device| names.contains(&device.backing.as_str())) {
        Some(device) => {
            (Observed::No, format!("{} is backed by {}, judging by the name", device.name, device.backing))
        }
        None => (Observed::Yes, "none is backed by a memfd of this process".to_owned()),
    }
}

#[cfg(test)]
mod tests;
