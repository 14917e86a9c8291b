//! The descriptors that clients send along.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use arbitrary::Arbitrary;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{fd, memfd};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::page_size;

/// What a client may come with.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A memfd of three pages, one of them with data.
    Memfd,
    /// Another one, whose own name is taken.
    Namesake,
    /// One without pages.
    Empty,
    /// One that may not change any more.
    Sealed,
    /// One larger than a file may be.
    Large,
    /// One of huge pages, where the host has them; else as `Memfd`.
    Huge,
    /// One whose own name is none for a file.
    BadName,
    /// The first one, open for reading.
    ReadOnly,
    /// The first one, as a place only.
    Path,
    /// A pipe.
    Pipe,
    /// A file on a disk.
    Regular,
    /// A userfaultfd of this process: the same each time, so that it was used before but for the first.
    Userfaultfd,
    /// One that is new each time.
    NewUserfaultfd,
    /// The pagemap of this process.
    Pagemap,
    /// The maps of this process.
    Maps,
}

impl Kind {
    /// True if the service may own it.
    pub(super) const fn is_adoptable(self) -> bool {
        matches!(self, Self::Memfd | Self::Namesake | Self::Empty | Self::Sealed | Self::Huge | Self::BadName)
    }

    /// The name that it has of its own.
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

/// Those of one run, made when first wanted: one kind is always the same file.
#[derive(Default)]
pub(super) struct Descriptors {
    made: HashMap<Kind, OwnedFd>,
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
            Kind::NewUserfaultfd => make(Kind::Userfaultfd),
            _ => self.made.entry(kind).or_insert_with(|| make(kind)).try_clone().unwrap(),
        }
    }
}

fn make(kind: Kind) -> OwnedFd {
    match kind {
        Kind::Pipe => std::io::pipe().unwrap().0.into(),
        Kind::Regular => regular(),
        Kind::Userfaultfd | Kind::NewUserfaultfd => Userfaultfd::create().unwrap().into(),
        Kind::Pagemap => fs::File::open("/proc/self/pagemap").unwrap().into(),
        Kind::Maps => fs::File::open("/proc/self/maps").unwrap().into(),
        Kind::Huge => memfd::create(kind.own_name(), Some(kind.bytes()))
            .and_then(|made| memfd::resize(made.as_fd(), kind.bytes()).map(|()| made))
            .unwrap_or_else(|_| make(Kind::Memfd)),
        _ => {
            let made = memfd::create(kind.own_name(), None).unwrap();
            memfd::resize(made.as_fd(), kind.bytes()).unwrap();
            if kind.bytes() > 0 {
                nix::sys::uio::pwrite(&made, b"x", 0).unwrap();
            }
            if kind == Kind::Sealed {
                memfd::add_seals(made.as_fd(), fdmap_sys::mapping::IMMUTABLE_SEALS).unwrap();
            }
            made
        }
    }
}

/// The file has a path as long as it is open: without one, on tmpfs, it could be taken for a memfd.
fn regular() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("fdmap-fuzz-{}", std::process::id()));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap().into()
}

/// Descriptors that this process has open.
pub(super) fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The pages that hold data, by `lseek` alone.
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
