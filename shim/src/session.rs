//! The shim's connection to the service and the lock that guards it. The connection is made on first use and made again after it
//! broke. Each new connection runs the `on_connect` function, which reports the process's mappings to the service.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use fdmap_client::error::RefusalCode;
use fdmap_client::proto::convert::FileName;
use fdmap_client::{ClientError, Endpoint, FdpassClient, Timeouts};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};
use nix::time::{ClockId, clock_gettime};

use crate::config::{Config, Mode};
use crate::descriptor::inode_of;
use crate::guard::Guard;
use crate::mapping_table;
use crate::readahead_cache::ReadaheadCache;
use crate::stderr::{self, OnceMessage};

/// Timeouts of one request; a call of the program makes at most a few requests.
const TIMEOUTS: Timeouts = Timeouts { connect: Duration::from_secs(1), answer: Duration::from_secs(5) };
/// Delay before the next connection attempt if no service answers.
const RECONNECT_DELAY: Duration = Duration::from_millis(200);
/// Delay before the next request to a service that did not answer in time.
const UNRESPONSIVE_DELAY: Duration = Duration::from_secs(30);
/// Interval of checks whether the service has closed the connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for another thread that holds the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(20);
/// Lowest number of the session's descriptor, if the limit on descriptors allows it.
pub const MIN_SESSION_FD: i32 = 1000;
/// Lowest number of any descriptor of the shim: lower ones are the standard streams, even if the program has closed them.
pub const MIN_SHIM_FD: i32 = 3;

static LOCKED: AtomicBool = AtomicBool::new(false);
static SHIM: ShimCell = ShimCell(UnsafeCell::new(None));
/// The session's descriptor, which a forked child closes; -1 without a session.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static SOCKET_INODE: AtomicU64 = AtomicU64::new(0);

static UNAVAILABLE_MESSAGE: OnceMessage = OnceMessage::new();
static SECCOMP_MESSAGE: OnceMessage = OnceMessage::new();
static REFUSED_MESSAGE: OnceMessage = OnceMessage::new();

struct ShimCell(UnsafeCell<Option<Shim>>);

// SAFETY: only the holder of the lock accesses the content, or a forked child, which has one thread.
unsafe impl Sync for ShimCell {}

/// State of the shim besides the mapping table.
pub struct Shim {
    pub config: Config,
    endpoint: Endpoint,
    session: Option<Session>,
    on_connect: fn(&mut Self),
    /// Time before which no connection is attempted.
    not_before: Duration,
    next_check: Duration,
    /// `on_connect` is running.
    restoring: bool,
    /// Device and inode of files that the service is known to have.
    pub known_files: Vec<(u64, u64)>,
    pub readahead: ReadaheadCache,
}

struct Session {
    fdpass: FdpassClient,
    inode: u64,
}

impl Session {
    /// Checks whether the descriptor is still the session's: the program may have closed it and reused its number.
    fn is_open(&self) -> bool {
        inode_of(self.fdpass.as_fd().as_raw_fd()) == Some(self.inode)
    }
}

/// Why a request to the service failed.
#[derive(Debug)]
pub enum CallFailure {
    /// No service, or no answer. The message was printed.
    Unavailable,
    /// The service refused the request, or this process lacks something that the request needs.
    Refused(ClientError),
}

impl CallFailure {
    /// The service's refusal code; `None` if the service did not refuse.
    pub const fn code(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(error) => error.refusal(),
            Self::Unavailable => None,
        }
    }
}

/// Sets up the state, without connecting. Runs before any other code of the shim.
pub fn initialize(config: Config, on_connect: fn(&mut Shim)) {
    let endpoint = Endpoint::from_env();
    let shim = Shim {
        config,
        endpoint,
        session: None,
        on_connect,
        not_before: Duration::ZERO,
        next_check: Duration::ZERO,
        restoring: false,
        known_files: Vec::new(),
        readahead: ReadaheadCache::default(),
    };
    // SAFETY: no other code of the shim runs before this.
    unsafe { *SHIM.0.get() = Some(shim) };
}

/// Gives up the parent's session in a forked child. The child has one thread; a lock holder exists only in the parent. Neither
/// allocates nor frees memory.
pub fn reset_after_fork() {
    // SAFETY: the child has no other thread.
    let shim = unsafe { &mut *SHIM.0.get() };
    let consistent = !LOCKED.load(Ordering::Acquire);
    if let Some(shim) = shim {
        // Another thread of the parent may have been changing these, so they are not freed.
        std::mem::forget(shim.session.take());
        std::mem::forget(std::mem::take(&mut shim.known_files));
        shim.readahead.reset_after_fork(consistent);
        shim.restoring = false;
        shim.not_before = Duration::ZERO;
    }
    let socket = SOCKET.swap(-1, Ordering::Relaxed);
    if socket >= 0 && inode_of(socket) == Some(SOCKET_INODE.load(Ordering::Relaxed)) {
        // SAFETY: the inode proves that the descriptor is the session's, which the child does not use.
        unsafe { libc::close(socket) };
    }
    LOCKED.store(false, Ordering::Release);
}

/// Runs `work` under the lock. Returns `None` if another thread holds the lock for longer than [`LOCK_TIMEOUT`].
pub fn with_shim<T>(_guard: &Guard, work: impl FnOnce(&mut Shim) -> T) -> Option<T> {
    let start = now();
    while LOCKED.swap(true, Ordering::Acquire) {
        if now().saturating_sub(start) > LOCK_TIMEOUT {
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    let _unlock = Unlock;
    // SAFETY: this thread holds the lock.
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
    /// Sends a request to the service. Connects first if there is no session, and retries once if the session broke.
    pub fn call<T>(
        &mut self,
        mut request: impl FnMut(&mut FdpassClient) -> Result<T, ClientError>,
    ) -> Result<T, CallFailure> {
        let mut may_retry = self.session.is_some();
        loop {
            let result = request(self.connected()?);
            match result {
                Ok(answer) => return Ok(answer),
                Err(error @ (ClientError::Refused { .. } | ClientError::Untrackable { .. })) => {
                    return Err(CallFailure::Refused(error));
                }
                Err(ClientError::Broken(_)) if may_retry => {
                    may_retry = false;
                    self.disconnect();
                }
                Err(error) => {
                    self.disconnect();
                    return Err(self.mark_unavailable(&error));
                }
            }
        }
    }

    /// Checks, at most once per [`CHECK_INTERVAL`], whether the service has closed the session, and reconnects if so.
    pub fn check_session(&mut self) {
        if now() < self.next_check {
            return;
        }
        self.next_check = now() + CHECK_INTERVAL;
        if let Some(session) = &self.session {
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            let fd = session.fdpass.as_fd().as_raw_fd();
            if session.is_open() && !matches!(recv(fd, &mut [0], flags), Ok(0) | Err(Errno::ECONNRESET)) {
                return;
            }
            self.disconnect();
        } else if mapping_table::all().is_empty() {
            return;
        }
        // A failure has printed its message.
        let _ = self.connected();
    }

    /// Connects to the service. In strict mode a failure exits the program.
    pub fn connect_now(&mut self) -> bool {
        self.connected().is_ok()
    }

    fn connected(&mut self) -> Result<&mut FdpassClient, CallFailure> {
        // The program may have closed the descriptor and reused its number: it must not be closed again.
        if self.session.as_ref().is_some_and(|session| !session.is_open()) {
            std::mem::forget(self.session.take());
        }
        if self.session.is_none() {
            self.connect()?;
            if !std::mem::replace(&mut self.restoring, true) {
                (self.on_connect)(self);
                self.restoring = false;
            }
        }
        self.session.as_mut().map(|session| &mut session.fdpass).ok_or(CallFailure::Unavailable)
    }

    fn connect(&mut self) -> Result<(), CallFailure> {
        if now() < self.not_before {
            return Err(CallFailure::Unavailable);
        }
        if is_seccomp_filtered() {
            // A seccomp filter is never removed.
            self.not_before = Duration::MAX;
            let reason = "a seccomp filter is installed in this process";
            if self.config.mode == Mode::Strict {
                stderr::exit(format_args!("{reason}; exiting because of FDMAP_SHIM=strict"));
            }
            SECCOMP_MESSAGE.print(format_args!("{reason}; continuing without fdmapd"));
            return Err(CallFailure::Unavailable);
        }
        let mut fdpass =
            FdpassClient::connect(&self.endpoint, TIMEOUTS).map_err(|error| self.mark_unavailable(&error))?;
        // Some programs give low numbers a meaning; RLIMIT_NOFILE may forbid high ones.
        if fdpass.renumber(MIN_SESSION_FD).is_err() {
            fdpass.renumber(MIN_SHIM_FD).map_err(|error| self.mark_unavailable(&error))?;
        }
        let fd = fdpass.as_fd().as_raw_fd();
        let inode = inode_of(fd).ok_or(CallFailure::Unavailable)?;
        SOCKET_INODE.store(inode, Ordering::Relaxed);
        SOCKET.store(fd, Ordering::Relaxed);
        self.known_files.clear();
        self.session = Some(Session { fdpass, inode });
        Ok(())
    }

    fn disconnect(&mut self) {
        SOCKET.store(-1, Ordering::Relaxed);
        if let Some(session) = self.session.take()
            && !session.is_open()
        {
            // The number belongs to the program now.
            std::mem::forget(session);
        }
    }

    fn mark_unavailable(&mut self, error: &ClientError) -> CallFailure {
        let unresponsive = matches!(error, ClientError::TimedOut { .. });
        self.not_before = now() + if unresponsive { UNRESPONSIVE_DELAY } else { RECONNECT_DELAY };
        if self.config.mode == Mode::Strict {
            stderr::exit(format_args!("{error}; exiting because of FDMAP_SHIM=strict"));
        }
        UNAVAILABLE_MESSAGE.print(format_args!("{error}; continuing without fdmapd"));
        CallFailure::Unavailable
    }

    /// Reports a refused request: prints the first one; in strict mode exits the program.
    pub fn report_refusal(&self, what: std::fmt::Arguments<'_>, failure: &CallFailure) {
        let CallFailure::Refused(error) = failure else { return };
        if self.config.mode == Mode::Strict {
            stderr::exit(format_args!("{what}: {error}; exiting because of FDMAP_SHIM=strict"));
        }
        REFUSED_MESSAGE.print(format_args!("{what}: {error}; continuing without it"));
    }
}

/// The service's name for the file with this device and inode.
pub const fn inode_name(device: u64, inode: u64) -> FileName {
    FileName::Inode { device, number: inode }
}

/// Checks whether a seccomp filter is installed. Its rules are unknown: it may kill the program for a call that only the shim makes.
fn is_seccomp_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// Current `CLOCK_MONOTONIC` time.
pub fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}
