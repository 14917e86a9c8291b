//! Limits on what one user can make the service hold.

use std::num::NonZero;
use std::time::Duration;

use super::allocated::{AllocatedLimits, ram_bytes};

/// The limits. Those per user do not apply to administrators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of one file, in bytes.
    pub file_bytes: u64,
    /// Sizes of all files of one owner together, in bytes.
    pub bytes_per_user: u64,
    /// What the files of one owner, and of all owners but root, may hold.
    pub allocated: AllocatedLimits,
    /// Files of one owner. Of administrators, ephemeral files only.
    pub files_per_user: u32,
    /// Connections of one user, to the gRPC and the fdpass socket together.
    pub sessions_per_user: u32,
    /// Watch and `WatchCheckpoints` streams of one user.
    pub watches_per_user: u32,
    /// Open streams of answers of one user: Scan, Diff, Changes, Watch and `WatchCheckpoints`.
    pub streams_per_user: u32,
    /// Memory of the service for the requests of one user until their answers begin, and the answers that it has not read, in bytes: at
    /// least 8 KiB for each call. As much for its streams, beyond one message of each.
    pub buffered_bytes_per_user: u64,
    /// Page indexes in one Lookup.
    pub lookup_pages: u32,
    /// Pages in one Scan, Lookup or Changes that requests attributes.
    pub attribute_pages: u64,
    /// Retained snapshots of one user, of all files together.
    pub retained_per_user: u32,
    /// Memory of the service for the stamps of one user's files, in bytes; as much for its retained snapshots, frozen sets, open streams,
    /// and the attributes of calls in progress.
    pub state_bytes_per_user: u64,
    /// Longest `retain_for` of a request.
    pub retain_for: Duration,
    /// Shared snapshots that one user's processes hold, in bytes. Also the size limit of a single one, which applies to
    /// administrators too.
    pub shared_bytes_per_user: u64,
    /// Shared snapshots that the processes of all users but root hold together, in bytes.
    pub shared_bytes_of_users: u64,
    /// Shared snapshots that one user's processes hold. Each costs the service a descriptor.
    pub shared_per_user: u32,
    /// Tracked address spaces of one user: Track requests whose mappings exist. Each costs the service three descriptors. Up to as
    /// many others, which are no longer tracked and have page tables left, cost one each. The same holds for children.
    pub tracked_per_user: u32,
    /// Page tables of one user's tracked mappings, in bytes, also of those that were tracked before, until they are freed. The kernel
    /// charges them to the service.
    pub page_table_bytes_per_user: u64,
    /// Tracked children of one user's tracked processes: forked address spaces whose userfaultfd the service holds. Each costs the
    /// service up to three descriptors.
    pub tracked_children_per_user: u32,
    /// Calls of one user that wait for their turn or for a thread, or run.
    pub calls_per_user: u32,
    /// Threads of the calls of one user.
    pub threads_per_user: u32,
    /// All users but root together have at most this many times what one user may have.
    pub users_at_limit: u32,
    /// Time for which an ephemeral file that was never opened exists at least.
    pub unused_file_timeout: Duration,
    /// Time after which an inode helper without calls, or a receiver without sessions, ends.
    pub helper_idle_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let ram = ram_bytes();
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            file_bytes: 16 << 40,
            bytes_per_user: 64 << 40,
            allocated: AllocatedLimits::default(),
            files_per_user: 1024,
            sessions_per_user: 256,
            watches_per_user: 16,
            streams_per_user: 256,
            buffered_bytes_per_user: ram / 64,
            lookup_pages: 4096,
            attribute_pages: 4 << 20,
            retained_per_user: 64,
            state_bytes_per_user: ram / 64,
            retain_for: Duration::from_secs(3600),
            shared_bytes_per_user: (ram / 32).min(4 << 30),
            shared_bytes_of_users: (ram / 8).min(64 << 30),
            shared_per_user: 64,
            tracked_per_user: 1024,
            page_table_bytes_per_user: ram / 64,
            tracked_children_per_user: 1024,
            calls_per_user: 1024,
            threads_per_user: threads_per_user(processors),
            users_at_limit: 16,
            unused_file_timeout: Duration::from_secs(30),
            helper_idle_timeout: Duration::from_secs(10),
        }
    }
}

/// As many as the processors, so that a user with many calls leaves time to others; more than one, because a call can wait for a
/// process.
fn threads_per_user(processors: usize) -> u32 {
    u32::try_from(processors).map_or(16, |processors| processors.clamp(2, 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_has_as_many_threads_as_processors_within_limits() {
        let processors = [1, 2, 3, 16, 17, usize::MAX];
        assert_eq!(processors.map(threads_per_user), [2, 2, 3, 16, 16, 16]);
    }
}
