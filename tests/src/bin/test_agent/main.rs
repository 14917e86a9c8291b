//! The test agent: accesses files as clients of the service do, and memfds as other programs do. It reads the
//! commands of `fdmap_tests::test_agent::command` from standard input, and writes the replies to standard output.

mod call;
mod children;
mod descriptor;
mod direct;
mod draw;
mod file;
mod guard;
mod memfd;
mod operations;
mod remap;
mod remote;
mod requests;
mod store;
mod unnoticed;
mod writes;

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;

use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::test_agent::command::{Command, Reply};

use call::{Done, error_text};
use draw::Draw;
use file::OpenFile;
use memfd::OwnMemfd;
use operations::Operations;
use writes::Writes;

/// One method of writing.
trait Writer {
    /// Writes some pages and logs them. Writes that are still in flight afterwards are logged later.
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done;

    /// Waits for the writes in flight.
    fn finish(&mut self, lane: &mut Lane<'_>) -> Done {
        let _ = lane;
        Ok(())
    }
}

#[derive(Default)]
struct Agent {
    file: OpenFile,
    memfd: OwnMemfd,
    writes: Writes,
    operations: Operations,
}

fn main() {
    let mut agent = Agent::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let reply = match serde_json::from_str(&line) {
            // Returning drops the mappings. The client library harvests and unmaps them, as in any program that exits
            // normally.
            Ok(Command::Return) => return,
            Ok(command) => agent.perform(command).unwrap_or_else(Reply::Failed),
            Err(error) => Reply::Failed(format!("{line:?}: {error}")),
        };
        let mut out = std::io::stdout().lock();
        let written = serde_json::to_writer(&mut out, &reply).map_err(std::io::Error::from);
        if written.and_then(|()| writeln!(out)).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

impl Agent {
    fn perform(&mut self, command: Command) -> Done<Reply> {
        match command {
            Command::File(command) => self.file.perform(command),
            Command::Memfd(command) => self.memfd.perform(command),
            Command::Writer(command) => self.writes.perform(command),
            Command::Operation(command) => self.operations.perform(command),
            Command::Claim(file) => requests::claim(&file),
            Command::TrackFor { runtime_dir, pid } => requests::track_for(&runtime_dir, pid),
            Command::SetUndumpable => {
                nix::sys::prctl::set_dumpable(false).map(|()| Reply::Done).map_err(error_text)
            }
            Command::Exec => Err(exec()),
            Command::Exit => std::process::exit(0),
            Command::Return => unreachable!("main returns"),
        }
    }
}

/// Executes a program that sends the reply and reads its standard input to the end. Returns only the error.
fn exec() -> String {
    let done = serde_json::to_string(&Reply::Done).unwrap_or_default();
    let script = format!("echo '{done}'; exec cat");
    std::process::Command::new("sh").args(["-c", &script]).exec().to_string()
}
