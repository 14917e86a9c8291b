//! Changes of a file's inode: size, seals, and the ownership that an adopted file had. Each may wait for a client, so a helper makes it.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_proto::file::{Right, Seal, Seals};
use fdmap_sys::{Errno, SyscallError};

use super::super::inode_calls::{InodeCallError, InodeCalls, WhenLate};
use super::super::{Caller, FileError};
use super::ServiceFile;
use crate::tracking::WRITER_SEALS;
use crate::watchdog::{Operation, Phase};

/// Changes of the inode of one file. Only one of them is in progress, so that a client blocks one helper by a file.
#[derive(Debug, Default)]
pub(super) struct InodeChanges {
    /// Locked while the service waits for a change.
    turn: Mutex<()>,
    /// A change was not answered in time, or is in progress.
    late: AtomicBool,
}

/// The caller that changes an inode, the helpers of the file's owner, and the notifier for watchers if the change is late.
pub(in super::super) struct ChangeBy<'a, N> {
    pub(in super::super) caller: &'a Caller,
    pub(in super::super) calls: &'a InodeCalls,
    pub(in super::super) user: u32,
    pub(in super::super) notify: N,
}

type CallResult = Result<(), InodeCallError>;

impl ServiceFile {
    /// Begins an operation on the file, for the log.
    pub(in super::super) fn begin(&self, operation: &'static str, phase: Phase) -> Operation {
        Operation::begin(operation, &self.scans.source().name, phase)
    }

    /// Changes the size and the owner's charge. While the size is uncertain, the larger one is charged.
    pub(in super::super) fn resize(
        self: &Arc<Self>,
        by: ChangeBy<'_, impl FnOnce() + Send + 'static>,
        bytes: u64,
    ) -> Result<(), FileError> {
        let operation = || format!("resize {self} to {bytes} bytes");
        let _turn = self.turn(by.caller, Right::Write, operation)?;
        self.require_unfenced()?;
        let before = self.charge_at_least(bytes, by.caller.admin)?;
        let settle = move |file: &Self, result: &CallResult| {
            let settled = match result {
                Ok(()) => bytes,
                Err(InodeCallError::Ended) if file.size_bytes() != Ok(bytes) => before.max(bytes),
                Err(InodeCallError::Ended) => bytes,
                Err(_) => before,
            };
            file.reduce_charge(settled);
        };
        let ChangeBy { calls, user, notify, .. } = by;
        let late = self.when_late(notify, settle);
        let result = self.finish_change(calls.resize(user, self.fd.as_fd(), bytes, late), settle);
        match result {
            Err(InodeCallError::Syscall(SyscallError { errno: Errno::EPERM, .. })) => {
                let seal = if bytes > self.size_bytes()? { Seal::Grow } else { Seal::Shrink };
                Err(FileError::Sealed { operation: format!("resizing to {bytes} bytes"), seal })
            }
            other => other.map_err(|error| FileError::of_inode(operation(), error)),
        }
    }

    /// Adds seals.
    pub(in super::super) fn seal(
        self: &Arc<Self>,
        by: ChangeBy<'_, impl FnOnce() + Send + 'static>,
        seals: Seals,
    ) -> Result<(), FileError> {
        let operation = || format!("add seals {seals} to {self}");
        let turn = self.turn(by.caller, Right::Write, operation)?;
        self.require_unfenced()?;
        match self.add_seals(by, seals, &turn) {
            Err(InodeCallError::Syscall(SyscallError { errno: Errno::EPERM, .. })) => {
                Err(FileError::Sealed { operation: format!("adding seals {seals}"), seal: Seal::Seal })
            }
            Err(InodeCallError::Syscall(SyscallError { errno: Errno::EBUSY, .. })) => {
                Err(FileError::MappedWritable)
            }
            other => other.map_err(|error| FileError::of_inode(operation(), error)),
        }
    }

    /// Seals the file against new writers. Writable mappings that exist stay.
    pub(in super::super) fn seal_writers(
        self: &Arc<Self>,
        by: ChangeBy<'_, impl FnOnce() + Send + 'static>,
    ) -> Result<(), FileError> {
        let operation = || format!("seal {self} against new writers");
        let turn = self.turn(by.caller, Right::Write, operation)?;
        match self.add_seals(by, WRITER_SEALS, &turn) {
            Err(InodeCallError::Syscall(SyscallError { errno: Errno::EPERM, .. })) => {
                Err(FileError::Sealed {
                    operation: "sealing against new writers".to_owned(),
                    seal: Seal::Seal,
                })
            }
            other => other.map_err(|error| FileError::of_inode(operation(), error)),
        }
    }

    /// Undoes the change of the inode's owner and mode at adoption. After [`InodeCallError::Blocked`], `late` gets the result.
    pub(in super::super) fn restore_ownership(
        &self,
        calls: &InodeCalls,
        user: u32,
        late: WhenLate,
    ) -> CallResult {
        self.former_ownership.map_or(Ok(()), |former| calls.restore(user, self.fd.as_fd(), former, late))
    }

    fn add_seals(
        self: &Arc<Self>,
        by: ChangeBy<'_, impl FnOnce() + Send + 'static>,
        seals: Seals,
        _turn: &MutexGuard<'_, ()>,
    ) -> CallResult {
        let ChangeBy { calls, user, notify, .. } = by;
        let late = self.when_late(notify, |_, _| ());
        self.finish_change(calls.add_seals(user, self.fd.as_fd(), seals.bits(), late), |_, _| ())
    }

    /// Waits while another call changes the inode. Fails if one is late, or if the caller lacks `right` by then. `operation` describes the
    /// change for the error.
    pub(in super::super) fn turn(
        &self,
        caller: &Caller,
        right: Right,
        operation: impl FnOnce() -> String,
    ) -> Result<MutexGuard<'_, ()>, FileError> {
        let InodeChanges { turn, late } = &self.inode_changes;
        // The lock protects no data.
        let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.require(caller, right)?;
        if late.load(Ordering::SeqCst) {
            return Err(FileError::of_inode(operation(), InodeCallError::Earlier));
        }
        Ok(turn)
    }

    /// A change begins. Returns what gets its result if it is late.
    fn when_late(
        self: &Arc<Self>,
        notify: impl FnOnce() + Send + 'static,
        settle: impl FnOnce(&Self, &CallResult) + Send + 'static,
    ) -> WhenLate {
        self.inode_changes.late.store(true, Ordering::SeqCst);
        let file = Arc::downgrade(self);
        Box::new(move |result| {
            if let Some(file) = file.upgrade()
                && file.finish_change(result, settle).is_ok()
            {
                notify();
            }
        })
    }

    /// A change has a result. A late one has none yet.
    fn finish_change(&self, result: CallResult, settle: impl FnOnce(&Self, &CallResult)) -> CallResult {
        if !matches!(result, Err(InodeCallError::Blocked)) {
            settle(self, &result);
            self.inode_changes.late.store(false, Ordering::SeqCst);
        }
        result
    }

    /// Charges the owner for `bytes`, if that is more than now. Returns the charge before.
    fn charge_at_least(&self, bytes: u64, unlimited: bool) -> Result<u64, FileError> {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        let before = charge.bytes.amount();
        charge.bytes.resize(before.max(bytes), unlimited)?;
        Ok(before)
    }

    fn reduce_charge(&self, bytes: u64) {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        // A reduction never fails.
        let _ = charge.bytes.resize(bytes, true);
    }
}
