//! The companion: the process that reads forks. It is single-threaded, never waits for the service, and ends when the
//! service does.
//!
//! ```text
//!  userfaultfds --events--> [followed] --children--> [news] --socket--> service
//!                               ^                                          |
//!                               +------------ Follow, Unfollow ------------+
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use fdmap_sys::uffd::{UffdEvent, Userfaultfd};
use fdmap_sys::{Errno, SyscallError, process, scm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::wire::{self, FollowId, Message, Received, Sent};

/// The first argument that makes `fdmapd` its companion.
pub const ARGUMENT: &str = "forks-companion";

/// Children that the service has not been told of yet. Each is a descriptor of this process.
const UNTOLD: usize = 1024;
/// Events that are read, or messages that are received, before the others have their turn.
const BURST: usize = 64;
/// How long to wait for what the kernel is short of.
const PAUSE: Duration = Duration::from_millis(10);

/// True if this process has the companion's socket for its standard input.
#[must_use]
pub fn is_started_as_one() -> bool {
    scm::is_seqpacket(io::stdin().as_fd())
}

/// The companion, from its beginning to its end. Nothing may have been opened before.
#[must_use]
pub fn main() -> ExitCode {
    if !is_started_as_one() {
        eprintln!("fdmapd: {ARGUMENT} is for fdmapd itself, which gives it a socket as standard input");
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

fn prepare() -> Result<(), SyscallError> {
    process::close_from(3)?;
    // The service is told to stop by these as well, and closes the socket when it is done.
    process::ignore_signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    process::set_name(c"fdmapd-forks")
}

/// What is to be told next, with the child's userfaultfd.
struct News {
    message: Message,
    child: Option<Rc<Userfaultfd>>,
}

struct Companion<'a> {
    socket: BorrowedFd<'a>,
    followed: BTreeMap<FollowId, Rc<Userfaultfd>>,
    news: VecDeque<News>,
    /// How many of the news are children.
    untold: usize,
    /// Whose losses are among the news.
    lost: BTreeSet<FollowId>,
    /// A descriptor to let go of when there are no others, so that an event can still be read.
    spare: Option<OwnedFd>,
    /// The socket has no room.
    full: bool,
    /// The kernel is short of something that it does not wake us for.
    short: bool,
}

impl<'a> Companion<'a> {
    fn new(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            followed: BTreeMap::new(),
            news: VecDeque::new(),
            untold: 0,
            lost: BTreeSet::new(),
            spare: socket.try_clone_to_owned().ok(),
            full: false,
            short: false,
        }
    }

    /// Until the other end of the socket is closed.
    fn run(mut self) {
        loop {
            let (ready, spoken_to) = self.wait();
            for id in ready {
                self.read_forks(id);
            }
            if (spoken_to && !self.obey()) || !self.tell() {
                return;
            }
        }
    }

    /// Waits until something can be read, or told; gives whose events, and whether there is something on the socket.
    fn wait(&mut self) -> (Vec<FollowId>, bool) {
        let paused = std::mem::take(&mut self.short);
        if paused {
            std::thread::sleep(PAUSE);
        }
        let writable = if self.full { PollFlags::POLLOUT } else { PollFlags::empty() };
        let mut polled = Vec::with_capacity(1 + self.followed.len());
        polled.push(PollFd::new(self.socket, PollFlags::POLLIN | writable));
        polled.extend(self.followed.values().map(|uffd| PollFd::new(uffd.as_fd(), PollFlags::POLLIN)));
        let timeout = if paused { PollTimeout::ZERO } else { PollTimeout::NONE };
        if poll(&mut polled, timeout).is_err() {
            // No memory for so many at once: each of them is tried.
            self.short = true;
            return (self.followed.keys().copied().collect(), true);
        }
        let is_ready = |one: &PollFd<'_>| one.any().unwrap_or(true);
        let (socket, uffds) = polled.split_at(1);
        let ready = self.followed.keys().zip(uffds).filter(|(_, polled)| is_ready(polled));
        (ready.map(|(id, _)| *id).collect(), socket.iter().any(is_ready))
    }

    fn read_forks(&mut self, id: FollowId) {
        let Some(uffd) = self.followed.get(&id).map(Rc::clone) else { return };
        for _ in 0..BURST {
            match uffd.read_event() {
                Ok(None) => return,
                Ok(Some(UffdEvent::Fork(child))) => self.adopt(id, child),
                Ok(Some(_)) => {}
                Err(error) if is_short(&error) => {
                    // The event is still there, and the process that forked waits for somebody to read it.
                    if self.spare.take().is_none() {
                        self.short = true;
                        return;
                    }
                    match uffd.read_event() {
                        Ok(Some(UffdEvent::Fork(child))) => {
                            drop(child);
                            self.tell_loss(id);
                        }
                        Ok(_) => {}
                        Err(_) => self.short = true,
                    }
                    self.spare = self.socket.try_clone_to_owned().ok();
                    if self.short {
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

    fn adopt(&mut self, parent: FollowId, child: Userfaultfd) {
        if self.untold >= UNTOLD {
            drop(child);
            self.tell_loss(parent);
            return;
        }
        let (id, child) = (FollowId::draw(), Rc::new(child));
        self.followed.insert(id, Rc::clone(&child));
        self.untold += 1;
        self.news.push_back(News { message: Message::Forked { parent, child: id }, child: Some(child) });
    }

    fn tell_loss(&mut self, parent: FollowId) {
        if self.lost.insert(parent) {
            self.news.push_back(News { message: Message::Lost(parent), child: None });
        }
    }

    fn end(&mut self, id: FollowId) {
        self.followed.remove(&id);
        self.news.push_back(News { message: Message::Ended(id), child: None });
    }

    /// Does what the service says; `false` when it will say nothing any more.
    fn obey(&mut self) -> bool {
        for _ in 0..BURST {
            match wire::receive(self.socket) {
                // Without a descriptor there was no room for it here.
                Received::Message(Message::Follow(id), fd) => match fd.map(Userfaultfd::from_fd) {
                    Some(Ok(uffd)) => drop(self.followed.insert(id, Rc::new(uffd))),
                    Some(Err(_)) | None => self.end(id),
                },
                Received::Message(Message::Unfollow(id), _) => {
                    // Forks that wait happened before it was let go.
                    self.read_forks(id);
                    self.end(id);
                }
                // A fork whose event is not read yet has made no child that runs.
                Received::Message(Message::Tell(id), _) => {
                    self.news.push_back(News { message: Message::Told(id), child: None });
                }
                Received::Message(..) | Received::Closed => return false,
                Received::Nothing => break,
            }
        }
        true
    }

    /// Tells what the socket has room for; `false` when nobody is there to be told.
    fn tell(&mut self) -> bool {
        self.full = false;
        while let Some(News { message, child }) = self.news.front() {
            match wire::send(self.socket, *message, child.as_ref().map(|uffd| uffd.as_fd())) {
                Sent::Yes => {}
                Sent::Full => {
                    self.full = true;
                    break;
                }
                Sent::Short => {
                    self.short = true;
                    break;
                }
                Sent::Gone => return false,
            }
            match message {
                Message::Forked { .. } => self.untold -= 1,
                Message::Lost(id) => drop(self.lost.remove(id)),
                _ => {}
            }
            self.news.pop_front();
        }
        true
    }
}

const fn is_short(error: &SyscallError) -> bool {
    matches!(error.errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)
}
