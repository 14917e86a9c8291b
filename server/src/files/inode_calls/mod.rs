//! Calls that change the inode of a client's file, made by processes of their own.
//!
//! chmod, chown, ftruncate and F_ADD_SEALS wait for the lock of the inode (`i_rwsem`), uninterruptibly. A client holds it for as long
//! as it wants: in a write(2) from memory that a FUSE daemon does not serve. So a helper makes them:
//!
//! ```text
//!             call, descriptor                  answer
//!   service ------------------> fdmapd-inode ----------> service
//!                                    |
//!                                    +-- sleeps for 500 ms: InodeCallError::Blocked. The helper is late: it gets no other call,
//!                                        and ends when it has answered
//! ```
//!
//! Each user has up to [`MAX_HELPERS`] helpers, of which each makes one call at a time. A late one is never killed: its call may be
//! half done. It outlives the service.
//!
//! - **A late take** is undone by its helper, as is one that no service keeps.
//! - **A restore** is never refused: while all helpers of the user are late, one of them makes it after its other calls.
//! - **Any other late call** takes effect when it can. The function that the caller passed gets the answer.

mod call;
pub mod helper;
mod late;
mod process;

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError};

use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;
use crate::tracking::holder::Worker;
use crate::watchdog;
use call::{Answer, InodeCall};
use late::{Completion, LateHelper};
use process::{HelperProcess, Received};

/// Helpers of one user. While all of them are late, further calls fail at once.
const MAX_HELPERS: usize = 4;
/// Late helpers of all users but root together. With so many, only calls that restore an inode are made for them.
const MAX_LATE_OF_USERS: usize = 16 * MAX_HELPERS;
/// Time in which a restore finds a helper that takes it: the thread that looks at late ones removes those that have ended.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(2);

static LATE: LogLimit = LogLimit::new();

/// A call failed. After the first two, it may still take effect, or have taken effect.
#[derive(Debug, thiserror::Error)]
pub enum InodeCallError {
    #[error(
        "a process holds the lock of the inode, as a write in progress does. The call may still take effect later"
    )]
    Blocked,
    #[error("the process that makes the call ended")]
    Ended,
    #[error("an earlier call on this inode has not returned")]
    Earlier,
    #[error(
        "{MAX_HELPERS} calls on inodes of files of user {0} have not returned: processes hold the locks of the inodes"
    )]
    TooManyBlocked(u32),
    #[error(
        "{MAX_LATE_OF_USERS} calls on inodes of files of all users have not returned: processes hold the locks of the \
         inodes"
    )]
    TooManyOfAll,
    #[error("starting a process that makes the call")]
    Start(#[source] SyscallError),
    #[error(transparent)]
    Syscall(SyscallError),
}

/// What a caller gets after its call was late. Runs on a thread that all late calls share.
pub(super) type WhenLate = Box<dyn FnOnce(Result<(), InodeCallError>) + Send>;

/// Makes calls that change inodes.
#[derive(Debug)]
pub(super) struct InodeCalls(Arc<Helpers>);

/// The helpers of all users.
#[derive(Debug)]
struct Helpers {
    worker: Worker,
    /// A helper without calls ends after this time.
    idle_timeout: Duration,
    state: Mutex<State>,
    /// A helper became idle or late, or ended.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    users: HashMap<u32, UserHelpers>,
    /// Have been closed, and are to be reaped.
    ended: Vec<Child>,
    /// A thread looks at all helpers.
    has_thread: bool,
}

#[derive(Debug, Default)]
struct UserHelpers {
    /// With the time of the last call.
    idle: Vec<(HelperProcess, Instant)>,
    /// Helpers that make a call, or start.
    busy: usize,
    late: Vec<LateHelper>,
}

impl InodeCalls {
    pub(super) fn new(worker: Worker, idle_timeout: Duration) -> Self {
        Self(Arc::new(Helpers { worker, idle_timeout, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// Takes ownership of an inode for the service, as [`fdmap_sys::ownership::take`]. Returns the former ownership. After
    /// [`InodeCallError::Blocked`], `undone` gets a result when the inode has its former ownership again.
    pub(super) fn take(
        &self,
        user: u32,
        file: BorrowedFd<'_>,
        undone: WhenLate,
    ) -> Result<Ownership, InodeCallError> {
        match self.call(user, InodeCall::Take, file, undone)? {
            Answer::Taken(before) => Ok(before),
            // No helper answers that.
            _ => Err(InodeCallError::Ended),
        }
    }

    /// Sets the size of a file. After [`InodeCallError::Blocked`], `late` gets the result.
    pub(super) fn resize(
        &self,
        user: u32,
        file: BorrowedFd<'_>,
        bytes: u64,
        late: WhenLate,
    ) -> Result<(), InodeCallError> {
        self.call(user, InodeCall::Resize(bytes), file, late).map(drop)
    }

    /// Adds `F_SEAL_*` bits. After [`InodeCallError::Blocked`], `late` gets the result.
    pub(super) fn add_seals(
        &self,
        user: u32,
        file: BorrowedFd<'_>,
        seals: u32,
        late: WhenLate,
    ) -> Result<(), InodeCallError> {
        self.call(user, InodeCall::AddSeals(seals), file, late).map(drop)
    }

    /// Undoes a take. After [`InodeCallError::Blocked`], `late` gets the result. No other error is caused by processes of the user.
    pub(super) fn restore(
        &self,
        user: u32,
        file: BorrowedFd<'_>,
        before: Ownership,
        late: WhenLate,
    ) -> Result<(), InodeCallError> {
        let call = InodeCall::Restore(before);
        let mut late = late;
        let deadline = Instant::now() + RESTORE_TIMEOUT;
        while Instant::now() < deadline {
            match self.0.acquire(user) {
                Ok(helper) => return self.make(user, helper, call, file, late).map(drop),
                Err(InodeCallError::TooManyBlocked(_)) => {}
                Err(error) => return Err(error),
            }
            late = match self.0.append(user, call, file, late) {
                Ok(()) => return Err(InodeCallError::Blocked),
                Err(late) => late,
            };
        }
        Err(InodeCallError::TooManyBlocked(user))
    }

    fn call(
        &self,
        user: u32,
        call: InodeCall,
        file: BorrowedFd<'_>,
        late: WhenLate,
    ) -> Result<Answer, InodeCallError> {
        if user != 0 && self.0.late_of_users() >= MAX_LATE_OF_USERS {
            return Err(InodeCallError::TooManyOfAll);
        }
        let helper = self.0.acquire(user)?;
        self.make(user, helper, call, file, late)
    }

    /// Makes a call by a helper that this thread has acquired.
    fn make(
        &self,
        user: u32,
        helper: HelperProcess,
        call: InodeCall,
        file: BorrowedFd<'_>,
        late: WhenLate,
    ) -> Result<Answer, InodeCallError> {
        let _waiting = helper.pid().map(watchdog::wait_for);
        if helper.send(call, Some(file)).is_err() {
            self.0.end(user, helper);
            return Err(InodeCallError::Ended);
        }
        if !helper.wait() {
            self.0.be_late(user, helper, call, late);
            return Err(InodeCallError::Blocked);
        }
        let Received::Answer(answer) = helper.receive() else {
            self.0.end(user, helper);
            return Err(InodeCallError::Ended);
        };
        let kept = if call == InodeCall::Take { helper.send(InodeCall::Keep, None) } else { Ok(()) };
        match kept {
            Ok(()) => self.0.release(user, helper),
            Err(SyscallError { errno, .. }) => {
                self.0.end(user, helper);
                // One that has ended undoes nothing. Any other one undoes the take now.
                if !matches!(errno, Errno::EPIPE | Errno::ECONNRESET) {
                    return Err(InodeCallError::Ended);
                }
            }
        }
        match answer {
            Answer::Failed(error) => Err(InodeCallError::Syscall(error)),
            answer => Ok(answer),
        }
    }
}

impl Helpers {
    /// A helper that makes no call. Starts one if there is none. Waits while all of them make calls.
    fn acquire(self: &Arc<Self>, user: u32) -> Result<HelperProcess, InodeCallError> {
        let mut state = self.lock();
        self.ensure_thread(&mut state);
        loop {
            let State { users, ended, .. } = &mut *state;
            let of_user = users.entry(user).or_default();
            if of_user.late.len() >= MAX_HELPERS {
                return Err(InodeCallError::TooManyBlocked(user));
            }
            if let Some((helper, _)) = of_user.idle.pop() {
                if helper.is_ready(Duration::ZERO) {
                    // It has ended: it sends nothing unasked.
                    helper.note_ended(user);
                    ended.extend(helper.close());
                    continue;
                }
                of_user.busy += 1;
                return Ok(helper);
            }
            if of_user.busy + of_user.late.len() < MAX_HELPERS {
                of_user.busy += 1;
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        HelperProcess::start(self.worker, user).map_err(|error| {
            self.change(user, |of_user, _| of_user.busy -= 1);
            InodeCallError::Start(error)
        })
    }

    /// Late helpers of all users but root.
    fn late_of_users(&self) -> usize {
        self.lock().users.iter().filter(|(user, _)| **user != 0).map(|(_, of_user)| of_user.late.len()).sum()
    }

    fn release(&self, user: u32, helper: HelperProcess) {
        self.change(user, |of_user, _| {
            of_user.busy -= 1;
            of_user.idle.push((helper, Instant::now()));
        });
    }

    /// The helper has ended.
    fn end(&self, user: u32, helper: HelperProcess) {
        helper.note_ended(user);
        self.change(user, |of_user, ended| {
            of_user.busy -= 1;
            ended.extend(helper.close());
        });
    }

    /// The helper has not answered in time.
    fn be_late(&self, user: u32, helper: HelperProcess, call: InodeCall, late: WhenLate) {
        let mut expected: Vec<Completion> = Vec::new();
        if call == InodeCall::Take {
            // After a failure the helper has ended, or finds the socket closed when it has taken the inode.
            let _ = helper.send(InodeCall::Undo, None);
            expected.push(None);
        }
        expected.push(Some(late));
        incidents::count(Incident::InodeHelperLate);
        if let Some(omitted) = LATE.permit() {
            let (file, pid) = (watchdog::file(), helper.pid());
            let file = file.as_deref();
            tracing::warn!(
                file,
                user,
                pid,
                ?call,
                omitted,
                "a process holds the lock of the inode of a file"
            );
        }
        self.change(user, |of_user, _| {
            of_user.busy -= 1;
            of_user.late.push(LateHelper::new(helper, expected));
        });
    }

    /// Lets a late helper make a call after its other ones. Otherwise waits for a change of the helpers, and returns `late`: they may have
    /// answered meanwhile, or have ended.
    fn append(
        &self,
        user: u32,
        call: InodeCall,
        file: BorrowedFd<'_>,
        late: WhenLate,
    ) -> Result<(), WhenLate> {
        let mut state = self.lock();
        let helpers = state.users.get_mut(&user).map_or(&mut [][..], |of_user| &mut of_user.late);
        helpers.sort_by_key(LateHelper::calls);
        for helper in helpers {
            if helper.send(call, file).is_ok() {
                helper.expect(late);
                return Ok(());
            }
        }
        drop(self.changed.wait_timeout(state, late::INTERVAL));
        Err(late)
    }

    fn change(&self, user: u32, change: impl FnOnce(&mut UserHelpers, &mut Vec<Child>)) {
        let mut state = self.lock();
        let State { users, ended, .. } = &mut *state;
        change(users.entry(user).or_default(), ended);
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
