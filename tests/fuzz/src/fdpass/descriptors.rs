//! The descriptors of packets.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{fd, memfd};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::page_size;

const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The kind of a descriptor.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A memfd of three pages, the first with data.
    Memfd,
    /// A memfd whose name is already in use by a file.
    Namesake,
    /// A memfd of size 0.
    Empty,
    /// A memfd with all seals.
    Sealed,
    /// A memfd above the size limit.
    Large,
    /// A memfd of huge pages if the host has any, else as `Memfd`.
    Huge,
    /// A memfd whose name is not valid for a file.
    BadName,
    /// `Memfd`, read-only.
    ReadOnly,
    /// `Memfd`, `O_PATH`.
    Path,
    Pipe,
    /// A regular file.
    Regular,
    /// A userfaultfd of this process, the same one for each packet.
    Userfaultfd,
    /// A new userfaultfd for each packet.
    NewUserfaultfd,
    /// `/proc/self/pagemap`
    Pagemap,
    /// `/proc/self/maps`
    Maps,
}

impl Kind {
    /// True if the service can adopt it.
    pub(super) const fn is_adoptable(self) -> bool {
        matches!(self, Self::Memfd | Self::Namesake | Self::Empty | Self::Sealed | Self::Huge | Self::BadName)
    }

    /// The name argument of `memfd_create`.
    pub(super) const fn own_name(self) -> &'static str {
        match self {
            Self::Namesake => "ram",
            Self::Empty => "empty",
            Self::Sealed => "sealed",
            Self::Large => "large",
            Self::Huge => "huge",
            Self::BadName => "a/b",
            _ => "memfd",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Large => 1 << 40,
            Self::Huge => 2 << 20,
            _ => 3 * page_size().bytes(),
        }
    }
}

/// The descriptors of one run, created at first use. All descriptors of a kind refer to the same file.
#[derive(Default)]
pub(super) struct Descriptors {
    created: HashMap<Kind, OwnedFd>,
}

impl Descriptors {
    pub(super) fn get(&mut self, kind: Kind) -> OwnedFd {
        match kind {
            Kind::ReadOnly => fd::reopen(self.get(Kind::Memfd).as_fd(), false).unwrap(),
            Kind::Path => {
                let memfd = self.get(Kind::Memfd);
                let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
                open(path.as_str(), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).unwrap()
            }
            Kind::NewUserfaultfd => create(Kind::Userfaultfd),
            _ => self.created.entry(kind).or_insert_with(|| create(kind)).try_clone().unwrap(),
        }
    }
}

fn create(kind: Kind) -> OwnedFd {
    match kind {
        Kind::Pipe => std::io::pipe().unwrap().0.into(),
        Kind::Regular => regular(),
        Kind::Userfaultfd | Kind::NewUserfaultfd => Userfaultfd::create().unwrap().into(),
        Kind::Pagemap => fs::File::open("/proc/self/pagemap").unwrap().into(),
        Kind::Maps => fs::File::open("/proc/self/maps").unwrap().into(),
        Kind::Huge => memfd::create(kind.own_name(), Some(kind.bytes()))
            .and_then(|memfd| memfd::resize(memfd.as_fd(), kind.bytes()).map(|()| memfd))
            .unwrap_or_else(|_| create(Kind::Memfd)),
        _ => {
            let memfd = memfd::create(kind.own_name(), None).unwrap();
            memfd::resize(memfd.as_fd(), kind.bytes()).unwrap();
            if kind.bytes() > 0 {
                nix::sys::uio::pwrite(&memfd, b"x", 0).unwrap();
            }
            if kind == Kind::Sealed {
                memfd::add_seals(memfd.as_fd(), fdmap_sys::mapping::IMMUTABLE_SEALS).unwrap();
            }
            memfd
        }
    }
}

/// The file keeps its path: a deleted file on tmpfs would be adoptable shared memory.
fn regular() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("fdmap-fuzz-{}", std::process::id()));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap().into()
}

/// Number of open descriptors of this process.
pub(crate) fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Number of open descriptors of this process that are not sockets: those of inode helpers stay open for a while.
pub(crate) fn open_files() -> usize {
    let is_socket = |link: &Path| link.as_os_str().as_encoded_bytes().starts_with(b"socket:");
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    // A descriptor that was closed meanwhile has no link.
    let links = descriptors.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| !is_socket(link)).count()
}

/// Checks that no more than `expected` files are open, within [`CLOSE_TIMEOUT`]: an inode helper, which is a thread here, closes the
/// descriptor of its last call after its answer.
///
/// # Panics
/// If there are more.
pub(crate) fn check_open_files(expected: usize, source: &str) {
    let deadline = Instant::now() + CLOSE_TIMEOUT;
    loop {
        let open = open_files();
        if open <= expected {
            return;
        }
        assert!(Instant::now() < deadline, "{source} left descriptors open: {open} instead of {expected}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The pages with data, by `lseek(SEEK_DATA)`.
pub(super) fn data_pages(file: &OwnedFd) -> Vec<u64> {
    let size = u64::try_from(fd::stat(file).unwrap().st_size).unwrap();
    let mut pages = Vec::new();
    let mut offset = 0;
    while offset < size {
        let Some(data) = fdmap_sys::seek::next_data(file.as_fd(), offset).unwrap() else { break };
        let page = page_size().page_at(data).0;
        pages.push(page);
        offset = (page + 1) * page_size().bytes();
    }
    pages
}
