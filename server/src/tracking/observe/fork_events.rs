//! Fork events of the processes that map one file.
//!
//! The thread that reads fork events must not wait for the lock of the tracker, because the tracker may wait for a process that
//! forks. So it puts the events into this queue.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::charge::Charge;
use super::forks::{FollowId, ForkEvent, ForkSink, ForkSubscription};
use super::holder::{HeldSpace, WeakSpace};
use crate::log_limit::LogLimit;

/// Children in the queue with their userfaultfds. Of further children the queue only records that they exist.
const MAX_QUEUED_CHILDREN: usize = 1024;

static REFUSED: LogLimit = LogLimit::new();

/// Charges the user of a tracked process for children of the process, and for their children.
pub trait ChildCharges: Debug + Send + Sync {
    /// Charges the user for one child. `None`: the user has as many as it may, or as many page tables of them.
    fn charge(&self) -> Option<Charge>;
}

/// The userfaultfd of a child.
#[derive(Debug)]
pub(crate) struct ChildUffd {
    pub(crate) held: HeldSpace,
    /// Reports the forks of the child.
    pub(crate) forks: ForkSubscription,
    pub(crate) charge: Charge,
}

/// A fork that the tracker has not processed.
#[derive(Debug)]
pub(crate) struct Fork {
    pub(crate) parent: FollowId,
    /// `None`: the userfaultfd of the child was lost, or its user may have no further child. The child is not
    /// tracked.
    pub(crate) child: Option<ChildUffd>,
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
    /// The receiver of the events of a process, and of its descendants. It does not keep the tracker alive.
    pub(crate) fn sink(self: &Arc<Self>, charges: Arc<dyn ChildCharges>) -> ForkSink {
        let events = Arc::clone(self);
        Arc::new(move |news| events.receive(news, &*charges))
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

    fn receive(&self, news: ForkEvent, charges: &dyn ChildCharges) {
        self.enqueue(news, charges);
        if self.ended.load(Ordering::SeqCst) {
            self.end();
        }
    }

    fn enqueue(&self, news: ForkEvent, charges: &dyn ChildCharges) {
        match news {
            ForkEvent::Child { parent, uffd, subscription } => {
                let charge = charges.charge();
                if charge.is_none()
                    && let Some(omitted) = REFUSED.permit()
                {
                    let user = uffd.holder().user();
                    tracing::warn!(
                        user,
                        omitted,
                        "a child is not tracked: its user has too many tracked children, or page tables"
                    );
                }
                let mut queue = lock(&self.queue);
                if let Some(charge) = charge
                    && queue.len() < MAX_QUEUED_CHILDREN
                {
                    self.close_if_broken(subscription.id(), &uffd);
                    let child = ChildUffd { held: uffd, forks: subscription, charge };
                    queue.push(Fork { parent, child: Some(child) });
                    return;
                }
                push_lost(&mut queue, parent);
                // Released without the lock. The holder closes it when the companion has.
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
