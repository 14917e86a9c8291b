//! The fdpass socket: what carries a descriptor goes here, since gRPC cannot. It owns the sessions and the building of shared
//! snapshots; rights and files are `files`', states are read as for gRPC.

mod listener;
mod protocol;
mod session;
mod snapshot;

pub use listener::serve;
pub use protocol::{Arrived, Operation, ProtocolError, operation};
pub use session::{Answer, Session};
