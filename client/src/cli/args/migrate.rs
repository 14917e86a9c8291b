//! Arguments of `fdmap migrate`, `fdmap receive` and `fdmap fence`.

use std::ffi::OsString;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueHint};
use fdmap_client::proto::FileName;

use super::super::parse::{NewName, file_name, new_name};
use super::{AccessArgs, CompressArg, LifetimeArgs};

/// Arguments of `fdmap migrate`
///
/// Sends all pages with data while the writers run, then what they have written since, until the rest fits --downtime. Then it pauses the
/// writers, sends the rest, compares digests of both files, fences the file here, and has the destination complete its own. After an
/// error and ^C the writers are resumed, and the destination has nothing. After success the writers stay paused: end them.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("pausing").required(true).args(["pause", "freeze_cgroup", "paused", "await_finalize"])))]
pub struct MigrateArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Where fdmap receive listens. Needs --tls-ca, --tls-cert and --tls-key
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    pub to: String,
    /// Pause the writers when the rest can be sent in this time, by the rate so far
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = humantime::parse_duration)]
    pub downtime: Duration,
    /// Pause the writers after this number of rounds at the latest
    #[arg(long, value_name = "N", default_value = "8")]
    pub rounds: NonZero<u32>,
    /// Compress the pages
    #[arg(long, value_enum, default_value = "none")]
    pub compress: CompressArg,
    /// Threads that read and compress [default: the number of processors]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZero<usize>>,
    /// Give up if a broken connection stays broken for this time
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    pub reconnect_within: Duration,
    /// Shell command that pauses the writers, and returns when no write is in progress, direct I/O included
    #[arg(long, value_name = "COMMAND", help_heading = "Pause")]
    pub pause: Option<String>,
    /// Shell command that resumes them after an error
    #[arg(long, value_name = "COMMAND", requires = "pause", help_heading = "Pause")]
    pub resume: Option<String>,
    /// Freeze this cgroup
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath, help_heading = "Pause")]
    pub freeze_cgroup: Option<PathBuf>,
    /// The writers are paused already, or there are none
    #[arg(long, help_heading = "Pause")]
    pub paused: bool,
    /// Send rounds until Finalize is called at the socket of --control, by a program that has paused the writers
    #[arg(long, requires = "control", help_heading = "Pause")]
    pub await_finalize: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// Control by other programs
#[derive(Args, Debug)]
pub struct ControlArgs {
    /// Serve fdmap.v1.MigrationControl (gRPC: Watch, Finalize, Cancel) at this unix socket, to root and to the caller. Only a stale socket of the
    /// caller may exist there
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub control: Option<PathBuf>,
}

/// Arguments of `fdmap receive`
///
/// Receives one file into the service on this host, and ends. A source needs a certificate that --tls-ca has signed. The file gets the
/// size, backing and seals that it has at the source; an administrator also gives it that owner and those rights, unless options name others.
/// A file that is not kept ends with its last user: give a command that uses it.
#[derive(Args, Debug)]
pub struct ReceiveArgs {
    /// Address to listen at, such as 0.0.0.0:7443. Port 0 selects a free one, which is printed
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    pub listen: String,
    /// NAME of the new file, or USER/NAME to make USER the owner [default: the name at the source]
    #[arg(long, value_parser = new_name)]
    pub name: Option<NewName>,
    /// Give up, and delete what was received, if a broken connection stays broken for this time
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    pub reconnect_within: Duration,
    #[command(flatten)]
    pub control: ControlArgs,
    #[command(flatten)]
    pub lifetime: LifetimeArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    /// Command and its arguments; it gets the file as descriptor 3, open for reading and writing
    #[arg(last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

/// Arguments of `fdmap fence`
///
/// No generation of a fenced file is closed, and it is not opened for writing. Processes that map it keep their mappings.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("change").required(true).args(["reason", "remove"])))]
pub struct FenceArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Why, such as "migrated to host.example"; users read it in errors
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// End the fence
    #[arg(long)]
    pub remove: bool,
}

fn host_and_port(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':').filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    parts.map(|_| text.to_owned()).ok_or_else(|| format!("{text:?} is not HOST:PORT"))
}
