//! Children that have all mappings of the agent, and store to them on request.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use fdmap_tests::test_agent::command::{ChildrenCommand, Reply};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};

use crate::call::{Done, Place, error_text};

/// The children, each with the socket by which it is asked to write.
#[derive(Default)]
pub struct Children(Vec<(Pid, OwnedFd)>);

impl Children {
    pub fn perform(&mut self, place: Place, command: ChildrenCommand) -> Done<Reply> {
        match command {
            ChildrenCommand::Fork { count } => {
                let mut slowest = Duration::ZERO;
                for _ in 0..count {
                    let began = Instant::now();
                    let child = lasting(place)?;
                    slowest = slowest.max(began.elapsed());
                    self.0.push(child);
                }
                return micros(slowest);
            }
            ChildrenCommand::ForkBriefly { count, page } => {
                let mut slowest = Duration::ZERO;
                for _ in 0..count {
                    slowest = slowest.max(brief(place, page)?);
                }
                return micros(slowest);
            }
            ChildrenCommand::Write { child, page } => {
                let (_, socket) = self.0.get(child).ok_or("no such child")?;
                send(socket.as_raw_fd(), &page.to_ne_bytes(), MsgFlags::empty()).map_err(error_text)?;
                let mut done = [0; 8];
                let received = recv(socket.as_raw_fd(), &mut done, MsgFlags::empty()).map_err(error_text)?;
                if received != done.len() {
                    return Err(format!("child {child} ended"));
                }
            }
            ChildrenCommand::End => {
                for (child, _) in self.0.drain(..) {
                    kill(child, Signal::SIGKILL).map_err(error_text)?;
                    waitpid(child, None).map_err(error_text)?;
                }
            }
        }
        Ok(Reply::Done)
    }
}

fn micros(duration: Duration) -> Done<Reply> {
    u64::try_from(duration.as_micros()).map(Reply::Number).map_err(error_text)
}

/// Forks a child that stores to each page that it receives, until the agent ends.
fn lasting(place: Place) -> Done<(Pid, OwnedFd)> {
    let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
        .map_err(error_text)?;
    let agent = getpid();
    // SAFETY: the child allocates no memory and takes no lock: it receives, stores, answers, and exits by _exit.
    match unsafe { fork() }.map_err(error_text)? {
        ForkResult::Parent { child } => Ok((child, socket)),
        ForkResult::Child => {
            let fails = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_err() || getppid() != agent;
            let mut page = [0; 8];
            while !fails && recv(theirs.as_raw_fd(), &mut page, MsgFlags::empty()) == Ok(page.len()) {
                store(place, u64::from_ne_bytes(page));
                let _ = send(theirs.as_raw_fd(), &page, MsgFlags::empty());
            }
            // SAFETY: _exit does not return, and runs no exit handlers of the parent.
            unsafe { libc::_exit(i32::from(fails)) }
        }
    }
}

/// Forks a child that stores to a page and exits, and waits for it. Returns the time of the fork.
fn brief(place: Place, page: u64) -> Done<Duration> {
    let began = Instant::now();
    // SAFETY: the child allocates no memory and takes no lock: it stores, and exits by _exit.
    match unsafe { fork() }.map_err(error_text)? {
        ForkResult::Parent { child } => {
            let took = began.elapsed();
            match waitpid(child, None).map_err(error_text)? {
                WaitStatus::Exited(_, 0) => Ok(took),
                other => Err(format!("a child ended as {other:?}")),
            }
        }
        ForkResult::Child => {
            store(place, page);
            // SAFETY: _exit does not return, and runs no exit handlers of the parent.
            unsafe { libc::_exit(0) }
        }
    }
}

fn store(place: Place, page: u64) {
    // SAFETY: the byte lies in a shared mapping of the agent, to which there are no references.
    unsafe { place.page(page).write_volatile(0x5a) };
}
