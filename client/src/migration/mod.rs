//! Migration of a file to the service on another host, over gRPC with mutual TLS.
//!
//! ```text
//!   host A: fdmapd <--states, changes, content-- [source] --steps--> [receive] --create, content--> fdmapd: host B
//!                                                         <--acks---
//! ```
//!
//! Other programs watch and steer either end: [`control`].
//!
//! Both ends run in the processes of their callers, and not in the services. `docs/migration.md` has the protocol and its states.

mod content;
pub mod control;
mod digest;
mod error;
mod message;
mod monitor;
pub mod receive;
pub mod source;

pub use content::ReceivedPages;
pub use error::MigrationError;
pub use monitor::{MigrationEnd, MigrationMonitor, MigrationState};

/// Steps that the source sends before the destination has acknowledged them. A step has at most 1 MiB of content.
const MAX_UNACKNOWLEDGED: usize = 32;
