//! A receiver: the process that accepts descriptors of one user's clients. It has no secrets, and opens nothing.
//!
//! A close of a foreign descriptor may never return, and the process that does it may then never end, whatever signal it gets: a
//! FUSE file whose daemon does not answer, a TCP socket with `SO_LINGER`. So the service itself receives none. A receiver passes
//! packets on, with descriptors whose close cannot be blocked, and closes all others.
//!
//! ```text
//!   client <--socket of the client--> [relay] <--session socket--> service
//!                                        |
//!                                        +--foreign descriptors--> [closer thread]
//! ```
//!
//! Where the kernel passes descriptors on any unix socket (before Linux 6.16), it also keeps a descriptor of each gRPC connection of the
//! user, so that the last close of it is made here.
//!
//! It ends when the service closes the control socket.

mod check;
mod closer;
mod kept;
mod relay;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, process, scm};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::wire::{BUFFER_BYTES, Control, PongMessage};
use crate::confinement::{self, CallRule, ConfinementError, call, call_with};
use crate::parent::Parent;
use closer::Closer;
use kept::Kept;
use relay::{EndedRelay, Relay};

/// First argument of `fdmapd` that starts a receiver. The second is the user, or [`REFUSED`], for `ps`; the third the process id of the
/// service.
pub const ARGUMENT: &str = "fdpass-receiver";
/// In place of a user: the receiver closes connections that the service refused.
pub(super) const REFUSED: &str = "refused";

/// Interval of the check whether clients have received their replies.
const DEADLINE_INTERVAL: Duration = Duration::from_secs(1);
/// Wait before the next attempt if the kernel lacks memory or descriptors.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// The system calls of a receiver: it relays messages, and checks and closes descriptors.
const CALLS: &[CallRule] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendmsg),
    call(libc::SYS_shutdown),
    call_with(libc::SYS_setsockopt, 2, scm::SO_PASSRIGHTS.cast_unsigned()),
    // SIOCOUTQ
    call_with(libc::SYS_ioctl, 1, 0x5411),
    call_with(libc::SYS_fcntl, 1, libc::F_GETFL.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_GET_SEALS.cast_unsigned()),
    call(libc::SYS_fstatfs),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_readlink),
    call(libc::SYS_readlinkat),
];

/// Runs a receiver. The process must not have opened any descriptor before.
#[must_use]
pub fn main() -> ExitCode {
    if !scm::is_seqpacket(io::stdin().as_fd()) {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs a socket from fdmapd as standard input");
        return ExitCode::FAILURE;
    }
    let control = io::stdin();
    match prepare() {
        Ok((closer, service)) => {
            let receiver = Receiver {
                control: control.as_fd(),
                closer,
                relays: Vec::new(),
                ended: Vec::new(),
                kept: Vec::new(),
                to_close: Vec::new(),
                buffer: vec![0; BUFFER_BYTES],
            };
            if receiver.run() {
                // The service ended. Its descriptors are closed first.
                service.wait_for_end();
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fdmapd: {}", fdmap_proto::error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn prepare() -> Result<(Closer, Parent), ConfinementError> {
    process::close_from(3)?;
    // These signals stop the service, which closes the socket when it ends.
    process::ignore_signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    process::set_name(c"fdmapd-receiver")?;
    let service = Parent::from_argument(3)?;
    confinement::enter()?;
    let closer = Closer::start().call(|| "clone of a thread".to_owned())?;
    confinement::restrict(CALLS)?;
    Ok((closer, service))
}

struct Receiver<'a> {
    control: BorrowedFd<'a>,
    closer: Closer,
    relays: Vec<Relay>,
    ended: Vec<EndedRelay>,
    kept: Vec<Kept>,
    /// Of the last message. The service closes them before it sends the next one.
    to_close: Vec<OwnedFd>,
    buffer: Vec<u8>,
}

/// What [`Receiver::wait`] found.
struct Ready {
    /// The relays to pump.
    relays: Vec<usize>,
    /// The kept connections that the service no longer needs, in order.
    ended: Vec<usize>,
    /// The control socket is ready.
    has_control: bool,
}

impl Receiver<'_> {
    /// Runs until the service closes the control socket. Returns true if the service may have descriptors of which the last close is to be
    /// made here: by the exit of this process, where no close lingers.
    fn run(mut self) -> bool {
        loop {
            let Ready { relays, ended, has_control } = self.wait();
            for index in relays {
                self.relays[index].pump(&mut self.buffer, &self.closer);
            }
            let relays = self.relays.extract_if(.., |relay| relay.has_ended());
            self.ended.extend(relays.map(|relay| relay.end(&self.closer)));
            for released in self.ended.extract_if(.., |ended| ended.is_released()) {
                released.close(&self.closer);
            }
            for index in ended.into_iter().rev() {
                self.kept.swap_remove(index).end(&self.closer);
            }
            if has_control && !self.receive_control() {
                return self.leave();
            }
        }
    }

    /// Ends all connections for the clients, and leaves the descriptors open. Returns true if the service may have copies.
    fn leave(self) -> bool {
        self.kept.iter().for_each(Kept::shut_down);
        self.relays.iter().for_each(Relay::shut_down);
        let has_copies = !self.kept.is_empty()
            || !self.to_close.is_empty()
            || !self.ended.is_empty()
            || self.relays.iter().any(Relay::has_unanswered);
        std::mem::forget(self);
        has_copies
    }

    /// Waits until a socket is ready, or until it is time to look at all of them.
    fn wait(&self) -> Ready {
        let mut polled = Vec::with_capacity(1 + 2 * self.relays.len() + self.kept.len());
        let mut relays = Vec::with_capacity(2 * self.relays.len());
        polled.push(PollFd::new(self.control, PollFlags::POLLIN));
        for (index, relay) in self.relays.iter().enumerate() {
            for (socket, events) in relay.awaited().into_iter().flatten() {
                polled.push(PollFd::new(socket, events));
                relays.push(index);
            }
        }
        polled.extend(self.kept.iter().map(Kept::awaited));
        let timeout = if self.relays.iter().any(Relay::is_exhausted) || !self.ended.is_empty() {
            Some(RETRY_DELAY)
        } else {
            self.relays.iter().any(Relay::has_deadline).then_some(DEADLINE_INTERVAL)
        };
        let timeout = timeout.and_then(|timeout| PollTimeout::try_from(timeout).ok());
        let is_ready = |one: &PollFd<'_>| one.any().unwrap_or(true);
        match poll(&mut polled, timeout.unwrap_or(PollTimeout::NONE)) {
            // A signal, or the kernel lacks memory to poll so many sockets; or a timeout: try each of them.
            Err(_) | Ok(0) => {
                Ready { relays: (0..self.relays.len()).collect(), ended: Vec::new(), has_control: true }
            }
            Ok(_) => {
                let (control, sockets) = polled.split_at(1);
                let (sockets, leashes) = sockets.split_at(relays.len());
                let ready = relays.into_iter().zip(sockets).filter(|(_, socket)| is_ready(socket));
                let mut ready: Vec<_> = ready.map(|(index, _)| index).collect();
                ready.extend((0..self.relays.len()).filter(|index| self.relays[*index].is_due()));
                ready.sort_unstable();
                ready.dedup();
                Ready {
                    relays: ready,
                    ended: (0..leashes.len()).filter(|index| is_ready(&leashes[*index])).collect(),
                    has_control: control.iter().any(is_ready),
                }
            }
        }
    }

    /// Handles the messages of the service. Returns `false` if the socket is closed.
    fn receive_control(&mut self) -> bool {
        let mut message = [0; Control::MAX_BYTES];
        loop {
            let packet = match scm::receive(self.control, &mut message) {
                Ok(Some(packet)) => packet,
                Err(error) if matches!(error.errno, Errno::EAGAIN | Errno::ENOMEM | Errno::ENOBUFS) => {
                    return true;
                }
                Ok(None) | Err(_) => return false,
            };
            self.closer.close(self.to_close.drain(..));
            let control = Control::decode(&message[..packet.len]);
            match (control, <[_; 2]>::try_from(packet.descriptors)) {
                (Some(Control::Session), Ok([client, service])) => {
                    self.relays.push(Relay::new(client, service));
                }
                (Some(Control::Keep), Ok([socket, leash])) => self.kept.push(Kept::new(socket, leash)),
                (Some(Control::Close), Err(sockets)) => self.to_close = sockets,
                // This process has no room for two sockets, whose ends the service and the client see.
                (Some(Control::Session | Control::Keep), Err(sockets)) => self.closer.close(sockets),
                (Some(Control::Ping), _) => {
                    let (blocked, unclosed) = (self.closer.is_blocked(), self.closer.unclosed());
                    let pong = PongMessage { blocked, unclosed };
                    // The service sends the next ping after it has received the pong, so there is room.
                    if scm::send(self.control, &pong.encode(), &[]).is_err() {
                        return false;
                    }
                }
                (Some(Control::Close), Ok(_)) | (None, _) => return false,
            }
        }
    }
}
