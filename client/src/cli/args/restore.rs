//! Arguments of `fdmap restore`.

use std::ffi::OsString;
use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use fdmap_client::image::ImageLocation;

use super::super::parse::{NewName, image_location, new_name};
use super::{AccessArgs, LifetimeArgs};

/// Arguments of `fdmap restore`
///
/// Creates the files of an image that fdmap dump or CRIU wrote, with their content, size and seals. An administrator also restores their
/// owners and rights; with an option for access, the caller is the owner unless --uid or --name has another one. A file that is not kept
/// ends with its last user: give a command that uses it.
///
/// With --lazy no file is created: private memory of another process, such as that of a Firecracker guest, is filled from the image while the
/// process runs. The process connects to --uffd-socket and passes its userfaultfd. fdmap exits when all pages are copied, or with the command.
#[derive(Args, Debug)]
pub struct RestoreArgs {
    /// Directory or URL (s3://BUCKET/PREFIX, file:///PATH) of the image; its parents are found by their links. The environment variables
    /// AWS_* have the endpoint, the region and the credentials of S3
    #[arg(value_parser = image_location(), value_hint = ValueHint::DirPath)]
    pub image: ImageLocation,
    /// Restore only the file of this name or number (shmid) in the image
    #[arg(long, value_name = "FILE")]
    pub file: Option<String>,
    /// NAME of the new file, or USER/NAME to make USER the owner [default: the name in the image]
    #[arg(long, value_parser = new_name)]
    pub name: Option<NewName>,
    /// Fill memory of a process on first access, and in the background, instead of creating files
    #[arg(long, requires = "uffd_socket", conflicts_with_all = ["name", "jobs", "keep", "ephemeral", "mode", "owner", "group", "other", "uid", "gid"])]
    pub lazy: bool,
    /// Socket to create, mode 0600. It accepts one message: a userfaultfd and a JSON list of mappings, as Firecracker sends them
    #[arg(long, value_name = "PATH", requires = "lazy", value_hint = ValueHint::FilePath)]
    pub uffd_socket: Option<PathBuf>,
    /// Threads that read, decompress and write [default: the number of processors, and for S3 at least 8]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZero<usize>>,
    #[command(flatten)]
    pub lifetime: LifetimeArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    /// Command and its arguments; it gets the files as descriptors 3, 4, ..., open for reading and writing. With --lazy it gets the path of
    /// the socket in FDMAP_UFFD_SOCKET
    #[arg(last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}
