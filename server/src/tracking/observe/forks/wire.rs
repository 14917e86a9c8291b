//! The protocol between the service and its companion: messages of one size, some with a userfaultfd. Both ends are the
//! same program, so integers have the native byte order.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytemuck::{Pod, Zeroable};
use fdmap_sys::{Errno, scm};

use crate::random::random_id;

/// Identifies a followed address space while the service runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FollowId(u64);

impl FollowId {
    /// A random id, so that both ends, and a new companion, can create ids without coordination.
    pub(super) fn draw() -> Self {
        random_id(|id| Some(Self(id)))
    }
}

impl fmt::Display for FollowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// To the companion, with a userfaultfd: start reading its events.
    Follow(FollowId),
    /// To the companion: stop reading its events. The reply is [`Message::Ended`].
    Unfollow(FollowId),
    /// To the companion, with a unique id: reply [`Message::Synced`] after all events that were read before.
    Sync(FollowId),
    /// From the companion: the reply to [`Message::Sync`].
    Synced(FollowId),
    /// From the companion, with the userfaultfd of the child, which the companion follows as well.
    Forked { parent: FollowId, child: FollowId },
    /// From the companion: a child of this address space could not be passed on.
    Lost(FollowId),
    /// From the companion: it no longer follows this address space. This is the last message about it.
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
            Message::Sync(id) => (6, id, FollowId(0)),
            Message::Synced(id) => (7, id, FollowId(0)),
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
            6 => Message::Sync(about),
            7 => Message::Synced(about),
            _ => return None,
        })
    }
}

/// The result of [`send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Yes,
    /// The socket buffer is full. poll() reports when it has room.
    Full,
    /// The kernel lacks another resource, such as descriptors in flight. poll() does not report when it is available.
    Exhausted,
    /// The other end is closed.
    Closed,
}

/// Sends a message without blocking.
pub(super) fn send(socket: BorrowedFd<'_>, message: Message, fd: Option<BorrowedFd<'_>>) -> Sent {
    let frame = Frame::from(message);
    match scm::send(socket, bytemuck::bytes_of(&frame), fd.as_slice()) {
        Ok(()) => Sent::Yes,
        Err(error) => match error.errno {
            Errno::EAGAIN => Sent::Full,
            Errno::ETOOMANYREFS | Errno::ENOBUFS | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE => {
                Sent::Exhausted
            }
            _ => Sent::Closed,
        },
    }
}

/// The result of [`receive`].
#[derive(Debug)]
pub(super) enum Received {
    /// A message, and the descriptor that it carried.
    Message(Message, Option<OwnedFd>),
    /// No message is available.
    Nothing,
    /// The other end is closed, or sent an invalid message.
    Closed,
}

/// Receives a message without blocking.
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
            // The other end was closed with unread messages. The error is reported once; earlier messages can still be
            // received.
            Err(error) if error.errno == Errno::ECONNRESET => continue,
            Ok(_) | Err(_) => Received::Closed,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use fdmap_sys::testing::hangup::wait_for_hangup;

    use super::*;

    #[test]
    fn messages_arrive_in_order_and_survive_their_sender() {
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
        // Closing an end with unread messages causes ECONNRESET before the pending messages.
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
        wait_for_hangup(other.as_fd());
        assert!(matches!(receive(other.as_fd()), Received::Closed));
        assert_eq!(send(other.as_fd(), all[0], None), Sent::Closed);
    }

    #[test]
    fn invalid_message_counts_as_closed() {
        let (one, other) = scm::socket_pair().unwrap();
        for bytes in [&[0_u8; 24][..], &[1; 23], &[1; 25]] {
            scm::send(one.as_fd(), bytes, &[]).unwrap();
            assert!(matches!(receive(other.as_fd()), Received::Closed), "{} bytes", bytes.len());
        }
    }

    #[test]
    fn full_socket_is_reported() {
        let (one, _other) = scm::socket_pair().unwrap();
        let sent = (0..100_000).map(|_| send(one.as_fd(), Message::Lost(FollowId(1)), None));
        assert_eq!(sent.into_iter().find(|sent| *sent != Sent::Yes), Some(Sent::Full));
    }
}
