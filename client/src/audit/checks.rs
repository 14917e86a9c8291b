//! The conclusions. Pure.

use nix::fcntl::OFlag;

use super::Seen;
use super::parse::SmapsEntry;
use super::procfs::{Descriptor, Facts, Tried};

/// One respect in which writes may go unseen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// A stable name.
    pub name: &'static str,
    /// Whether all is seen in this respect.
    pub seen: Seen,
    /// What was found.
    pub detail: String,
    /// What is meant.
    pub meaning: &'static str,
    /// What can be done about it.
    pub remedy: &'static str,
}

impl Finding {
    fn new(
        name: &'static str,
        (seen, detail): (Seen, String),
        meaning: &'static str,
        remedy: &'static str,
    ) -> Self {
        Self { name, seen, detail, meaning, remedy }
    }
}

/// What the facts amount to: a finding for each respect, always the same ones in the same order.
#[must_use]
pub fn judge(facts: &Facts) -> Vec<Finding> {
    vec![
        Finding::new(
            "visible",
            visible(facts),
            "who tracks a process reads its maps and its page tables",
            "run this as root, or as the process's user; a process that is not dumpable must hand over its own \
             /proc/self/pagemap and maps, or be looked into by a service with CAP_SYS_PTRACE",
        ),
        Finding::new(
            "mappings",
            mappings(facts),
            "writes through a mapping are seen once it is tracked, and each of them must be",
            "have each of the mappings below tracked: MappedFile::track, or Track on the fdpass socket",
        ),
        Finding::new(
            "userfaultfd",
            userfaultfd(facts),
            "a mapping can be registered with one userfaultfd only; the tracker's fails where there is another",
            "end the use of the other one, or do not have that mapping tracked: it is told conservatively",
        ),
        Finding::new(
            "seccomp",
            seccomp(facts),
            "a process without a userfaultfd of its own cannot have its writes tracked",
            "allow userfaultfd(2) in the filter, or have the mapping tracked before the filter is set",
        ),
        Finding::new(
            "direct-io",
            direct_io(facts),
            "a direct read that is in flight over a checkpoint writes to the page after it was found clean",
            "open without O_DIRECT, or pause such reads for checkpoints; a service with the xarray probe sees the \
             pinned pages and tells them conservatively",
        ),
        Finding::new(
            "io-uring",
            io_uring(facts),
            "registered buffers are pinned and written like those of direct reads; registered files may be \
             O_DIRECT, and no list shows them",
            "do not register buffers in tracked memory, nor files opened with O_DIRECT",
        ),
        Finding::new(
            "native-aio",
            native_aio(facts),
            "io_submit is made for direct I/O, and writes to files by it give no signal",
            "use threads or io_uring without registered buffers",
        ),
        Finding::new(
            "dma",
            dma(facts),
            "devices write to memory without page tables",
            "unmap the device's buffers for checkpoints, or track dirty pages by its IOMMU",
        ),
        Finding::new(
            "unnotified-descriptors",
            silent(facts),
            "write(2) and its kin through a descriptor that memfd_create made give no signal; through one that was \
             opened they do",
            "open the memfd anew by /proc/self/fd/N and close the descriptor of memfd_create, let the service make \
             the file, or close the file to further writers; --try-descriptors may tell those apart that cannot be \
             told by their flags",
        ),
        Finding::new(
            "loop-devices",
            loop_devices(facts),
            "writes of a loop device to its file give no signal",
            "detach the device, or close the file to further writers",
        ),
    ]
}

fn unseen(what: &str, why: &str) -> (Seen, String) {
    (Seen::Unknown, format!("its {what} cannot be read: {why}"))
}

fn visible(facts: &Facts) -> (Seen, String) {
    match (&facts.pagemap, &facts.mappings) {
        (Ok(()), Ok(_)) => (Seen::Yes, "its pagemap and maps can be opened".to_owned()),
        (Err(why), _) => (Seen::No, format!("its pagemap cannot be opened: {why}")),
        (_, Err(why)) => (Seen::No, format!("its maps cannot be read: {why}")),
    }
}

/// The mappings of shared memory that can be written to, or be made so.
pub fn writers(mappings: &[SmapsEntry]) -> impl Iterator<Item = &SmapsEntry> {
    mappings.iter().filter(|entry| entry.shared && entry.may_write && entry.is_shared_memory())
}

fn mappings(facts: &Facts) -> (Seen, String) {
    let all = match &facts.mappings {
        Ok(all) => all,
        Err(why) => return unseen("mappings", why),
    };
    let count = writers(all).count();
    let protected = writers(all).filter(|entry| entry.write_protect).count();
    let detail = match count {
        0 => "no writable mapping of shared memory".to_owned(),
        _ => format!("{count} of shared memory, {protected} of them registered for write-protection now"),
    };
    (Seen::Yes, detail)
}

fn userfaultfd(facts: &Facts) -> (Seen, String) {
    let all = match &facts.mappings {
        Ok(all) => all,
        Err(why) => return unseen("mappings", why),
    };
    if let Some(entry) = writers(all).find(|entry| entry.other_faults) {
        return (Seen::No, format!("one serves faults of {:#x}-{:#x}", entry.start, entry.end));
    }
    let protected = writers(all).filter(|entry| entry.write_protect).count();
    let open = match &facts.descriptors {
        Ok(all) => all.iter().filter(|fd| fd.target == "anon_inode:[userfaultfd]").count(),
        Err(why) if protected > 0 => return unseen("descriptors", why),
        Err(_) => 0,
    };
    match (protected, open) {
        (0, 0) => (Seen::Yes, "none in use".to_owned()),
        (0, _) => (Seen::Yes, format!("{open} open, none of them used for shared memory")),
        // Who is tracked by the client library closes its own descriptor: the service has one.
        (_, 0) => (Seen::Yes, format!("{protected} mappings are tracked by one that is held elsewhere")),
        _ => (
            Seen::Unknown,
            format!("{protected} mappings are tracked; {open} are held here, not only elsewhere"),
        ),
    }
}

fn seccomp(facts: &Facts) -> (Seen, String) {
    match facts.seccomp {
        None | Some(0) => (Seen::Yes, "no filter".to_owned()),
        Some(1) => (Seen::No, "strict mode".to_owned()),
        Some(mode) => (Seen::Unknown, format!("mode {mode}: filters, which may forbid userfaultfd(2)")),
    }
}

/// Numbers and targets of descriptors, the first few of them.
fn list<'a>(descriptors: impl Iterator<Item = &'a Descriptor>) -> String {
    const MOST: usize = 4;
    let all: Vec<_> = descriptors.map(|fd| format!("{} ({})", fd.number, fd.target)).collect();
    let more = all.len().saturating_sub(MOST);
    let shown = all[..all.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

fn direct_io(facts: &Facts) -> (Seen, String) {
    let all = match &facts.descriptors {
        Ok(all) => all,
        Err(why) => return unseen("descriptors", why),
    };
    // Pipes use the flag for packets; shmem takes it and does nothing about it.
    let direct: Vec<_> = all
        .iter()
        .filter(|fd| fd.info.is_some_and(|info| info.has(OFlag::O_DIRECT)))
        .filter(|fd| !fd.target.starts_with("pipe:") && !fd.target.starts_with("/memfd:"))
        .collect();
    if !direct.is_empty() {
        return (Seen::No, format!("open with O_DIRECT: {}", list(direct.into_iter())));
    }
    match all.iter().filter(|fd| fd.info.is_none()).count() {
        0 => (Seen::Yes, "no descriptor with O_DIRECT".to_owned()),
        missed => (Seen::Unknown, format!("the flags of {missed} descriptors cannot be read")),
    }
}

fn io_uring(facts: &Facts) -> (Seen, String) {
    const RING: &str = "anon_inode:[io_uring]";
    let all = match &facts.descriptors {
        Ok(all) => all,
        Err(why) => return unseen("descriptors", why),
    };
    let rings: Vec<_> = all.iter().filter(|fd| fd.target == RING).collect();
    let pinned: u64 = rings.iter().filter_map(|fd| fd.info?.user_buffers).sum();
    if pinned > 0 {
        return (Seen::No, format!("{pinned} registered buffers: {}", list(rings.into_iter())));
    }
    // A ring whose descriptor was closed lives on while it is mapped.
    let mapped = facts.mappings.as_ref().is_ok_and(|all| all.iter().any(|entry| entry.name == RING));
    if rings.is_empty() {
        return match (mapped, &facts.mappings) {
            (true, _) => (Seen::Unknown, "a ring is mapped that has no descriptor".to_owned()),
            (false, Ok(_)) => (Seen::Yes, "none in use".to_owned()),
            (false, Err(why)) => unseen("mappings", why),
        };
    }
    // The kernel leaves the counts out while it is busy.
    let clean = |fd: &&Descriptor| {
        fd.info.is_some_and(|info| info.user_buffers == Some(0) && info.user_files == Some(0))
    };
    if rings.iter().all(clean) {
        return (Seen::Yes, format!("{} rings, nothing registered", rings.len()));
    }
    (Seen::Unknown, format!("registered files, or counts that cannot be read: {}", list(rings.into_iter())))
}

fn native_aio(facts: &Facts) -> (Seen, String) {
    match &facts.mappings {
        Err(why) => unseen("mappings", why),
        Ok(all) => match all.iter().filter(|entry| entry.name.starts_with("/[aio]")).count() {
            0 => (Seen::Yes, "no context".to_owned()),
            contexts => (Seen::No, format!("{contexts} contexts")),
        },
    }
}

fn dma(facts: &Facts) -> (Seen, String) {
    const DEVICES: [&str; 6] = [
        "/dev/vfio/",
        "/dev/iommu",
        "/dev/infiniband/",
        "/dev/vhost-vdpa",
        "anon_inode:[vfio-device]",
        "anon_inode:[iommufd]",
    ];
    let all = match &facts.descriptors {
        Ok(all) => all,
        Err(why) => return unseen("descriptors", why),
    };
    let devices: Vec<_> =
        all.iter().filter(|fd| DEVICES.iter().any(|begin| fd.target.starts_with(begin))).collect();
    if devices.is_empty() {
        return (Seen::Yes, "no VFIO, IOMMU, RDMA or vDPA device open".to_owned());
    }
    (Seen::No, list(devices.into_iter()))
}

fn silent(facts: &Facts) -> (Seen, String) {
    let all = match &facts.descriptors {
        Ok(all) => all,
        Err(why) => return unseen("descriptors", why),
    };
    let memfds = || all.iter().filter(|fd| fd.target.starts_with("/memfd:"));
    let silent: Vec<_> = memfds().filter(|fd| fd.tried == Some(Tried::Silent)).collect();
    if !silent.is_empty() {
        return (Seen::No, format!("made by memfd_create: {}", list(silent.into_iter())));
    }
    let unknown: Vec<_> = memfds().filter(|fd| may_be_silent(fd)).collect();
    if !unknown.is_empty() {
        let which = list(unknown.into_iter());
        return (Seen::Unknown, format!("made by memfd_create, or opened and not to be told apart: {which}"));
    }
    match memfds().count() {
        0 => (Seen::Yes, "no descriptor of a memfd".to_owned()),
        count => (Seen::Yes, format!("{count} of memfds, none made by memfd_create to write through")),
    }
}

/// The flags of a descriptor that `memfd_create` made are those of one that was opened with `O_RDWR`; any other mode can only
/// have been opened, and so can one with `O_DIRECT`, which `memfd_create`'s does not take.
fn may_be_silent(fd: &Descriptor) -> bool {
    if fd.tried.is_some() {
        return false;
    }
    fd.info.is_none_or(|info| info.writable() && info.has(OFlag::O_RDWR) && !info.has(OFlag::O_DIRECT))
}

fn loop_devices(facts: &Facts) -> (Seen, String) {
    let loops = match &facts.loops {
        Ok(loops) => loops,
        Err(why) => return (Seen::Unknown, format!("/sys/block cannot be read: {why}")),
    };
    let mut of_memfds = loops.iter().filter(|device| device.backing.starts_with("/memfd:")).peekable();
    if of_memfds.peek().is_none() {
        return (Seen::Yes, "none on this host is made of a memfd".to_owned());
    }
    let names: Vec<&str> = match (&facts.descriptors, &facts.mappings) {
        (Ok(descriptors), Ok(mappings)) => {
            let descriptors = descriptors.iter().map(|fd| fd.target.as_str());
            descriptors.chain(mappings.iter().map(|entry| entry.name.as_str())).collect()
        }
        (Err(why), _) => return unseen("descriptors", why),
        (_, Err(why)) => return unseen("mappings", why),
    };
    // The device tells the name of its file only, and names of memfds are not unique.
    match of_memfds.find(|device| names.contains(&device.backing.as_str())) {
        Some(device) => (Seen::No, format!("{} is made of {}, by its name", device.name, device.backing)),
        None => (Seen::Yes, "none is made of a memfd of this process".to_owned()),
    }
}

#[cfg(test)]
mod tests;
