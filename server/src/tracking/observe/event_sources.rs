//! The event sources that all tracked files share: events of writes, system call tracing and fork events.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use fdmap_sys::SyscallError;

use super::forks::{Companions, Forks};
use super::holder::{FindCounter, Holders, Worker};
use super::loop_devices::LoopDevices;
use super::mappers::MapperSearch;
use super::modify_events::ModifyEvents;
use super::own_calls::CallCounter;
use super::space_events::{SpaceSubscription, SpaceTracer};
use super::trace::WriteTracer;
use crate::store::FdStore;
use crate::tracking::baseline::ctime_is_fine;

/// The event sources of a service. Tracing and the fork reader start when they are first needed.
#[derive(Debug)]
pub struct EventSources {
    worker: Worker,
    modify_events: ModifyEvents,
    holders: Holders,
    companions: Companions,
    store: Option<FdStore>,
    traces_calls: bool,
    /// Or why system calls are not traced.
    trace: OnceLock<Result<WriteTracer, String>>,
    fine_ctime: bool,
    spaces: Arc<SpaceTracing>,
    loop_devices: LoopDevices,
    mapper_search: MapperSearch,
}

/// Traces events of address spaces, from when that is first needed.
#[derive(Debug)]
pub(crate) struct SpaceTracing {
    enabled: bool,
    tracer: OnceLock<Option<Arc<SpaceTracer>>>,
}

impl SpaceTracing {
    pub(crate) const fn new(enabled: bool) -> Self {
        Self { enabled, tracer: OnceLock::new() }
    }

    /// `None`: disabled or unavailable.
    pub(crate) fn tracer(&self) -> Option<&Arc<SpaceTracer>> {
        let start = || {
            let started = self.enabled.then(SpaceTracer::start)?;
            started
                .inspect_err(|error| {
                    let reason = fdmap_proto::error_chain(error);
                    tracing::info!(reason, "events of address spaces are not traced");
                })
                .ok()
        };
        self.tracer.get_or_init(start).as_ref()
    }
}

impl EventSources {
    /// - `store`: the descriptor store; with a store, forks are not observed.
    /// - `traces_calls`: trace system calls, if the kernel permits it.
    /// - `starts_processes`: start this program again as holders of userfaultfds and readers of fork events. Otherwise threads of
    ///   this process are the holders, and forks are not observed: for trials and tests.
    ///
    /// # Errors
    /// `inotify_init1`.
    pub fn new(
        store: Option<FdStore>,
        traces_calls: bool,
        starts_processes: bool,
    ) -> Result<Self, SyscallError> {
        let spaces = Arc::new(SpaceTracing::new(traces_calls));
        let its = Arc::clone(&spaces);
        let counter = FindCounter(Arc::new(move || Some(Arc::clone(its.tracer()?) as Arc<dyn CallCounter>)));
        let worker = if starts_processes { Worker::Process } else { Worker::Thread };
        // A descriptor store does not read events. A process that forks while the service is not running would wait for the next
        // service.
        let reads_forks = starts_processes && store.is_none();
        Ok(Self {
            worker,
            modify_events: ModifyEvents::new()?,
            holders: Holders::new(worker, counter),
            companions: Companions::new(reads_forks),
            store,
            traces_calls,
            trace: OnceLock::new(),
            fine_ctime: ctime_is_fine(),
            spaces,
            loop_devices: LoopDevices::new(worker),
            mapper_search: MapperSearch::new(worker),
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
        let followed = self.spaces.tracer()?.follow(pagemap);
        followed
            .inspect_err(|error| {
                let error = fdmap_proto::error_chain(error);
                tracing::warn!(error, "events of an address space cannot be traced");
            })
            .ok()
    }

    /// Loads the programs that trace address spaces, unless they are loaded or disabled.
    pub(crate) fn load_space_programs(&self) {
        let _ = self.spaces.tracer();
    }

    /// The reader of the fork events of a user's processes; `None`: disabled or unavailable.
    pub(crate) fn forks(&self, user: u32) -> Option<Arc<Forks>> {
        self.companions.of_user(user)
    }

    /// The search for the files of loop devices.
    pub(super) const fn loop_devices(&self) -> &LoopDevices {
        &self.loop_devices
    }

    /// The search for mappers of a file in the maps of all processes.
    pub(super) const fn mapper_search(&self) -> &MapperSearch {
        &self.mapper_search
    }

    /// Whether processes or threads do the work of helpers.
    pub(crate) const fn worker(&self) -> Worker {
        self.worker
    }

    /// The processes that hold userfaultfds.
    pub(crate) const fn holders(&self) -> &Holders {
        &self.holders
    }

    /// The store that holds descriptors while the service is not running.
    #[must_use]
    pub const fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
    }
}
