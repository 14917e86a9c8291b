//! The companion: the process that reads fork events. It is single-threaded, never blocks on the service, and ends when
//! the service closes the socket.
//!
//! ```text
//!  userfaultfds --events--> [followed] --children--> [outbox] --socket--> service
//!                               ^                                            |
//!                               +------------ Follow, Unfollow --------------+
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError, process, scm};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::wire::{self, FollowId, Message, Received, Sent};
use crate::confinement::{self, CallRule, ConfinementError, call, call_with};

/// First argument of `fdmapd` that starts the companion.
pub const ARGUMENT: &str = "forks-companion";

/// Children in the outbox. Each uses a descriptor of this process.
const MAX_PENDING_CHILDREN: usize = 1024;
/// Events of one userfaultfd, or messages of the service, that are handled before other work.
const MAX_BURST: usize = 64;
/// Wait before the next attempt if the kernel lacks memory or descriptors.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// The system calls of the companion: it reads events, and passes messages and userfaultfds.
const CALLS: &[CallRule] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendmsg),
    // Before Linux 6.10, events are read without preadv2.
    call(libc::SYS_preadv2),
    call(libc::SYS_read),
    call_with(libc::SYS_fcntl, 1, libc::F_DUPFD_CLOEXEC.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_GETFL.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_SETFL.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_SETFD.cast_unsigned()),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_readlink),
    call(libc::SYS_readlinkat),
];

/// True if standard input is the socket of a companion.
#[must_use]
pub fn is_started_as_one() -> bool {
    scm::is_seqpacket(io::stdin().as_fd())
}

/// Runs the companion. The process must not have opened any descriptor before.
#[must_use]
pub fn main() -> ExitCode {
    if !is_started_as_one() {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs a socket from fdmapd as standard input");
        return ExitCode::FAILURE;
    }
    if let Err(error) = prepare() {
        eprintln!("fdmapd: {}", fdmap_proto::error_chain(&error));
        return ExitCode::FAILURE;
    }
    let socket = io::stdin();
    Companion::new(socket.as_fd()).run();
    ExitCode::SUCCESS
}

fn prepare() -> Result<(), ConfinementError> {
    process::close_from(3)?;
    // These signals stop the service, which closes the socket when it ends.
    process::ignore_signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    process::set_name(c"fdmapd-forks")?;
    confinement::enter()?;
    confinement::restrict(CALLS)
}

/// A message to the service, and the userfaultfd of a child.
struct Outgoing {
    message: Message,
    child: Option<Rc<Userfaultfd>>,
}

struct Companion<'a> {
    socket: BorrowedFd<'a>,
    followed: BTreeMap<FollowId, Rc<Userfaultfd>>,
    outbox: VecDeque<Outgoing>,
    /// Number of children in the outbox.
    pending_children: usize,
    /// Parents with a `Lost` message in the outbox.
    lost: BTreeSet<FollowId>,
    /// A reserved descriptor, which is closed to read an event when descriptors are exhausted.
    reserve: Option<OwnedFd>,
    /// The socket buffer is full.
    full: bool,
    /// The kernel lacks a resource, and poll() does not report when it is available again.
    exhausted: bool,
}

impl<'a> Companion<'a> {
    fn new(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            followed: BTreeMap::new(),
            outbox: VecDeque::new(),
            pending_children: 0,
            lost: BTreeSet::new(),
            reserve: socket.try_clone_to_owned().ok(),
            full: false,
            exhausted: false,
        }
    }

    /// Runs until the service closes the socket.
    fn run(mut self) {
        loop {
            let (ready, has_messages) = self.wait();
            for id in ready {
                self.read_forks(id);
            }
            if (has_messages && !self.receive_messages()) || !self.send_messages() {
                return;
            }
        }
    }

    /// Waits until a descriptor is ready. Returns the readable userfaultfds, and whether the socket is ready.
    fn wait(&mut self) -> (Vec<FollowId>, bool) {
        let paused = std::mem::take(&mut self.exhausted);
        if paused {
            std::thread::sleep(RETRY_DELAY);
        }
        let writable = if self.full { PollFlags::POLLOUT } else { PollFlags::empty() };
        let mut polled = Vec::with_capacity(1 + self.followed.len());
        polled.push(PollFd::new(self.socket, PollFlags::POLLIN | writable));
        polled.extend(self.followed.values().map(|uffd| PollFd::new(uffd.as_fd(), PollFlags::POLLIN)));
        let timeout = if paused { PollTimeout::ZERO } else { PollTimeout::NONE };
        if poll(&mut polled, timeout).is_err() {
            // The kernel lacks memory to poll so many descriptors, so try each of them.
            self.exhausted = true;
            return (self.followed.keys().copied().collect(), true);
        }
        let is_ready = |one: &PollFd<'_>| one.any().unwrap_or(true);
        let (socket, uffds) = polled.split_at(1);
        let ready = self.followed.keys().zip(uffds).filter(|(_, polled)| is_ready(polled));
        (ready.map(|(id, _)| *id).collect(), socket.iter().any(is_ready))
    }

    fn read_forks(&mut self, id: FollowId) {
        let Some(uffd) = self.followed.get(&id).map(Rc::clone) else { return };
        for _ in 0..MAX_BURST {
            match uffd.read_event() {
                Ok(None) => return,
                Ok(Some(UffdEvent::Fork(child))) => self.add_child(id, child),
                Ok(Some(_)) => {}
                Err(error) if is_exhaustion(&error) => {
                    // The event is still pending, and the forking process is blocked. Close the reserved descriptor to
                    // read it.
                    if self.reserve.take().is_none() {
                        self.exhausted = true;
                        return;
                    }
                    match uffd.read_event() {
                        Ok(Some(UffdEvent::Fork(child))) => {
                            drop(child);
                            self.report_loss(id);
                        }
                        Ok(_) => {}
                        Err(_) => self.exhausted = true,
                    }
                    self.reserve = self.socket.try_clone_to_owned().ok();
                    if self.exhausted {
                        return;
                    }
                }
                Err(_) => {
                    self.end(id);
                    return;
                }
            }
        }
    }

    fn add_child(&mut self, parent: FollowId, child: Userfaultfd) {
        if self.pending_children >= MAX_PENDING_CHILDREN {
            drop(child);
            self.report_loss(parent);
            return;
        }
        let (id, child) = (FollowId::draw(), Rc::new(child));
        self.followed.insert(id, Rc::clone(&child));
        self.pending_children += 1;
        self.outbox
            .push_back(Outgoing { message: Message::Forked { parent, child: id }, child: Some(child) });
    }

    fn report_loss(&mut self, parent: FollowId) {
        if self.lost.insert(parent) {
            self.outbox.push_back(Outgoing { message: Message::Lost(parent), child: None });
        }
    }

    fn end(&mut self, id: FollowId) {
        self.followed.remove(&id);
        self.outbox.push_back(Outgoing { message: Message::Ended(id), child: None });
    }

    /// Handles the messages of the service. Returns `false` if the socket is closed.
    fn receive_messages(&mut self) -> bool {
        for _ in 0..MAX_BURST {
            match wire::receive(self.socket) {
                // The descriptor is missing if this process had no room for it.
                Received::Message(Message::Follow(id), fd) => match fd.map(Userfaultfd::from_fd) {
                    Some(Ok(uffd)) => drop(self.followed.insert(id, Rc::new(uffd))),
                    Some(Err(_)) | None => self.end(id),
                },
                Received::Message(Message::Unfollow(id), _) => {
                    // Pending events are forks before the subscription was dropped.
                    self.read_forks(id);
                    self.end(id);
                }
                // A child whose fork event is not read yet does not run, so all running children are in the outbox
                // before this.
                Received::Message(Message::Sync(id), _) => {
                    self.outbox.push_back(Outgoing { message: Message::Synced(id), child: None });
                }
                Received::Message(..) | Received::Closed => return false,
                Received::Nothing => break,
            }
        }
        true
    }

    /// Sends the outbox until the socket is full. Returns `false` if the socket is closed.
    fn send_messages(&mut self) -> bool {
        self.full = false;
        while let Some(Outgoing { message, child }) = self.outbox.front() {
            match wire::send(self.socket, *message, child.as_ref().map(|uffd| uffd.as_fd())) {
                Sent::Yes => {}
                Sent::Full => {
                    self.full = true;
                    break;
                }
                Sent::Exhausted => {
                    self.exhausted = true;
                    break;
                }
                Sent::Closed => return false,
            }
            match message {
                Message::Forked { .. } => self.pending_children -= 1,
                Message::Lost(id) => drop(self.lost.remove(id)),
                _ => {}
            }
            self.outbox.pop_front();
        }
        true
    }
}

const fn is_exhaustion(error: &SyscallError) -> bool {
    matches!(error.errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)
}
