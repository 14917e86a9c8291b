//! Arguments of `fdmap`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use fdmap_client::grpc::{Tls, TlsAddress};
use fdmap_client::proto::{Access, FileName, Lifetime, Right, Rights, Seal, SnapshotId};
use fdmap_client::{Endpoint, Timeouts};

mod dump;
mod exec;
mod migrate;
mod pages;
mod restore;
mod tracking;

pub use dump::{CompressArg, DumpArgs, PauseArgs};
pub use exec::ExecArgs;
pub use migrate::{ControlArgs, FenceArgs, MigrateArgs, ReceiveArgs};
pub use pages::{
    AdoptArgs, AttributeArg, CompareArgs, DetachArgs, DiffArgs, LayoutArg, LookupArgs, OpenArgs, PagesArgs,
    ReadingArgs, SnapshotArgs, StatArgs, StateArg,
};
pub use restore::RestoreArgs;
pub use tracking::{
    CheckpointArgs, CursorArgs, CursorCommand, DirtyArgs, DirtyRateArgs, DoctorArgs, PolicyArg, WatchArgs,
};

use super::CliError;
use super::parse::{Huge, NewName, access_of, file_name, new_name, size, snapshot_id, user};

const EXAMPLES: &str = "\
Examples:
  fdmap create ram --size 16G           create a file of 16 GiB
  fdmap pages ram 0..1024               print the states of its first 1024 pages
  fdmap pages ram --map                 draw all of it
  fdmap stat ram --json | jq .pages     page counts as JSON
  fdmap compare --pid 1234              list what pagemap misreports about a process
  fdmap checkpoint ram                  close a generation of writes, for example 7
  sleep 1; fdmap checkpoint ram         close the next one: the writes of this second
  fdmap dirty ram --since 7             list the pages written after generation 7
  fdmap dump ram images/1               write its content to an image in CRIU's format
  fdmap dump ram images/2 --parent images/1  write what changed since then
  fdmap restore images/2 --name copy    create a file with this content
  fdmap restore images/2 --lazy --uffd-socket vm.sock  fill the memory of a VMM from it, on demand
  fdmap migrate ram --to host:7443 ...  move it to another host, where fdmap receive runs
  fdmap doctor --pid 1234               check whether writes of a process can be tracked
  fdmap open ram -- sh -c 'cat <&3'     run a command with the file as descriptor 3
  fdmap adopt --pid 1234 --all --track  adopt the shared memory of a running process
  fdmap exec -- qemu-system-x86_64 ...  run a program and adopt its memfds

FILE is NAME for a file of your own, USER/NAME for a file of another user (a login name of this host, or a user id), or an id
as in id:0123456789abcdef. Sizes accept the units K, M, G and T (powers of 1024). Pages are
indexes of base pages in the file: 0..1024 and ..1024 are the first 1024 pages, 1024.. are the others.
";

/// Exit codes, for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  with --exit-code: there are differences, changes or coverage gaps; doctor: a capability is missing, or writes of
     the process cannot be tracked completely
  2  invalid command line
  3  no such file, snapshot or cursor
  4  permission denied
  5  the service is unreachable or did not respond in time
  6  the service rejected the request for another reason
  7  a local error";

/// Inspect and manage the files of a running fdmapd: page states, swap slots and written pages
#[derive(Debug, Parser)]
#[command(name = "fdmap", version, after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
pub struct Cli {
    #[command(flatten)]
    pub service: ServiceArgs,
    /// Print JSON for programs
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// How to reach the service
#[derive(Args, Debug)]
#[command(next_help_heading = "Service")]
pub struct ServiceArgs {
    /// Directory of both sockets [default: /run/fdmap]
    #[arg(long, global = true, value_name = "DIR", env = "FDMAP_RUNTIME_DIR", value_hint = ValueHint::DirPath)]
    runtime_dir: Option<PathBuf>,
    /// gRPC socket [default: DIR/fdmap.sock]
    #[arg(long, global = true, value_name = "PATH", env = "FDMAP_SOCKET", value_hint = ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// fdpass socket [default: DIR/fdpass.sock]
    #[arg(long, global = true, value_name = "PATH", env = "FDMAP_FDPASS_SOCKET", value_hint = ValueHint::FilePath)]
    fdpass_socket: Option<PathBuf>,
    /// Connect over TCP, for example to https://host:7443. Commands that pass file descriptors are unavailable over TCP
    #[arg(long, global = true, value_name = "URI", requires_all = ["tls_ca", "tls_cert", "tls_key"])]
    tcp: Option<String>,
    /// Certificate of the authority that signed the other side's certificate, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
    /// Own certificate, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_cert: Option<PathBuf>,
    /// Private key of the own certificate, PEM
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_key: Option<PathBuf>,
    /// Name in the service's certificate [default: the host name]
    #[arg(long, global = true, value_name = "NAME")]
    tls_server_name: Option<String>,
    /// Maximum time to wait for a response, or for the next message of a stream
    #[arg(long, global = true, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

impl ServiceArgs {
    /// Socket paths.
    pub fn endpoint(&self) -> Endpoint {
        let default = self.runtime_dir.clone().map_or_else(Endpoint::default, Endpoint::in_runtime_dir);
        Endpoint {
            socket: self.socket.clone().unwrap_or(default.socket),
            fdpass: self.fdpass_socket.clone().unwrap_or(default.fdpass),
        }
    }

    /// TCP address, if given.
    pub fn tcp(&self) -> Option<TlsAddress> {
        let (ca, cert, key) = (self.tls_ca.clone()?, self.tls_cert.clone()?, self.tls_key.clone()?);
        let server_name = self.tls_server_name.clone();
        Some(TlsAddress { uri: self.tcp.clone()?, tls: Tls { ca, cert, key, server_name } })
    }

    /// Certificates, for a connection to another host.
    ///
    /// # Errors
    /// [`CliError::Usage`] if one of them is missing.
    pub fn tls(&self) -> Result<Tls, CliError> {
        let given = |path: &Option<PathBuf>, option: &str| {
            path.clone().ok_or_else(|| CliError::Usage(format!("this command needs {option}")))
        };
        Ok(Tls {
            ca: given(&self.tls_ca, "--tls-ca")?,
            cert: given(&self.tls_cert, "--tls-cert")?,
            key: given(&self.tls_key, "--tls-key")?,
            server_name: self.tls_server_name.clone(),
        })
    }

    pub fn timeouts(&self) -> Timeouts {
        Timeouts { connect: Timeouts::default().connect.min(self.timeout), answer: self.timeout }
    }
}

/// Commands
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a file
    Create(CreateArgs),
    /// List the files that you may inspect
    Ls,
    /// Print metadata and page counts of files
    Stat(StatArgs),
    /// Print the state of each page of a file
    Pages(PagesArgs),
    /// Print the states of individual pages
    Lookup(LookupArgs),
    /// Print the pages whose state differs from a retained snapshot, or changes during some time
    Diff(DiffArgs),
    /// Delete a retained snapshot before its retention time ends
    DropSnapshot {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        /// Snapshot id, as printed with --retain-for
        #[arg(value_parser = snapshot_id)]
        snapshot: SnapshotId,
    },
    /// Run a command with a descriptor of a file
    Open(OpenArgs),
    /// Run an unmodified command whose memfds the service adopts
    Exec(ExecArgs),
    /// Transfer a memfd, or the shared memory of a running process, to the service
    Adopt(AdoptArgs),
    /// Stop tracking the mappings of a process
    ///
    /// Also deletes adopted files of yours that have no other tracked mapping; processes that map them keep the memory.
    Detach(DetachArgs),
    /// Remove files from the service; processes that have them open or mapped keep the memory
    #[command(visible_alias = "rm")]
    Delete {
        /// Each a NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(required = true, value_parser = file_name)]
        files: Vec<FileName>,
    },
    /// Change the size of a file
    Resize {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        /// New size, such as 512M
        #[arg(value_parser = size)]
        size: u64,
    },
    /// Add seals to a file
    Seal {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        /// Seals to add
        #[arg(required = true, value_enum)]
        seals: Vec<SealArg>,
    },
    /// Change owner, group and rights of a file
    Access {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        #[command(flatten)]
        access: AccessArgs,
    },
    /// Fetch the page states of a file as a shared snapshot
    Snapshot(SnapshotArgs),
    /// Compare /proc/PID/pagemap of a process with the page states of the mapped files
    Compare(CompareArgs),
    /// Close the open generation of writes to a file
    Checkpoint(CheckpointArgs),
    /// Print the pages of a file that were written after a generation
    Dirty(DirtyArgs),
    /// Manage cursors: generations that the service stores for a consumer of changes
    #[command(subcommand)]
    Cursor(CursorCommand),
    /// Print the tracked mappings of a file and the writers that are not observed
    Coverage {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Seal a file against new writers; existing mappings stay writable. Irreversible
    SealWriters {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Set how checkpoints of a file treat unobserved writers
    CoveragePolicy {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
        #[arg(value_enum)]
        policy: PolicyArg,
    },
    /// Measure the dirty page rate of a file
    DirtyRate(DirtyRateArgs),
    /// Write the content of files to an image in CRIU's format, completely or what changed since a parent image
    Dump(DumpArgs),
    /// Create files from an image that fdmap dump or CRIU wrote
    Restore(RestoreArgs),
    /// Move a file to the service on another host, where fdmap receive runs
    Migrate(MigrateArgs),
    /// Receive a file that fdmap migrate sends from another host
    Receive(ReceiveArgs),
    /// Fence a file whose content has moved elsewhere, or end the fence
    Fence(FenceArgs),
    /// Print changes to files, or the checkpoints of one file, as they happen
    Watch(WatchArgs),
    /// List the capabilities of this host, or check whether writes of a process can be tracked
    Doctor(DoctorArgs),
    /// Print a shell completion script
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Arguments of `fdmap create`
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// NAME, unique among the files of the owner, or USER/NAME to make USER the owner
    #[arg(value_parser = new_name)]
    pub name: NewName,
    /// Size, such as 16G
    #[arg(long, short, value_name = "SIZE", value_parser = size)]
    pub size: u64,
    /// Huge pages: thp for transparent huge pages, or a hugetlb page size such as 2M
    #[arg(long, value_name = "thp|SIZE", value_parser = Huge::parse)]
    pub huge: Option<Huge>,
    /// Seals to add
    #[arg(long, value_enum, value_delimiter = ',')]
    pub seal: Vec<SealArg>,
    #[command(flatten)]
    pub lifetime: LifetimeArgs,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// When the file ends
#[derive(Args, Clone, Copy, Debug)]
pub struct LifetimeArgs {
    /// Keep the file until it is deleted. Only administrators may, and users whom fdmapd --allow-keep names
    /// [default: files that an administrator owns and creates are kept]
    #[arg(long, conflicts_with = "ephemeral")]
    keep: bool,
    /// Delete the file when no process uses it [default: files of other users]
    #[arg(long)]
    ephemeral: bool,
}

impl LifetimeArgs {
    /// `None`: the default of the service.
    pub const fn lifetime(self) -> Option<Lifetime> {
        match (self.keep, self.ephemeral) {
            (true, _) => Some(Lifetime::Kept),
            (_, true) => Some(Lifetime::Ephemeral),
            _ => None,
        }
    }
}

/// Owner, group and rights
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// Rights as an octal mode: r grants inspect and read; w grants write, checkpoint and evict; x grants migrate
    #[arg(long, value_name = "MODE", conflicts_with_all = ["owner", "group", "other"])]
    mode: Option<String>,
    /// Rights of the owner
    #[arg(long, value_enum, value_delimiter = ',')]
    owner: Option<Vec<RightArg>>,
    /// Rights of group members
    #[arg(long, value_enum, value_delimiter = ',')]
    group: Option<Vec<RightArg>>,
    /// Rights of all other users
    #[arg(long, value_enum, value_delimiter = ',')]
    other: Option<Vec<RightArg>>,
    /// Owner, a user id or a login name of this host; only administrators can change it
    #[arg(long, value_name = "USER", value_parser = user)]
    uid: Option<u32>,
    /// Group id
    #[arg(long)]
    gid: Option<u32>,
}

impl AccessArgs {
    /// Adds the owner that the name of a new file has, if any.
    ///
    /// # Errors
    /// [`CliError::Usage`] if `--uid` names another one.
    pub fn owned_by(mut self, owner: Option<u32>) -> Result<Self, CliError> {
        match (self.uid, owner) {
            (Some(uid), Some(owner)) if uid != owner => {
                return Err(CliError::Usage(format!("the name has owner {owner}, and --uid is {uid}")));
            }
            _ => self.uid = self.uid.or(owner),
        }
        Ok(self)
    }

    /// Applies the given options to `base`; `None` if none was given.
    ///
    /// # Errors
    /// [`CliError::Usage`] if the mode is invalid.
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

/// A right
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

/// A seal, as in fcntl(2)
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SealArg {
    /// No further seals can be added
    Seal,
    /// The file cannot shrink
    Shrink,
    /// The file cannot grow
    Grow,
    /// The content cannot change
    Write,
    /// No write(2) and no new writable mappings; existing mappings stay writable
    FutureWrite,
    /// The executable bits cannot change
    Exec,
}

impl SealArg {
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
    fn command_line_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sockets_are_in_the_runtime_dir_unless_given() {
        let cli = Cli::parse_from(["fdmap", "ls", "--runtime-dir", "/x", "--socket", "/y"]);
        let endpoint = cli.service.endpoint();
        assert_eq!(
            (endpoint.socket, endpoint.fdpass),
            (PathBuf::from("/y"), PathBuf::from("/x/fdpass.sock"))
        );
    }

    #[test]
    fn adopt_needs_a_descriptor_a_path_or_a_process() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        assert!(parse("fdmap adopt --fd 3") && parse("fdmap adopt ram --path /x"));
        assert!(parse("fdmap adopt --pid 7") && parse("fdmap adopt --pid 7 --fd 3 --track --name ram"));
        assert!(parse("fdmap adopt --pid 7 --all --track --allow-eintr"));
        for bad in
            ["", " --all", " --track --fd 3", " --pid 7 --all --fd 3", " --pid 7 --path /x", " --pid 0"]
        {
            assert!(!parse(&format!("fdmap adopt{bad}")), "{bad}");
        }
        assert!(parse("fdmap drop-snapshot ram 00000000000000ff") && !parse("fdmap drop-snapshot ram"));
        assert!(parse("fdmap detach --pid 7 --keep-files") && !parse("fdmap detach"));
    }

    #[test]
    fn owner_of_a_new_file_is_given_once() {
        let owner = |line: &str| {
            let Command::Create(CreateArgs { name, access, .. }) = Cli::parse_from(line.split(' ')).command
            else {
                panic!("{line} creates no file");
            };
            let base = Access::private(5, 6);
            access.owned_by(name.uid).map(|access| access.over(base).unwrap().map(|access| access.uid))
        };
        assert_eq!(owner("fdmap create ram --size 1M").unwrap(), None);
        assert_eq!(owner("fdmap create 7/ram --size 1M").unwrap(), Some(7));
        assert_eq!(owner("fdmap create ram --size 1M --uid root").unwrap(), Some(0));
        assert_eq!(owner("fdmap create 7/ram --size 1M --uid 7").unwrap(), Some(7));
        assert!(owner("fdmap create 7/ram --size 1M --uid 8").is_err());
    }

    #[test]
    fn diff_needs_a_snapshot_or_a_time() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["fdmap", "diff", "ram"], args].concat()).is_ok();
        assert!(parse(&["00000000000000ff"]) && parse(&["--over", "5s"]));
        assert!(!parse(&[]) && !parse(&["00000000000000ff", "--over", "5s"]));
    }
}
