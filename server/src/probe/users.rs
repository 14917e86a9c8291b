//! Finds out whether a process uses a file. libbpf glue: loads `file_users.bpf.c`, tries it on a file of the service, and runs it on
//! demand.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use bytemuck::Zeroable as _;
use fdmap_proto::error_chain;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{SyscallError, fd, memfd};
use libbpf_rs::ObjectBuilder;

use super::dentry::DentryReferences;
use super::interface::ScanError;
use crate::bpf::records::{DentryRecord, Status};
use crate::bpf::{LoadError, load_explained, map_array, program_fd, run, status_text};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/file_users.bpf.o"));

/// The loaded program, or why it cannot be used.
#[derive(Debug)]
pub(super) struct UserFinder {
    counter: Result<Mutex<Counter>, String>,
}

impl UserFinder {
    /// Loads the program, and tries it on a file of the service.
    pub(super) fn load() -> Self {
        let loaded = load_explained(Counter::load).map_err(|refusal| refusal.to_string());
        let counter = loaded.and_then(|counter| try_counter(&counter).map(|()| Mutex::new(counter)));
        if let Err(error) = &counter {
            tracing::warn!(error, "users of a file cannot be counted in the kernel");
        }
        Self { counter }
    }

    /// See [`super::Probe::dentry_references`].
    pub(super) fn dentry_references(
        &self,
        own: [BorrowedFd<'_>; 2],
    ) -> Result<Option<DentryReferences>, ScanError> {
        let Ok(counter) = &self.counter else { return Ok(None) };
        // No code panics with the lock held.
        counter.lock().unwrap_or_else(PoisonError::into_inner).count(own).map(Some)
    }

    /// See [`super::Probe::users_refused`].
    pub(super) fn refused(&self) -> Option<String> {
        self.counter.as_ref().err().cloned()
    }
}

#[derive(Debug)]
struct Counter {
    program: OwnedFd,
    /// The [`DentryRecord`] of a run.
    record: SharedMapping,
}

impl Counter {
    fn load() -> Result<Self, LoadError> {
        let object = ObjectBuilder::default().name("fdmap_users")?.open_memory(OBJECT)?.load()?;
        let record = map_array::<DentryRecord>(&object, "dentries", 1, false)?;
        Ok(Self { program: program_fd(&object, "dentry_references")?, record })
    }

    fn count(&self, own: [BorrowedFd<'_>; 2]) -> Result<DentryReferences, ScanError> {
        let [first, second] = own.map(|fd| u64::from(fd.as_raw_fd().cast_unsigned()));
        let status = run(self.program.as_fd(), &mut [first, second])
            .map_err(|errno| ScanError::Run(errno.to_string()))?;
        let status = Status(status.unsigned_abs());
        if status != Status::FDMAP_STATUS_OK {
            return Err(ScanError::Walk { fd: own[0].as_raw_fd(), why: status_text(status) });
        }
        let mut record = DentryRecord::zeroed();
        let read = self.record.read_at(0, bytemuck::bytes_of_mut(&mut record));
        debug_assert!(read, "load checked that the map holds a record");
        Ok(DentryReferences {
            references: record.references,
            own: record.descriptions,
            links: record.links,
            named: record.named != 0,
            only_dentry: record.only_dentry != 0,
            settled: record.changed == 0,
        })
    }
}

/// Counts the users of a trial file, which has one at a time: a descriptor, then only a mapping.
fn try_counter(counter: &Counter) -> Result<(), String> {
    let failed = |error: SyscallError| error_chain(&error);
    let file = memfd::create("fdmap-trial", None).map_err(failed)?;
    memfd::resize(file.as_fd(), 1).map_err(failed)?;
    let other = fd::reopen(file.as_fd(), false).map_err(failed)?;
    let copy = fd::duplicate(other.as_fd()).map_err(failed)?;
    let is_used = || {
        let own = [file.as_fd(), other.as_fd()];
        counter.count(own).map(|references| references.is_used()).map_err(|error| error_chain(&error))
    };
    let before = is_used()?;
    let user = fd::reopen(file.as_fd(), true).map_err(failed)?;
    let opened = is_used()?;
    let mapping = SharedMapping::shared(&user, 0, 1, true).map_err(failed)?;
    drop(user);
    let mapped = is_used()?;
    drop((mapping, copy));
    let after = is_used()?;
    if (before, opened, mapped, after) == (false, true, true, false) {
        Ok(())
    } else {
        Err(format!(
            "reports a trial file as used: {before} before it is opened, {opened} while it is, {mapped} while it is only mapped, \
             {after} afterwards"
        ))
    }
}

#[cfg(test)]
mod needs_root;
