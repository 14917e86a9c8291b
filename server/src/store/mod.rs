//! The file descriptor store: descriptors that outlive the service's process.
//!
//! The service sends descriptors to the process that started it, by systemd's protocol (`FDSTORE=1` on `$NOTIFY_SOCKET`), and
//! receives them at the next start (`$LISTEN_FDS`). This module knows names and descriptors. It does not interpret them.

mod capacity;

use std::ffi::OsString;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::capacity::{Capacity, Room};
use crate::log_limit::LogLimit;
use fdmap_proto::units::FileId;
use fdmap_sys::{SyscallError, scm};
use nix::fcntl::OFlag;

/// The role of a stored descriptor. The number is the key of a tracked address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredFd {
    /// The memfd.
    File,
    /// The journal of the memfd.
    Journal,
    /// The userfaultfd that the mappings are registered with.
    Userfaultfd(u64),
    /// `/proc/PID/pagemap` of the process.
    Pagemap(u64),
    /// `/proc/PID/maps` of the process.
    Maps(u64),
}

/// The first part of every name. Names contain no colon: it separates the names in `$LISTEN_FDNAMES`.
const NAME_PREFIX: &str = "fdmap";

fn encode_name(file: FileId, role: StoredFd) -> String {
    match role {
        StoredFd::File => format!("{NAME_PREFIX}.{file}.file"),
        StoredFd::Journal => format!("{NAME_PREFIX}.{file}.journal"),
        StoredFd::Userfaultfd(key) => format!("{NAME_PREFIX}.{file}.uffd.{key:016x}"),
        StoredFd::Pagemap(key) => format!("{NAME_PREFIX}.{file}.pagemap.{key:016x}"),
        StoredFd::Maps(key) => format!("{NAME_PREFIX}.{file}.maps.{key:016x}"),
    }
}

/// The inverse of [`encode_name`]. `None` for every other name.
fn decode_name(name: &str) -> Option<(FileId, StoredFd)> {
    let mut parts = name.split('.');
    let (prefix, file, role, key) = (parts.next()?, parts.next()?, parts.next()?, parts.next());
    let id = u64::from_str_radix(file, 16).ok().and_then(FileId::new)?;
    let key = key.map(|key| u64::from_str_radix(key, 16)).transpose().ok()?;
    let role = match (role, key) {
        ("file", None) => StoredFd::File,
        ("journal", None) => StoredFd::Journal,
        ("uffd", Some(key)) => StoredFd::Userfaultfd(key),
        ("pagemap", Some(key)) => StoredFd::Pagemap(key),
        ("maps", Some(key)) => StoredFd::Maps(key),
        _ => return None,
    };
    // Encoding again rejects extra parts, missing zeroes and signs.
    (prefix == NAME_PREFIX && encode_name(id, role) == name).then_some((id, role))
}

/// The store that the parent process offers.
#[derive(Debug)]
pub struct FdStore {
    socket: OsString,
    capacity: Mutex<Capacity>,
}

/// Descriptors that the store has no room for.
static NO_ROOM: LogLimit = LogLimit::new();

impl FdStore {
    /// Returns `None` if the parent stores no descriptors. systemd sets `$FDSTORE` to the number that it accepts. `inherited`: what
    /// the store holds.
    #[must_use]
    pub fn from_env(inherited: &[(FileId, StoredFd, OwnedFd)]) -> Option<Self> {
        let descriptors: Option<u64> = std::env::var("FDSTORE").ok().and_then(|number| number.parse().ok());
        let socket = std::env::var_os("NOTIFY_SOCKET")?;
        let descriptors = descriptors.filter(|descriptors| *descriptors > 0)?;
        let mut capacity = Capacity::new(Room::of_store(descriptors));
        inherited.iter().for_each(|(file, role, _)| capacity.inherit(*file, *role));
        Some(Self { socket, capacity: Mutex::new(capacity) })
    }

    /// Stores the memfd of a file, and reserves room for its journal. Without room, the file is lost when the service ends, and the
    /// log reports that.
    pub fn add_file(&self, file: FileId, user: u32, fd: BorrowedFd<'_>) {
        let has_room = self.capacity().reserve(file, user, &[StoredFd::File, StoredFd::Journal]);
        if has_room {
            self.add(file, StoredFd::File, fd);
        } else if let Some(omitted) = NO_ROOM.permit() {
            tracing::warn!(
                id = %file,
                user,
                omitted,
                "the descriptor store has no room for a further file of this user: a restart loses the file"
            );
        }
    }

    /// Stores the descriptors of a tracked address space, all or none. Returns false without room: after a restart, the pages of
    /// its mappings are conservative.
    pub fn add_space(&self, file: FileId, descriptors: &[(StoredFd, BorrowedFd<'_>)]) -> bool {
        let roles: Vec<_> = descriptors.iter().map(|(role, _)| *role).collect();
        let has_room = {
            let mut capacity = self.capacity();
            capacity.contains(file) && capacity.reserve(file, 0, &roles)
        };
        if has_room {
            descriptors.iter().for_each(|(role, fd)| self.add(file, *role, *fd));
        } else if let Some(omitted) = NO_ROOM.permit() {
            tracing::warn!(
                id = %file,
                omitted,
                "the descriptor store has no room for a tracked address space: its pages are conservative after a restart"
            );
        }
        has_room
    }

    /// Sends a duplicate of `fd` to the store, if there is room for it. The protocol has no acknowledgement: a descriptor that the
    /// store refuses is missing at the next start, and recovery handles that.
    pub fn add(&self, file: FileId, role: StoredFd, fd: BorrowedFd<'_>) {
        if !self.capacity().send(file, role) {
            return;
        }
        let name = encode_name(file, role);
        if let Err(error) = self.send(&format!("FDSTORE=1\nFDNAME={name}"), &[fd]) {
            tracing::warn!(
                error = fdmap_proto::error_chain(&error),
                name,
                "cannot send a descriptor to the descriptor store"
            );
        }
    }

    /// Counts what the store holds of a file for `user`.
    pub fn charge(&self, file: FileId, user: u32) {
        self.capacity().charge(file, user);
    }

    /// Removes a descriptor from the store. With the memfd, it also returns the room of a journal that was never stored.
    pub fn remove(&self, file: FileId, role: StoredFd) {
        let name = encode_name(file, role);
        if let Err(error) = self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!(
                error = fdmap_proto::error_chain(&error),
                name,
                "cannot remove a descriptor from the descriptor store"
            );
            return;
        }
        let mut capacity = self.capacity();
        capacity.remove(file, role);
        if role == StoredFd::File {
            capacity.remove_reserved(file);
        }
    }

    fn capacity(&self) -> MutexGuard<'_, Capacity> {
        // No code panics with the lock held.
        self.capacity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pipe that ends when the parent has processed all messages so far: it then has closed what was removed. `None`: the message
    /// cannot be sent.
    #[must_use]
    pub fn barrier(&self) -> Option<OwnedFd> {
        let (barrier, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC).ok()?;
        let sent = self.send("BARRIER=1", &[theirs.as_fd()]);
        sent.is_ok().then_some(barrier)
    }

    fn send(&self, message: &str, fds: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        scm::send_to(&self.socket, message.as_bytes(), fds)
    }
}

/// Takes the stored descriptors from the environment, sorted by file. Closes descriptors with unknown names. Call this once,
/// before the process opens any other descriptor.
#[must_use]
pub fn inherited() -> Vec<(FileId, StoredFd, OwnedFd)> {
    let passed = match sd_notify::listen_fds_with_names() {
        Ok(passed) => passed,
        Err(error) => {
            tracing::warn!(%error, "cannot read $LISTEN_FDS: no stored descriptor is restored");
            return Vec::new();
        }
    };
    let mut stored = Vec::new();
    for (number, name) in passed {
        let fd = match fdmap_sys::fd::take_inherited(number) {
            Ok(fd) => fd,
            Err(error) => {
                tracing::warn!(
                    error = fdmap_proto::error_chain(&error),
                    name,
                    "cannot take an inherited descriptor"
                );
                continue;
            }
        };
        match decode_name(&name) {
            Some((file, role)) => stored.push((file, role, fd)),
            None => tracing::warn!(name, "closing an inherited descriptor with an unknown name"),
        }
    }
    stored.sort_by_key(|(file, role, _)| (*file, *role));
    stored
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_name_decodes_to_its_file_and_role() {
        let file = FileId::new(0x1f).unwrap();
        for role in [
            StoredFd::File,
            StoredFd::Journal,
            StoredFd::Userfaultfd(7),
            StoredFd::Pagemap(u64::MAX),
            StoredFd::Maps(0),
        ] {
            let name = encode_name(file, role);
            assert!(!name.contains(':'), "a colon separates names in $LISTEN_FDNAMES");
            assert_eq!(decode_name(&name), Some((file, role)));
        }
    }

    #[test]
    fn malformed_name_is_rejected() {
        for bad in [
            "",
            "fdmap",
            "fdmap.000000000000001f",
            "fdmap.000000000000001f.file.0000000000000001",
            "fdmap.1f.file",
            "fdmap.0000000000000000.file",
            "fdmap.000000000000001f.uffd",
            "fdmap.000000000000001f.uffd.7",
            "fdmap.000000000000001f.file.more",
            "other.000000000000001f.file",
        ] {
            assert_eq!(decode_name(bad), None, "{bad}");
        }
    }
}
