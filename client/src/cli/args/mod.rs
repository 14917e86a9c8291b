//! The arguments of `fdmap`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use fdmap_client::grpc::{Tls, TlsAddress};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, Right, Rights, Seal};
use fdmap_client::{Endpoint, Timeouts};

mod exec;
mod pages;
mod tracking;

pub use exec::ExecArgs;
pub use pages::{
    AdoptArgs, AttributeArg, CompareArgs, DiffArgs, LayoutArg, LookupArgs, OpenArgs, PagesArgs, PartialRange,
    ReadingArgs, ReleaseArgs, SnapshotArgs, StatArgs, StateArg,
};
pub use tracking::{
    CheckpointArgs, CursorArgs, CursorCommand, DirtyArgs, DoctorArgs, PolicyArg, RateArgs, WatchArgs,
};

use super::CliError;
use super::parse::{Huge, access_of, file_name, size};

const EXAMPLES: &str = "\
Examples:
  fdmap create ram --size 16G           make a file of 16 GiB
  fdmap pages ram 0..1024               the states of its first 1024 pages
  fdmap pages ram --map                 all of it, drawn
  fdmap stat ram --json | jq .pages     counts for programs
  fdmap compare --pid 1234              what pagemap gets wrong about that process
  fdmap checkpoint ram                  close a generation of writes: 7, say
  fdmap dirty ram --since 7             the pages that were written after it
  fdmap doctor --pid 1234               would all that process writes be seen?
  fdmap open ram -- sh -c 'cat <&3'     a descriptor of it, as number 3
  fdmap adopt --pid 1234 --all --track  take over the shared memory of a running process
  fdmap exec -- qemu-system-x86_64 ...  a program whose memfds are taken over as it makes them

A file is named by its name, or by id:0123456789abcdef. Sizes take K, M, G and T (of 1024). Pages are numbers of
base pages in the file: 0..1024 are the first 1024, 1024.. the rest, ..1024 as 0..1024.
";

/// What the exit codes mean.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  with --exit-code: there are differences, or a checkpoint is not exact; doctor: something is missing,
     or not all that the process writes would surely be seen
  2  the command line cannot be understood
  3  no such file, snapshot or cursor
  4  a right is missing
  5  no service answers, or not in time
  6  the service refuses for another reason
  7  something else went wrong here";

/// Ask a running fdmapd for files, and which of their pages hold data and where
#[derive(Debug, Parser)]
#[command(name = "fdmap", version, after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
pub struct Cli {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: ServiceArgs,
    /// Print JSON for programs
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub command: Command,
}

/// Where the service is
#[derive(Args, Debug)]
#[command(next_help_heading = "Service")]
pub struct ServiceArgs {
    /// The folder of both sockets
    #[arg(long, global = true, value_name = "DIR", env = "FDMAP_RUNTIME_DIR", value_hint = ValueHint::DirPath)]
    runtime_dir: Option<PathBuf>,
    /// The gRPC socket [default: DIR/fdmap.sock]
    #[arg(long, global = true, value_name = "PATH", env = "FDMAP_SOCKET", value_hint = ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// The fdpass socket [default: DIR/fdpass.sock]
    #[arg(long, global = true, value_name = "PATH", env = "FDMAP_FDPASS_SOCKET", value_hint = ValueHint::FilePath)]
    fdpass_socket: Option<PathBuf>,
    /// A service by TCP, such as https://host:7443; what needs descriptors is not to be had there
    #[arg(long, global = true, value_name = "URI", requires_all = ["tls_ca", "tls_cert", "tls_key"])]
    tcp: Option<String>,
    /// The authority that signs the service's certificate, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
    /// Our certificate, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_key: Option<PathBuf>,
    /// The name in the service's certificate, if it is not the host's
    #[arg(long, global = true, value_name = "NAME")]
    tls_server_name: Option<String>,
    /// How long to wait for an answer, or for the next piece of one
    #[arg(long, global = true, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

impl ServiceArgs {
    /// The sockets.
    #[must_use]
    pub fn place(&self) -> Endpoint {
        let folder = self.runtime_dir.clone().map_or_else(Endpoint::default, Endpoint::in_folder);
        Endpoint {
            socket: self.socket.clone().unwrap_or(folder.socket),
            fdpass: self.fdpass_socket.clone().unwrap_or(folder.fdpass),
        }
    }

    /// The service by TCP, if that is where it is.
    #[must_use]
    pub fn tcp(&self) -> Option<TlsAddress> {
        let (ca, cert, key) = (self.tls_ca.clone()?, self.tls_cert.clone()?, self.tls_key.clone()?);
        let server_name = self.tls_server_name.clone();
        Some(TlsAddress { uri: self.tcp.clone()?, tls: Tls { ca, cert, key, server_name } })
    }

    /// How long to wait.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        Timeouts { connect: Timeouts::default().connect.min(self.timeout), answer: self.timeout }
    }
}

/// What to do
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a file
    Create(CreateArgs),
    /// List the files that you may see
    Ls,
    /// Tell about files and how many of their pages are in which state
    Stat(StatArgs),
    /// Tell the state of each page of a file
    Pages(PagesArgs),
    /// Tell about single pages
    Lookup(LookupArgs),
    /// Tell what changed since a snapshot that was kept, or during some time
    Diff(DiffArgs),
    /// Let go of a kept snapshot before its time, or of a process that was adopted
    Release(ReleaseArgs),
    /// Run a command with a descriptor of a file
    Open(OpenArgs),
    /// Run a command whose memfds are given to the service, without a change to it
    Exec(ExecArgs),
    /// Give a memfd to the service, or the memory of a running process
    Adopt(AdoptArgs),
    /// Make the service let go of files; whoever has them open or mapped keeps them
    #[command(visible_alias = "rm")]
    Delete {
        /// The files
        #[arg(required = true, value_parser = file_name)]
        files: Vec<FileName>,
    },
    /// Change the size of a file
    Resize {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        /// The new size, such as 512M
        #[arg(value_parser = size)]
        size: u64,
    },
    /// Add seals to a file
    Seal {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        /// The seals
        #[arg(required = true, value_enum)]
        seals: Vec<SealArg>,
    },
    /// Change who may do what with a file
    Access {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        #[command(flatten)]
        #[allow(missing_docs)]
        access: AccessArgs,
    },
    /// Fetch the page states of a file as a shared snapshot
    Snapshot(SnapshotArgs),
    /// Set what /proc/PID/pagemap says of a process's mappings against what the files are
    Compare(CompareArgs),
    /// Close a generation of the writes to a file
    Checkpoint(CheckpointArgs),
    /// Tell which pages of a file were written since a generation was closed
    Dirty(DirtyArgs),
    /// Work with cursors: generations that the service remembers for whoever copies what was written
    #[command(subcommand)]
    Cursor(CursorCommand),
    /// Tell who writes to a file, and how much of that is observed
    Coverage {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Let nobody else write to a file; those who have it mapped go on. It cannot be undone
    SealWriters {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Change what checkpoints of a file do about writers that are not observed
    CoveragePolicy {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        #[arg(value_enum)]
        #[allow(missing_docs)]
        policy: PolicyArg,
    },
    /// Measure how many pages of a file are written in a while
    Rate(RateArgs),
    /// Tell of files as they come, change and go, or of the checkpoints of one
    Watch(WatchArgs),
    /// Tell what this host and its service can do, and what is lost; or whether all that a process writes can be seen
    Doctor(DoctorArgs),
    /// Print a script that completes this command's arguments
    Completions {
        #[arg(value_enum)]
        #[allow(missing_docs)]
        shell: Shell,
    },
}

/// A file to make
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// Unique in the service
    pub name: String,
    /// Its size, such as 16G
    #[arg(long, short, value_name = "SIZE", value_parser = size)]
    pub size: u64,
    /// Huge pages: thp for transparent ones, or the size of hugetlb pages such as 2M
    #[arg(long, value_name = "thp|SIZE", value_parser = Huge::parse)]
    pub huge: Option<Huge>,
    /// Seals to add right away
    #[arg(long, value_enum, value_delimiter = ',')]
    pub seal: Vec<SealArg>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub access: AccessArgs,
}

/// Who may do what
#[derive(Args, Debug)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// Rights as an octal mode: r is see and read, w is write, checkpoint and evict, x is migrate
    #[arg(long, value_name = "MODE", conflicts_with_all = ["owner", "group", "other"])]
    mode: Option<String>,
    /// Rights of the owner
    #[arg(long, value_enum, value_delimiter = ',')]
    owner: Option<Vec<RightArg>>,
    /// Rights of members of the group
    #[arg(long, value_enum, value_delimiter = ',')]
    group: Option<Vec<RightArg>>,
    /// Rights of everybody else
    #[arg(long, value_enum, value_delimiter = ',')]
    other: Option<Vec<RightArg>>,
    /// The owner's user id; only root gives files away
    #[arg(long)]
    uid: Option<u32>,
    /// The group's id
    #[arg(long)]
    gid: Option<u32>,
}

impl AccessArgs {
    /// What was asked for, on top of `base`; `None` if nothing was.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a mode that is none.
    pub fn over(&self, base: Access) -> Result<Option<Access>, CliError> {
        let rights = |rights: &Option<Vec<RightArg>>| {
            rights.as_ref().map(|rights| rights.iter().map(|right| right.right()).collect::<Rights>())
        };
        access_of(
            base,
            self.mode.as_deref(),
            [rights(&self.owner), rights(&self.group), rights(&self.other)],
            self.uid,
            self.gid,
        )
    }
}

/// A right, or all of them
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum RightArg {
    Inspect,
    Read,
    Write,
    Checkpoint,
    Evict,
    Migrate,
}

impl RightArg {
    const fn right(self) -> Right {
        match self {
            Self::Inspect => Right::Inspect,
            Self::Read => Right::Read,
            Self::Write => Right::Write,
            Self::Checkpoint => Right::Checkpoint,
            Self::Evict => Right::Evict,
            Self::Migrate => Right::Migrate,
        }
    }
}

/// A seal, as fcntl(2) knows it
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SealArg {
    /// No further seals
    Seal,
    /// The file cannot get smaller
    Shrink,
    /// The file cannot get larger
    Grow,
    /// Nobody can write to it
    Write,
    /// Nobody new can write to it; those who have it mapped go on
    FutureWrite,
    /// Its executable bits cannot change
    Exec,
}

impl SealArg {
    /// The seal.
    #[must_use]
    pub const fn seal(self) -> Seal {
        match self {
            Self::Seal => Seal::Seal,
            Self::Shrink => Seal::Shrink,
            Self::Grow => Seal::Grow,
            Self::Write => Seal::Write,
            Self::FutureWrite => Seal::FutureWrite,
            Self::Exec => Seal::Exec,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sockets_follow_the_folder_unless_said() {
        let cli = Cli::parse_from(["fdmap", "ls", "--runtime-dir", "/x", "--socket", "/y"]);
        let place = cli.service.place();
        assert_eq!((place.socket, place.fdpass), (PathBuf::from("/y"), PathBuf::from("/x/fdpass.sock")));
    }

    #[test]
    fn descriptor_path_or_process_is_adopted() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        assert!(parse("fdmap adopt --fd 3") && parse("fdmap adopt ram --path /x"));
        assert!(parse("fdmap adopt --pid 7") && parse("fdmap adopt --pid 7 --fd 3 --track --name ram"));
        assert!(parse("fdmap adopt --pid 7 --all --track --allow-eintr"));
        for bad in
            ["", " --all", " --track --fd 3", " --pid 7 --all --fd 3", " --pid 7 --path /x", " --pid 0"]
        {
            assert!(!parse(&format!("fdmap adopt{bad}")), "{bad}");
        }
        assert!(parse("fdmap release ram 00000000000000ff") && parse("fdmap release --pid 7 --keep"));
        assert!(!parse("fdmap release ram") && !parse("fdmap release ram 00000000000000ff --pid 7"));
    }

    #[test]
    fn diff_takes_a_snapshot_or_a_time() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["fdmap", "diff", "ram"], args].concat()).is_ok();
        assert!(parse(&["00000000000000ff"]) && parse(&["--over", "5s"]));
        assert!(!parse(&[]) && !parse(&["00000000000000ff", "--over", "5s"]));
    }
}
