//! The memfd of the agent.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use fdmap_sys::memfd;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::test_agent::command::{MemfdCommand, Reply};
use nix::libc;
use nix::unistd::{ForkResult, fork, pipe, setuid};

use crate::call::{Done, READ_WRITE, error_text};

const PAGE: usize = 4096;
/// A uid without privileges.
const UNPRIVILEGED: u32 = 65534;

#[derive(Default)]
pub struct OwnMemfd {
    file: Option<OwnedFd>,
    mapping: Option<RawMapping>,
    uffd: Option<Userfaultfd>,
    /// The pipe for pages that the child must write, and the pipe for its answers.
    child: Option<(OwnedFd, OwnedFd)>,
}

impl OwnMemfd {
    pub fn perform(&mut self, command: MemfdCommand) -> Done<Reply> {
        match command {
            MemfdCommand::Create { bytes, hugetlb } => return self.create(bytes, hugetlb),
            MemfdCommand::CreateUserfaultfd => {
                let uffd = self.uffd.insert(Userfaultfd::create().map_err(error_text)?);
                let fd = u64::try_from(uffd.as_fd().as_raw_fd()).map_err(error_text)?;
                return Ok(Reply::Number(fd));
            }
            MemfdCommand::CloseUserfaultfd => self.uffd = None,
            MemfdCommand::Write(page) => write(self.mapping()?, page as usize)?,
            MemfdCommand::Read(page) => {
                self.mapping()?.read(page as usize * PAGE).map(drop).map_err(error_text)?;
            }
            MemfdCommand::PageOut => {
                let mapping = self.mapping()?;
                mapping.advise(0, mapping.len(), libc::MADV_PAGEOUT).map_err(error_text)?;
            }
            MemfdCommand::Unmap => self.mapping = None,
            MemfdCommand::Cover => {
                let mapping = self.mapping()?;
                mapping.replace(0, mapping.len(), None, READ_WRITE).map_err(error_text)?;
            }
            MemfdCommand::Duplicate => return duplicate(self.mapping()?),
            MemfdCommand::BecomeUnprivileged => setuid(UNPRIVILEGED.into()).map_err(error_text)?,
            MemfdCommand::OpenPagemap => drop(Pagemap::open(None).map_err(error_text)?),
            MemfdCommand::Fork => return self.fork(),
            MemfdCommand::ChildWrite(page) => self.child_write(page as usize)?,
        }
        Ok(Reply::Done)
    }

    fn mapping(&self) -> Done<&RawMapping> {
        self.mapping.as_ref().ok_or_else(|| "no memfd is mapped".to_owned())
    }

    fn create(&mut self, bytes: u64, hugetlb: u64) -> Done<Reply> {
        let file = memfd::create("agent", (hugetlb != 0).then_some(hugetlb)).map_err(error_text)?;
        memfd::resize(file.as_fd(), bytes).map_err(error_text)?;
        let len = usize::try_from(bytes).map_err(error_text)?;
        let mapping = RawMapping::shared(file.as_fd(), 0, len).map_err(error_text)?;
        let reply = Reply::Memfd { fd: file.as_raw_fd(), address: mapping.address() as u64 };
        (self.file, self.mapping) = (Some(file), Some(mapping));
        Ok(reply)
    }

    /// The child writes pages on request, and ends with this process.
    fn fork(&mut self) -> Done<Reply> {
        let (requests, requesting) = pipe().map_err(error_text)?;
        let (answering, answers) = pipe().map_err(error_text)?;
        // SAFETY: the process has one thread: only commands of this module ran before.
        match unsafe { fork() }.map_err(error_text)? {
            ForkResult::Parent { child } => {
                self.child = Some((requesting, answering));
                Ok(Reply::Number(u64::from(child.as_raw().cast_unsigned())))
            }
            ForkResult::Child => {
                drop((requesting, answering));
                let mut requests = std::fs::File::from(requests);
                let mut answers = std::fs::File::from(answers);
                let mut page = [0; 8];
                while requests.read_exact(&mut page).is_ok() {
                    let done = self.mapping().is_ok_and(|all| write(all, usize::from_ne_bytes(page)).is_ok());
                    if answers.write_all(&[u8::from(done)]).is_err() {
                        break;
                    }
                }
                // SAFETY: _exit takes an integer. The parent flushes its own buffers.
                unsafe { libc::_exit(0) }
            }
        }
    }

    fn child_write(&self, page: usize) -> Done {
        let (requests, answers) = self.child.as_ref().ok_or("no child was forked")?;
        nix::unistd::write(requests, &page.to_ne_bytes()).map_err(error_text)?;
        let mut answer = [0];
        nix::unistd::read(answers, &mut answer).map_err(error_text)?;
        if answer == [1] { Ok(()) } else { Err("the child did not write".to_owned()) }
    }
}

fn write(mapping: &RawMapping, page: usize) -> Done {
    mapping.write(page * PAGE, b'w').map_err(error_text)
}

/// The duplicate stays mapped until the process ends.
fn duplicate(mapping: &RawMapping) -> Done<Reply> {
    let (start, _) = mapping.duplicate(0, mapping.len()).map_err(error_text)?.into_raw();
    Ok(Reply::Number(start.addr() as u64))
}
