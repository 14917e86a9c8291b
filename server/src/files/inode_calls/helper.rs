//! The helper's side: makes one call after the other, in the order of their messages.
//!
//! It outlives the service: it reads all messages that are queued before it ends, and undoes a take that the service did not keep.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;

use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::ownership::{self, Ownership};
use fdmap_sys::{Errno, SyscallError, memfd, process, scm};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::call::{Answer, CALL_BYTES, InodeCall};
use crate::confinement::{self, CallRule, ConfinementError, call, call_with};

/// First argument of `fdmapd` that starts a helper. The second is the user, for `ps`.
pub const ARGUMENT: &str = "inode-helper";

/// The capabilities of a helper: it changes owner and mode of inodes that belong to another user, before or afterwards.
pub(super) const CAPABILITIES: Capabilities = Capabilities::CHOWN.union(Capabilities::FOWNER);

const CALLS: &[CallRule] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendmsg),
    call(libc::SYS_geteuid),
    call(libc::SYS_getegid),
    call(libc::SYS_fstat),
    call(libc::SYS_newfstatat),
    call(libc::SYS_statx),
    call(libc::SYS_fchown),
    call(libc::SYS_fchmod),
    call(libc::SYS_ftruncate),
    call_with(libc::SYS_fcntl, 1, libc::F_GET_SEALS.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_ADD_SEALS.cast_unsigned()),
];

/// Runs a helper. The process must not have opened any descriptor before.
#[must_use]
pub fn main() -> ExitCode {
    let socket = io::stdin();
    if !scm::is_seqpacket(socket.as_fd()) {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs a socket from fdmapd as standard input");
        return ExitCode::FAILURE;
    }
    match prepare() {
        Ok(()) => {
            run(socket.as_fd());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fdmapd: {}", fdmap_proto::error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn prepare() -> Result<(), ConfinementError> {
    process::close_from(3)?;
    // These signals stop the service, which closes the socket when it ends.
    process::ignore_signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    process::set_name(c"fdmapd-inode")?;
    confinement::enter_with(CAPABILITIES)?;
    confinement::restrict(CALLS)
}

/// Makes calls until the service has closed the socket and none is left. The first answer means that the helper is ready.
pub(super) fn run(socket: BorrowedFd<'_>) {
    let mut helper = Helper { socket, taken: None };
    helper.answer(&Answer::Done);
    while let Some((call, descriptor)) = helper.receive() {
        helper.handle(call, descriptor);
    }
    helper.undo();
}

struct Helper<'a> {
    socket: BorrowedFd<'a>,
    /// The file of a take that the service has not kept, and the ownership before.
    taken: Option<(OwnedFd, Ownership)>,
}

impl Helper<'_> {
    fn handle(&mut self, call: InodeCall, descriptor: Option<OwnedFd>) {
        if call == InodeCall::Keep {
            self.taken = None;
            return;
        }
        self.undo();
        let answer = match (call, descriptor) {
            (InodeCall::Keep | InodeCall::Undo, _) => Answer::Done,
            (InodeCall::Take, Some(file)) => match ownership::take(file.as_fd()) {
                Ok(before) => {
                    self.taken = Some((file, before));
                    Answer::Taken(before)
                }
                Err(error) => Answer::Failed(error),
            },
            (InodeCall::Restore(before), Some(file)) => done(ownership::restore(file.as_fd(), before)),
            (InodeCall::Resize(bytes), Some(file)) => done(memfd::resize(file.as_fd(), bytes)),
            (InodeCall::AddSeals(seals), Some(file)) => done(memfd::add_seals(file.as_fd(), seals)),
            (_, None) => Answer::Failed(SyscallError {
                call: "recvmsg of the descriptor of a file".to_owned(),
                errno: Errno::EMFILE,
            }),
        };
        self.answer(&answer);
    }

    /// Undoes a take that was not kept.
    fn undo(&mut self) {
        if let Some((file, before)) = self.taken.take() {
            // Fails only if the process lacks the privileges, and then take had failed.
            let _ = ownership::restore(file.as_fd(), before);
        }
    }

    /// The next call; `None` if the service has closed the socket and no message is left.
    fn receive(&self) -> Option<(InodeCall, Option<OwnedFd>)> {
        loop {
            let mut message = [0; CALL_BYTES];
            match scm::receive(self.socket, &mut message) {
                Ok(Some(packet)) => {
                    let call = InodeCall::decode(&message[..packet.len])?;
                    return Some((call, packet.descriptors.into_iter().next()));
                }
                Ok(None) => return None,
                Err(SyscallError { errno: Errno::EAGAIN, .. }) => self.wait(PollFlags::POLLIN),
                // The service ended with unread answers. The kernel reports that once, before messages that are queued.
                Err(SyscallError { errno: Errno::ECONNRESET, .. }) => {}
                Err(_) => return None,
            }
        }
    }

    /// Sends an answer. After a failure, the service has closed the socket: it needs none.
    fn answer(&self, answer: &Answer) {
        while let Err(SyscallError { errno: Errno::EAGAIN, .. }) =
            scm::send(self.socket, &answer.encode(), &[])
        {
            self.wait(PollFlags::POLLOUT);
        }
    }

    fn wait(&self, events: PollFlags) {
        // A failed poll(2) was interrupted. A superfluous call after it is harmless.
        let _ = poll(&mut [PollFd::new(self.socket, events)], PollTimeout::NONE);
    }
}

fn done(result: Result<(), SyscallError>) -> Answer {
    result.map_or_else(Answer::Failed, |()| Answer::Done)
}
