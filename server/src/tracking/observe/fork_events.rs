//! Fork events of the processes that map one file.
//!
//! The thread that reads fork events must not wait for the lock of the tracker, because the tracker may wait for a process that
//! forks. So it puts the events into this queue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::forks::{FollowId, ForkEvent, ForkSink, ForkSubscription};
use super::holder::{HeldSpace, WeakSpace};

/// Children in the queue with their userfaultfds. Of further children the queue only records that they exist.
const MAX_QUEUED_CHILDREN: usize = 1024;

/// A fork that the tracker has not processed.
#[derive(Debug)]
pub(crate) struct Fork {
    pub(crate) parent: FollowId,
    /// The userfaultfd of the child; `None`: it was lost, and nothing is known about the child.
    pub(crate) child: Option<(HeldSpace, ForkSubscription)>,
}

#[derive(Debug, Default)]
pub(crate) struct ForkEvents {
    queue: Mutex<Vec<Fork>>,
    /// Userfaultfds that are closed if their fork events can no longer be read.
    followed: Mutex<HashMap<FollowId, WeakSpace>>,
    /// The tracker was dropped.
    ended: AtomicBool,
}

impl ForkEvents {
    /// The receiver of events. It does not keep the tracker alive.
    pub(crate) fn sink(self: &Arc<Self>) -> ForkSink {
        let events = Arc::clone(self);
        Arc::new(move |news| events.receive(news))
    }

    /// Closes `userfaultfd` when its fork events can no longer be read.
    pub(crate) fn close_if_broken(&self, id: FollowId, userfaultfd: &HeldSpace) {
        let mut followed = lock(&self.followed);
        followed.retain(|_, userfaultfd| !userfaultfd.is_dropped());
        followed.insert(id, userfaultfd.downgrade());
    }

    /// Removes the forks from the queue.
    pub(crate) fn take(&self) -> Vec<Fork> {
        std::mem::take(&mut *lock(&self.queue))
    }

    /// Drops everything: the tracker ends. A queued fork refers to the sink to which it was sent. Forks left in the queue would
    /// keep each other alive, with their userfaultfds.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        // Closed without the lock.
        drop(self.take());
    }

    fn receive(&self, news: ForkEvent) {
        self.enqueue(news);
        if self.ended.load(Ordering::SeqCst) {
            self.end();
        }
    }

    fn enqueue(&self, news: ForkEvent) {
        match news {
            ForkEvent::Child { parent, uffd, subscription } => {
                let mut queue = lock(&self.queue);
                if queue.len() < MAX_QUEUED_CHILDREN {
                    self.close_if_broken(subscription.id(), &uffd);
                    queue.push(Fork { parent, child: Some((uffd, subscription)) });
                    return;
                }
                push_lost(&mut queue, parent);
                // Closed without the lock.
                drop(queue);
                drop((uffd, subscription));
            }
            ForkEvent::Lost { parent } => {
                push_lost(&mut lock(&self.queue), parent);
            }
            ForkEvent::Broken { id } => {
                let userfaultfd = lock(&self.followed).remove(&id);
                if let Some(userfaultfd) = userfaultfd.and_then(|userfaultfd| userfaultfd.upgrade()) {
                    tracing::warn!(
                        "fork events of a tracked process cannot be read: its mappings are no longer tracked"
                    );
                    userfaultfd.close();
                }
            }
        }
    }
}

/// One entry without a child stands for any number of lost forks of `parent`.
fn push_lost(queue: &mut Vec<Fork>, parent: FollowId) {
    if !queue.iter().any(|fork| fork.parent == parent && fork.child.is_none()) {
        queue.push(Fork { parent, child: None });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
