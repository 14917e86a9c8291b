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

/// A message to the receiver on the control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// With a client's socket and a session socket.
    Session,
    /// With a socket and a leash: keep a descriptor of the socket until the service closes its end of the leash.
    Keep,
    /// With a socket: close it at the next message. The service closes it first.
    Close,
    /// Reply with a [`PongMessage`].
    Ping,
}

/// The answer of a receiver to [`Control::Ping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PongMessage {
    /// A descriptor of a client has not been closed for a while.
    pub(super) blocked: bool,
    /// Descriptors that it has received before the ping, and is to close. `u32::MAX` stands for more.
    pub(super) unclosed: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawPong {
    unclosed: u32,
    blocked: u32,
}

impl PongMessage {
    pub(super) const BYTES: usize = size_of::<RawPong>();

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        bytemuck::cast(RawPong { unclosed: self.unclosed, blocked: self.blocked.into() })
    }

    /// `None` for bytes that are no answer.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let RawPong { unclosed, blocked } = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        Some(Self { blocked: blocked != 0, unclosed })
    }
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
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        [Self::Session, Self::Keep, Self::Close, Self::Ping]
            .into_iter()
            .find(|control| control.bytes() == bytes)
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
        for control in [Control::Session, Control::Keep, Control::Close, Control::Ping] {
            assert!(control.bytes().len() <= Control::MAX_BYTES);
            assert_eq!(Control::decode(control.bytes()), Some(control));
        }
        assert_eq!(Control::decode(b"p"), None);
    }

    #[test]
    fn answers_to_pings_are_decoded() {
        for (blocked, unclosed) in [(false, 0), (true, 0), (false, 70_000), (true, u32::MAX)] {
            let pong = PongMessage { blocked, unclosed };
            assert_eq!(PongMessage::decode(&pong.encode()), Some(pong));
        }
        assert_eq!(PongMessage::decode(b"pong"), None);
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
