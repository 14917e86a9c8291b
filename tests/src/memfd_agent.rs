//! A test agent with its own memfd, mapped and tracked without the service.

use std::fs::{File, OpenOptions};
use std::os::fd::RawFd;

use fdmap_sys::address::AddressRange;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::pidfd::{self, PidFd};
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};

use crate::cgroup::Cgroup;
use crate::test_agent::command::{Command, MemfdCommand, Reply};
use crate::test_agent::{TestAgent, number};
use crate::tracked::{HUGE, PAGE, WpTracker, asynchronous};
use crate::{HarnessError, HarnessResult};

/// A running agent, killed on drop.
#[derive(Debug)]
pub struct MemfdAgent {
    pub agent: TestAgent,
    pub pidfd: PidFd,
    /// The agent's file, reopened for reading and writing.
    pub file: File,
    /// Where the agent maps the file.
    pub range: AddressRange,
}

impl MemfdAgent {
    /// Starts an agent that maps a new file of `pages` pages of 4 KiB.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(pages: u64, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::with(TestAgent::start(cgroup)?, pages * PAGE, 0)
    }

    /// Starts an agent that maps a new file of `pages` hugetlb pages of 2 MiB.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_huge(pages: u64) -> HarnessResult<Self> {
        Self::with(TestAgent::start(None)?, pages * HUGE, HUGE)
    }

    fn with(mut agent: TestAgent, bytes: u64, hugetlb: u64) -> HarnessResult<Self> {
        let (fd, start) = match agent.memfd(MemfdCommand::Create { bytes, hugetlb })? {
            Reply::Memfd { fd, address } => (fd, address),
            other => return Err(HarnessError::Agent(format!("{other:?}"))),
        };
        let path = format!("/proc/{}/fd/{fd}", agent.pid());
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file =
            file.map_err(|error| HarnessError::File { what: "opening", path: path.clone().into(), error })?;
        let pidfd = pidfd::open(agent.pid())?;
        Ok(Self { agent, pidfd, file, range: AddressRange { start, end: start + bytes } })
    }

    /// Registers the mapping with a userfaultfd that the agent creates and this process takes over.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn track(&mut self, more: UffdFeatures) -> HarnessResult<WpTracker> {
        let uffd = self.userfaultfd()?;
        let pagemap = Pagemap::open(Some(self.agent.pid()))?;
        WpTracker::new(uffd, pagemap, self.range, PAGE, asynchronous() | more)
    }

    /// Takes over a userfaultfd that the agent creates.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn userfaultfd(&mut self) -> HarnessResult<Userfaultfd> {
        let number = self.call_for_number(MemfdCommand::CreateUserfaultfd)?;
        let theirs = RawFd::try_from(number).map_err(|_| HarnessError::Agent(number.to_string()))?;
        Ok(Userfaultfd::from_fd(self.pidfd.descriptor(theirs)?)?)
    }

    /// Runs a command and waits for its reply.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn call(&mut self, command: MemfdCommand) -> HarnessResult<Reply> {
        self.agent.memfd(command)
    }

    /// Like [`call`](Self::call), for a command that replies with a number.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn call_for_number(&mut self, command: MemfdCommand) -> HarnessResult<u64> {
        number(self.agent.memfd(command)?)
    }

    /// Sends a command without waiting for its reply.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn send(&mut self, command: MemfdCommand) -> HarnessResult<()> {
        self.agent.send(&Command::Memfd(command))
    }

    /// Writes the first byte of a page.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write(&mut self, page: u64) -> HarnessResult<()> {
        self.call(MemfdCommand::Write(page)).map(drop)
    }
}
