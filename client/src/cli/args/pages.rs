//! Arguments of the commands that read page states or take descriptors.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{PageIndex, PageRange, PageState, SnapshotId};

use super::super::parse::{file_name, page_range, snapshot_id};
use super::AccessArgs;

/// Files to tell about
#[derive(Args, Debug)]
pub struct StatArgs {
    /// The files
    #[arg(required = true, value_parser = file_name)]
    pub files: Vec<FileName>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub reading: ReadingArgs,
}

/// How to read page states
#[derive(Args, Debug)]
#[command(next_help_heading = "Reading")]
pub struct ReadingArgs {
    /// How old the answer may be
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Tell swap-cached pages from swapped ones; takes longer
    #[arg(long)]
    pub swap_cached: bool,
    /// Keep what was read for so long, for fdmap diff
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub keep: Duration,
}

/// Pages to tell about
#[derive(Args, Debug)]
pub struct PagesArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Which pages, as A..B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// Only pages in these states
    #[arg(long, value_enum, value_delimiter = ',')]
    pub state: Vec<StateArg>,
    /// Attributes to tell as well
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHICH")]
    pub attributes: Vec<AttributeArg>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub reading: ReadingArgs,
    /// Draw the file
    #[arg(long, conflicts_with_all = ["state", "attributes", "entries"])]
    pub map: bool,
    /// Write little-endian 64-bit entries, as /proc/PID/pagemap has them, to a file, or to stdout for -
    #[arg(long, value_name = "FILE", conflicts_with_all = ["state", "attributes"], value_hint = ValueHint::FilePath)]
    pub entries: Option<PathBuf>,
}

/// A range whose ends may be left out
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialRange {
    /// The first page.
    pub start: PageIndex,
    /// The page after the last; `None` is the end of the file.
    pub end: Option<PageIndex>,
}

impl PartialRange {
    /// With the end of the file put in.
    #[must_use]
    pub fn within(self, file_pages: u64) -> Option<PageRange> {
        PageRange::new(self.start, self.end.unwrap_or(PageIndex(file_pages)))
    }
}

/// A page state
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum StateArg {
    Hole,
    Resident,
    SwapCached,
    Swapped,
    Unknown,
}

impl StateArg {
    /// The state.
    #[must_use]
    pub const fn state(self) -> PageState {
        match self {
            Self::Hole => PageState::Hole,
            Self::Resident => PageState::Resident,
            Self::SwapCached => PageState::SwapCached,
            Self::Swapped => PageState::Swapped,
            Self::Unknown => PageState::Unknown,
        }
    }
}

/// An attribute of pages
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttributeArg {
    /// log2 of the pages in the folio
    Order,
    /// The folio's flags
    Flags,
    /// By how many page tables the page is mapped
    MapCount,
    /// Whether the folio may be pinned for DMA
    Pinned,
    /// All of these
    All,
}

/// Pages to look up
#[derive(Args, Debug)]
pub struct LookupArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// The pages
    #[arg(required = true, value_name = "PAGE")]
    pub pages: Vec<u64>,
    /// Attributes to tell as well
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHICH")]
    pub attributes: Vec<AttributeArg>,
    /// How old the answer may be
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Tell swap-cached pages from swapped ones
    #[arg(long)]
    pub swap_cached: bool,
}

/// What to compare
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// The older snapshot, from --keep
    #[arg(value_parser = snapshot_id, required_unless_present = "over", conflicts_with = "over")]
    pub from: Option<SnapshotId>,
    /// The newer one [default: the file as it is now]
    #[arg(value_parser = snapshot_id)]
    pub to: Option<SnapshotId>,
    /// Compare now with then: read the file, wait so long, and read it again
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub over: Option<Duration>,
    /// Only these pages
    #[arg(long, value_name = "A..B", value_parser = page_range)]
    pub pages: Option<PartialRange>,
    /// Keep what is read now for so long
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub keep: Duration,
    /// Exit with 1 if there are changes
    #[arg(long)]
    pub exit_code: bool,
}

/// What to run
#[derive(Args, Debug)]
pub struct OpenArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// For reading and writing
    #[arg(long, short)]
    pub write: bool,
    /// The descriptor's number in the command; FDMAP_FD tells it as well
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(3..1024))]
    pub fd: i32,
    /// The command and its arguments
    #[arg(required = true, last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<std::ffi::OsString>,
}

/// Shared memory to give to the service
#[derive(Args, Debug)]
pub struct AdoptArgs {
    /// Its name in the service [default: the memfd's own]
    pub name: Option<String>,
    /// A descriptor that this command was started with; with --pid, one of that process
    #[arg(long, value_name = "N", conflicts_with = "path", required_unless_present_any = ["path", "pid"])]
    pub fd: Option<i32>,
    /// A path to it, such as /proc/PID/fd/N
    #[arg(long, value_hint = ValueHint::FilePath)]
    pub path: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub process: AdoptProcessArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub access: AccessArgs,
}

/// A running process whose memory is to be adopted
#[derive(Args, Debug)]
#[command(next_help_heading = "Of a running process")]
pub struct AdoptProcessArgs {
    /// The process, which needs to know nothing of it: its memfds, or those that --fd and --all say
    #[arg(long, short, value_name = "PID", conflicts_with = "path", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// All shared memory that it can write to: also of /dev/shm, System V and anonymous, and what it has no descriptor of
    #[arg(long, requires = "pid", conflicts_with = "fd")]
    pub all: bool,
    /// Have its writes through mappings observed: one of its threads is stopped for a moment
    #[arg(long, requires = "pid")]
    pub track: bool,
    /// As NAME
    #[arg(long = "name", value_name = "NAME", id = "named", requires = "pid", conflicts_with = "name")]
    pub name: Option<String>,
    /// Permit ending a system call with EINTR if every thread of the process is in a timed wait
    #[arg(long, requires = "track")]
    pub allow_eintr: bool,
    /// Pid of the fdmap process that started this one; they end together
    #[arg(long, hide = true, value_name = "PID", requires = "track", env = super::super::ADOPT_FOR, hide_env = true)]
    pub on_behalf_of: Option<u32>,
}

/// What to let go of
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The file of the snapshot: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name, required_unless_present = "pid", requires = "snapshot")]
    pub file: Option<FileName>,
    /// The snapshot
    #[arg(value_parser = snapshot_id)]
    pub snapshot: Option<SnapshotId>,
    /// A process whose writes are to be observed no longer. Files that were adopted, and of which no other mapping is
    /// tracked, are deleted from the service if they are yours; whoever has them mapped keeps them
    #[arg(long, short, value_name = "PID", conflicts_with = "file", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Delete no files
    #[arg(long, requires = "pid")]
    pub keep: bool,
}

/// A shared snapshot to fetch
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Which pages, as A..B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// How it tells the states
    #[arg(long, value_enum, default_value_t = LayoutArg::Entries)]
    pub layout: LayoutArg,
    /// How old it may be
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Write it, header and all, to a file, or to stdout for -
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}

/// The layout of a shared snapshot
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// A 64-bit pagemap entry for each page
    Entries,
    /// 2 bits for each page
    States,
}

/// What to compare
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// The process
    #[arg(long, short, value_name = "PID")]
    pub pid: u32,
    /// Only its mappings of this file [default: of every file that you may see]
    #[arg(value_parser = file_name)]
    pub file: Option<FileName>,
    /// List the first N pages of each mapping that pagemap tells wrongly
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub first: usize,
    /// Exit with 1 if pagemap tells any page wrongly
    #[arg(long)]
    pub exit_code: bool,
}
