//! A process that is tracked and forks when it is told to: the tests' own program, started once more.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{memfd, scm};
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use super::RETRY;

/// Children, each of which ends at once.
const EPHEMERAL: u8 = 1;
/// One child, which forks so many, each of which ends at once.
const GRANDCHILDREN: u8 = 2;

/// Longer than anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// In which a fork returns whose event is read at once.
const AT_ONCE: Duration = Duration::from_millis(100);

/// How long forks took.
pub struct Took {
    pub slowest: Duration,
    /// How many took longer than [`AT_ONCE`].
    late: u32,
}

/// Killed on drop.
pub struct Tracked {
    process: Child,
    socket: OwnedFd,
}

impl Tracked {
    /// A process with a registered mapping, and its userfaultfd, of which it has no descriptor itself. `None` if this host
    /// cannot tell forks and need not.
    pub fn start() -> Option<(Self, Userfaultfd)> {
        let (tracked, uffd, range) = Self::untold();
        let wanted = UffdFeatures::WP_ASYNC | UffdFeatures::WP_HUGETLBFS_SHMEM | UffdFeatures::EVENT_FORK;
        match uffd.api(wanted) {
            Err(error) if std::env::var_os("FDMAP_REQUIRE_ALL").is_none() => {
                eprintln!("not run: this host does not tell forks: {error}: {}", error.errno);
                return None;
            }
            other => other.unwrap(),
        };
        uffd.register_wp(range).unwrap();
        Some((tracked, uffd))
    }

    /// The same before features were agreed on.
    pub fn untold() -> (Self, Userfaultfd, AddressRange) {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        scm::set_timeout(&socket, PATIENCE).unwrap();
        let process = Command::new("/proc/self/exe")
            .args(["--exact", "dirty::forks::tests::tracked::process", "--test-threads=1"])
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

    /// None waits for anybody but the companion.
    pub fn fork(&self, count: u32) {
        self.tell(EPHEMERAL, count);
        let Took { slowest, late } = self.took();
        // Where there are more tests than processors, some wait for one of these.
        assert!(slowest < RETRY && late <= 1 + count / 100, "{late} of {count} forks were late: {slowest:?}");
    }

    pub fn fork_grandchildren(&self, count: u32) {
        self.tell(GRANDCHILDREN, count);
        self.took();
    }

    /// Begins to fork; returns when the fork waits for its event to be read.
    pub fn begin_to_fork(&self) {
        self.tell(EPHEMERAL, 1);
        super::until("the fork waits", || super::states_of(self.process.id()).contains('D'));
    }

    /// How long forks took, once all have returned.
    pub fn took(&self) -> Took {
        let mut answer = [0_u64; 2];
        let packet = scm::receive(self.socket.as_fd(), bytemuck::bytes_of_mut(&mut answer));
        assert!(packet.expect("a fork that returns").is_some());
        Took { slowest: Duration::from_micros(answer[0]), late: answer[1].try_into().unwrap() }
    }

    fn tell(&self, command: u8, count: u32) {
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

/// No test by itself.
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
            GRANDCHILDREN => {
                let one = fork_one(&|| {
                    fork_each(count);
                });
                Took { slowest: one, late: 0 }
            }
            _ => fork_each(count),
        };
        let micros = u64::try_from(took.slowest.as_micros()).unwrap();
        scm::send(socket.as_fd(), bytemuck::bytes_of(&[micros, took.late.into()]), &[]).unwrap();
    }
}

/// Children that end at once.
fn fork_each(count: u32) -> Took {
    let mut took = Took { slowest: Duration::ZERO, late: 0 };
    for _ in 0..count {
        let one = fork_one(&|| ());
        took.slowest = took.slowest.max(one);
        took.late += u32::from(one >= AT_ONCE);
    }
    took
}

/// How long the fork took. The child does its part and ends.
fn fork_one(part: &dyn Fn()) -> Duration {
    let begin = Instant::now();
    // SAFETY: the child makes system calls only.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            part();
            // SAFETY: it takes an integer; what this process would do at its end is not for the child to do.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            let took = begin.elapsed();
            waitpid(child, None).unwrap();
            took
        }
    }
}
