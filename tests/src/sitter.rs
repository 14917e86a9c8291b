//! A program that sits in a system call and tells whether it was disturbed: `tests/programs/sitter.c`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// One such process, killed on drop.
#[derive(Debug)]
pub struct Sitter {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    _process: CleanupGuard,
}

/// What a call came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Sat {
    /// What it returned: `-errno` if it failed.
    pub result: i64,
    /// How long it took, milliseconds.
    pub took: f64,
    /// `intact`, or which register changed.
    pub registers: String,
    /// The socket's timeout afterwards, milliseconds; -1 without one.
    pub socket_timeout: i64,
}

impl Sitter {
    /// Starts one by a command of the caller's.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(mut command: Command) -> HarnessResult<Self> {
        let shown = format!("{command:?}");
        let failed =
            |error: std::io::Error| HarnessError::Program { program: shown, said: error.to_string() };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().map(BufReader::new);
        let answers = answers.ok_or_else(|| HarnessError::Agent("nothing: it has no output".to_owned()))?;
        let mut sitter = Self { child, orders, answers, _process: process };
        sitter.expect("ready")?;
        Ok(sitter)
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it some bytes.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn send(&mut self, text: &str) -> HarnessResult<()> {
        let sent = self.orders.as_mut().map_or(Ok(()), |orders| orders.write_all(text.as_bytes()));
        sent.map_err(|error| HarnessError::Agent(error.to_string()))
    }

    /// The rest of its next line, which must begin so.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn expect(&mut self, begin: &str) -> HarnessResult<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| HarnessError::Agent(error.to_string()))?;
        match line.trim_end().strip_prefix(begin) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(HarnessError::Agent(line)),
        }
    }

    /// Has it enter a call, and waits until it sleeps there (or spins).
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn sit(&mut self, call: &str, milliseconds: i64) -> HarnessResult<Instant> {
        self.send(&format!("sit {call} {milliseconds}\n"))?;
        self.expect("sits")?;
        let began = Instant::now();
        if call != "spin" {
            let path = format!("/proc/{}/stat", self.pid());
            while !std::fs::read_to_string(&path).is_ok_and(|stat| stat.contains(") S ")) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(began)
    }

    /// Waits for the end of the call.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn sat(&mut self) -> HarnessResult<Sat> {
        let line = self.expect("done ")?;
        let mut words = line.split(' ');
        let mut sat = || {
            Some(Sat {
                result: words.next()?.parse().ok()?,
                took: words.next()?.parse().ok()?,
                registers: words.next()?.to_owned(),
                socket_timeout: words.next()?.parse().ok()?,
            })
        };
        sat().ok_or(HarnessError::Agent(line))
    }

    /// Its signal mask, what it does about SIGTRAP and its descriptors, in words.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn state(&mut self) -> HarnessResult<String> {
        self.send("state\n")?;
        self.expect("state")
    }

    /// Has it write to a page.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write(&mut self, page: u64) -> HarnessResult<()> {
        self.send(&format!("write {page}\n"))?;
        self.expect("written").map(drop)
    }
}

impl Drop for Sitter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
