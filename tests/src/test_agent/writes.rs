//! Commands for logged writes.

use std::path::Path;

use super::TestAgent;
use super::command::{
    AgentMapping, ChildrenCommand, Command, FileOf, MappingEnd, Reply, Span, WriterCommand,
};
use crate::no_lost_writes::log::Log;
use crate::no_lost_writes::method::Method;
use crate::pattern::Pattern;
use crate::service::Service;
use crate::{HarnessError, HarnessResult};

/// Writes by several threads for a time.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The method of each thread, `METHOD` or `METHOD@MAPPING`, separated by spaces.
    pub writers: &'a str,
    pub millis: u64,
    pub seed: u64,
    pub pages: Span,
    /// The lane of the first thread.
    pub lane: usize,
}

impl<'a> Run<'a> {
    #[must_use]
    pub fn new(writers: &'a str, millis: u64, seed: u64, pages: std::ops::Range<u64>, lane: usize) -> Self {
        Self { writers, millis, seed, pages: pages.into(), lane }
    }

    fn command(self) -> HarnessResult<Command> {
        let Self { writers, millis, seed, pages, lane } = self;
        let writers = writers.split(' ').map(str::parse).collect::<Result<_, _>>();
        let writers = writers.map_err(|error| HarnessError::Agent(format!("{error}")))?;
        Ok(Command::Writer(WriterCommand::Run { writers, millis, seed, pages, lane }))
    }
}

impl TestAgent {
    /// Executes a command for logged writes.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn writer(&mut self, command: WriterCommand) -> HarnessResult<Reply> {
        self.call(&Command::Writer(command))
    }

    /// Logs writes from now on.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn use_log(&mut self, log: &Log) -> HarnessResult<()> {
        self.writer(WriterCommand::OpenLog(log.path().into())).map(drop)
    }

    /// Maps a file through the client library.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn map(&mut self, service: &Service, name: &str, tracked: bool) -> HarnessResult<AgentMapping> {
        self.map_in(service.folder(), name, tracked)
    }

    /// Like [`map`](Self::map), with the runtime directory of the service.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn map_in(&mut self, runtime_dir: &Path, name: &str, tracked: bool) -> HarnessResult<AgentMapping> {
        let file = FileOf::new(runtime_dir, name);
        match self.writer(WriterCommand::Map { file, tracked })? {
            Reply::Mapping(mapping) => Ok(mapping),
            other => Err(HarnessError::Agent(format!("{other:?}"))),
        }
    }

    /// Stores to pages of a mapping, without a log.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn poke(&mut self, mapping: usize, first: u64, end: u64) -> HarnessResult<()> {
        self.writer(WriterCommand::Poke { mapping, pages: Span { first, end } }).map(drop)
    }

    /// Executes a command for the children of the agent; they store to the mapping.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn children(&mut self, mapping: usize, command: ChildrenCommand) -> HarnessResult<Reply> {
        self.writer(WriterCommand::Children { mapping, command })
    }

    /// Stores to the pages of a pattern through a mapping, logged in `lane`.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write_pattern(
        &mut self,
        mapping: usize,
        pattern: Pattern,
        pages: std::ops::Range<u64>,
        lane: usize,
    ) -> HarnessResult<()> {
        self.writer(WriterCommand::Fill { mapping, pattern, pages: pages.into(), lane }).map(drop)
    }

    /// Stores to each page through a mapping, logged in `lane`.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write_all(
        &mut self,
        mapping: usize,
        seed: u64,
        pages: std::ops::Range<u64>,
        lane: usize,
    ) -> HarnessResult<()> {
        self.write_pattern(mapping, Pattern { seed, percent: 100 }, pages, lane)
    }

    /// Reads one byte of each of the first `end` pages of a mapping.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn read_mapping(&mut self, mapping: usize, end: u64) -> HarnessResult<()> {
        self.writer(WriterCommand::Read { mapping, pages: Span { first: 0, end } }).map(drop)
    }

    /// Makes one write to some of these pages, logged in lane 0.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn write_once(
        &mut self,
        method: Method,
        seed: u64,
        pages: std::ops::Range<u64>,
    ) -> HarnessResult<()> {
        let writer = super::command::Writer { method, mapping: None };
        self.writer(WriterCommand::WriteOnce { writer, seed, pages: pages.into(), lane: 0 }).map(drop)
    }

    /// Frees the memory of these pages, logged in lane 0.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn free(&mut self, method: Method, pages: std::ops::Range<u64>) -> HarnessResult<()> {
        self.writer(WriterCommand::Free { method, pages: pages.into(), lane: 0 }).map(drop)
    }

    /// Ends a mapping by raw system calls.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn end_mapping(&mut self, mapping: usize, end: MappingEnd) -> HarnessResult<()> {
        self.writer(WriterCommand::EndMapping { mapping, end }).map(drop)
    }

    /// Sets the target of remote writes: a process and its mapping.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn set_remote(&mut self, pid: u32, mapping: AgentMapping) -> HarnessResult<()> {
        let AgentMapping { address, len, .. } = mapping;
        self.writer(WriterCommand::Remote { pid, address, len }).map(drop)
    }

    /// Writes for a time, and waits for the end.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn run(&mut self, run: Run<'_>) -> HarnessResult<()> {
        self.call(&run.command()?).map(drop)
    }

    /// Begins to write for a time.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn start_run(&mut self, run: Run<'_>) -> HarnessResult<()> {
        self.send(&run.command()?)
    }
}
