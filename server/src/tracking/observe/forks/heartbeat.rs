//! Whether the companion answers: while it follows address spaces, a message to which it replies is always on its way.

use std::time::{Duration, Instant};

use super::wire::FollowId;

/// Time between two messages.
pub(super) const INTERVAL: Duration = Duration::from_millis(500);
/// Time for the reply. A companion that takes longer and does not run is replaced.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// The last message to the current companion.
#[derive(Debug, Default)]
pub(super) struct Heartbeat {
    sent: Option<Sent>,
}

#[derive(Debug)]
struct Sent {
    id: FollowId,
    at: Instant,
    replied: bool,
}

impl Heartbeat {
    /// The id of the next message, if one is due.
    pub(super) fn next(&mut self, now: Instant) -> Option<FollowId> {
        if self.sent.as_ref().is_some_and(|sent| !sent.replied || now - sent.at < INTERVAL) {
            return None;
        }
        let id = FollowId::draw();
        self.sent = Some(Sent { id, at: now, replied: false });
        Some(id)
    }

    /// True if this is the reply to the last message.
    pub(super) fn reply(&mut self, id: FollowId) -> bool {
        let sent = self.sent.as_mut().filter(|sent| sent.id == id);
        sent.map(|sent| sent.replied = true).is_some()
    }

    /// True if the reply is late.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.sent.as_ref().is_some_and(|sent| !sent.replied && now - sent.at >= REPLY_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_is_late_after_its_timeout_only() {
        let (mut heartbeat, now) = (Heartbeat::default(), Instant::now());
        assert!(!heartbeat.is_late(now));
        let first = heartbeat.next(now).unwrap();
        assert_eq!(heartbeat.next(now + 2 * INTERVAL), None, "one message at a time");
        assert!(!heartbeat.is_late(now + REPLY_TIMEOUT / 2) && heartbeat.is_late(now + REPLY_TIMEOUT));
        assert!(!heartbeat.reply(FollowId::draw()) && heartbeat.reply(first));
        assert!(!heartbeat.is_late(now + REPLY_TIMEOUT));
        assert_eq!(heartbeat.next(now + INTERVAL / 2), None);
        assert!(heartbeat.next(now + INTERVAL).is_some());
    }
}
