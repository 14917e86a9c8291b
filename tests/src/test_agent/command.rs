//! The commands of a test agent and its replies: one JSON value per line.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::operation::OperationCommand;
pub use super::service_file::FileOf;
use crate::no_lost_writes::method::{Method, NoSuchMethod};
use crate::pattern::Pattern;

/// The pages from `first` up to, but not including, `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub first: u64,
    pub end: u64,
}

impl From<std::ops::Range<u64>> for Span {
    fn from(range: std::ops::Range<u64>) -> Self {
        Self { first: range.start, end: range.end }
    }
}

impl Span {
    #[must_use]
    pub const fn range(self) -> std::ops::Range<u64> {
        self.first..self.end
    }
}

/// The commands of a test agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    File(FileCommand),
    Memfd(MemfdCommand),
    Writer(WriterCommand),
    Operation(OperationCommand),
    /// Asks the service to track the file without a mapping that could be tracked. The refusal is the reply.
    Claim(FileOf),
    /// Asks the service to track a file of the agent in another process.
    TrackFor {
        runtime_dir: PathBuf,
        pid: u32,
    },
    /// `prctl(PR_SET_DUMPABLE, 0)`
    SetUndumpable,
    /// Executes another program, which reads its standard input to the end.
    Exec,
    /// `exit`, without unmapping anything first. There is no reply.
    Exit,
    /// Returns from `main`, which harvests and unmaps. There is no reply.
    Return,
}

/// The file that the agent has open and mapped at an address aligned to 2 MiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileCommand {
    /// Opens and maps a file in place of the previous one.
    Open(FileOf),
    /// Maps the file in which [`FileCommand::March`] counts pages: those begun at offset 0, those done at offset 8.
    MapProgress(FileOf),
    /// Writes the pages of a pattern.
    Fill { pattern: Pattern, pages: Span },
    /// Replies with the number of pages whose content differs from the pattern.
    Verify { pattern: Pattern, pages: Span },
    /// Reads one byte of each page.
    Read(Span),
    /// `fallocate(FALLOC_FL_PUNCH_HOLE)`
    Punch(Span),
    /// `fallocate`
    Allocate(Span),
    /// `ftruncate` to a size in bytes.
    Truncate(u64),
    /// `madvise(MADV_HUGEPAGE)`
    AdviseHugePages,
    /// `madvise(MADV_PAGEOUT)`
    PageOut,
    /// Writes page after page and counts them in the progress file.
    March(Span),
    /// Reads and writes random pages of the first `pages`; replies with their number.
    Churn { seed: u64, pages: u64, millis: u64 },
    /// Truncates the file to one page and extends it to `pages` again, `times` times.
    Flap { seed: u64, pages: u64, times: u64 },
}

/// A memfd of the agent, mapped once. The agent has one thread while it executes only these commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemfdCommand {
    /// Creates and maps the memfd. The size of hugetlb pages is in bytes, 0 for shmem.
    Create {
        bytes: u64,
        hugetlb: u64,
    },
    /// Creates a userfaultfd; replies with its descriptor number.
    CreateUserfaultfd,
    CloseUserfaultfd,
    /// Writes the first byte of a page.
    Write(u64),
    /// Reads the first byte of a page.
    Read(u64),
    PageOut,
    Unmap,
    /// Maps anonymous memory over the mapping.
    Cover,
    /// Duplicates the mapping by `mremap` with an old length of 0; replies with the address.
    Duplicate,
    /// `setuid` to 65534.
    BecomeUnprivileged,
    /// Opens `/proc/self/pagemap`.
    OpenPagemap,
    /// Forks a child that writes pages on request; replies with its pid.
    Fork,
    /// Writes the first byte of a page in the child.
    ChildWrite(u64),
}

/// Writes to a file of a service, each logged in [`crate::no_lost_writes::log::Log`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriterCommand {
    OpenLog(PathBuf),
    /// Maps the file through the client library; replies with the mapping.
    Map {
        file: FileOf,
        tracked: bool,
    },
    /// Unmaps a mapping through the client library.
    Unmap(usize),
    /// Sets the file on disk that direct I/O reads.
    Source(PathBuf),
    /// Sets the block device over the file.
    Device(PathBuf),
    /// Sets the target of remote writes: a process and its mapping of the file.
    Remote {
        pid: u32,
        address: usize,
        len: usize,
    },
    /// Stores to the pages of a pattern, without a log.
    Poke {
        mapping: usize,
        pages: Span,
    },
    /// Stores to the pages of a pattern; replies with their number.
    Fill {
        mapping: usize,
        pattern: Pattern,
        pages: Span,
        lane: usize,
    },
    /// Reads one byte of each page.
    Read {
        mapping: usize,
        pages: Span,
    },
    PageOut(usize),
    /// Forks children, or has them write.
    Children {
        mapping: usize,
        command: ChildrenCommand,
    },
    /// Installs a guard region over some pages, and removes it. `process`: by process_madvise.
    Guard {
        mapping: usize,
        pages: Span,
        process: bool,
    },
    /// Forks a child that writes the first byte of a page and exits. It leaves no trace in this process or in the last pid of
    /// the host.
    ForkUnnoticed {
        mapping: usize,
        page: u64,
    },
    /// Ends a mapping by raw system calls.
    EndMapping {
        mapping: usize,
        end: MappingEnd,
    },
    /// Maps the file untracked, stores to the pages of a pattern, and unmaps it.
    FillUntracked {
        pattern: Pattern,
        pages: Span,
        lane: usize,
    },
    /// Makes one write to some of these pages.
    WriteOnce {
        writer: Writer,
        seed: u64,
        pages: Span,
        lane: usize,
    },
    /// Frees the memory of these pages by [`Method::Punch`] or [`Method::Remove`].
    Free {
        method: Method,
        pages: Span,
        lane: usize,
    },
    /// Writes for a time. Each writer has its own thread and its own lane, starting with `lane`.
    Run {
        writers: Vec<Writer>,
        millis: u64,
        seed: u64,
        pages: Span,
        lane: usize,
    },
}

/// Forked children that have all mappings of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChildrenCommand {
    /// Forks children that run until [`Self::End`], or the end of the agent; replies with the time of the slowest fork, in microseconds.
    Fork { count: u64 },
    /// The child, numbered from 0, stores to the page.
    Write { child: usize, page: u64 },
    /// Forks children in sequence, each of which stores to the page and exits; replies with the time of the slowest fork, in
    /// microseconds.
    ForkBriefly { count: u64, page: u64 },
    /// Kills all children, and waits for their end.
    End,
}

/// One writing thread: its method, and its mapping if that is not mapping 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writer {
    pub method: Method,
    pub mapping: Option<usize>,
}

impl FromStr for Writer {
    type Err = NoSuchMethod;

    /// `METHOD` or `METHOD@MAPPING`
    fn from_str(word: &str) -> Result<Self, NoSuchMethod> {
        let (method, mapping) = word.split_once('@').map_or((word, None), |(method, at)| (method, Some(at)));
        let mapping = mapping.map(str::parse).transpose().map_err(|_| NoSuchMethod(word.to_owned()))?;
        Ok(Self { method: method.parse()?, mapping })
    }
}

/// How a mapping of the client library ends without the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MappingEnd {
    Unmap,
    /// `munmap` of the middle half.
    UnmapPart,
    /// Anonymous memory replaces it.
    CoverAnonymous,
    /// An untracked mapping of the same file replaces it.
    CoverSameFile,
    /// Anonymous memory replaces its first half.
    CoverPart,
    /// `mremap` to another address.
    Move,
    /// `mremap` of the first half to another address.
    MovePart,
    /// `mremap` to half its length.
    Shrink,
    /// `mremap` with an old length of 0: a second mapping.
    Duplicate,
    /// `mremap(MREMAP_DONTUNMAP)`: a second mapping takes the page tables.
    LeaveBehind,
}

/// The replies of a test agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Number(u64),
    Mapping(AgentMapping),
    Pages(Span),
    /// A new memfd: its descriptor and the address of its mapping.
    Memfd {
        fd: i32,
        address: u64,
    },
    /// The command failed.
    Failed(String),
}

/// A mapping of an agent: its number, address and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentMapping {
    pub number: usize,
    pub address: usize,
    pub len: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_replies_survive_json() {
        let file = FileOf { runtime_dir: "/run/a b".into(), name: "ram".to_owned() };
        let writers: Vec<Writer> = "store remap@1".split(' ').map(|word| word.parse().unwrap()).collect();
        assert_eq!(writers[1], Writer { method: Method::Remap, mapping: Some(1) });
        assert!("store@x".parse::<Writer>().is_err());
        for command in [
            Command::Claim(file.clone()),
            Command::Writer(WriterCommand::Map { file, tracked: true }),
            Command::Writer(WriterCommand::Run {
                writers,
                millis: 1,
                seed: u64::MAX,
                pages: (3..9).into(),
                lane: 2,
            }),
        ] {
            let line = serde_json::to_string(&command).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Command>(&line).unwrap(), command);
        }
    }
}
