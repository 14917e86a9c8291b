//! What the service and its companion say to each other: small messages of one size, some with a userfaultfd. Both ends
//! are the same program, so they are in the machine's own order of bytes.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytemuck::{Pod, Zeroable};
use fdmap_sys::{Errno, scm};

use crate::random::random_id;

/// Names an address space whose forks are read, for as long as the service runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FollowId(u64);

impl FollowId {
    /// Drawn at random, so that neither end nor an end that takes another's place has to ask which are in use.
    pub(super) fn draw() -> Self {
        random_id(|id| Some(Self(id)))
    }
}

impl fmt::Display for FollowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// To the companion, with a userfaultfd: read its events from now on.
    Follow(FollowId),
    /// To the companion: read them no more. [`Message::Ended`] answers it.
    Unfollow(FollowId),
    /// To the companion, under a number of its own: say [`Message::Told`] when all that was read before is told.
    Tell(FollowId),
    /// From the companion: that is done.
    Told(FollowId),
    /// From the companion, with the child's userfaultfd, which it follows as well.
    Forked {
        /// Who forked.
        parent: FollowId,
        /// The child.
        child: FollowId,
    },
    /// From the companion: a child of this one could not be passed on.
    Lost(FollowId),
    /// From the companion: it does not follow this one any more. Nothing about it comes after this.
    Ended(FollowId),
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Frame {
    kind: u64,
    about: u64,
    child: u64,
}

impl From<Message> for Frame {
    fn from(message: Message) -> Self {
        let (kind, about, child) = match message {
            Message::Follow(id) => (1, id, FollowId(0)),
            Message::Unfollow(id) => (2, id, FollowId(0)),
            Message::Forked { parent, child } => (3, parent, child),
            Message::Lost(id) => (4, id, FollowId(0)),
            Message::Ended(id) => (5, id, FollowId(0)),
            Message::Tell(id) => (6, id, FollowId(0)),
            Message::Told(id) => (7, id, FollowId(0)),
        };
        Self { kind, about: about.0, child: child.0 }
    }
}

impl Frame {
    const fn message(self) -> Option<Message> {
        let about = FollowId(self.about);
        Some(match self.kind {
            1 => Message::Follow(about),
            2 => Message::Unfollow(about),
            3 => Message::Forked { parent: about, child: FollowId(self.child) },
            4 => Message::Lost(about),
            5 => Message::Ended(about),
            6 => Message::Tell(about),
            7 => Message::Told(about),
            _ => return None,
        })
    }
}

/// What became of a message that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is on its way.
    Yes,
    /// There is no room. There will be when the socket can be written to.
    Full,
    /// The kernel is short of something else, such as descriptors in flight; when that ends, it does not say.
    Short,
    /// Nobody will take it.
    Gone,
}

/// Sends without waiting.
pub(super) fn send(socket: BorrowedFd<'_>, message: Message, fd: Option<BorrowedFd<'_>>) -> Sent {
    let frame = Frame::from(message);
    match scm::send(socket, bytemuck::bytes_of(&frame), fd.as_slice()) {
        Ok(()) => Sent::Yes,
        Err(error) => match error.errno {
            Errno::EAGAIN => Sent::Full,
            Errno::ETOOMANYREFS | Errno::ENOBUFS | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE => {
                Sent::Short
            }
            _ => Sent::Gone,
        },
    }
}

/// What there was to receive.
#[derive(Debug)]
pub(super) enum Received {
    /// A message and what came along.
    Message(Message, Option<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// Nothing ever: the other end is closed, or no program of ours.
    Closed,
}

/// Receives without waiting.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Received {
    let mut frame = Frame::zeroed();
    loop {
        return match scm::receive(socket, bytemuck::bytes_of_mut(&mut frame)) {
            Ok(Some(packet)) if packet.len == size_of::<Frame>() && !packet.truncated => {
                match frame.message() {
                    Some(message) => Received::Message(message, packet.descriptors.into_iter().next()),
                    None => Received::Closed,
                }
            }
            Err(error) if error.errno == Errno::EAGAIN => Received::Nothing,
            // The other end was closed with messages unread. It is said once; what it sent before that is still there.
            Err(error) if error.errno == Errno::ECONNRESET => continue,
            Ok(_) | Err(_) => Received::Closed,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_the_last_ones_survive_their_sender() {
        let (one, other) = scm::socket_pair().unwrap();
        let (parent, child) = (FollowId::draw(), FollowId::draw());
        let all = [
            Message::Follow(parent),
            Message::Unfollow(parent),
            Message::Forked { parent, child },
            Message::Lost(parent),
            Message::Ended(child),
        ];
        assert!(matches!(receive(other.as_fd()), Received::Nothing));
        // Unread messages at the end that is closed: the other end learns of that before all else.
        assert_eq!(send(other.as_fd(), all[0], None), Sent::Yes);
        for message in all {
            assert_eq!(send(one.as_fd(), message, Some(one.as_fd())), Sent::Yes);
        }
        drop(one);
        for message in all {
            match receive(other.as_fd()) {
                Received::Message(got, Some(_)) => assert_eq!(got, message),
                got => panic!("{got:?}"),
            }
        }
        assert!(matches!(receive(other.as_fd()), Received::Closed));
        assert_eq!(send(other.as_fd(), all[0], None), Sent::Gone);
    }

    #[test]
    fn what_is_no_message_ends_the_conversation() {
        let (one, other) = scm::socket_pair().unwrap();
        for bytes in [&[0_u8; 24][..], &[1; 23], &[1; 25]] {
            scm::send(one.as_fd(), bytes, &[]).unwrap();
            assert!(matches!(receive(other.as_fd()), Received::Closed), "{} bytes", bytes.len());
        }
    }

    #[test]
    fn full_socket_is_told() {
        let (one, _other) = scm::socket_pair().unwrap();
        let sent = (0..100_000).map(|_| send(one.as_fd(), Message::Lost(FollowId(1)), None));
        assert_eq!(sent.into_iter().find(|sent| *sent != Sent::Yes), Some(Sent::Full));
    }
}
