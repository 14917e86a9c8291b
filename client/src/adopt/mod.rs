//! Adopts the shared memory of a running process: finds its files, registers them with the service and, on request, tracks
//! the process's writes through its mappings. The process needs no change and no knowledge of fdmap.
//!
//! [`adopt`] and [`detach`] are the API. `discover` and `naming` find and name the files; `tracee` is the process, opened
//! once; `uffd` and `syscall_insn`, for x86-64 only, create userfaultfds inside of it.
//!
//! Taking descriptors (pidfd_getfd(2)) and opening mappings (`/proc/PID/map_files`) has no effect on the process. Tracking
//! has: one thread is stopped for less than a millisecond and makes two system calls for each userfaultfd. SIGKILL to the
//! caller while such a call runs harms the process; `uffd` says why, and docs/adopting.md what remains of that risk.

mod discover;
mod naming;
#[cfg(target_arch = "x86_64")]
mod syscall_insn;
mod tracee;
#[cfg_attr(not(target_arch = "x86_64"), path = "unsupported.rs")]
mod uffd;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use fdmap_proto::{
    Access, ClientMapping, FileInfo, FileName, Lifetime, MappingId, PageIndex, PageSize, error_chain,
};
use fdmap_sys::maps::may_write;
use fdmap_sys::{Errno, SyscallError};

use crate::error::RefusalCode;
use crate::{ClientError, FdpassClient};
use discover::{Discovery, Inode, SharedFile, discover};
use tracee::Tracee;

/// Mappings that one request to track can name.
const MAX_MAPPINGS_PER_REQUEST: usize = 64;

/// Which files of a process to adopt, and how.
#[derive(Clone, Debug)]
pub struct AdoptOptions {
    /// The files.
    pub selection: Selection,
    /// Name in the service; valid for a single file only. `None`: the file's own name, made unique among the files of the owner.
    pub name: Option<String>,
    /// Access rights in the service. `None`: the caller alone has access.
    pub access: Option<Access>,
    /// When the files end. `None`: the default of the service.
    pub lifetime: Option<Lifetime>,
    /// Track the process's writes through its mappings of the files.
    pub track: bool,
    /// Permit ending a system call with `EINTR` if every thread is in a timed wait that cannot be restarted.
    pub allow_eintr: bool,
}

/// Selects files of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The file of this descriptor.
    Descriptor(i32),
    /// All memfds among the descriptors.
    Memfds,
    /// All memfds among the descriptors, and all shared memory that the process can write through a mapping: files of tmpfs
    /// and hugetlbfs, System V segments, anonymous shared memory.
    All,
}

/// Result of [`adopt`].
#[derive(Debug)]
pub struct Adopted {
    /// The adopted files.
    pub files: Vec<AdoptedFile>,
    /// The stop of one thread; `None` if no thread was stopped.
    pub stop: Option<ThreadStop>,
    /// What failed. The rest succeeded.
    pub problems: Vec<Problem>,
}

/// One adopted file.
#[derive(Clone, Debug)]
pub struct AdoptedFile {
    /// The file as the service describes it.
    pub info: FileInfo,
    /// True if the service had the file before.
    pub already_registered: bool,
    /// Mappings of the process that are tracked from now on.
    pub tracked: Vec<(MappingId, ClientMapping)>,
}

/// A failure that concerns one file, descriptor or mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file, descriptor or mapping.
    pub subject: String,
    /// The error with its causes.
    pub reason: String,
}

impl Problem {
    fn new(subject: String, error: &AdoptError) -> Self {
        Self { subject, reason: error_chain(error) }
    }
}

/// The stop of a thread into which system calls were injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadStop {
    /// Thread id.
    pub tid: u32,
    /// Number of the system call that the thread was in; `None` if it was in none.
    pub syscall: Option<i64>,
    /// Upper bound of the time that the thread was stopped.
    pub duration: Duration,
    /// What became of the system call.
    pub outcome: ResumeOutcome,
}

/// What became of the system call that a stopped thread was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// The thread was in no call, or the call had its result.
    Unchanged,
    /// The kernel restarted the call, with the time that remained if it has a timeout.
    Restarted,
    /// fdmap made the call again as it was.
    Reissued,
    /// The call returned `EINTR`.
    Interrupted,
}

impl ResumeOutcome {
    /// The variant's name in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Restarted => "restarted",
            Self::Reissued => "reissued",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Why a process, or a file of it, cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A request to the service, or reading the process, failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The process rules out injected system calls. It was not touched.
    #[error("its mappings cannot be tracked: {0}")]
    Untrackable(String),
    /// The caller may not trace the process. It was not touched.
    #[error(
        "no permission to trace it: run as root, with CAP_SYS_PTRACE, or as its user with kernel.yama.ptrace_scope=0"
    )]
    Denied(#[source] SyscallError),
    /// No thread stopped in time. All threads continue.
    #[error("none of its threads could be stopped: they sleep uninterruptibly, or exit")]
    NotStopped,
    /// Every thread is in a timed wait that a stop would end with `EINTR`. The process was not touched.
    #[error(
        "thread {tid} blocks adoption: it is in a timed {syscall}, which a stop ends with EINTR (permitted by --allow-eintr), \
         and no other thread is better"
    )]
    TimedWait {
        /// Thread id.
        tid: u32,
        /// Name of the system call.
        syscall: &'static str,
    },
    /// The process exited.
    #[error("process {0} has exited")]
    ProcessExited(u32),
    /// The thread exited while it was stopped, or its process called execve.
    #[error("thread {0} exited, or its process called execve")]
    ThreadExited(u32),
    /// The thread did not run for two seconds. It has its own registers.
    #[error("thread {0} does not run, as in a frozen cgroup; nothing was changed")]
    Frozen(u32),
    /// An injected system call failed.
    #[error("{call} injected into the process")]
    Injected {
        /// Name of the call.
        call: &'static str,
        /// Its error.
        #[source]
        errno: Errno,
    },
    /// The process has no such file.
    #[error("{0}")]
    NotFound(String),
    /// The descriptor is not one of shmem or hugetlb, or was opened with `O_PATH`.
    #[error("descriptor {0} is no open file of shared memory")]
    NotSharedMemory(i32),
    /// The process has the file open for reading only, and its user may not write to it.
    #[error(
        "descriptor {0} is not open for reading and writing, and the user of the process may not write to the file"
    )]
    NotWritable(i32),
    /// This kernel or architecture cannot track writes of other processes. The process was not touched.
    #[error("{0}")]
    Unsupported(&'static str),
}

impl From<SyscallError> for AdoptError {
    fn from(error: SyscallError) -> Self {
        Self::Client(error.into())
    }
}

/// Registers files of a process with the service and, if `options.track` is set, tracks its writes to them.
///
/// With tracking this takes up to five seconds. Signals to the calling thread wait while the process is stopped.
///
/// # Errors
/// [`AdoptError`] if nothing could be adopted. If only some of the work fails, [`Adopted::problems`] lists it.
pub fn adopt(session: &mut FdpassClient, pid: u32, options: &AdoptOptions) -> Result<Adopted, AdoptError> {
    let tracee = Tracee::open(pid)?;
    if options.track {
        // Before anything is changed.
        tracee.check_injectable()?;
    }
    let Discovery { files: found, mut problems } = discover(&tracee, options.selection)?;
    if found.is_empty() && problems.is_empty() {
        const NONE: &str = "no shared memory of the selected kinds (default: memfds; --all: every kind)";
        return Err(AdoptError::NotFound(NONE.to_owned()));
    }
    if options.name.is_some() && found.len() > 1 {
        let count = found.len();
        return Err(AdoptError::NotFound(format!(
            "process {pid} has {count} files; --name needs a single one"
        )));
    }
    let mut files = Vec::new();
    for (inode, shared) in found {
        match register(session, pid, &shared, options) {
            Ok((info, already_registered)) => {
                files.push((inode, AdoptedFile { info, already_registered, tracked: Vec::new() }));
            }
            Err(error) => problems.push(Problem::new(shared.target, &error.into())),
        }
    }
    let mut stop = None;
    if options.track {
        // The files stay adopted if tracking fails, so the caller gets to know them.
        if let Err(error) = track(session, &tracee, &mut files, options, &mut problems, &mut stop) {
            problems.push(Problem::new(format!("tracking process {pid}"), &error));
        }
    }
    Ok(Adopted { files: files.into_iter().map(|(_, file)| file).collect(), stop, problems })
}

/// Registers one file with the service. True if the service had it before.
fn register(
    session: &mut FdpassClient,
    pid: u32,
    shared: &SharedFile,
    options: &AdoptOptions,
) -> Result<(FileInfo, bool), ClientError> {
    let (device, number) = shared.inode;
    match session.open(&FileName::Inode { device, number }, false) {
        Ok((_, info)) => return Ok((info, true)),
        Err(ClientError::Refused { code: RefusalCode::NotFound, .. }) => {}
        Err(error) => return Err(error),
    }
    let names = match &options.name {
        Some(name) => vec![name.clone()],
        None => naming::candidates(&shared.target, pid, number),
    };
    let mut last = ClientError::Unexpected("no name for the file");
    for name in names {
        match session.adopt_with_lifetime(shared.file.as_fd(), &name, options.access, options.lifetime) {
            Ok(info) => return Ok((info, false)),
            Err(error @ ClientError::Refused { code: RefusalCode::AlreadyExists, .. }) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Tracks all mappings of these files through which the process can write.
fn track(
    session: &mut FdpassClient,
    tracee: &Tracee,
    files: &mut [(Inode, AdoptedFile)],
    options: &AdoptOptions,
    problems: &mut Vec<Problem>,
    stop: &mut Option<ThreadStop>,
) -> Result<(), AdoptError> {
    let pid = tracee.pid;
    let mut requests = Vec::new();
    for (index, (inode, _)) in files.iter().enumerate() {
        let mappings = writable_mappings(tracee, *inode, session.page_size())?;
        requests.extend(mappings.chunks(MAX_MAPPINGS_PER_REQUEST).map(|part| (index, part.to_vec())));
    }
    if requests.is_empty() {
        return Ok(());
    }
    fdmap_sys::uffd::require_wp_async().map_err(AdoptError::Unsupported)?;
    let (userfaultfds, stopped) = uffd::create_userfaultfds(tracee, requests.len(), options.allow_eintr)?;
    *stop = Some(stopped);
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).ok();
    let pagemap = pagemap.as_ref().map(|file| file.as_fd());
    tracee.check_alive()?;
    for (userfaultfd, (index, mappings)) in userfaultfds.into_iter().zip(requests) {
        let (_, file) = &mut files[index];
        let name = FileName::Id(file.info.id);
        let maps = Some(tracee.maps.as_fd());
        match session.track_process(pid, &name, userfaultfd.as_fd(), pagemap, maps, &mappings) {
            Ok(ids) => file.tracked.extend(ids.into_iter().zip(mappings)),
            Err(error) => {
                let subject = format!("tracking {}", file.info.caller_name());
                problems.push(Problem::new(subject, &error.into()));
            }
        }
    }
    Ok(())
}

fn writable_mappings(
    tracee: &Tracee,
    (device, inode): Inode,
    page_size: PageSize,
) -> Result<Vec<ClientMapping>, AdoptError> {
    let mut mappings = Vec::new();
    for vma in tracee.maps.shared_of(device, inode)? {
        if may_write(tracee.pid, &vma)? {
            mappings.push(ClientMapping {
                address: vma.range.start,
                length_bytes: vma.range.len(),
                first_page: PageIndex(vma.offset / page_size.bytes()),
            });
        }
    }
    Ok(mappings)
}

/// A file whose mappings by a process are no longer tracked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetachedFile {
    /// The file, by its inode.
    pub file: FileName,
    /// Mappings that were tracked.
    pub mappings: u32,
}

/// Stops tracking a process. The service harvests each of its mappings a last time and then unregisters it, while the
/// process keeps running. Later writes are not tracked.
///
/// # Errors
/// [`AdoptError`]. Files that were detached before the failure stay detached.
pub fn detach(session: &mut FdpassClient, pid: u32) -> Result<Vec<DetachedFile>, AdoptError> {
    let tracee = Tracee::open(pid)?;
    let mut inodes: Vec<Inode> = tracee.shared_vmas()?.iter().map(|vma| (vma.device, vma.inode)).collect();
    inodes.sort_unstable();
    inodes.dedup();
    let mut detached = Vec::new();
    for (device, number) in inodes {
        let file = FileName::Inode { device, number };
        match session.detach(Some(pid), &file, &[]) {
            Ok(mappings) => detached.push(DetachedFile { file, mappings }),
            // The service does not have this file.
            Err(ClientError::Refused { code: RefusalCode::NotFound, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(detached)
}
