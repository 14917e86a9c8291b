//! Arguments of the commands that read page states or pass descriptors.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{PageState, SnapshotId};

use super::super::parse::{NewName, file_name, new_name, page_range, snapshot_id};
use super::{AccessArgs, LifetimeArgs};
use crate::cli::range::PartialRange;

/// Arguments of `fdmap stat`
#[derive(Args, Debug)]
pub struct StatArgs {
    /// Each a NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(required = true, value_parser = file_name)]
    pub files: Vec<FileName>,
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// Options for reading page states
#[derive(Args, Debug)]
#[command(next_help_heading = "Reading")]
pub struct ReadingArgs {
    /// Maximum age of the answer; 0s reads the kernel now
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Distinguish swap-cached from swapped pages; takes longer
    #[arg(long)]
    pub swap_cached: bool,
    /// Retain the snapshot for TIME, for fdmap diff
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub retain_for: Duration,
}

/// Arguments of `fdmap pages`
#[derive(Args, Debug)]
pub struct PagesArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Pages A up to B, excluding B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// Print only pages in these states
    #[arg(long, value_enum, value_delimiter = ',')]
    pub state: Vec<StateArg>,
    /// Page attributes to print
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ATTRIBUTE")]
    pub attributes: Vec<AttributeArg>,
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// Draw a map of the file
    #[arg(long, conflicts_with_all = ["state", "attributes", "entries"])]
    pub map: bool,
    /// Write little-endian 64-bit entries in the layout of /proc/PID/pagemap to FILE; - is stdout
    #[arg(long, value_name = "FILE", conflicts_with_all = ["state", "attributes"], value_hint = ValueHint::FilePath)]
    pub entries: Option<PathBuf>,
}

/// A page state
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StateArg {
    Hole,
    Resident,
    SwapCached,
    Swapped,
    Unknown,
}

impl StateArg {
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

/// A page attribute
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttributeArg {
    /// log2 of the number of pages in the folio
    Order,
    /// Folio flags
    Flags,
    /// Number of page tables that map the page
    MapCount,
    /// Whether the folio may be pinned for DMA
    Pinned,
    /// All attributes
    All,
}

/// Arguments of `fdmap lookup`
#[derive(Args, Debug)]
pub struct LookupArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Page indexes
    #[arg(required = true, value_name = "PAGE")]
    pub pages: Vec<u64>,
    /// Page attributes to print
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ATTRIBUTE")]
    pub attributes: Vec<AttributeArg>,
    /// Maximum age of the answer; 0s reads the kernel now
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Distinguish swap-cached from swapped pages
    #[arg(long)]
    pub swap_cached: bool,
}

/// Arguments of `fdmap diff`
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Older snapshot, retained with --retain-for
    #[arg(value_parser = snapshot_id, required_unless_present = "over", conflicts_with = "over")]
    pub from: Option<SnapshotId>,
    /// Newer snapshot [default: the current state]
    #[arg(value_parser = snapshot_id)]
    pub to: Option<SnapshotId>,
    /// Read the file, wait for TIME, read it again and compare
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub over: Option<Duration>,
    /// Compare only pages A up to B, excluding B
    #[arg(long, value_name = "A..B", value_parser = page_range)]
    pub pages: Option<PartialRange>,
    /// Retain the newer snapshot for TIME
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub retain_for: Duration,
    /// Exit with 1 if there are differences
    #[arg(long)]
    pub exit_code: bool,
}

/// Arguments of `fdmap open`
#[derive(Args, Debug)]
pub struct OpenArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Open for reading and writing
    #[arg(long, short)]
    pub write: bool,
    /// Descriptor number in the command; also in the environment variable FDMAP_FD
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(3..1024))]
    pub fd: i32,
    /// Command and its arguments
    #[arg(required = true, last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<std::ffi::OsString>,
}

/// Arguments of `fdmap adopt`
#[derive(Args, Debug)]
pub struct AdoptArgs {
    /// NAME in the service, or USER/NAME to make USER the owner [default: the memfd's name]
    #[arg(value_parser = new_name)]
    pub name: Option<NewName>,
    /// Descriptor inherited by this command; with --pid, a descriptor of that process
    #[arg(long, value_name = "N", conflicts_with = "path", required_unless_present_any = ["path", "pid"])]
    pub fd: Option<i32>,
    /// Path of the file, such as /proc/PID/fd/N
    #[arg(long, value_hint = ValueHint::FilePath)]
    pub path: Option<PathBuf>,
    #[command(flatten)]
    pub process: AdoptProcessArgs,
    #[command(flatten)]
    pub lifetime: LifetimeArgs,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// Options for adopting memory of a running process
#[derive(Args, Debug)]
#[command(next_help_heading = "Running process")]
pub struct AdoptProcessArgs {
    /// Adopt the memfds of process PID, or the files selected by --fd or --all
    #[arg(long, short, value_name = "PID", conflicts_with = "path", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Adopt all shared memory that the process can write: also /dev/shm, System V and anonymous memory, and files
    /// without a descriptor
    #[arg(long, requires = "pid", conflicts_with = "fd")]
    pub all: bool,
    /// Track writes through its mappings. Stops one thread briefly
    #[arg(long, requires = "pid")]
    pub track: bool,
    /// NAME in the service, or USER/NAME to make USER the owner
    #[arg(long = "name", value_name = "NAME", id = "named", requires = "pid", conflicts_with = "name", value_parser = new_name)]
    pub name: Option<NewName>,
    /// Permit ending a system call with EINTR if every thread of the process is in a timed wait
    #[arg(long, requires = "track")]
    pub allow_eintr: bool,
    /// Pid of the fdmap process that started this one; they end together
    #[arg(long, hide = true, value_name = "PID", requires = "track", env = super::super::ADOPT_FOR, hide_env = true)]
    pub on_behalf_of: Option<u32>,
}

/// Arguments of `fdmap detach`
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// Process whose mappings to detach
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: u32,
    /// Do not delete files
    #[arg(long)]
    pub keep_files: bool,
}

/// Arguments of `fdmap snapshot`
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Pages A up to B, excluding B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// Layout of the page states
    #[arg(long, value_enum, default_value_t = LayoutArg::Entries)]
    pub layout: LayoutArg,
    /// Maximum age of the snapshot; 0s reads the kernel now
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration)]
    pub max_age: Duration,
    /// Write header and page states to FILE; - is stdout
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}

/// Layout of a shared snapshot
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// One 64-bit pagemap entry per page
    Entries,
    /// 2 bits per page
    States,
}

/// Arguments of `fdmap compare`
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Process whose pagemap to compare
    #[arg(long, short, value_name = "PID")]
    pub pid: u32,
    /// Compare only mappings of this file [default: all files that you may inspect]
    #[arg(value_parser = file_name)]
    pub file: Option<FileName>,
    /// List the first N misreported pages of each mapping
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub first: usize,
    /// Exit with 1 if pagemap misreports any page
    #[arg(long)]
    pub exit_code: bool,
}
