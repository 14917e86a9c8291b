//! Files and mappings that the service is told of.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use fdmap_client::ClientError;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{ClientMapping, MappingId, PageIndex};
use fdmap_sys::Errno;
use fdmap_sys::error::{CallContext as _, SyscallError};
use fdmap_sys::memfd::{self, MemfdKind};
use fdmap_sys::uffd::Userfaultfd;
use nix::libc;

use crate::mapping_table::{self, Entry};
use crate::memory::page_bytes;
use crate::policy::{self, Decision, Found};
use crate::session::{Failed, Shim};

/// Mappings that one request can name.
const MOST: usize = 64;
/// Files that are remembered as known.
const MOST_KNOWN: usize = 1024;

/// A file of the program, if it is one that is taken over.
#[derive(Debug)]
pub struct Taken {
    device: u64,
    inode: u64,
    name: Vec<u8>,
}

impl Taken {
    /// Looks at a descriptor. Changes nothing.
    pub fn look(shim: &Shim, number: i32) -> Option<Self> {
        let mut link = [0_u8; 320];
        let stat = stat(number)?;
        if stat.st_nlink != 0 {
            return None;
        }
        let link = link_of(number, &mut link)?;
        // SAFETY: F_GETFL takes no argument and touches no memory.
        let access = unsafe { libc::fcntl(number, libc::F_GETFL) };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let found = Found { mode: stat.st_mode, links: stat.st_nlink, size, access, link };
        if policy::file(&found, &shim.config) != Decision::Serve {
            return None;
        }
        let name = policy::memfd_name(&found)?.to_vec();
        Some(Self { device: stat.st_dev, inode: stat.st_ino, name })
    }
}

/// False for what is no memfd for sure. Needs no lock and allocates nothing.
pub fn could_be_memfd(number: i32) -> bool {
    stat(number).is_some_and(|stat| stat.st_nlink == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// The service's name for a file of this inode.
pub const fn named(device: u64, inode: u64) -> FileName {
    FileName::Inode { device, number: inode }
}

/// A new mapping of the program: its file is given to the service, and its writes are observed.
pub fn mapped(shim: &mut Shim, number: i32, entry: &Entry) {
    let Some(taken) = Taken::look(shim, number) else { return };
    let mut entry = Entry { device: taken.device, inode: taken.inode, ..*entry };
    // Other threads may close it meanwhile: a descriptor of our own.
    let Some(memfd) = duplicate(number) else { return };
    // hugetlb mappings end with a huge page.
    let unit = match memfd::kind(memfd.as_fd()) {
        Ok(Some(MemfdKind::Hugetlb(bytes))) => bytes,
        _ => page_bytes(),
    };
    entry.range.end = entry.range.start + entry.range.len().next_multiple_of(unit);
    let adopted = adopt(shim, memfd.as_fd(), &taken);
    drop(memfd);
    // Without room, or without a service, it is not known or not tracked; the service tells such writes conservatively.
    let Some(slot) = mapping_table::add(&entry) else { return };
    match adopted {
        Ok(()) if shim.config.track => track(shim, &[(slot, entry)]),
        Ok(()) => {}
        Err(failed) => {
            let name = String::from_utf8_lossy(&taken.name);
            shim.complain(format_args!("memfd {name:?} cannot be adopted"), &failed);
        }
    }
}

/// Gives a memfd to the service, unless it has it.
fn adopt(shim: &mut Shim, memfd: BorrowedFd<'_>, taken: &Taken) -> Result<(), Failed> {
    let key = (taken.device, taken.inode);
    if shim.known.contains(&key) {
        return Ok(());
    }
    let own = String::from_utf8_lossy(&taken.name).into_owned();
    // A name that is taken is made unique. An inode that is owned already is refused by any name.
    let other = unique(&own, taken.inode);
    let keep = shim.config.keep;
    let mut give = |name: &str| {
        shim.ask(|service| {
            if keep { service.adopt(memfd, name, None) } else { service.lend(memfd, name, None) }.map(drop)
        })
    };
    let mut new = give(&own);
    if let Err(Some(RefusalCode::AlreadyExists | RefusalCode::InvalidArgument)) =
        new.as_ref().map_err(Failed::code)
    {
        new = give(&other);
    }
    match new {
        Ok(()) => set_coverage_policy(shim, &named(taken.device, taken.inode)),
        Err(failed) if failed.code() == Some(RefusalCode::AlreadyExists) => {}
        Err(failed) => return Err(failed),
    }
    remember(shim, key);
    Ok(())
}

/// Remembers that the service has a file. What is forgotten is given to it again, and refused.
fn remember(shim: &mut Shim, key: (u64, u64)) {
    if shim.known.len() >= MOST_KNOWN {
        shim.known.clear();
    }
    shim.known.push(key);
}

/// The service has a file no longer, as after it was deleted there: it is given to it again. True if it has it then.
fn adopt_again(shim: &mut Shim, entry: &Entry) -> bool {
    let key = (entry.device, entry.inode);
    shim.known.retain(|one| *one != key);
    let Some(memfd) = find(entry) else { return false };
    let taken = Taken::look(shim, std::os::fd::AsRawFd::as_raw_fd(&memfd));
    taken.is_some_and(|taken| adopt(shim, memfd.as_fd(), &taken).is_ok())
}

/// A name for a file whose own is taken, or no name at all.
fn unique(name: &str, inode: u64) -> String {
    let clean: String =
        name.chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).take(50).collect();
    let clean = if clean.is_empty() { "memfd".to_owned() } else { clean };
    format!("{clean}.{}.{inode}", std::process::id())
}

/// Has the service make a memfd in place of one that the program asks for; close-on-exec.
pub fn make(shim: &mut Shim, name: &[u8], flags: u32) -> Option<OwnedFd> {
    let own = String::from_utf8_lossy(name).into_owned();
    let others = [own.clone(), unique(&own, 0), unique(&own, rand())];
    for other in others {
        match shim.ask(|service| service.memfd_create(&other, &own, flags)) {
            Ok((memfd, _)) => {
                if let Some(stat) = stat(std::os::fd::AsRawFd::as_raw_fd(&memfd)) {
                    set_coverage_policy(shim, &named(stat.st_dev, stat.st_ino));
                    remember(shim, (stat.st_dev, stat.st_ino));
                }
                return Some(memfd);
            }
            Err(failed)
                if matches!(
                    failed.code(),
                    Some(RefusalCode::AlreadyExists | RefusalCode::InvalidArgument)
                ) => {}
            Err(failed) => {
                shim.complain(format_args!("memfd {own:?} is not made by the service"), &failed);
                return None;
            }
        }
    }
    None
}

/// A number that is another one each time.
fn rand() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn set_coverage_policy(shim: &mut Shim, file: &FileName) {
    if let Some(policy) = shim.config.policy
        && let Err(failed) = shim.ask(|service| service.set_coverage_policy(file, policy))
    {
        shim.complain(format_args!("the policy of {file} cannot be set"), &failed);
    }
}

/// Has the writes through mappings of one file observed. Those that are refused but were observed before go on to be: the
/// service that we spoke with has handed them to the next one.
fn track(shim: &mut Shim, entries: &[(usize, Entry)]) {
    track_some(shim, entries, true);
}

/// `again`: a file that the service does not have is given to it once more.
fn track_some(shim: &mut Shim, entries: &[(usize, Entry)], again: bool) {
    for some in entries.chunks(MOST) {
        let Some((_, first)) = some.first() else { return };
        let file = named(first.device, first.inode);
        let mappings: Vec<_> = some.iter().map(|(_, entry)| client_mapping(entry)).collect();
        let tracked = shim.ask(|service| {
            let refused =
                |_| ClientError::Untrackable { file: file.to_string(), reason: "there is no userfaultfd" };
            let uffd = Userfaultfd::create().map_err(refused)?;
            let (pagemap, maps) = (open_own("pagemap")?, open_own("maps")?);
            let (pagemap, maps) = (pagemap.as_ref().map(File::as_fd), maps.as_ref().map(File::as_fd));
            service.track(&file, uffd.as_fd(), pagemap, maps, &mappings)
        });
        match tracked {
            Ok(ids) => {
                for ((slot, _), id) in some.iter().zip(ids) {
                    mapping_table::set_id(*slot, Some(id));
                }
            }
            Err(failed)
                if again && failed.code() == Some(RefusalCode::NotFound) && adopt_again(shim, first) =>
            {
                track_some(shim, some, false);
            }
            Err(_) if some.iter().all(|(_, entry)| entry.id.is_some()) => {}
            // One that cannot be observed is not to spoil the others.
            Err(Failed::Refused(_)) if some.len() > 1 => {
                for one in some {
                    track_some(shim, std::slice::from_ref(one), again);
                }
            }
            // The program's own userfaultfd was there before: it has its reasons.
            Err(failed) if failed.code() == Some(RefusalCode::FailedPrecondition) => {}
            Err(failed) => shim.complain(format_args!("the writes to {file} cannot be observed"), &failed),
        }
    }
}

/// The same for mappings of several files.
fn track_each(shim: &mut Shim, entries: &[(usize, Entry)]) {
    let mut entries = entries.to_vec();
    entries.sort_by_key(|(_, entry)| (entry.device, entry.inode));
    for of_one in entries.chunk_by(|(_, a), (_, b)| (a.device, a.inode) == (b.device, b.inode)) {
        track(shim, of_one);
    }
}

/// Tracks what the table has of mappings that were let go of, by the ids that they had, and `others`.
pub fn track_anew(shim: &mut Shim, released: &[Entry], mut others: Vec<(usize, Entry)>) {
    let pid = own_pid();
    for (slot, entry) in mapping_table::all() {
        if entry.pid == pid && entry.id.is_some() && released.iter().any(|old| old.id == entry.id) {
            mapping_table::set_id(slot, None);
            others.push((slot, Entry { id: None, ..entry }));
        }
    }
    if shim.config.track {
        track_each(shim, &others);
    }
}

fn client_mapping(entry: &Entry) -> ClientMapping {
    ClientMapping {
        address: entry.range.start,
        length: entry.range.len(),
        first_page: PageIndex(entry.offset / page_bytes()),
    }
}

/// A file of `/proc/self`. `None` if this process may not look into itself: the service may.
fn open_own(name: &str) -> Result<Option<File>, SyscallError> {
    let path = format!("/proc/self/{name}");
    match File::open(&path).call(|| format!("open of {path}")) {
        Ok(file) => Ok(Some(file)),
        Err(SyscallError { errno: Errno::EACCES | Errno::EPERM | Errno::ENOENT, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Has what was written through mappings taken, and observes them no longer: they are about to end, and nothing can write
/// through them any more.
pub fn untrack(shim: &mut Shim, entries: &[Entry]) {
    by_file(entries, |file, ids| {
        // Where it fails the service tells all of them as written.
        let _ = shim.ask(|service| service.untrack(file, ids));
    });
}

/// The same for mappings that go on to be written: from now on they are unobserved. Those that this process got by a fork the
/// service knows by other ids.
pub fn release(shim: &mut Shim, entries: &[Entry]) {
    let pid = own_pid();
    let own: Vec<_> = entries.iter().filter(|entry| entry.pid == pid).copied().collect();
    by_file(&own, |file, ids| {
        let _ = shim.ask(|service| service.detach(None, file, ids));
    });
}

/// The same for those that this process got by a fork. Their ids are not known here: all that this process has of their files
/// is let go of, and its own mappings elsewhere are tracked anew.
pub fn release_inherited(shim: &mut Shim, entries: &[Entry]) {
    let pid = own_pid();
    let mut files: Vec<_> =
        entries.iter().filter(|entry| entry.pid != pid).map(|entry| (entry.device, entry.inode)).collect();
    files.sort_unstable();
    files.dedup();
    for (device, inode) in files {
        let file = named(device, inode);
        if shim.ask(|service| service.detach(None, &file, &[])).is_ok() {
            let others = mapping_table::all().into_iter().map(|(_, entry)| entry);
            let others = others.filter(|entry| (entry.device, entry.inode) == (device, inode));
            let others: Vec<_> = others.filter(|entry| !entries.contains(entry)).collect();
            track_anew(shim, &others, Vec::new());
        }
    }
}

fn by_file(entries: &[Entry], mut each: impl FnMut(&FileName, &[MappingId])) {
    let mut entries: Vec<_> = entries.iter().filter(|entry| entry.id.is_some()).collect();
    entries.sort_by_key(|entry| (entry.device, entry.inode));
    for of_one in entries.chunk_by(|a, b| (a.device, a.inode) == (b.device, b.inode)) {
        let file = named(of_one[0].device, of_one[0].inode);
        let ids: Vec<_> = of_one.iter().filter_map(|entry| entry.id).collect();
        for ids in ids.chunks(MOST) {
            each(&file, ids);
        }
    }
}

/// A session has begun: the service is told of all mappings, of which it may know nothing. It is another process than the one
/// that was told before, or this is the first time.
pub fn renew(shim: &mut Shim) {
    let pid = own_pid();
    let mut entries: Vec<_> =
        mapping_table::all().into_iter().filter(|(_, entry)| entry.pid == pid).collect();
    entries.sort_by_key(|(_, entry)| (entry.device, entry.inode));
    for of_one in entries.chunk_by(|(_, a), (_, b)| (a.device, a.inode) == (b.device, b.inode)) {
        let (_, first) = &of_one[0];
        let Some(memfd) = find(first) else { continue };
        let Some(taken) = Taken::look(shim, std::os::fd::AsRawFd::as_raw_fd(&memfd)) else { continue };
        match adopt(shim, memfd.as_fd(), &taken) {
            Ok(()) if shim.config.track => track(shim, of_one),
            Ok(()) => {}
            Err(failed) => shim.complain(
                format_args!("{} cannot be adopted again", named(first.device, first.inode)),
                &failed,
            ),
        }
    }
}

/// A descriptor of a mapping's file: one that the program has, or else by the mapping itself, which takes privileges.
fn find(entry: &Entry) -> Option<OwnedFd> {
    let fds = std::fs::read_dir("/proc/self/fd").ok()?;
    let numbers = fds.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let same = |number: &i32| {
        // SAFETY: F_GETFL takes no argument and touches no memory.
        let access = || unsafe { libc::fcntl(*number, libc::F_GETFL) } & libc::O_ACCMODE;
        stat(*number).is_some_and(|stat| (stat.st_dev, stat.st_ino) == (entry.device, entry.inode))
            && access() == libc::O_RDWR
    };
    let numbers: Vec<i32> = numbers.collect();
    numbers.iter().find(|number| same(number)).and_then(|number| duplicate(*number)).or_else(|| {
        let maps = fdmap_sys::maps::Maps::open(std::process::id()).ok()?;
        let vma = maps.vma_at_or_after(entry.range.start, true).ok()??;
        let path = format!("/proc/self/map_files/{:x}-{:x}", vma.range.start, vma.range.end);
        let file = File::options().read(true).write(true).open(path).ok()?;
        Some(file.into())
    })
}

/// This process, as it calls itself.
pub fn own_pid() -> i32 {
    // SAFETY: getpid only gives a number.
    unsafe { libc::getpid() }
}

fn duplicate(number: i32) -> Option<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes integers, touches no memory and fails for a number that is no descriptor.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: fcntl just made this descriptor and nobody else knows of it.
    (own >= 0).then(|| unsafe { OwnedFd::from_raw_fd(own) })
}

fn stat(number: i32) -> Option<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat fills the struct, for which there is room, or fails.
    let done = unsafe { libc::fstat(number, stat.as_mut_ptr()) };
    // SAFETY: fstat succeeded, so it is filled.
    (done == 0).then(|| unsafe { stat.assume_init() })
}

/// What `/proc/self/fd` shows for a descriptor; `None` if that is longer than the room. Allocates nothing.
pub fn link_of(number: i32, room: &mut [u8]) -> Option<&[u8]> {
    use std::io::Write as _;
    let mut path = [0_u8; 32];
    write!(&mut path[..31], "/proc/self/fd/{number}").ok()?;
    // SAFETY: the path ends with a zero byte, which write! left there; readlink writes at most as many bytes as there is room.
    let len = unsafe { libc::readlink(path.as_ptr().cast(), room.as_mut_ptr().cast(), room.len()) };
    let len = usize::try_from(len).ok().filter(|len| *len < room.len())?;
    Some(&room[..len])
}
