//! The thread that hears from the companion, tells the sinks, and puts another companion in the place of one that ended.

use fdmap_proto::error_chain;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_sys::uffd::Userfaultfd;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::link::Link;
use super::wire::{self, FollowId, Message, Received, Sent};
use super::{Followed, Following, ForkNews, RETRY, Shared, Sink};

/// Between attempts at what the kernel was short of.
const PAUSE: u16 = 10;

/// Until the service lets go of [`super::Forks`].
pub(super) fn run(shared: &Arc<Shared>) {
    let mut trouble = None;
    loop {
        let (link, waits_for) = {
            let mut state = shared.lock();
            if state.stopping {
                break;
            }
            shared.flush(&mut state);
            (state.link.clone(), state.waits_for)
        };
        if wait(shared, link.as_deref(), waits_for)
            && let Some(link) = link
            && !listen(shared, &link)
        {
            replace(shared, link, &mut trouble);
        }
    }
    let (link, followed) = {
        let mut state = shared.lock();
        (state.link.take(), std::mem::take(&mut state.followed))
    };
    // First the companion, so that it is no reader any more of what is closed here.
    drop(link);
    drop(followed);
}

/// Waits until there is something to do; `true` if the companion has something to say or has ended.
fn wait(shared: &Shared, link: Option<&Link>, waits_for: Option<Sent>) -> bool {
    let mut polled = vec![PollFd::new(shared.wake.as_fd(), PollFlags::POLLIN)];
    if let Some(link) = link {
        let writable = if waits_for == Some(Sent::Full) { PollFlags::POLLOUT } else { PollFlags::empty() };
        polled.push(PollFd::new(link.as_fd(), PollFlags::POLLIN | writable));
    }
    let timeout = if waits_for == Some(Sent::Short) { PAUSE.into() } else { PollTimeout::NONE };
    if poll(&mut polled, timeout).is_err() {
        // A signal. To look once too often does no harm.
        return true;
    }
    // It counts only that it was told.
    let _ = shared.wake.read();
    polled.get(1).is_some_and(|link| link.any().unwrap_or(true))
}

/// Hears what there is; `false` when the companion has ended.
fn listen(shared: &Arc<Shared>, link: &Link) -> bool {
    loop {
        match wire::receive(link.as_fd()) {
            Received::Message(message, fd) => hear(shared, message, fd),
            Received::Nothing => return true,
            Received::Closed => return false,
        }
        if shared.lock().stopping {
            return true;
        }
    }
}

fn hear(shared: &Arc<Shared>, message: Message, fd: Option<OwnedFd>) {
    match message {
        Message::Forked { parent, child } => hear_of_child(shared, parent, child, fd),
        Message::Lost(parent) => {
            if let Some(sink) = sink_of(shared, parent) {
                sink(ForkNews::Lost { parent });
            }
        }
        Message::Ended(id) => {
            let ended = shared.lock().followed.remove(&id);
            if let Some(Followed { uffd: Some(uffd), sink }) = ended {
                drop(uffd);
                tracing::debug!(%id, "forks cannot be read");
                sink(ForkNews::Broken { id });
            }
        }
        Message::Told(id) => {
            shared.lock().told.insert(id);
            shared.news.notify_all();
        }
        // The companion does not say these.
        Message::Follow(_) | Message::Unfollow(_) | Message::Tell(_) => {}
    }
}

fn hear_of_child(shared: &Arc<Shared>, parent: FollowId, child: FollowId, fd: Option<OwnedFd>) {
    let sink = sink_of(shared, parent);
    // Without a descriptor there was no room for it in this process.
    let uffd = fd.and_then(|fd| Userfaultfd::from_fd(fd).ok());
    let kept = uffd.as_ref().and_then(|uffd| uffd.try_clone().ok());
    match (sink, uffd, kept) {
        (Some(sink), Some(uffd), Some(kept)) => {
            let followed = Followed { uffd: Some(kept), sink: Arc::clone(&sink) };
            shared.lock().followed.insert(child, followed);
            let following = Following { shared: Arc::clone(shared), id: child };
            sink(ForkNews::Child { parent, uffd, following });
        }
        (sink, ..) => {
            let mut state = shared.lock();
            state.outbox.push_back(Message::Unfollow(child));
            shared.flush(&mut state);
            drop(state);
            if let Some(sink) = sink {
                sink(ForkNews::Lost { parent });
            }
        }
    }
}

fn sink_of(shared: &Shared, id: FollowId) -> Option<Sink> {
    shared.lock().followed.get(&id).map(|followed| Arc::clone(&followed.sink))
}

/// Starts another companion, or gives up. `trouble` is since when no companion has lasted.
fn replace(shared: &Shared, link: Arc<Link>, trouble: &mut Option<Instant>) {
    let (sinks, let_go) = {
        let mut state = shared.lock();
        state.link = None;
        state.outbox.clear();
        state.told.clear();
        let sinks = state.followed.iter().map(|(id, followed)| (*id, Arc::clone(&followed.sink)));
        let sinks: Vec<_> = sinks.collect();
        // Nobody will confirm it to them any more.
        let let_go: Vec<_> = state.followed.extract_if(.., |_, followed| followed.uffd.is_none()).collect();
        (sinks, let_go)
    };
    drop(let_go);
    let lasted = link.since.elapsed() >= RETRY;
    match link.end() {
        Ok(status) => tracing::warn!(pid = link.pid, %status, "the process that reads forks has ended"),
        Err(error) => tracing::warn!(pid = link.pid, %error, "the process that reads forks has ended"),
    }
    drop(link);

    let since = match *trouble {
        Some(since) if !lasted => {
            // One that ends as soon as it has begun should not keep a processor busy.
            pause();
            since
        }
        _ => *trouble.insert(Instant::now()),
    };
    let given_up = loop {
        let mut state = shared.lock();
        if state.stopping {
            return;
        }
        // Somebody who wants to follow may have started one meanwhile.
        if state.link.is_none() && since.elapsed() >= RETRY {
            break Some(std::mem::take(&mut state.followed));
        }
        match shared.revive(&mut state) {
            Ok(()) => break None,
            Err(error) => tracing::debug!("{}", error_chain(&error)),
        }
        drop(state);
        pause();
    };
    match given_up {
        None => {
            for (parent, sink) in sinks {
                sink(ForkNews::Lost { parent });
            }
        }
        Some(followed) => {
            *trouble = None;
            tracing::warn!(followed = followed.len(), "no process can be had that reads forks");
            for (id, Followed { uffd, sink }) in followed {
                drop(uffd);
                sink(ForkNews::Broken { id });
            }
        }
    }
}

fn pause() {
    std::thread::sleep(Duration::from_millis(PAUSE.into()));
}
