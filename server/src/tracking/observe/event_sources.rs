//! The event sources that all tracked files share: events of writes, system call tracing and fork events.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use fdmap_sys::SyscallError;

use super::forks::Forks;
use super::modify_events::ModifyEvents;
use super::space_events::{SpaceSubscription, SpaceTracer};
use super::trace::WriteTracer;
use crate::store::FdStore;
use crate::tracking::baseline::ctime_is_fine;

/// The event sources of a service. Tracing and the fork reader start when they are first needed.
#[derive(Debug)]
pub struct EventSources {
    modify_events: ModifyEvents,
    forks: OnceLock<Option<Arc<Forks>>>,
    store: Option<FdStore>,
    traces_calls: bool,
    reads_forks: bool,
    /// Or why system calls are not traced.
    trace: OnceLock<Result<WriteTracer, String>>,
    fine_ctime: bool,
    spaces: OnceLock<Option<Arc<SpaceTracer>>>,
}

impl EventSources {
    /// - `store`: the descriptor store; with a store, forks are not observed.
    /// - `traces_calls`: trace system calls, if the kernel permits it.
    /// - `reads_forks`: start this program again as a reader of fork events.
    ///
    /// # Errors
    /// `inotify_init1`.
    pub fn new(store: Option<FdStore>, traces_calls: bool, reads_forks: bool) -> Result<Self, SyscallError> {
        Ok(Self {
            modify_events: ModifyEvents::new()?,
            forks: OnceLock::new(),
            store,
            traces_calls,
            reads_forks,
            trace: OnceLock::new(),
            fine_ctime: ctime_is_fine(),
            spaces: OnceLock::new(),
        })
    }

    /// The events of writes through descriptors.
    pub(crate) const fn modify_events(&self) -> &ModifyEvents {
        &self.modify_events
    }

    /// True if two changes of an inode have different ctimes.
    pub(crate) const fn fine_ctime(&self) -> bool {
        self.fine_ctime
    }

    /// The trace of system calls that write; `None`: disabled or unavailable.
    #[must_use]
    pub(crate) fn trace(&self) -> Option<&WriteTracer> {
        self.try_trace().ok()
    }

    /// Loads the programs that trace system calls, unless they are loaded, and attaches them once.
    ///
    /// # Errors
    /// Why system calls cannot be traced.
    pub(crate) fn try_trace(&self) -> Result<&WriteTracer, &str> {
        let start = || {
            if !self.traces_calls {
                return Err("disabled by --no-call-trace".to_owned());
            }
            WriteTracer::start().map_err(|error| error.to_string()).inspect_err(|reason| {
                tracing::info!(reason, "system calls are not traced");
            })
        };
        self.trace.get_or_init(start).as_ref().map_err(String::as_str)
    }

    /// Counts events of the address space of `pagemap`; `None`: disabled or unavailable.
    #[must_use]
    pub(crate) fn follow_space(&self, pagemap: BorrowedFd<'_>) -> Option<SpaceSubscription> {
        let start = || {
            if !self.traces_calls {
                return None;
            }
            let started = SpaceTracer::start();
            started
                .inspect_err(|error| {
                    let reason = fdmap_proto::error_chain(error);
                    tracing::info!(reason, "events of address spaces are not traced");
                })
                .ok()
        };
        let followed = self.spaces.get_or_init(start).as_ref()?.follow(pagemap);
        followed
            .inspect_err(|error| {
                let error = fdmap_proto::error_chain(error);
                tracing::warn!(error, "events of an address space cannot be traced");
            })
            .ok()
    }

    /// The reader of fork events; `None`: disabled, unavailable, or the service has a descriptor store.
    #[must_use]
    pub(crate) fn forks(&self) -> Option<&Arc<Forks>> {
        let start = || {
            // A descriptor store does not read events. A process that forks while the service is not running would wait for the
            // next service.
            if self.store.is_some() || !self.reads_forks {
                return None;
            }
            let started = Forks::start();
            started
                .inspect_err(|error| {
                    tracing::warn!(error = fdmap_proto::error_chain(error), "forks are not observed");
                })
                .ok()
        };
        self.forks.get_or_init(start).as_ref()
    }

    /// The store that holds descriptors while the service is not running.
    #[must_use]
    pub const fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
    }
}
