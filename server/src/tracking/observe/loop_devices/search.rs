//! The search for the inodes of the backing files of loop devices, in a process of its own: it may wait for the file system of any of them.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_sys::Errno;
use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::loop_device::backing_inode;

use super::of_attached;
use crate::own_program::search_process::{self, Inode};

/// First argument of `fdmapd` that starts the process. The other one is the pid of the service.
pub const ARGUMENT: &str = "loop-search";

/// A device that is being detached has a file, and the kernel does not report it any more.
const DETACH_TIMEOUT: Duration = Duration::from_millis(100);

fn backing_inodes() -> io::Result<BTreeSet<Inode>> {
    let began = Instant::now();
    loop {
        match of_attached(|number| Ok(backing_inode(number)?)) {
            Ok(inodes) => return Ok(inodes.into_iter().collect()),
            Err(error)
                if error.raw_os_error() == Some(Errno::ENXIO as i32) && began.elapsed() < DETACH_TIMEOUT =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Runs the search in this process.
#[must_use]
pub fn main() -> ExitCode {
    let service = std::env::args().nth(2).and_then(|text| text.parse().ok());
    let Some(service) = service else {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs the pid of fdmapd");
        return ExitCode::FAILURE;
    };
    if let Err(error) = search_process::prepare(service, Capabilities::empty(), c"fdmapd-loops") {
        eprintln!("fdmapd: {}", error_chain(&error));
        return ExitCode::FAILURE;
    }
    let inodes = match backing_inodes() {
        Ok(inodes) => inodes,
        Err(error) => {
            // Usually the process may not open the devices.
            eprintln!("fdmapd: search for the backing files of loop devices: {}", error_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    match io::stdout().write_all(search_process::inode_lines(&inodes).as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
