//! A FUSE file system: of one file, whose reads and writes the kernel passes through to another file, or of files that leave some
//! requests unanswered. linux/fuse.h.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

use super::calls::open_backing;
use crate::error::{CallContext as _, SyscallError};

/// The name of the file.
pub const NAME: &str = "file";

/// Room for any request.
const REQUEST_BYTES: usize = 1 << 16;
const INIT_EXT: u32 = 1 << 30;
/// `FUSE_PASSTHROUGH`, in the upper half of the flags.
const PASSTHROUGH: u32 = 1 << 5;
const FOPEN_PASSTHROUGH: u32 = 1 << 7;
const FOLDER: u64 = 1;
const FILE: u64 = 2;

/// `FUSE_FLUSH`: a close(2) of the file waits for the answer, and no signal ends the wait.
pub const FLUSH: u32 = 25;
/// `FUSE_STATFS`: statfs(2) and fstatfs(2).
pub const STATFS: u32 = 17;

/// A mounted file system. Only [`Self::serve`] answers requests after the mount.
#[derive(Debug)]
pub struct Fuse {
    device: File,
}

impl Fuse {
    /// Mounts a file system that supports passthrough in the mount namespace of the calling thread, for the caller to unmount.
    ///
    /// # Errors
    /// The open of `/dev/fuse` (`ENOENT`: the kernel has no FUSE), `mount`, or the first request.
    pub fn mount(folder: &Path) -> Result<Self, SyscallError> {
        Self::mount_for(folder, 0)
    }

    /// The same as fusermount(1) mounts a file system of `user`, which other users may access too.
    ///
    /// # Errors
    /// As [`Self::mount`].
    pub fn mount_for(folder: &Path, user: u32) -> Result<Self, SyscallError> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.call(|| "open of /dev/fuse".to_owned())?;
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id={user},group_id={user},allow_other");
        let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
        mount(Some("fdmap-test"), folder, Some("fuse"), flags, Some(options.as_str()))
            .call(|| format!("mount of fuse at {}", folder.display()))?;
        let fuse = Self { device };
        fuse.answer_next(|_| Ok(Reply::new().words(&init())))?;
        Ok(fuse)
    }

    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Answers requests until the file system is unmounted and its file is closed. Reads and writes of the file go to `backing`, a
    /// file of `size` bytes. Calls `wait` before it answers a request for attributes.
    ///
    /// # Errors
    /// The ioctl that opens `backing` (the kernel has no passthrough), or an access of the device.
    pub fn serve(&self, backing: BorrowedFd<'_>, size: u64, wait: impl Fn()) -> Result<(), SyscallError> {
        let backing_id = open_backing(self.device.as_fd(), backing)
            .call(|| format!("FUSE_DEV_IOC_BACKING_OPEN of descriptor {}", backing.as_raw_fd()))?;
        loop {
            let answered = self.answer_next(|request| {
                if request.opcode() == GETATTR {
                    wait();
                }
                answer(request, backing_id.cast_unsigned(), size)
            });
            match answered {
                Err(error) if error.errno == Errno::ENODEV => return Ok(()),
                other => other?,
            }
        }
    }

    /// Answers requests until the file system is unmounted and its file is closed, except those with an opcode in `unanswered`: they
    /// wait until the process that serves the device has ended. Each name is that of the same file, which cannot be read.
    ///
    /// # Errors
    /// An access of the device.
    pub fn serve_without(&self, unanswered: &[u32]) -> Result<(), SyscallError> {
        loop {
            match self.answer_next(|request| answer_except(request, unanswered)) {
                Err(error) if error.errno == Errno::ENODEV => return Ok(()),
                other => other?,
            }
        }
    }

    fn answer_next(
        &self,
        answer: impl Fn(&Request) -> Result<Reply, Option<Errno>>,
    ) -> Result<(), SyscallError> {
        let mut bytes = vec![0; REQUEST_BYTES];
        let read = (&self.device).read(&mut bytes).call(|| "read of /dev/fuse".to_owned())?;
        bytes.truncate(read);
        let request = Request(bytes);
        let (error, payload) = match answer(&request) {
            Ok(reply) => (0, reply.0),
            Err(Some(errno)) => (-(errno as i32), Vec::new()),
            // A request without an answer.
            Err(None) => return Ok(()),
        };
        let length = u32::try_from(16 + payload.len()).unwrap_or(u32::MAX);
        let header = Reply::new().words(&[length, error.cast_unsigned()]).longs(&[request.long(8)]);
        let reply = [header.0, payload].concat();
        (&self.device).write(&reply).map(drop).call(|| "write to /dev/fuse".to_owned())
    }
}

/// `struct fuse_in_header`, and the arguments behind its 40 bytes.
struct Request(Vec<u8>);

impl Request {
    /// The upper half of the first 64 bits.
    fn opcode(&self) -> u64 {
        self.long(0) >> 32
    }

    fn long(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    }
}

/// The bytes of an answer.
struct Reply(Vec<u8>);

impl Reply {
    const fn new() -> Self {
        Self(Vec::new())
    }

    fn words(mut self, words: &[u32]) -> Self {
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self
    }

    fn longs(mut self, longs: &[u64]) -> Self {
        self.0.extend(longs.iter().flat_map(|long| long.to_le_bytes()));
        self
    }
}

/// `struct fuse_init_out`: major, minor, `max_readahead`, flags, 2 x u16, `max_write`, `time_gran`, 2 x u16, flags2,
/// `max_stack_depth`.
fn init() -> [u32; 16] {
    let mut words = [0; 16];
    (words[0], words[1], words[3]) = (7, 40, INIT_EXT);
    (words[5], words[6], words[8], words[9]) = (4096, 1, PASSTHROUGH, 1);
    words
}

/// `struct fuse_attr` of the folder or the file.
fn attributes(node: u64, size: u64) -> Reply {
    let mode = if node == FOLDER { 0o040_700 } else { 0o100_600 };
    let links = if node == FOLDER { 2 } else { 1 };
    // ino, size, blocks, 3 times; nanoseconds of 3 times, mode, nlink, uid, gid, rdev, blksize, flags
    let numbers = [node, size, size / 512, 0, 0, 0];
    Reply::new().longs(&numbers).words(&[0, 0, 0, mode, links, 0, 0, 0, 4096, 0])
}

const LOOKUP: u64 = 1;
const FORGET: u64 = 2;
const GETATTR: u64 = 3;
const OPEN: u64 = 14;
const RELEASE: u64 = 18;
const INTERRUPT: u64 = 36;
const BATCH_FORGET: u64 = 42;

fn answer_except(request: &Request, unanswered: &[u32]) -> Result<Reply, Option<Errno>> {
    match request.opcode() {
        opcode if unanswered.iter().any(|one| u64::from(*one) == opcode) => Err(None),
        LOOKUP => Ok(entry(0)),
        OPEN => Ok(Reply::new().longs(&[0]).words(&[0, 0])),
        _ => answer(request, 0, 0),
    }
}

/// The file of `size` bytes, as LOOKUP answers.
fn entry(size: u64) -> Reply {
    // nodeid, generation, validity of the entry and of the attributes
    let reply = Reply::new().longs(&[FILE, 0, 0, 0, 0]);
    Reply([reply.0, attributes(FILE, size).0].concat())
}

fn answer(request: &Request, backing_id: u32, size: u64) -> Result<Reply, Option<Errno>> {
    match request.opcode() {
        LOOKUP => {
            let name = request.0.get(40..).unwrap_or_default();
            if name != [NAME.as_bytes(), &[0]].concat() {
                return Err(Some(Errno::ENOENT));
            }
            Ok(entry(size))
        }
        GETATTR => {
            let node = request.long(16);
            Ok(Reply([Reply::new().longs(&[0, 0]).0, attributes(node, size).0].concat()))
        }
        // fh, open_flags, backing_id
        OPEN => Ok(Reply::new().longs(&[0]).words(&[FOPEN_PASSTHROUGH, backing_id])),
        RELEASE => Ok(Reply::new()),
        FORGET | INTERRUPT | BATCH_FORGET => Err(None),
        _ => Err(Some(Errno::ENOSYS)),
    }
}
