//! One session: passes packets of the client to the service, and replies to the client.
//!
//! ```text
//!   waiting for BEGIN --> running --client or service closes its socket, a deadline passes--> ended
//! ```

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

use fdmap_sys::{Errno, scm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use super::check;
use super::closer::Closer;
use crate::fdpass::wire::{BEGIN, HEADER_BYTES, PacketHeader, SEND_TIMEOUT};

/// Packets of one session that the service has not replied to. More of them wait in the client's socket: the service performs one
/// operation of a session at a time, and nothing is lost in its queue when it ends the session.
const MAX_UNANSWERED: usize = 1;

/// A session between a client and the service.
#[derive(Debug)]
pub(super) struct Relay {
    client: OwnedFd,
    service: OwnedFd,
    state: State,
    /// The client sends nothing more.
    client_finished: bool,
    to_service: Option<Outgoing>,
    to_client: Option<Outgoing>,
    /// The descriptors of the packets that the service has not replied to. The service closes those that it does not use, and while
    /// they are open here, that is never the last close, which takes the longest.
    unanswered: VecDeque<Vec<OwnedFd>>,
    /// The kernel lacked a resource, and poll() does not report when it is available again.
    exhausted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Ended,
}

/// A message that did not fit in the buffer of a socket.
#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    since: Instant,
}

impl Relay {
    /// A session that waits for [`BEGIN`]. Until then the client cannot send descriptors, where the kernel has `SO_PASSRIGHTS`.
    pub(super) const fn new(client: OwnedFd, service: OwnedFd) -> Self {
        Self {
            client,
            service,
            state: State::Waiting,
            client_finished: false,
            to_service: None,
            to_client: None,
            unanswered: VecDeque::new(),
            exhausted: false,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    pub(super) const fn is_exhausted(&self) -> bool {
        self.exhausted
    }

    pub(super) const fn has_deadline(&self) -> bool {
        self.to_client.is_some()
    }

    /// True if it is to be pumped although no socket is ready.
    pub(super) fn is_due(&self) -> bool {
        self.exhausted || self.is_late()
    }

    fn is_late(&self) -> bool {
        self.to_client.as_ref().is_some_and(|outgoing| outgoing.since.elapsed() >= SEND_TIMEOUT)
    }

    /// The sockets that [`Self::pump`] waits for. poll() always reports that the other end of one was closed.
    pub(super) fn awaited(&self) -> [Option<(BorrowedFd<'_>, PollFlags)>; 2] {
        let flag = |set: bool, flag: PollFlags| if set { flag } else { PollFlags::empty() };
        // A socket whose buffer has room is writable, whatever else the kernel lacks.
        let waits_for_room = |outgoing: &Option<Outgoing>| outgoing.is_some() && !self.exhausted;
        let client = flag(self.receives_packets(), PollFlags::POLLIN)
            | flag(waits_for_room(&self.to_client), PollFlags::POLLOUT);
        let service = flag(self.to_client.is_none(), PollFlags::POLLIN)
            | flag(waits_for_room(&self.to_service), PollFlags::POLLOUT);
        // While a reply waits for the client, the end of the service's socket changes nothing.
        let service = (!service.is_empty()).then(|| (self.service.as_fd(), service));
        [Some((self.client.as_fd(), client)), service]
    }

    fn receives_packets(&self) -> bool {
        self.state == State::Running
            && !self.client_finished
            && self.to_service.is_none()
            && self.unanswered.len() < MAX_UNANSWERED
    }

    /// Passes on at most one message in each direction, without blocking.
    pub(super) fn pump(&mut self, buffer: &mut [u8], closer: &Closer) {
        self.exhausted = false;
        if !self.pass_reply(buffer, closer) || !self.pass_packet(buffer, closer) || self.is_late() {
            self.state = State::Ended;
        }
    }

    /// Passes a reply of the service to the client. Returns `false` if the session has ended.
    fn pass_reply(&mut self, buffer: &mut [u8], closer: &Closer) -> bool {
        if let Some(Outgoing { bytes, descriptors, since }) = self.to_client.take() {
            return self.send_reply(&bytes, descriptors, since);
        }
        match scm::receive(self.service.as_fd(), buffer) {
            Ok(Some(reply)) if reply.truncated || reply.descriptors_lost => false,
            Ok(Some(reply)) if self.state == State::Running => {
                closer.close_checked(self.unanswered.pop_front().into_iter().flatten());
                self.send_reply(&buffer[..reply.len], reply.descriptors, Instant::now())
            }
            Ok(Some(message)) if &buffer[..message.len] == BEGIN => {
                self.state = State::Running;
                // Older kernels lack the option, and pass descriptors anyway.
                let _ = scm::pass_descriptors(&self.client, true);
                true
            }
            Ok(_) => false,
            Err(error) => error.errno == Errno::EAGAIN,
        }
    }

    /// A reply with descriptors waits until the client has read all others: descriptors in the queues of sockets are counted for all
    /// receivers together, and further ones are refused.
    fn send_reply(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>, since: Instant) -> bool {
        if !descriptors.is_empty() && scm::has_unread(self.client.as_fd()).unwrap_or(false) {
            self.exhausted = true;
            self.to_client = Some(Outgoing { bytes: bytes.to_vec(), descriptors, since });
            return true;
        }
        match send(self.client.as_fd(), bytes, &descriptors) {
            Sent::Yes => true,
            Sent::Closed => false,
            Sent::Later { exhausted } => {
                self.exhausted |= exhausted;
                self.to_client = Some(Outgoing { bytes: bytes.to_vec(), descriptors, since });
                true
            }
        }
    }

    /// Passes a packet of the client to the service. Returns `false` if the session has ended.
    fn pass_packet(&mut self, buffer: &mut [u8], closer: &Closer) -> bool {
        if let Some(Outgoing { bytes, descriptors, since }) = self.to_service.take() {
            // While the service takes nothing, a client that has closed its socket ends the session.
            return self.send_packet(&bytes, descriptors, since)
                && (self.to_service.is_none() || !is_closed(self.client.as_fd()));
        }
        if !self.receives_packets() {
            return !is_closed(self.client.as_fd());
        }
        let received = match scm::receive(self.client.as_fd(), &mut buffer[HEADER_BYTES..]) {
            Ok(Some(received)) => received,
            Ok(None) => {
                self.client_finished = true;
                // The client may wait for a reply. An error means that the service has ended the session.
                return shutdown(self.service.as_raw_fd(), Shutdown::Write).is_ok();
            }
            Err(error) => return error.errno == Errno::EAGAIN,
        };
        let mut descriptors = received.descriptors;
        let header = PacketHeader {
            descriptors: u32::try_from(descriptors.len()).unwrap_or(u32::MAX),
            truncated: received.truncated,
            descriptors_lost: received.descriptors_lost,
            foreign: !check::all_reach_the_service(&descriptors),
        };
        if header.foreign {
            closer.close(std::mem::take(&mut descriptors));
        }
        buffer[..HEADER_BYTES].copy_from_slice(&header.encode());
        self.send_packet(&buffer[..HEADER_BYTES + received.len], descriptors, Instant::now())
    }

    fn send_packet(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>, since: Instant) -> bool {
        match send(self.service.as_fd(), bytes, &descriptors) {
            Sent::Yes => self.unanswered.push_back(descriptors),
            Sent::Later { exhausted } => {
                self.exhausted |= exhausted;
                self.to_service = Some(Outgoing { bytes: bytes.to_vec(), descriptors, since });
            }
            Sent::Closed => {
                // Closed with the others when the session ends. A reply may still wait for the client.
                self.unanswered.push_back(descriptors);
                self.client_finished = true;
            }
        }
        true
    }

    /// True if the service may have descriptors of packets.
    pub(super) fn has_unanswered(&self) -> bool {
        self.unanswered.iter().any(|descriptors| !descriptors.is_empty())
    }

    /// Reports the end of the connections, even if an earlier close is blocked, or the service has not received a packet.
    pub(super) fn shut_down(&self) {
        for socket in [&self.client, &self.service] {
            // Fails only if that has happened.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Ends the session for both sides. The close of the client's socket closes the descriptors in its queue.
    pub(super) fn end(self, closer: &Closer) -> EndedRelay {
        self.shut_down();
        let unsent = self.to_service.into_iter().flat_map(|outgoing| outgoing.descriptors);
        closer.close_checked(unsent);
        closer.close([self.client]);
        EndedRelay { service: self.service, descriptors: self.unanswered.into_iter().flatten().collect() }
    }
}

/// Descriptors of a session that has ended. They stay open while a packet with them is in the queue of the service, which may close
/// it at any time.
#[derive(Debug)]
pub(super) struct EndedRelay {
    service: OwnedFd,
    descriptors: Vec<OwnedFd>,
}

impl EndedRelay {
    /// True if the service has received all packets, or has closed its socket and what was queued.
    pub(super) fn is_released(&self) -> bool {
        self.descriptors.is_empty() || !scm::has_unread(self.service.as_fd()).unwrap_or(false)
    }

    pub(super) fn close(self, closer: &Closer) {
        closer.close_checked(self.descriptors);
    }
}

/// The result of [`send`].
enum Sent {
    Yes,
    /// The socket buffer is full, or, if `exhausted`, the kernel lacks another resource.
    Later {
        exhausted: bool,
    },
    Closed,
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[OwnedFd]) -> Sent {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    match scm::send(socket, bytes, &descriptors).map_err(|error| error.errno) {
        Ok(()) => Sent::Yes,
        Err(Errno::EAGAIN) => Sent::Later { exhausted: false },
        Err(Errno::ETOOMANYREFS | Errno::ENOBUFS | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => {
            Sent::Later { exhausted: true }
        }
        Err(_) => Sent::Closed,
    }
}

/// True if the other end of the socket was closed.
fn is_closed(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests;
