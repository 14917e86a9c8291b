//! The fdpass socket: requests whose answer carries a descriptor, or which carry one themselves. gRPC cannot pass descriptors.
//!
//! It owns the sessions and builds shared snapshots. Files and rights belong to `files`, and page states are read as for gRPC. It
//! receives no descriptor of a client: the processes of `receiver` do.

mod error;
mod listener;
mod passed;
mod protocol;
pub mod receiver;
mod receivers;
mod session;
mod snapshot;
mod wire;

pub use error::ProtocolError;
pub(crate) use listener::serve;
pub use protocol::{Operation, Packet, decode_packet};
pub(crate) use receivers::{Connection, Kept, Receivers, Refuser};
pub use session::{Peer, Session, SessionReply};
