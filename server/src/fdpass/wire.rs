//! The messages between the service and a receiver. Both ends are the same program, so integers have the native byte order.
//!
//! ```text
//!   control socket, one per receiver:   service --[Session or Keep + 2 sockets, Close + socket, Ping]--> receiver --[Pong]--> service
//!   session socket, one per session:    service --[BEGIN, then replies]--> receiver --[header and packet]--> service
//! ```
//!
//! Replies and packets are passed on with their descriptors, and replies without any change.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use fdmap_proto::MAX_FDPASS_MESSAGE_BYTES;

/// A client that does not receive its reply in this time is disconnected.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The first message of the service on a session socket: it has closed its descriptor of the client's socket.
pub(super) const BEGIN: &[u8] = b"begin";

/// A message on the control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// To the receiver, with a client's socket and a session socket.
    Session,
    /// To the receiver, with a socket and a leash: keep a descriptor of the socket until the service closes its end of the leash.
    Keep,
    /// To the receiver, with a socket: close it at the next message. The service closes it first.
    Close,
    /// To the receiver: reply [`Control::Pong`].
    Ping,
    /// From the receiver.
    Pong {
        /// A descriptor of a client has not been closed for a while.
        blocked: bool,
    },
}

impl Control {
    /// Longer than any message.
    pub(super) const MAX_BYTES: usize = 8;

    pub(super) const fn bytes(self) -> &'static [u8] {
        match self {
            Self::Session => b"session",
            Self::Keep => b"keep",
            Self::Close => b"close",
            Self::Ping => b"ping",
            Self::Pong { blocked: false } => b"pong",
            Self::Pong { blocked: true } => b"blocked",
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let pongs = [false, true].map(|blocked| Self::Pong { blocked });
        let mut all = [Self::Session, Self::Keep, Self::Close, Self::Ping].into_iter().chain(pongs);
        all.find(|control| control.bytes() == bytes)
    }
}

/// Length of a header.
pub(super) const HEADER_BYTES: usize = size_of::<RawHeader>();
/// Length of a buffer for a header and a packet: one byte more than a message may have, to detect longer ones.
pub(super) const BUFFER_BYTES: usize = HEADER_BYTES + MAX_FDPASS_MESSAGE_BYTES + 1;

/// What a receiver knows about a client's packet, besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PacketHeader {
    /// Number of descriptors that the packet carried. All of them are passed on, or none.
    pub(super) descriptors: u32,
    /// The message was longer than the buffer.
    pub(super) truncated: bool,
    /// The kernel dropped descriptors.
    pub(super) descriptors_lost: bool,
    /// A descriptor is of a type that does not reach the service.
    pub(super) foreign: bool,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawHeader {
    descriptors: u32,
    flags: u32,
}

const TRUNCATED: u32 = 1;
const LOST: u32 = 2;
const FOREIGN: u32 = 4;

impl PacketHeader {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let flags =
            flag(self.truncated, TRUNCATED) | flag(self.descriptors_lost, LOST) | flag(self.foreign, FOREIGN);
        bytemuck::cast(RawHeader { descriptors: self.descriptors, flags })
    }

    /// The header, and the packet behind it. `None` if the message is too short.
    pub(super) fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (header, packet) = message.split_at_checked(HEADER_BYTES)?;
        let RawHeader { descriptors, flags } = bytemuck::try_pod_read_unaligned(header).ok()?;
        let header = Self {
            descriptors,
            truncated: flags & TRUNCATED != 0,
            descriptors_lost: flags & LOST != 0,
            foreign: flags & FOREIGN != 0,
        };
        Some((header, packet))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_decoded() {
        for control in
            [Control::Session, Control::Keep, Control::Close, Control::Ping, Control::Pong { blocked: true }]
        {
            assert!(control.bytes().len() <= Control::MAX_BYTES);
            assert_eq!(Control::decode(control.bytes()), Some(control));
        }
        assert_eq!(Control::decode(b"p"), None);
    }

    #[test]
    fn headers_are_decoded() {
        for flags in 0..8 {
            let header = PacketHeader {
                descriptors: 253,
                truncated: flags & 1 != 0,
                descriptors_lost: flags & 2 != 0,
                foreign: flags & 4 != 0,
            };
            let message = [&header.encode()[..], b"packet"].concat();
            assert_eq!(PacketHeader::decode(&message), Some((header, &b"packet"[..])));
        }
        assert_eq!(PacketHeader::decode(&[0; HEADER_BYTES - 1]), None);
    }
}
