//! The QMP monitor of a running QEMU.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{HarnessError, HarnessResult};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A session with the monitor.
#[derive(Debug)]
pub struct Qmp {
    socket: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the monitor.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if it does not answer.
    pub fn connect(path: &Path) -> HarnessResult<Self> {
        let failed =
            |error: std::io::Error| HarnessError::Agent(format!("the monitor {}: {error}", path.display()));
        let socket = UnixStream::connect(path).map_err(failed)?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        let mut session = Self { socket: BufReader::new(socket) };
        session.execute("qmp_capabilities")?;
        Ok(session)
    }

    /// Executes a command without arguments, and waits for its result.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the command fails.
    pub fn execute(&mut self, command: &str) -> HarnessResult<()> {
        let failed = |error: std::io::Error| HarnessError::Agent(format!("{command}: {error}"));
        writeln!(self.socket.get_mut(), "{{\"execute\":\"{command}\"}}").map_err(failed)?;
        loop {
            let mut line = String::new();
            let got = self.socket.read_line(&mut line).map_err(failed)?;
            // The greeting and events may precede the result.
            if line.starts_with("{\"return\"") {
                return Ok(());
            }
            if got == 0 || line.starts_with("{\"error\"") {
                return Err(HarnessError::Agent(format!("{command}: {line}")));
            }
        }
    }
}
