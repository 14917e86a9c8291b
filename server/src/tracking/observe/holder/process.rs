//! The holder's side: a table of address spaces, one thread for each lane, and a few that close userfaultfds. A call that waits for
//! a process blocks its lane, and no other one. The control thread waits for none.
//!
//! ```text
//!   service --Hold---------------> [table] <--+
//!      |  |                                   |
//!      |  +-----Lane--> threads: call, result +
//!      +--Release--> [closers]
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use fdmap_sys::capabilities::{self, Capabilities};
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError, process, scm};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::gettid;

use super::super::own_calls::exclude_own_calls;
use super::call::{SpaceCall, SpaceResult};
use super::closers::Closers;
use super::space::{ScanBuffer, Space, SpaceFiles};
use super::thread::start_thread;
use super::wire::{CallMessage, Control, ResultMessage, SpaceId, read_frame, write_frame};
use crate::confinement::{self, ConfinementError};
use crate::parent::Parent;

/// First argument of `fdmapd` that starts a holder. The second is the user, for `ps`; the third the process id of the service.
pub const ARGUMENT: &str = "space-holder";

/// How long a lane waits for the descriptors of a call, which the control thread receives.
const HOLD_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a userfaultfd stays open for another process that has to close it first.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(30);
/// Milliseconds between two looks whether all userfaultfds are closed, before the end.
const QUIT_INTERVAL: u8 = 20;

/// Runs a holder. The process must not have opened any descriptor before.
#[must_use]
pub fn main() -> ExitCode {
    let control = io::stdin();
    if !scm::is_seqpacket(control.as_fd()) {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs a socket from fdmapd as standard input");
        return ExitCode::FAILURE;
    }
    match prepare() {
        Ok(service) => {
            if !run(control.as_fd()) {
                // The service ended. Its descriptors are closed first: a process that closes the last copy of a userfaultfd may
                // wait for the processes of the address space.
                service.wait_for_end();
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fdmapd: {}", fdmap_proto::error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn prepare() -> Result<Parent, ConfinementError> {
    process::close_from(3)?;
    // These signals stop the service, which closes the socket when it ends.
    process::ignore_signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    process::set_name(c"fdmapd-holder")?;
    let service = Parent::from_argument(3)?;
    // To open the pagemap and the maps of processes of other users.
    capabilities::forbid_new_privileges()?;
    capabilities::keep_only(Capabilities::SYS_PTRACE | Capabilities::DAC_READ_SEARCH)?;
    // The holders of other users may not trace this one: all have the service's user.
    process::set_undumpable()?;
    confinement::refuse_deadly(&[libc::SYS_openat, libc::SYS_bpf])?;
    Ok(service)
}

/// The descriptors of each address space.
struct Table {
    spaces: Mutex<BTreeMap<SpaceId, Versioned>>,
    added: Condvar,
    closers: Arc<Closers>,
    /// Why the calls of this process are not excluded from those that are counted.
    counted: Mutex<Option<Errno>>,
}

/// The version of the descriptors of an address space.
type Versioned = (u64, Arc<Space>);

/// Handles the messages of the service. Returns true after [`Control::Quit`], false if the service closed the socket.
pub(super) fn run(control: BorrowedFd<'_>) -> bool {
    // Without a thread that closes userfaultfds this holder ends: it has none yet.
    let Ok(closers) = Closers::start() else { return true };
    let (spaces, added, counted) = (Mutex::default(), Condvar::new(), Mutex::default());
    let table = Arc::new(Table { spaces, added, closers, counted });
    let mut quitting = false;
    loop {
        match Control::receive(control) {
            Ok(Some((Control::Quit, _))) => quitting = true,
            Ok(Some((message, descriptors))) => {
                quitting = false;
                table.handle(message, descriptors);
            }
            Ok(None) if quitting && table.closers.unfinished() == 0 => return true,
            Ok(None) => {
                let timeout = if quitting { PollTimeout::from(QUIT_INTERVAL) } else { PollTimeout::NONE };
                // A failed poll(2) was interrupted. A superfluous receive is harmless.
                let _ = poll(&mut [PollFd::new(control, PollFlags::POLLIN)], timeout);
            }
            // The service has closed its end behind this message.
            Err(_) if quitting => {
                while table.closers.unfinished() > 0 {
                    let _ = poll(&mut [], PollTimeout::from(QUIT_INTERVAL));
                }
                return true;
            }
            Err(_) => return false,
        }
    }
}

impl Table {
    fn handle(self: &Arc<Self>, message: Control, descriptors: Vec<OwnedFd>) {
        match message {
            Control::Hold(id, version) => {
                // Without room for the descriptors the calls of the address space fail.
                let Some(space) = space_of(descriptors) else { return };
                let before = self.lock().insert(id, (version, Arc::new(space)));
                self.added.notify_all();
                drop(before);
            }
            Control::Release(id, acknowledged) => {
                let space = self.lock().remove(&id);
                let mut descriptors = descriptors.into_iter();
                let userfaultfd = descriptors.next();
                let closed = acknowledged.then(|| descriptors.next()).flatten().map(Arc::new);
                if let (Some((_, space)), Some(closed)) = (&space, &closed) {
                    // A call in progress may have the last copy.
                    let _ = space.closed.set(Arc::clone(closed));
                }
                let barriers: Vec<_> = descriptors.collect();
                self.closers.add(move || {
                    for barrier in &barriers {
                        let timeout = PollTimeout::try_from(BARRIER_TIMEOUT).unwrap_or(PollTimeout::MAX);
                        // A failure ends the wait.
                        let _ = poll(&mut [PollFd::new(barrier.as_fd(), PollFlags::empty())], timeout);
                    }
                    drop((space, userfaultfd));
                    drop(closed);
                });
            }
            Control::Lane => {
                let Some(lane) = descriptors.into_iter().next() else { return };
                let (table, lane) = (Arc::clone(self), Arc::new(UnixStream::from(lane)));
                let its = Arc::clone(&lane);
                // Ends when the service closes the lane.
                if start_thread("lane", move || drop(table.serve(&its))).is_err() {
                    // The service has no other thread to wait for. A failure ends the lane.
                    let _ = write_frame(&lane, &ResultMessage::no_thread(), &[]);
                }
            }
            Control::Exclude(name) => {
                let excluded = match descriptors.first() {
                    Some(program) => exclude_own_calls(program.as_fd(), name),
                    None => Err(Errno::EMFILE),
                };
                *self.counted.lock().unwrap_or_else(PoisonError::into_inner) = excluded.err();
            }
            Control::Quit => {}
        }
    }

    /// Makes the calls that arrive on a lane.
    fn serve(&self, lane: &UnixStream) -> io::Result<()> {
        let counted = *self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(lane, &ResultMessage::ready(gettid().as_raw().cast_unsigned(), counted), &[])?;
        let mut buffer = ScanBuffer::default();
        loop {
            let (message, _) = read_frame::<CallMessage>(lane)?;
            let (id, version) = (SpaceId(message.id), message.version);
            let call = message.call().ok_or(io::ErrorKind::InvalidData)?;
            let Some(space) = self.wait_for(id, version) else {
                let error =
                    SyscallError { call: "recvmsg of a userfaultfd".to_owned(), errno: Errno::EMFILE };
                write_frame(lane, &ResultMessage::new(SpaceResult::Failed(error)), &[])?;
                continue;
            };
            let SpaceCall::Open { pid } = call else {
                write_frame(lane, &ResultMessage::new(space.make(&call, &mut buffer)), &[])?;
                continue;
            };
            match SpaceFiles::open(pid) {
                Ok(files) => {
                    let descriptors = [files.pagemap.as_fd(), files.maps.as_fd()];
                    write_frame(lane, &ResultMessage::new(SpaceResult::Done), &descriptors)?;
                }
                Err(error) => write_frame(lane, &ResultMessage::new(SpaceResult::Failed(error)), &[])?,
            }
        }
    }

    fn wait_for(&self, id: SpaceId, version: u64) -> Option<Arc<Space>> {
        let has = |spaces: &BTreeMap<SpaceId, Versioned>| {
            spaces.get(&id).filter(|(held, _)| *held == version).map(|(_, space)| Arc::clone(space))
        };
        let missing = |spaces: &mut BTreeMap<_, _>| has(spaces).is_none();
        let waited = self.added.wait_timeout_while(self.lock(), HOLD_TIMEOUT, missing);
        let (spaces, _) = waited.unwrap_or_else(PoisonError::into_inner);
        has(&spaces)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<SpaceId, Versioned>> {
        // No code panics with the lock held.
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.closers.end();
    }
}

fn space_of(descriptors: Vec<OwnedFd>) -> Option<Space> {
    let mut descriptors = descriptors.into_iter();
    let userfaultfd = Userfaultfd::from_fd(descriptors.next()?).ok()?;
    let files = match (descriptors.next(), descriptors.next()) {
        (Some(pagemap), Some(maps)) => {
            let (pagemap, maps) = (Pagemap::from_fd(pagemap).ok()?, Maps::from_fd(maps).ok()?);
            Some(SpaceFiles { pagemap: Arc::new(pagemap), maps })
        }
        _ => None,
    };
    Some(Space { userfaultfd, files, closed: OnceLock::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_that_is_to_end_does_not_wait_for_the_end_of_the_service() {
        let (service, holder) = scm::socket_pair().unwrap();
        Control::Quit.send(service.as_fd(), &[]).unwrap();
        drop(service);
        assert!(run(holder.as_fd()));
    }

    #[test]
    fn holder_without_a_message_to_end_waits_for_the_end_of_the_service() {
        let (service, holder) = scm::socket_pair().unwrap();
        drop(service);
        fdmap_sys::testing::hangup::wait_for_hangup(holder.as_fd());
        assert!(!run(holder.as_fd()));
    }
}
