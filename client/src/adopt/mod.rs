//! Files of processes that know nothing of fdmap: found, given to the service, and their mappings tracked.
//!
//! [`adopt`] and [`release`] are all there is to call. What is found out is in files of its own: `found` and `name` the
//! files, `target` what stands in the way, `threads` and `calls` which thread is stopped and what becomes of the call that it
//! is in (pure). `inside`, `stop` and `stay` are the part that touches the process, on x86-64 only.
//!
//! Descriptors are taken by pidfd_getfd and mappings through `/proc/PID/map_files`, of which the process notices nothing. Only
//! tracking does something to it: one of its threads is stopped for a moment and makes a userfaultfd.

#[cfg(target_arch = "x86_64")]
mod calls;
mod error;
mod found;
#[cfg_attr(not(target_arch = "x86_64"), path = "elsewhere.rs")]
mod inside;
mod name;
#[cfg(target_arch = "x86_64")]
mod place;
#[cfg(target_arch = "x86_64")]
mod rest;
#[cfg(target_arch = "x86_64")]
mod slept;
#[cfg(target_arch = "x86_64")]
mod stay;
#[cfg(target_arch = "x86_64")]
mod stop;
#[cfg(target_arch = "x86_64")]
mod target;
#[cfg(target_arch = "x86_64")]
mod threads;

pub use error::AdoptError;

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use fdmap_proto::convert::FileName;
use fdmap_proto::error_chain;
use fdmap_proto::{Access, ClientMapping, FileInfo, MappingId, PageIndex, PageSize};
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::pidfd;

use crate::error::RefusalCode;
use crate::{ClientError, FdpassClient};
use found::{Found, Inode, Memory};

/// Mappings that one userfaultfd can be handed over for.
const MOST: usize = 64;

/// What is to be adopted, and how.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Which files.
    pub which: Which,
    /// The name in the service, if it is one file; without it the file's own, made unique.
    pub name: Option<String>,
    /// Who may do what with them; `None`: the caller alone.
    pub access: Option<Access>,
    /// Have the writes through the process's mappings observed.
    pub track: bool,
    /// A thread may wait longer than it was to, where there is no other way.
    pub longer_waits: bool,
}

/// Files of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// What this descriptor of it is of.
    Descriptor(i32),
    /// Memfds that it has a descriptor of.
    Memfds,
    /// These, and whatever shared memory it can write to through a mapping: of /dev/shm, System V, anonymous.
    All,
}

/// A process that was adopted.
#[derive(Debug)]
pub struct Adopted {
    /// Its files.
    pub files: Vec<AdoptedFile>,
    /// The stop of one of its threads; `None`: there was no need for one.
    pub stopped: Option<Stopped>,
    /// What could not be done.
    pub problems: Vec<Problem>,
}

/// One of its files.
#[derive(Clone, Debug)]
pub struct AdoptedFile {
    /// What the service says of it.
    pub info: FileInfo,
    /// The service had it already.
    pub was_here: bool,
    /// Mappings that are tracked from now on.
    pub tracked: Vec<(MappingId, ClientMapping)>,
}

/// What could not be done, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// A file, a descriptor or a mapping.
    pub what: String,
    /// Why not.
    pub why: String,
}

impl Problem {
    fn new(what: String, error: &AdoptError) -> Self {
        Self { what, why: error_chain(error) }
    }
}

/// A thread that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Its number.
    pub tid: u32,
    /// The system call that it was in.
    pub number: Option<i64>,
    /// How long at most: from before it was asked to stop until after it was let go.
    pub stopped: Duration,
    /// How it went on.
    pub left: Left,
}

/// How a thread went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It was in no call, or had its result.
    AsItWas,
    /// The kernel made its call again, with the time that remained.
    Restarted,
    /// Its call was made again, and waits for as long as it takes.
    MadeAgain,
    /// Its call was made again with the time that remained, as it was measured.
    WithTheRest(Duration),
    /// Its call was made again, and its time began anew.
    Anew,
}

impl Left {
    /// Lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AsItWas => "as-it-was",
            Self::Restarted => "restarted",
            Self::MadeAgain => "made-again",
            Self::WithTheRest(_) => "made-again-with-the-rest",
            Self::Anew => "made-again-anew",
        }
    }
}

/// userfaultfds of a process, and how they were made.
#[derive(Debug)]
struct Inside {
    descriptors: Vec<OwnedFd>,
    stopped: Stopped,
    staying: inside::Staying,
}

/// Gives files of a process to the service, and has its writes to them observed if that is wished.
///
/// This may take as long as the call in which one of the process's threads is, but not more than a minute: see docs/adopting.md.
/// Signals to the calling thread wait meanwhile.
///
/// # Errors
/// [`AdoptError`] if nothing could be done; what could not be done of several things is among the problems.
pub fn adopt(session: &mut FdpassClient, pid: u32, wish: &Wish) -> Result<Adopted, AdoptError> {
    let process = pidfd::open(pid)?;
    if wish.track {
        // Before anything is done.
        inside::check(pid)?;
    }
    let mut found = Found::default();
    match wish.which {
        Which::Descriptor(number) => {
            let memory = found::descriptor(pid, &process, number)?;
            found.files.insert(memory.inode, memory);
        }
        Which::Memfds => found.descriptors(pid, &process)?,
        Which::All => {
            found.descriptors(pid, &process)?;
            found.mappings(pid)?;
        }
    }
    let Found { files: memories, mut problems } = found;
    if memories.is_empty() && problems.is_empty() {
        return Err(AdoptError::Nothing(format!("process {pid} has no such shared memory")));
    }
    if wish.name.is_some() && memories.len() > 1 {
        let count = memories.len();
        return Err(AdoptError::Nothing(format!(
            "process {pid} has {count} files, which cannot all have one name"
        )));
    }
    let mut files = Vec::new();
    for (inode, memory) in memories {
        match adopt_one(session, pid, &memory, wish) {
            Ok((info, was_here)) => files.push((inode, AdoptedFile { info, was_here, tracked: Vec::new() })),
            Err(error) => problems.push(Problem::new(memory.target, &error.into())),
        }
    }
    let mut stopped = None;
    if wish.track {
        // What was adopted stays so, and is to be told.
        if let Err(error) = track(session, pid, &mut files, wish, &mut problems, &mut stopped) {
            problems.push(Problem::new(format!("tracking process {pid}"), &error));
        }
    }
    Ok(Adopted { files: files.into_iter().map(|(_, file)| file).collect(), stopped, problems })
}

/// Gives one file to the service. True if it was there already.
fn adopt_one(
    session: &mut FdpassClient,
    pid: u32,
    memory: &Memory,
    wish: &Wish,
) -> Result<(FileInfo, bool), ClientError> {
    let (device, number) = memory.inode;
    match session.open(&FileName::Inode { device, number }, false) {
        Ok((_, info)) => return Ok((info, true)),
        Err(ClientError::Refused { code: RefusalCode::NotFound, .. }) => {}
        Err(error) => return Err(error),
    }
    let names = match &wish.name {
        Some(name) => vec![name.clone()],
        None => name::candidates(&memory.target, pid, number),
    };
    let mut last = ClientError::Unexpected("a name");
    for name in names {
        match session.adopt(memory.file.as_fd(), &name, wish.access) {
            Ok(info) => return Ok((info, false)),
            Err(error @ ClientError::Refused { code: RefusalCode::AlreadyExists, .. }) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Has all mappings of these files observed through which the process can write.
fn track(
    session: &mut FdpassClient,
    pid: u32,
    files: &mut [(Inode, AdoptedFile)],
    wish: &Wish,
    problems: &mut Vec<Problem>,
    was_stopped: &mut Option<Stopped>,
) -> Result<(), AdoptError> {
    let maps = Maps::open(pid)?;
    let mut parts = Vec::new();
    for (index, ((device, inode), _)) in files.iter().enumerate() {
        let mappings = writable(pid, &maps, (*device, *inode), session.page_size())?;
        parts.extend(mappings.chunks(MOST).map(|part| (index, part.to_vec())));
    }
    if parts.is_empty() {
        return Ok(());
    }
    let Inside { descriptors, stopped, staying } = inside::userfaultfds(pid, parts.len(), wish.longer_waits)?;
    *was_stopped = Some(stopped);
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).ok();
    let pagemap = pagemap.as_ref().map(|file| file.as_fd());
    for (userfaultfd, (index, part)) in descriptors.into_iter().zip(parts) {
        let (_, file) = &mut files[index];
        let name = FileName::Id(file.info.id);
        let maps = Some(maps.as_fd());
        match session.track_process(pid, &name, userfaultfd.as_fd(), pagemap, maps, &part) {
            Ok(ids) => file.tracked.extend(ids.into_iter().zip(part)),
            Err(error) => {
                let what = format!("tracking {}", file.info.name);
                problems.push(Problem::new(what, &error.into()));
            }
        }
    }
    Ok(staying.join()?)
}

fn writable(
    pid: u32,
    maps: &Maps,
    (device, inode): Inode,
    page_size: PageSize,
) -> Result<Vec<ClientMapping>, AdoptError> {
    let mut mappings = Vec::new();
    for vma in maps.shared_of(device, inode)? {
        if may_write(pid, &vma)? {
            mappings.push(ClientMapping {
                address: vma.range.start,
                length: vma.range.len(),
                first_page: PageIndex(vma.offset / page_size.bytes()),
            });
        }
    }
    Ok(mappings)
}

/// A file of which mappings of a process were let go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// Its inode.
    pub file: FileName,
    /// How many mappings were tracked.
    pub mappings: u32,
}

/// Has the service take what a process wrote to any of its files, and let go of its mappings: they can be written all the while,
/// and are untracked from then on.
///
/// # Errors
/// [`AdoptError`]; what was let go of until then stays so.
pub fn release(session: &mut FdpassClient, pid: u32) -> Result<Vec<Released>, AdoptError> {
    let mut inodes: Vec<Inode> = Maps::open(pid)?
        .all()?
        .into_iter()
        .filter(|vma| vma.shared && vma.inode != 0)
        .map(|vma| (vma.device, vma.inode))
        .collect();
    inodes.sort_unstable();
    inodes.dedup();
    let mut released = Vec::new();
    for (device, number) in inodes {
        let file = FileName::Inode { device, number };
        match session.detach(Some(pid), &file, &[]) {
            Ok(mappings) => released.push(Released { file, mappings }),
            // Not one of the service's.
            Err(ClientError::Refused { code: RefusalCode::NotFound, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(released)
}
