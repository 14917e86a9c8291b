//! Puppets: processes of one thread that map a memfd of their own and do to it what clients do to files, also those that
//! end. See `fdmap-puppet`.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

use fdmap_sys::address::AddressRange;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::pidfd::{self, PidFd};
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};

use crate::actor::Actor;
use crate::cgroup::Cgroup;
use crate::tracked::{HUGE, PAGE, WpTracker, asynchronous};
use crate::{HarnessError, HarnessResult};

/// A running puppet, killed on drop.
#[derive(Debug)]
pub struct Puppet {
    /// To tell it what to do.
    pub actor: Actor,
    /// Its process.
    pub pidfd: PidFd,
    /// Its file, opened anew for reading and writing.
    pub file: File,
    /// Where it has mapped the file.
    pub range: AddressRange,
}

impl Puppet {
    /// Starts one that maps a new file of so many pages of 4 KiB.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(pages: u64, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::with(Actor::start_program("fdmap-puppet", cgroup)?, "map", pages * PAGE)
    }

    /// Starts one that maps a new file of hugetlb pages of 2 MiB.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_huge(pages: u64) -> HarnessResult<Self> {
        Self::with(Actor::start_program("fdmap-puppet", None)?, "map-huge", pages * HUGE)
    }

    fn with(mut actor: Actor, map: &str, bytes: u64) -> HarnessResult<Self> {
        let said = actor.call(&format!("{map} {bytes}"))?;
        let (fd, start) = said.split_once(' ').ok_or_else(|| HarnessError::Actor(said.clone()))?;
        let path = format!("/proc/{}/fd/{fd}", actor.pid());
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file =
            file.map_err(|error| HarnessError::File { what: "opening", path: path.clone().into(), error })?;
        let start = number(start)?;
        let pidfd = pidfd::open(actor.pid())?;
        Ok(Self { actor, pidfd, file, range: AddressRange { start, end: start + bytes } })
    }

    /// Has it make a userfaultfd, takes that over and registers the mapping with it.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn track(&mut self, more: UffdFeatures) -> HarnessResult<WpTracker> {
        let uffd = self.userfaultfd()?;
        let pagemap = Pagemap::open(Some(self.actor.pid()))?;
        WpTracker::new(uffd, pagemap, self.range, PAGE, asynchronous() | more)
    }

    /// Has it make a userfaultfd, and takes that over.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn userfaultfd(&mut self) -> HarnessResult<Userfaultfd> {
        let said = self.actor.call("userfaultfd")?;
        let theirs = RawFd::try_from(number(&said)?).map_err(|_| HarnessError::Actor(said))?;
        Ok(Userfaultfd::from_fd(take_over(&self.pidfd, theirs)?)?)
    }

    /// Has it do something.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn call(&mut self, command: &str) -> HarnessResult<String> {
        self.actor.call(command)
    }

    /// Has it write a page.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn write(&mut self, page: u64) -> HarnessResult<()> {
        self.actor.call(&format!("write {page}")).map(drop)
    }
}

fn number(word: &str) -> HarnessResult<u64> {
    word.parse().map_err(|_| HarnessError::Actor(word.to_owned()))
}

/// A descriptor of another process, by `pidfd_getfd`.
fn take_over(process: &PidFd, theirs: RawFd) -> Result<OwnedFd, SyscallError> {
    let call = || format!("pidfd_getfd of {theirs}");
    let pidfd = process.as_fd().as_raw_fd();
    // SAFETY: the call takes integers and touches no memory.
    let got = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_getfd, pidfd, theirs, 0) };
    let raw = RawFd::try_from(Errno::result(got).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
    // SAFETY: the kernel just made this descriptor and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}
