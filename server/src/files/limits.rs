//! Bounds on what one user can make the service hold.

use std::time::Duration;

/// Bounds. Those "per user" do not bind administrators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest size of one file, bytes.
    pub file_bytes: u64,
    /// For all files of one owner, bytes.
    pub bytes_per_user: u64,
    /// Files of one owner.
    pub files_per_user: u32,
    /// Connections of one user to both sockets together.
    pub sessions_per_user: u32,
    /// Watches of one user.
    pub watches_per_user: u32,
    /// Page indexes in one Lookup.
    pub lookup_pages: u32,
    /// Pages in one Scan or Lookup that asks for attributes.
    pub attribute_pages: u64,
    /// Kept snapshots of one user, of all files together.
    pub kept_per_user: u32,
    /// How long a snapshot is kept at most.
    pub keep: Duration,
    /// Bytes of shared snapshots that one user's processes hold; a single one has no more, whoever asks for it.
    pub shared_bytes_per_user: u64,
    /// How many these may be: each costs the service a descriptor.
    pub shared_per_user: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes: 16 << 40,
            bytes_per_user: 64 << 40,
            files_per_user: 1024,
            sessions_per_user: 256,
            watches_per_user: 16,
            lookup_pages: 4096,
            attribute_pages: 4 << 20,
            kept_per_user: 64,
            keep: Duration::from_secs(3600),
            shared_bytes_per_user: 4 << 30,
            shared_per_user: 64,
        }
    }
}
