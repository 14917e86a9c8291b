//! The search for users in `/proc`, in a process of its own: reading the maps of a process waits for the lock of its address space,
//! which that process may hold for ever. If the search is late, every file counts as used.
//!
//! It writes `process PID` before it reads a process, and at the end the files in use.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_sys::capabilities::Capabilities;

use super::users::inodes_in_use;
use crate::incidents::{self, Incident};
use crate::own_program::search_process::{self, Inode, SearchProcess};
use crate::store::FdStore;

/// First argument of `fdmapd` that starts the process. The others are the pid of the service, and the pid of the process that holds
/// the stored descriptors, or 0.
pub const ARGUMENT: &str = "user-search";

/// To read what other users have open and mapped.
const KEPT: Capabilities = Capabilities::DAC_READ_SEARCH.union(Capabilities::SYS_PTRACE);

/// A search takes some 0.1 ms for each process.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Searches one after the other.
#[derive(Debug)]
pub(super) struct Search {
    process: SearchProcess,
    /// The process for which the last search waited, which the log names.
    blocked_by: Option<u32>,
}

impl Default for Search {
    fn default() -> Self {
        Self { process: SearchProcess::new("users of files", KEPT, 1), blocked_by: None }
    }
}

impl Search {
    /// The inodes that a process other than the service has open or mapped. `None` if the search found out nothing.
    pub(super) fn inodes_in_use(&mut self) -> Option<BTreeSet<Inode>> {
        // The parent process holds the stored descriptors of every file, so its descriptors do not count. Without a store, the
        // parent counts as any process: it may be a shell that started the service in the background and then executed the
        // program that creates files.
        let store = FdStore::from_env(&[]).map_or(0, |_| std::os::unix::process::parent_id());
        let arguments = [ARGUMENT, &std::process::id().to_string(), &store.to_string()];
        let asked = self.process.run(arguments, Instant::now() + SEARCH_TIMEOUT);
        let text = asked.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot start a search for users of ephemeral files");
            None
        })?;
        let found = search_process::inodes_of(&text);
        if found.is_some() {
            self.blocked_by = None;
        } else {
            incidents::count(Incident::SearchLate);
            let process = last_process(&text);
            if self.blocked_by != process {
                tracing::warn!(
                    pid = process,
                    "ephemeral files stay: the search for their users did not end, and read this process last"
                );
                self.blocked_by = process;
            }
        }
        found
    }
}

/// The process that the search read last.
fn last_process(text: &str) -> Option<u32> {
    text.lines().filter_map(|line| line.strip_prefix("process ")).next_back()?.parse().ok()
}

/// Runs the search in this process.
#[must_use]
pub fn main() -> ExitCode {
    let numbers: Vec<u32> = std::env::args().skip(2).filter_map(|text| text.parse().ok()).collect();
    let [service, store] = *numbers else {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs the pids of fdmapd and of its store");
        return ExitCode::FAILURE;
    };
    if let Err(error) = search_process::prepare(service, KEPT, c"fdmapd-search") {
        eprintln!("fdmapd: {}", error_chain(&error));
        return ExitCode::FAILURE;
    }
    let mut out = io::stdout().lock();
    // The service notices if a write fails.
    let found = inodes_in_use(&[service, std::process::id()], store, |pid| {
        let _ = writeln!(out, "process {pid}").and_then(|()| out.flush());
    });
    let Some(found) = found else { return ExitCode::FAILURE };
    match out.write_all(search_process::inode_lines(&found).as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_was_read_last_is_named() {
        assert_eq!(last_process("process 1\nprocess 20\n"), Some(20));
        assert_eq!(last_process("process 1\nfile 1 5\n"), Some(1));
        assert_eq!(last_process(""), None);
    }
}
