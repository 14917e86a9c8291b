//! The way to the service: one session, made when it is needed and made anew when it broke, for whoever has the shim's lock.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use fdmap_client::error::RefusalCode;
use fdmap_client::{ClientError, Endpoint, FdpassClient, Timeouts};
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};
use nix::time::{ClockId, clock_gettime};

use crate::config::{Config, Mode};
use crate::guard::Inside;
use crate::readahead::Reader;
use crate::service_calls;
use crate::stderr::{self, Once};

/// How long a silent service is waited for: nothing that the program calls takes longer than a few of these.
const TIMEOUTS: Timeouts = Timeouts { connect: Duration::from_secs(1), answer: Duration::from_secs(5) };
/// Where there is no service it is looked for again after this.
const ABSENT: Duration = Duration::from_millis(200);
/// One that did not answer is left alone for this.
const SILENT: Duration = Duration::from_secs(30);
/// How often is looked whether the session has ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long another thread is waited for.
const PATIENCE: Duration = Duration::from_secs(20);
/// The session's descriptor has this number or a higher one, if it may.
pub const LEAST_NUMBER: i32 = 1000;
/// It never has a lower one: those are the program's standard streams, though it may have closed them.
pub const LOWEST_NUMBER: i32 = 3;

static LOCKED: AtomicBool = AtomicBool::new(false);
static SHIM: Cell = Cell(UnsafeCell::new(None));
/// The session's descriptor and its inode, to close it in a fork; -1: none.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static SOCKET_INODE: AtomicU64 = AtomicU64::new(0);

struct Cell(UnsafeCell<Option<Shim>>);

// SAFETY: what is in it is reached by whoever has the lock only, and by a forked child that has no other thread.
unsafe impl Sync for Cell {}

/// What the shim knows beyond the table of mappings.
pub struct Shim {
    /// What the environment asked for.
    pub config: Config,
    place: Endpoint,
    session: Option<Session>,
    /// Nobody is asked before this moment.
    not_before: Duration,
    look_at: Duration,
    renewing: bool,
    /// Inodes of which it is known that the service has them.
    pub known: Vec<(u64, u64)>,
    /// Of reads of pagemaps.
    pub reader: Reader,
}

struct Session {
    fdpass: FdpassClient,
    inode: u64,
}

/// Why the service did not do it.
#[derive(Debug)]
pub enum Failed {
    /// There is none, or it does not answer. It was said.
    Gone,
    /// It says no, or something that it needs cannot be had here.
    Refused(ClientError),
}

impl Failed {
    /// The service's reason, if it was the service that said no.
    pub const fn code(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(error) => error.refusal(),
            Self::Gone => None,
        }
    }
}

static SAID_ABSENT: Once = Once::new();
static SAID_FILTERED: Once = Once::new();
static SAID_REFUSED: Once = Once::new();

/// Before anything else: what the environment asked for.
pub fn begin(config: Config) {
    let place = Endpoint::from_env();
    let shim = Shim {
        config,
        place,
        session: None,
        not_before: Duration::ZERO,
        look_at: Duration::ZERO,
        renewing: false,
        known: Vec::new(),
        reader: Reader::default(),
    };
    // SAFETY: nothing else of the shim runs before this.
    unsafe { *SHIM.0.get() = Some(shim) };
}

/// In a forked child, which has one thread: the session is the parent's, and whoever had the lock is not here. Allocates and
/// frees nothing.
pub fn abandon() {
    // SAFETY: there is no other thread.
    let shim = unsafe { &mut *SHIM.0.get() };
    let sound = !LOCKED.load(Ordering::Acquire);
    if let Some(shim) = shim {
        // Another thread of the parent may have been at work on it: neither is freed.
        std::mem::forget(shim.session.take());
        std::mem::forget(std::mem::take(&mut shim.known));
        shim.reader.abandon(sound);
        shim.renewing = false;
        shim.not_before = Duration::ZERO;
    }
    let socket = SOCKET.swap(-1, Ordering::Relaxed);
    if socket >= 0 && inode_of(socket) == Some(SOCKET_INODE.load(Ordering::Relaxed)) {
        // SAFETY: it is the session's, as its inode tells, and nobody uses that any more.
        unsafe { libc::close(socket) };
    }
    LOCKED.store(false, Ordering::Release);
}

/// Works with the service, when no other thread does. `None` if another one does for too long.
pub fn with<T>(_inside: &Inside, work: impl FnOnce(&mut Shim) -> T) -> Option<T> {
    let began = now();
    while LOCKED.swap(true, Ordering::Acquire) {
        if now().saturating_sub(began) > PATIENCE {
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    let _unlock = Unlock;
    // SAFETY: we have the lock.
    let shim = unsafe { &mut *SHIM.0.get() };
    shim.as_mut().map(work)
}

struct Unlock;

impl Drop for Unlock {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

impl Shim {
    /// Has the service do something; over a new session if the old one has ended.
    pub fn ask<T>(
        &mut self,
        mut what: impl FnMut(&mut FdpassClient) -> Result<T, ClientError>,
    ) -> Result<T, Failed> {
        let mut again = self.session.is_some();
        loop {
            let done = what(self.connected()?);
            match done {
                Ok(done) => return Ok(done),
                Err(error @ (ClientError::Refused { .. } | ClientError::Untrackable { .. })) => {
                    return Err(Failed::Refused(error));
                }
                Err(ClientError::Broken(_)) if again => {
                    again = false;
                    self.hang_up();
                }
                Err(error) => {
                    self.hang_up();
                    return Err(self.gone(&error));
                }
            }
        }
    }

    /// Looks, now and then, whether the service has gone: if it is back, it is told of our mappings again.
    pub fn tend(&mut self) {
        if now() < self.look_at {
            return;
        }
        self.look_at = now() + LOOK;
        if let Some(session) = &self.session {
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            let number = session.fdpass.as_fd().as_raw_fd();
            if inode_of(number) == Some(session.inode)
                && !matches!(recv(number, &mut [0], flags), Ok(0) | Err(nix::errno::Errno::ECONNRESET))
            {
                return;
            }
            self.hang_up();
        } else if crate::mapping_table::all().is_empty() {
            return;
        }
        // Whatever fails was said.
        let _ = self.connected();
    }

    /// True if a session is to be had: in strict mode the program ends if not.
    pub fn reach(&mut self) -> bool {
        self.connected().is_ok()
    }

    fn connected(&mut self) -> Result<&mut FdpassClient, Failed> {
        // The program may have closed our descriptor, as those do that close all, and have given its number to another file.
        if let Some(session) = &self.session
            && inode_of(session.fdpass.as_fd().as_raw_fd()) != Some(session.inode)
        {
            std::mem::forget(self.session.take());
        }
        if self.session.is_none() {
            self.connect()?;
            if !std::mem::replace(&mut self.renewing, true) {
                service_calls::renew(self);
                self.renewing = false;
            }
        }
        self.session.as_mut().map(|session| &mut session.fdpass).ok_or(Failed::Gone)
    }

    fn connect(&mut self) -> Result<(), Failed> {
        if now() < self.not_before {
            return Err(Failed::Gone);
        }
        if is_filtered() {
            // No filter is ever taken away again.
            self.not_before = Duration::MAX;
            let what = "this process filters its system calls (Seccomp: 2 in /proc/self/status)";
            if self.config.mode == Mode::Strict {
                stderr::end(format_args!("{what}; FDMAP_SHIM=strict ends the program"));
            }
            SAID_FILTERED.say(format_args!("{what}; going on without fdmapd"));
            return Err(Failed::Gone);
        }
        let mut fdpass = FdpassClient::connect(&self.place, TIMEOUTS).map_err(|error| self.gone(&error))?;
        // Low numbers mean something to some programs; high ones may not be had everywhere.
        if fdpass.renumber(LEAST_NUMBER).is_err() {
            fdpass.renumber(LOWEST_NUMBER).map_err(|error| self.gone(&error))?;
        }
        let number = fdpass.as_fd().as_raw_fd();
        let inode = inode_of(number).ok_or(Failed::Gone)?;
        SOCKET_INODE.store(inode, Ordering::Relaxed);
        SOCKET.store(number, Ordering::Relaxed);
        self.known.clear();
        self.session = Some(Session { fdpass, inode });
        Ok(())
    }

    fn hang_up(&mut self) {
        SOCKET.store(-1, Ordering::Relaxed);
        if let Some(session) = self.session.take()
            && inode_of(session.fdpass.as_fd().as_raw_fd()) != Some(session.inode)
        {
            // Not ours to close.
            std::mem::forget(session);
        }
    }

    fn gone(&mut self, error: &ClientError) -> Failed {
        let silent = matches!(error, ClientError::TimedOut { .. });
        self.not_before = now() + if silent { SILENT } else { ABSENT };
        if self.config.mode == Mode::Strict {
            stderr::end(format_args!("{error}; FDMAP_SHIM=strict ends the program"));
        }
        SAID_ABSENT.say(format_args!("{error}; going on without it"));
        Failed::Gone
    }

    /// Tells of something that the program could have had otherwise: once, or the program ends.
    pub fn complain(&self, what: std::fmt::Arguments<'_>, failed: &Failed) {
        let Failed::Refused(error) = failed else { return };
        if self.config.mode == Mode::Strict {
            stderr::end(format_args!("{what}: {error}; FDMAP_SHIM=strict ends the program"));
        }
        SAID_REFUSED.say(format_args!("{what}: {error}; going on without it"));
    }
}

/// True if a filter judges the system calls of this process. What it thinks of ours is not known, and it may end the program.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// The inode of a descriptor.
pub fn inode_of(number: i32) -> Option<u64> {
    // SAFETY: the descriptor is looked at only, and if there is none of that number, fstat says so.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    nix::sys::stat::fstat(fd).ok().map(|stat| stat.st_ino)
}

/// The kernel's clock.
pub fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}
