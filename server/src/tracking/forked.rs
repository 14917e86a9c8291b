//! What a tracker hears of forks, and the userfaultfds that it holds: both are reached without the tracker's lock, since a
//! process may wait for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_sys::SyscallError;
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;

use super::forks::{FollowId, ForkEvent, ForkSink, ForkSubscription};

/// Children whose userfaultfds are held until they are found. Of more it is only known that they were.
const MOST: usize = 1024;

/// A userfaultfd that may have to be closed at any moment, so that nobody waits for its events.
#[derive(Clone, Debug)]
pub struct Held(Arc<Mutex<Option<Userfaultfd>>>);

impl Held {
    /// Holds it.
    #[must_use]
    pub fn new(userfaultfd: Userfaultfd) -> Self {
        Self(Arc::new(Mutex::new(Some(userfaultfd))))
    }

    /// Does something with it, unless it was closed.
    pub fn with<T>(&self, work: impl FnOnce(&Userfaultfd) -> T) -> Option<T> {
        self.lock().as_ref().map(work)
    }

    /// Lets go of a range; the kernel may have done so before.
    pub fn unregister(&self, range: AddressRange) -> Result<(), SyscallError> {
        self.with(|userfaultfd| userfaultfd.unregister(range)).unwrap_or(Ok(()))
    }

    fn close(&self) {
        let closed = self.lock().take();
        drop(closed);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Userfaultfd>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fork that a tracker has not dealt with.
#[derive(Debug)]
pub struct Fork {
    /// Who forked.
    pub parent: FollowId,
    /// The child's; `None`: nothing is known of it.
    pub child: Option<(Held, ForkSubscription)>,
}

/// The forks of one file's mappers.
#[derive(Debug, Default)]
pub struct Forked {
    news: Mutex<Vec<Fork>>,
    held: Mutex<HashMap<FollowId, Held>>,
    /// The tracker has gone: nobody wants to know.
    over: AtomicBool,
}

impl Forked {
    /// Where news go. It keeps no tracker alive.
    #[must_use]
    pub fn sink(self: &Arc<Self>) -> ForkSink {
        let forked = Arc::clone(self);
        Arc::new(move |news| forked.hear(news))
    }

    /// `held` is to be closed when nobody reads its forks any more.
    pub fn hold(&self, id: FollowId, held: &Held) {
        lock(&self.held).insert(id, held.clone());
    }

    /// What has come since this was asked last.
    #[must_use]
    pub fn take(&self) -> Vec<Fork> {
        std::mem::take(&mut *lock(&self.news))
    }

    /// Forgets those that nobody else holds any more.
    pub fn sweep(&self) {
        lock(&self.held).retain(|_, held| Arc::strong_count(&held.0) > 1);
    }

    /// The tracker goes. News hold on to whom they are told, and would keep each other, and their userfaultfds, for ever.
    pub fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        let news = self.take();
        let held = std::mem::take(&mut *lock(&self.held));
        // Closed without the locks.
        drop((news, held));
    }

    fn hear(&self, news: ForkEvent) {
        self.note(news);
        if self.over.load(Ordering::SeqCst) {
            self.end();
        }
    }

    fn note(&self, news: ForkEvent) {
        match news {
            ForkEvent::Child { parent, uffd, subscription: following } => {
                let mut news = lock(&self.news);
                if news.len() < MOST {
                    let held = Held::new(uffd);
                    self.hold(following.id(), &held);
                    news.push(Fork { parent, child: Some((held, following)) });
                    return;
                }
                push_lost(&mut news, parent);
                // Closed without the lock.
                drop(news);
                drop((uffd, following));
            }
            ForkEvent::Lost { parent } => {
                push_lost(&mut lock(&self.news), parent);
            }
            ForkEvent::Broken { id } => {
                let held = lock(&self.held).remove(&id);
                if let Some(held) = held {
                    tracing::warn!(
                        "nobody reads the forks of a tracked process: its mappings are tracked no more"
                    );
                    held.close();
                }
            }
        }
    }
}

/// Once is enough to know it.
fn push_lost(news: &mut Vec<Fork>, parent: FollowId) {
    if !news.iter().any(|fork| fork.parent == parent && fork.child.is_none()) {
        news.push(Fork { parent, child: None });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
