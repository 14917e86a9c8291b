//! Connections to the socket of a hand-off, until one passes a userfaultfd.
//!
//! ```text
//!   connection -> parts of the message -> complete list, one userfaultfd -> hand-off
//!        |                |
//!        |                | without a userfaultfd: other bytes or descriptors, its end, 10 s  -> refused, others are accepted
//!        |                | with one: the same                                                -> error: its memory cannot be filled
//!        |
//!        | too many, and none of them has passed a userfaultfd: the oldest                    -> refused
//! ```

use std::io::ErrorKind;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use fdmap_sys::uffd::{Userfaultfd, is_userfaultfd};
use fdmap_sys::{Errno, SyscallError, peer, scm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use super::super::error::ImageError;
use super::super::progress::Control;

/// Longest message.
const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Time in which the message of a connection arrives.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections whose message is not complete.
const MAX_CONNECTIONS: usize = 16;
/// Longest time in which a cancellation, and the end of a command, are noticed.
const CHECK_MILLIS: u8 = 20;
/// Refused connections that are reported one by one; after these, one in each interval.
const MAX_REPORTS: u64 = 10;
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// A mapping as Firecracker describes it. It sends the fields of later versions, too.
#[derive(Debug, Deserialize)]
pub(super) struct PassedMapping {
    pub(super) base_host_virt_addr: u64,
    pub(super) size: u64,
    pub(super) offset: u64,
    /// Bytes.
    pub(super) page_size: Option<u64>,
    /// Bytes, in spite of its name: that of older versions.
    pub(super) page_size_kib: Option<u64>,
}

/// A userfaultfd with the mappings that are registered with it.
#[derive(Debug)]
pub struct HandOff {
    pub(super) connection: UnixStream,
    pub(super) mappings: Vec<PassedMapping>,
    pub(super) uffd: Userfaultfd,
}

/// Accepts connections until one passes a userfaultfd. `check` is called now and then; its error ends the wait. `on_refused` gets the reason
/// why a connection was refused that has passed none, for the first ones and then now and then.
///
/// # Errors
/// [`ImageError`], also if the message of a connection is invalid that has passed a userfaultfd.
pub fn accept(
    listener: &UnixListener,
    control: &Control,
    mut check: impl FnMut() -> Result<(), ImageError>,
    on_refused: &dyn Fn(&str),
) -> Result<HandOff, ImageError> {
    let failed = |error| ImageError::HandOff(format!("accept: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let mut connections: Vec<Connection> = Vec::new();
    let mut reports = Reports::default();
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    loop {
        control.check()?;
        check()?;
        match listener.accept() {
            Ok((stream, _)) => connections.push(Connection::new(stream).map_err(failed)?),
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(failed(error)),
        }
        let mut waiting = Vec::with_capacity(connections.len());
        for mut connection in connections {
            let step = connection.advance(&mut buffer);
            match step {
                Ok(Some(mappings)) => return connection.complete(mappings),
                Ok(None) => waiting.push(connection),
                Err(reason) if connection.has_userfaultfd() => return Err(ImageError::HandOff(reason)),
                Err(reason) => reports.report(&connection.described(&reason), Instant::now(), on_refused),
            }
        }
        connections = waiting;
        if connections.len() > MAX_CONNECTIONS
            && let Some(at) = connections.iter().position(|connection| !connection.has_userfaultfd())
        {
            let reason = connections.remove(at).described("too many connections");
            reports.report(&reason, Instant::now(), on_refused);
        }
        wait(listener, &connections);
    }
}

/// Waits until a connection or a part of a message arrives, or for some time.
fn wait(listener: &UnixListener, connections: &[Connection]) {
    let streams = connections.iter().map(|connection| connection.stream.as_fd());
    let fds = std::iter::once(listener.as_fd()).chain(streams);
    let mut polled: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    // What fails in this is found by the next call.
    let _ = poll(&mut polled, PollTimeout::from(CHECK_MILLIS));
}

/// True if a later accept(2) may succeed.
fn is_temporary(error: &std::io::Error) -> bool {
    let is_short = |errno: i32| {
        [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM].contains(&Errno::from_raw(errno))
    };
    let kinds = [ErrorKind::WouldBlock, ErrorKind::Interrupted, ErrorKind::ConnectionAborted];
    kinds.contains(&error.kind()) || error.raw_os_error().is_some_and(is_short)
}

/// A connection whose message is not complete.
struct Connection {
    stream: UnixStream,
    begun: Instant,
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Connection {
    fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, begun: Instant::now(), bytes: Vec::new(), descriptors: Vec::new() })
    }

    /// Its memory waits for content.
    fn has_userfaultfd(&self) -> bool {
        self.descriptors.iter().any(|fd| is_userfaultfd(fd.as_fd()).unwrap_or(false))
    }

    /// The message, once it is complete; or the reason why the connection is refused.
    fn advance(&mut self, buffer: &mut [u8]) -> Result<Option<Vec<PassedMapping>>, String> {
        loop {
            let packet = match scm::receive(self.stream.as_fd(), buffer) {
                Ok(Some(packet)) => packet,
                Ok(None) => return Err("the connection ended before the message was complete".to_owned()),
                Err(SyscallError { errno: Errno::EAGAIN, .. }) if self.begun.elapsed() < MESSAGE_TIMEOUT => {
                    return Ok(None);
                }
                Err(SyscallError { errno: Errno::EAGAIN, .. }) => {
                    return Err(format!("no complete message within {MESSAGE_TIMEOUT:?}"));
                }
                Err(error) => return Err(error.to_string()),
            };
            self.descriptors.extend(packet.descriptors);
            if packet.descriptors_lost || self.descriptors.len() > 1 {
                return Err("more than one descriptor".to_owned());
            }
            if !self.descriptors.is_empty() && !self.has_userfaultfd() {
                return Err("its descriptor is not a userfaultfd".to_owned());
            }
            self.bytes.extend_from_slice(&buffer[..packet.len]);
            match serde_json::from_slice(&self.bytes) {
                Ok(_) if self.descriptors.is_empty() => return Err("no userfaultfd".to_owned()),
                Ok(mappings) => return Ok(Some(mappings)),
                Err(error) if error.is_eof() && self.bytes.len() < MAX_MESSAGE_BYTES => {}
                Err(error) if error.is_eof() => return Err("the message is too long".to_owned()),
                Err(error) => return Err(format!("invalid list of mappings: {error}")),
            }
        }
    }

    fn complete(mut self, mappings: Vec<PassedMapping>) -> Result<HandOff, ImageError> {
        let descriptor = self.descriptors.pop();
        let descriptor = descriptor.ok_or_else(|| ImageError::HandOff("no userfaultfd".to_owned()))?;
        Ok(HandOff { connection: self.stream, mappings, uffd: Userfaultfd::from_fd(descriptor)? })
    }

    fn described(&self, reason: &str) -> String {
        match peer::credentials(&self.stream) {
            Ok(peer) => format!("connection of process {} (uid {}) refused: {reason}", peer.pid, peer.uid),
            Err(_) => format!("connection refused: {reason}"),
        }
    }
}

/// Limits the reports of refused connections. Pure.
#[derive(Debug, Default)]
struct Reports {
    reported: u64,
    /// Since the last report.
    suppressed: u64,
    last: Option<Instant>,
}

impl Reports {
    fn report(&mut self, reason: &str, now: Instant, out: &dyn Fn(&str)) {
        let is_due = self.last.is_none_or(|last| now.saturating_duration_since(last) >= REPORT_INTERVAL);
        if self.reported >= MAX_REPORTS && !is_due {
            self.suppressed += 1;
            return;
        }
        match std::mem::take(&mut self.suppressed) {
            0 => out(reason),
            others => out(&format!("{reason}; and {others} before")),
        }
        self.reported += 1;
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn reports_are_limited() {
        let lines = RefCell::new(Vec::new());
        let out = |line: &str| lines.borrow_mut().push(line.to_owned());
        let (mut reports, start) = (Reports::default(), Instant::now());
        (0..100).for_each(|number| reports.report(&number.to_string(), start, &out));
        reports.report("later", start + REPORT_INTERVAL, &out);
        reports.report("next", start + REPORT_INTERVAL, &out);
        reports.report("last", start + REPORT_INTERVAL * 2, &out);
        let expected = (0..10).map(|number| number.to_string());
        let later = ["later; and 90 before", "last; and 1 before"].map(str::to_owned);
        assert_eq!(*lines.borrow(), expected.chain(later).collect::<Vec<_>>());
    }

    #[test]
    fn message_is_complete_in_any_parts_and_refused_without_a_userfaultfd() {
        let refused = |parts: &[&str], descriptors: usize| {
            let (own, other) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(own).unwrap();
            let memfd = fdmap_sys::memfd::create("other", None).unwrap();
            let mut buffer = vec![0; MAX_MESSAGE_BYTES];
            for (number, part) in parts.iter().enumerate() {
                assert!(connection.advance(&mut buffer).unwrap().is_none());
                let passed = vec![memfd.as_fd(); if number == 0 { descriptors } else { 0 }];
                scm::send(other.as_fd(), part.as_bytes(), &passed).unwrap();
            }
            if descriptors == 0 && parts.concat().is_empty() {
                assert!(connection.advance(&mut buffer).unwrap().is_none(), "it waits");
            }
            drop(other);
            let reason = connection.advance(&mut buffer).unwrap_err();
            assert!(!connection.has_userfaultfd());
            reason
        };
        let ended = "the connection ended before the message was complete";
        let mapping = r#"{"base_host_virt_addr":4096,"size":4096,"offset":0}]"#;
        for (parts, descriptors, reason) in [
            (&[][..], 0, ended),
            (&["[{\"base", "_host"], 0, ended),
            (&["["], 1, "its descriptor is not a userfaultfd"),
            (&["["], 2, "more than one descriptor"),
            (&["[", mapping], 0, "no userfaultfd"),
            (&["GET / HTTP/1.1\r\n"], 0, "invalid list of mappings: expected value"),
        ] {
            let found = refused(parts, descriptors);
            assert!(found.starts_with(reason), "{found}, expected {reason}");
        }
        let long = "[".to_owned() + &" ".repeat(MAX_MESSAGE_BYTES - 1);
        assert_eq!(refused(&[&long], 0), "the message is too long");
    }
}
