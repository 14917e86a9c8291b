//! A tracked process that forks on request: the test binary, started again.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::calls;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{memfd, scm};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use super::RETRY_TIMEOUT;
use crate::tracking::observe::holder::HeldSpace;

/// Command: fork children that end at once.
const FORK_CHILDREN: u8 = 1;
/// Command: fork a child that forks children that end at once.
const FORK_GRANDCHILDREN: u8 = 2;

/// Exceeds the duration of every step.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// A fork takes less if its event is read at once.
const MAX_PROMPT_FORK: Duration = Duration::from_millis(100);

/// Durations of forks.
pub struct ForkTimes {
    pub slowest: Duration,
    /// Number of forks that took at least [`MAX_PROMPT_FORK`].
    late: u32,
}

/// Killed on drop.
pub struct Tracked {
    process: Child,
    socket: OwnedFd,
}

impl Tracked {
    /// Starts a process with a registered mapping. Returns it with its userfaultfd, of which the process has no
    /// descriptor.
    pub fn start() -> (Self, HeldSpace) {
        let (tracked, uffd, range) = Self::start_without_features();
        let wanted = UffdFeatures::WP_ASYNC | UffdFeatures::WP_HUGETLBFS_SHMEM | UffdFeatures::EVENT_FORK;
        uffd.api(wanted).expect("this host has fork events");
        uffd.register_wp(range).unwrap();
        (tracked, super::held(uffd))
    }

    /// The same, before features are negotiated and the range is registered.
    pub fn start_without_features() -> (Self, Userfaultfd, AddressRange) {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        scm::set_timeout(&socket, REPLY_TIMEOUT).unwrap();
        let process = Command::new("/proc/self/exe")
            .args(["--exact", "tracking::observe::forks::needs_root::tracked::process", "--test-threads=1"])
            .stdin(theirs)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut range = [0_u64; 2];
        let mut packet = scm::receive(socket.as_fd(), bytemuck::cast_slice_mut(&mut range)).unwrap().unwrap();
        let uffd = Userfaultfd::from_fd(packet.descriptors.remove(0)).unwrap();
        let [start, end] = range;
        (Self { process, socket }, uffd, AddressRange { start, end })
    }

    /// Forks, and checks that no fork waits for anything but the companion.
    pub fn fork(&self, count: u32) {
        self.send(FORK_CHILDREN, count);
        let ForkTimes { slowest, late } = self.took();
        // With more tests than CPUs, a few forks wait for a CPU.
        assert!(
            slowest < RETRY_TIMEOUT && late <= 1 + count / 100,
            "{late} of {count} forks were late: {slowest:?}"
        );
    }

    pub fn fork_grandchildren(&self, count: u32) {
        self.send(FORK_GRANDCHILDREN, count);
        self.took();
    }

    /// Starts a fork, and returns when it is blocked on its event.
    pub fn begin_to_fork(&self) {
        self.send(FORK_CHILDREN, 1);
        super::until("the fork is blocked", || super::states_of(self.process.id()).contains('D'));
    }

    /// Waits until all forks have returned.
    pub fn took(&self) -> ForkTimes {
        let mut answer = [0_u64; 2];
        let packet = scm::receive(self.socket.as_fd(), bytemuck::bytes_of_mut(&mut answer));
        assert!(packet.expect("a fork that returns").is_some());
        ForkTimes { slowest: Duration::from_micros(answer[0]), late: answer[1].try_into().unwrap() }
    }

    fn send(&self, command: u8, count: u32) {
        let mut bytes = [0; 5];
        bytes[0] = command;
        bytes[1..].copy_from_slice(&count.to_ne_bytes());
        scm::send(self.socket.as_fd(), &bytes, &[]).unwrap();
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// The tracked process, not a test.
#[test]
fn process() {
    let socket = io::stdin();
    if !scm::is_seqpacket(socket.as_fd()) {
        return;
    }
    let file = memfd::create("tracked", None).unwrap();
    memfd::resize(file.as_fd(), 4 * 4096).unwrap();
    let mapping = SharedMapping::shared(&file, 0, 4 * 4096, true).unwrap();
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
    let uffd = Userfaultfd::create().unwrap();
    scm::send(socket.as_fd(), bytemuck::bytes_of(&[start, start + 4 * 4096]), &[uffd.as_fd()]).unwrap();
    drop(uffd);
    let mut bytes = [0; 5];
    while let Ok(Some(_)) = scm::receive(socket.as_fd(), &mut bytes) {
        let [command, count @ ..] = bytes;
        let count = u32::from_ne_bytes(count);
        let took = match command {
            FORK_GRANDCHILDREN => {
                let one = fork_one(&|| {
                    fork_each(count);
                });
                ForkTimes { slowest: one, late: 0 }
            }
            _ => fork_each(count),
        };
        let micros = u64::try_from(took.slowest.as_micros()).unwrap();
        scm::send(socket.as_fd(), bytemuck::bytes_of(&[micros, took.late.into()]), &[]).unwrap();
    }
}

/// Forks children that end at once.
fn fork_each(count: u32) -> ForkTimes {
    let mut took = ForkTimes { slowest: Duration::ZERO, late: 0 };
    for _ in 0..count {
        let one = fork_one(&|| ());
        took.slowest = took.slowest.max(one);
        took.late += u32::from(one >= MAX_PROMPT_FORK);
    }
    took
}

/// Forks a child that runs `work` and ends. Returns the duration of the fork.
fn fork_one(work: &dyn Fn()) -> Duration {
    let begin = Instant::now();
    // SAFETY: the child only makes system calls.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            work();
            calls::exit_now(0)
        }
        ForkResult::Parent { child } => {
            let took = begin.elapsed();
            waitpid(child, None).unwrap();
            took
        }
    }
}
