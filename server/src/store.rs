//! Descriptors that outlive the process: handed to whoever started the service, by systemd's protocol (`FDSTORE=1` on
//! `$NOTIFY_SOCKET`), and handed back at the next start (`$LISTEN_FDS`). It knows names and descriptors, not what they are.

use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};

use fdmap_proto::units::FileId;
use fdmap_sys::{SyscallError, scm};

/// What a kept descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// The file itself.
    File,
    /// Its journal.
    Journal,
    /// The userfaultfd of the tracked mappings of that key.
    Userfaultfd(u64),
    /// The pagemap of their process.
    Pagemap(u64),
    /// The maps of their process.
    Maps(u64),
}

/// Names have no colon, which separates them in `$LISTEN_FDNAMES`.
const PREFIX: &str = "fdmap";

/// The name that a descriptor is kept under.
fn name_of(file: FileId, kept: Kept) -> String {
    match kept {
        Kept::File => format!("{PREFIX}.{file}.file"),
        Kept::Journal => format!("{PREFIX}.{file}.journal"),
        Kept::Userfaultfd(key) => format!("{PREFIX}.{file}.uffd.{key:016x}"),
        Kept::Pagemap(key) => format!("{PREFIX}.{file}.pagemap.{key:016x}"),
        Kept::Maps(key) => format!("{PREFIX}.{file}.maps.{key:016x}"),
    }
}

/// What [`name_of`] gave that name to.
fn meaning_of(name: &str) -> Option<(FileId, Kept)> {
    let mut parts = name.split('.');
    let (prefix, file, what, key) = (parts.next()?, parts.next()?, parts.next()?, parts.next());
    let id = u64::from_str_radix(file, 16).ok().and_then(FileId::new)?;
    let key = key.map(|key| u64::from_str_radix(key, 16)).transpose().ok()?;
    let kept = match (what, key) {
        ("file", None) => Kept::File,
        ("journal", None) => Kept::Journal,
        ("uffd", Some(key)) => Kept::Userfaultfd(key),
        ("pagemap", Some(key)) => Kept::Pagemap(key),
        ("maps", Some(key)) => Kept::Maps(key),
        _ => return None,
    };
    // Exactly as it was given: nothing behind, nothing else in front.
    (prefix == PREFIX && name_of(id, kept) == name).then_some((id, kept))
}

/// A place where descriptors are kept while the service is away.
#[derive(Debug)]
pub struct Store {
    socket: OsString,
}

impl Store {
    /// `None` unless whoever started the service keeps descriptors: systemd says so by `$FDSTORE`, how many there may be.
    #[must_use]
    pub fn of_parent() -> Option<Self> {
        let room: Option<u64> = std::env::var("FDSTORE").ok().and_then(|room| room.parse().ok());
        let socket = std::env::var_os("NOTIFY_SOCKET")?;
        room.is_some_and(|room| room > 0).then_some(Self { socket })
    }

    /// Has a descriptor kept. That it was received is not told; what is lost is missing at the next start, and reckoned with.
    pub fn keep(&self, file: FileId, kept: Kept, fd: BorrowedFd<'_>) {
        let name = name_of(file, kept);
        if let Err(error) = self.tell(&format!("FDSTORE=1\nFDNAME={name}"), &[fd]) {
            tracing::warn!(error = fdmap_proto::error_chain(&error), name, "handing a descriptor to be kept");
        }
    }

    /// Has it kept no longer.
    pub fn remove(&self, file: FileId, kept: Kept) {
        let name = name_of(file, kept);
        if let Err(error) = self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!(
                error = fdmap_proto::error_chain(&error),
                name,
                "letting go of a descriptor that is kept"
            );
        }
    }

    fn tell(&self, message: &str, fds: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        scm::send_to(&self.socket, message.as_bytes(), fds)
    }
}

/// The descriptors that were kept, in order of their files. Others that were passed are closed. To be asked for once, before
/// anything else is opened.
#[must_use]
pub fn inherited() -> Vec<(FileId, Kept, OwnedFd)> {
    let passed = match sd_notify::listen_fds_with_names() {
        Ok(passed) => passed,
        Err(error) => {
            tracing::warn!(%error, "taking descriptors from whoever started this");
            return Vec::new();
        }
    };
    let mut found = Vec::new();
    for (number, name) in passed {
        let fd = match fdmap_sys::fd::take_inherited(number) {
            Ok(fd) => fd,
            Err(error) => {
                tracing::warn!(error = fdmap_proto::error_chain(&error), name, "taking a descriptor");
                continue;
            }
        };
        match meaning_of(&name) {
            Some((file, kept)) => found.push((file, kept, fd)),
            None => tracing::warn!(name, "a descriptor that was passed means nothing here, and is closed"),
        }
    }
    found.sort_by_key(|(file, kept, _)| (*file, *kept));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_what_they_were_given_for() {
        let file = FileId::new(0x1f).unwrap();
        for kept in [Kept::File, Kept::Journal, Kept::Userfaultfd(7), Kept::Pagemap(u64::MAX), Kept::Maps(0)]
        {
            let name = name_of(file, kept);
            assert!(!name.contains(':'), "it separates names");
            assert_eq!(meaning_of(&name), Some((file, kept)));
        }
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
            assert_eq!(meaning_of(bad), None, "{bad}");
        }
    }
}
