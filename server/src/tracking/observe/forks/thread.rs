//! The thread that receives the companion's messages, calls the sinks, and replaces a companion that ended.

use crate::incidents::{self, Incident};
use fdmap_proto::error_chain;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_sys::pidfd;
use fdmap_sys::uffd::Userfaultfd;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::heartbeat;
use super::link::Link;
use super::wire::{self, FollowId, Message, Received, Sent};
use super::{Followed, ForkEvent, ForkSink, ForkSubscription, MAX_UNFOLLOWED, RETRY_TIMEOUT, Shared};

/// Wait between attempts if the kernel lacks memory or descriptors.
const RETRY_DELAY_MS: u16 = 10;

/// Runs until [`super::Forks`] is dropped.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut failing_since = None;
    loop {
        let (link, waits_for, follows) = {
            let mut state = shared.lock();
            if state.stopping {
                break;
            }
            let follows = !state.followed.is_empty() && state.link.is_some();
            if follows && let Some(id) = state.heartbeat.next(Instant::now()) {
                state.outbox.push_back(Message::Sync(id));
            }
            shared.flush(&mut state);
            (state.link.clone(), state.waits_for, follows)
        };
        let has_messages = wait(shared, link.as_deref(), waits_for, follows);
        let Some(link) = link else { continue };
        let has_ended = has_messages && !receive_messages(shared, &link);
        let is_stuck = !has_ended && is_stuck(shared, &link);
        if is_stuck {
            // What it sends until then is received, so that holders close the userfaultfds. Its end is logged when it is replaced.
            let _ = link.end();
            receive_messages(shared, &link);
        }
        if has_ended || is_stuck {
            replace(shared, link, &mut failing_since);
        }
    }
    let (link, followed) = {
        let mut state = shared.lock();
        (state.link.take(), std::mem::take(&mut state.followed))
    };
    // End the companion before closing the userfaultfds: the last close of each may block, and is the holder's.
    drop(link);
    drop(followed);
}

/// True if the companion has not replied in time, and sleeps: it is stopped, or a call on a userfaultfd blocks it. One that runs, or
/// waits for a processor, is only slow.
fn is_stuck(shared: &Shared, link: &Link) -> bool {
    let is_late = {
        let state = shared.lock();
        let is_current = state.link.as_ref().is_some_and(|current| current.pid == link.pid);
        is_current && state.heartbeat.is_late(Instant::now())
    };
    let is_stuck = is_late && pidfd::state_of(link.pid) != Ok('R');
    if is_stuck {
        tracing::warn!(
            pid = link.pid,
            "the process that reads fork events does not answer: another one replaces it"
        );
    }
    is_stuck
}

/// Waits until there is work, or if `follows` a heartbeat is due. Returns `true` if the companion sent messages or ended.
fn wait(shared: &Shared, link: Option<&Link>, waits_for: Option<Sent>, follows: bool) -> bool {
    let mut polled = vec![PollFd::new(shared.wake.as_fd(), PollFlags::POLLIN)];
    if let Some(link) = link {
        let writable = if waits_for == Some(Sent::Full) { PollFlags::POLLOUT } else { PollFlags::empty() };
        polled.push(PollFd::new(link.as_fd(), PollFlags::POLLIN | writable));
    }
    let timeout = if waits_for == Some(Sent::Exhausted) {
        RETRY_DELAY_MS.into()
    } else if follows {
        PollTimeout::try_from(heartbeat::INTERVAL).unwrap_or(PollTimeout::MAX)
    } else {
        PollTimeout::NONE
    };
    if poll(&mut polled, timeout).is_err() {
        // A signal interrupted poll(). A superfluous receive is harmless.
        return true;
    }
    // Reset the eventfd. Its value is irrelevant.
    let _ = shared.wake.read();
    polled.get(1).is_some_and(|link| link.any().unwrap_or(true))
}

/// Handles all messages of the companion. Returns `false` if it ended.
fn receive_messages(shared: &Arc<Shared>, link: &Link) -> bool {
    loop {
        match wire::receive(link.as_fd()) {
            Received::Message(message, fd) => handle(shared, message, fd),
            Received::Nothing => return true,
            Received::Closed => return false,
        }
        if shared.lock().stopping {
            return true;
        }
    }
}

fn handle(shared: &Arc<Shared>, message: Message, fd: Option<OwnedFd>) {
    match message {
        Message::Forked { parent, child } => handle_child(shared, parent, child, fd),
        Message::Lost(parent) => {
            if let Some(sink) = sink_of(shared, parent) {
                sink(ForkEvent::Lost { parent });
            }
        }
        Message::Ended(id) => {
            let mut state = shared.lock();
            let ended = state.followed.remove(&id);
            state.unfollowed -= usize::from(ended.as_ref().is_some_and(|one| one.unfollowed));
            drop(state);
            if let Some(Followed { uffd, unfollowed: false, sink, .. }) = ended {
                drop(uffd);
                tracing::debug!(%id, "fork events of the userfaultfd cannot be read");
                sink(ForkEvent::Broken { id });
            }
        }
        Message::Synced(id) => {
            let mut state = shared.lock();
            if !state.heartbeat.reply(id) {
                state.synced.insert(id);
                drop(state);
                shared.synced.notify_all();
            }
        }
        // The companion does not send these.
        Message::Follow(_) | Message::Unfollow(_) | Message::Sync(_) => {}
    }
}

fn handle_child(shared: &Arc<Shared>, parent: FollowId, child: FollowId, fd: Option<OwnedFd>) {
    // The parent is followed until the companion has confirmed that it is not.
    let state = shared.lock();
    let followed = state.followed.get(&parent).map(|one| (one.uffd.clone(), Arc::clone(&one.sink)));
    let has_room = state.unfollowed < MAX_UNFOLLOWED;
    drop(state);
    // The descriptor is missing if this process had no room for it.
    let uffd = fd.and_then(|fd| Userfaultfd::from_fd(fd).ok());
    // The companion has a copy until it gets Unfollow: so this close is not the last one.
    let is_full = followed.as_ref().is_some_and(|(parent, _)| parent.holder().is_full());
    let uffd = uffd.filter(|_| !is_full);
    // From here on the holder closes it.
    let uffd = uffd.and_then(|uffd| Some(followed.as_ref()?.0.sibling(uffd)));
    match (followed, uffd) {
        (Some((_, sink)), Some(uffd)) if has_room => {
            let followed = Followed::new(uffd.clone(), Arc::clone(&sink), shared);
            shared.lock().followed.insert(child, followed);
            let subscription = ForkSubscription { shared: Arc::clone(shared), id: child };
            sink(ForkEvent::Child { parent, uffd, subscription });
        }
        (followed, uffd) => {
            // The companion has a copy until it gets the message. It may be the last one: then a child that holds its own mmap_lock
            // delays the fork events of its user.
            drop(uffd);
            let mut state = shared.lock();
            state.outbox.push_back(Message::Unfollow(child));
            shared.flush(&mut state);
            drop(state);
            if let Some((_, sink)) = followed {
                sink(ForkEvent::Lost { parent });
            }
        }
    }
}

fn sink_of(shared: &Shared, id: FollowId) -> Option<ForkSink> {
    shared.lock().followed.get(&id).map(|followed| Arc::clone(&followed.sink))
}

/// Starts a new companion in place of `link`, or closes all userfaultfds. `failing_since` is the time since which no
/// companion has lasted.
fn replace(shared: &Shared, link: Arc<Link>, failing_since: &mut Option<Instant>) {
    let (sinks, unfollowed) = {
        let mut state = shared.lock();
        state.link = None;
        state.outbox.clear();
        state.synced.clear();
        let sinks = state.followed.iter().map(|(id, followed)| (*id, Arc::clone(&followed.sink)));
        let sinks: Vec<_> = sinks.collect();
        // The new companion will not confirm these.
        let unfollowed: Vec<_> = state.followed.extract_if(.., |_, followed| followed.unfollowed).collect();
        state.unfollowed = 0;
        (sinks, unfollowed)
    };
    drop(unfollowed);
    let lasted = link.since.elapsed() >= RETRY_TIMEOUT;
    incidents::count(Incident::CompanionEnded);
    match link.end() {
        Ok(status) => {
            let status = status.map_or_else(|| "none yet".to_owned(), |status| status.to_string());
            tracing::warn!(pid = link.pid, status, "the process that reads fork events ended");
        }
        Err(error) => tracing::warn!(pid = link.pid, %error, "the process that reads fork events ended"),
    }
    drop(link);

    let since = match *failing_since {
        Some(since) if !lasted => {
            // Do not restart a companion that ends at once in a busy loop.
            back_off();
            since
        }
        _ => *failing_since.insert(Instant::now()),
    };
    let abandoned = loop {
        let mut state = shared.lock();
        if state.stopping {
            return;
        }
        // A call of follow() may have started a companion meanwhile.
        if state.link.is_none() && since.elapsed() >= RETRY_TIMEOUT {
            state.unfollowed = 0;
            break Some(std::mem::take(&mut state.followed));
        }
        match shared.ensure_companion(&mut state) {
            Ok(()) => break None,
            Err(error) => tracing::debug!("{}", error_chain(&error)),
        }
        drop(state);
        back_off();
    };
    match abandoned {
        None => {
            for (parent, sink) in sinks {
                sink(ForkEvent::Lost { parent });
            }
        }
        Some(followed) => {
            *failing_since = None;
            tracing::warn!(
                followed = followed.len(),
                "no process that reads fork events can be started; closing the userfaultfds"
            );
            for (id, Followed { uffd, sink, .. }) in followed {
                drop(uffd);
                sink(ForkEvent::Broken { id });
            }
        }
    }
}

fn back_off() {
    std::thread::sleep(Duration::from_millis(RETRY_DELAY_MS.into()));
}
