//! Arguments of `fdmap dump`.

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use fdmap_client::image::{Compression, ImageLocation};
use fdmap_client::proto::FileName;

use super::super::parse::{file_name, image_location};

/// Arguments of `fdmap dump`
///
/// The image has all writes that ended before the dump began. Without --pause and --freeze-cgroup the writers may run meanwhile: each page is
/// read by itself, and a page that is written meanwhile is in the next incremental image.
///
/// Swapped pages are read from their swap slots, so that nothing is swapped in, if the user may open the swap areas. Else they are swapped in,
/// and out again.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Each a NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f. All of them are in one image
    #[arg(required = true, value_parser = file_name)]
    pub files: Vec<FileName>,
    /// Directory or URL (s3://BUCKET/PREFIX, file:///PATH) of the image; created, or empty. The environment variables AWS_* have the
    /// endpoint, the region and the credentials of S3
    #[arg(value_parser = image_location(), value_hint = ValueHint::DirPath)]
    pub image: ImageLocation,
    /// Do not store again what did not change since this image. It is in the same bucket, or both are in directories
    #[arg(long, value_name = "IMAGE", value_parser = image_location(), value_hint = ValueHint::DirPath)]
    pub parent: Option<ImageLocation>,
    /// Compress the pages. CRIU and crit read uncompressed pages only
    #[arg(long, value_enum, default_value = "none")]
    pub compress: CompressArg,
    /// Threads that read and compress [default: the number of processors]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZero<usize>>,
    #[command(flatten)]
    pub pause: PauseArgs,
}

/// How the writers are paused
#[derive(Args, Debug)]
#[command(next_help_heading = "Pause")]
pub struct PauseArgs {
    /// Shell command that pauses the writers for the last round, and returns when no write is in progress, direct I/O included
    #[arg(long, value_name = "COMMAND", conflicts_with = "freeze_cgroup")]
    pub pause: Option<String>,
    /// Shell command that resumes them, after the last round and after an error
    #[arg(long, value_name = "COMMAND", requires = "pause")]
    pub resume: Option<String>,
    /// Freeze this cgroup for the last round
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub freeze_cgroup: Option<PathBuf>,
    /// Rounds before the pause, each an image in IMAGE with what changed since the one before
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub rounds: u32,
}

/// Compression of pages
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum CompressArg {
    None,
    Zstd,
    Lz4,
}

impl CompressArg {
    pub const fn compression(self) -> Compression {
        match self {
            Self::None => Compression::None,
            Self::Zstd => Compression::Zstd,
            Self::Lz4 => Compression::Lz4,
        }
    }
}
