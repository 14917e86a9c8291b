//! Charges users for page tables that tracking allocates in their address spaces.
//!
//! Write protection needs page tables for a whole mapping, whether it holds data or not, and the kernel charges them to the service,
//! which makes the call. They exist until the process unmaps the range or ends. So what Track charged is still charged when the mapping
//! is no longer tracked, as long as the process lives, and as far as it has so many page tables.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_proto::file::Backing;
use fdmap_sys::pidfd;

use super::{Caller, FileError, Quota, QuotaPermit};
use crate::tracking::Charged;

/// Bytes of an entry of a page table, for a page of 4096 bytes or a huge page.
const ENTRY_BYTES: u64 = 8;
/// Bytes of one page table. A mapping has up to two that it fills only in part, and one of each higher level.
const PAGE_TABLE_BYTES: u64 = 4096;
const PARTIAL_TABLES: u64 = 4;

/// The page tables of tracked mappings.
#[derive(Debug)]
pub struct PageTables {
    quota: Arc<Quota>,
    processes: Mutex<HashMap<TrackedProcess, Tables>>,
}

/// A process, and the user who is charged for its page tables. It costs no descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct TrackedProcess {
    user: u32,
    pid: u32,
    /// No other process with this pid has it.
    start_time: u64,
}

#[derive(Debug)]
struct Tables {
    /// Bytes for mappings that are tracked. They have permits of their own.
    tracked: u64,
    /// For mappings that no longer are.
    left: QuotaPermit,
}

/// What a user is charged for a tracked address space.
#[derive(Debug)]
pub struct TrackedCharge {
    space: QuotaPermit,
    tables: QuotaPermit,
    process: TrackedProcess,
    all: Arc<PageTables>,
}

impl PageTables {
    #[must_use]
    pub fn new(quota: Arc<Quota>) -> Arc<Self> {
        Arc::new(Self { quota, processes: Mutex::default() })
    }

    /// Charges the caller for [`table_bytes`] of mappings of process `pid`. `space` charges the same user for its address space.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn charge(
        self: &Arc<Self>,
        caller: &Caller,
        space: QuotaPermit,
        pid: u32,
        table_bytes: u64,
    ) -> Result<TrackedCharge, FileError> {
        let tables = self.quota.acquire(caller, table_bytes).or_else(|_| {
            self.release(space.uid());
            self.quota.acquire(caller, table_bytes)
        })?;
        Ok(self.add(space, tables, pid))
    }

    /// Charges the user of `space` for what was charged before, by a previous process of the service.
    #[must_use]
    pub fn charge_again(self: &Arc<Self>, space: QuotaPermit, pid: u32, table_bytes: u64) -> TrackedCharge {
        let tables = self.quota.charge_again(space.uid(), table_bytes);
        self.add(space, tables, pid)
    }

    fn add(self: &Arc<Self>, space: QuotaPermit, tables: QuotaPermit, pid: u32) -> TrackedCharge {
        let user = space.uid();
        // A process that has ended has no page tables, and its Track fails.
        let start_time = pidfd::start_time(pid).unwrap_or_default();
        let process = TrackedProcess { user, pid, start_time };
        let none = || Tables { tracked: 0, left: self.quota.charge_again(user, 0) };
        self.lock().entry(process).or_insert_with(none).tracked += tables.amount();
        TrackedCharge { space, tables, process, all: Arc::clone(self) }
    }

    /// Reduces what is left of a user's processes to the page tables that they have.
    fn release(&self, user: u32) {
        let mut processes = self.lock();
        for (process, tables) in processes.iter_mut().filter(|(process, _)| process.user == user) {
            let exist = if process.lives() { pidfd::page_table_bytes(process.pid).ok() } else { Some(0) };
            tables.keep_left(exist.map_or(u64::MAX, |bytes| bytes.saturating_sub(tables.tracked)));
        }
        processes.retain(|_, tables| tables.tracked > 0 || tables.left.amount() > 0);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TrackedProcess, Tables>> {
        // No code panics with the lock held.
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn keep_left(&mut self, max_bytes: u64) {
        // A reduction never fails.
        let _ = self.left.resize(self.left.amount().min(max_bytes), true);
    }
}

impl TrackedProcess {
    fn lives(&self) -> bool {
        pidfd::start_time(self.pid) == Ok(self.start_time)
    }
}

impl Charged for TrackedCharge {
    fn user(&self) -> u32 {
        self.space.uid()
    }
}

impl Drop for TrackedCharge {
    fn drop(&mut self) {
        let mut processes = self.all.lock();
        let Some(tables) = processes.get_mut(&self.process) else { return };
        tables.tracked = tables.tracked.saturating_sub(self.tables.amount());
        if self.process.lives() {
            // A charge without limit never fails.
            let _ = tables.left.resize(tables.left.amount().saturating_add(self.tables.amount()), true);
        } else if tables.tracked == 0 {
            processes.remove(&self.process);
        }
    }
}

/// The page tables of a mapping.
pub(crate) const fn table_bytes(backing: Backing, mapped_bytes: u64) -> u64 {
    let page_bytes = match backing {
        Backing::Hugetlb(page_bytes) => page_bytes,
        Backing::Shmem | Backing::ShmemThp => 4096,
    };
    let entries = mapped_bytes / page_bytes * ENTRY_BYTES;
    entries.next_multiple_of(PAGE_TABLE_BYTES) + PARTIAL_TABLES * PAGE_TABLE_BYTES
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::super::Quotas;
    use super::*;

    const OF_ONE_GIB: u64 = (2 << 20) + (16 << 10);

    #[test]
    fn tables_have_an_entry_for_each_page() {
        for (backing, bytes) in [
            (Backing::Shmem, OF_ONE_GIB),
            (Backing::ShmemThp, OF_ONE_GIB),
            (Backing::Hugetlb(2 << 20), 20 << 10),
        ] {
            assert_eq!(table_bytes(backing, 1 << 30), bytes, "{backing:?}");
        }
    }

    #[test]
    fn page_tables_are_charged_until_the_process_ends_as_far_as_they_exist() {
        let quotas = Quotas::new(16);
        let (spaces, bytes) =
            (quotas.quota("spaces", 100), quotas.quota("bytes of page tables", 2 * OF_ONE_GIB));
        let tables = PageTables::new(Arc::clone(&bytes));
        let caller = Caller::new(1, 1, Vec::new(), 0);
        let charge = |pid| tables.charge(&caller, spaces.acquire(&caller, 1).unwrap(), pid, OF_ONE_GIB);
        let used = || {
            let probe = bytes.acquire_for(1, 4 * OF_ONE_GIB, false).unwrap_err().to_string();
            probe.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap()
        };
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let first = charge(child.id()).unwrap();
        assert_eq!((first.user(), used()), (1, OF_ONE_GIB));
        let second = charge(child.id()).unwrap();
        assert!(charge(child.id()).unwrap_err().to_string().contains("bytes of page tables"));
        // They are charged after the end of tracking, too, until another charge needs them: the process has few page tables.
        drop((first, second));
        assert_eq!(used(), 2 * OF_ONE_GIB);
        let third = charge(child.id()).unwrap();
        assert!((OF_ONE_GIB..OF_ONE_GIB + (1 << 20)).contains(&used()), "{}", used());
        child.kill().unwrap();
        child.wait().unwrap();
        drop(third);
        assert_eq!(used(), 0);
        assert_eq!(tables.lock().len(), 0);
        let recovered = tables.charge_again(spaces.charge_again(1, 1), std::process::id(), 4 * OF_ONE_GIB);
        assert!(used() > 2 * OF_ONE_GIB, "the limit does not apply to what exists");
        drop(recovered);
    }
}
