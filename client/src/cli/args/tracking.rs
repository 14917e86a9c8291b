//! Arguments of the commands about writes.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{CoveragePolicy, Generation};

use super::super::parse::{cursor_name, file_name, generation, page_range};
use crate::cli::range::PartialRange;

/// Arguments of `fdmap checkpoint`
#[derive(Args, Debug)]
pub struct CheckpointArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Harvest every tracked mapping even if no write was observed
    #[arg(long)]
    pub force_scan: bool,
    /// Idempotency key, not 0: a retry with the same key returns the original result
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub idempotency_key: Option<u64>,
    /// Exit with 1 if the coverage is not exact
    #[arg(long)]
    pub exit_code: bool,
}

/// Arguments of `fdmap dirty`
#[derive(Args, Debug)]
pub struct DirtyArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Pages A up to B, excluding B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// Report pages written after this generation; 0: in any generation
    #[arg(long, value_name = "GENERATION", value_parser = generation, required_unless_present = "cursor", conflicts_with = "cursor")]
    pub since: Option<Generation>,
    /// Report the frozen set of this cursor
    #[arg(long, value_name = "CURSOR", value_parser = cursor_name)]
    pub cursor: Option<String>,
    /// Print the current dirty, writeback and referenced flags of the folios
    #[arg(long)]
    pub flags: bool,
    /// Draw a map of the file
    #[arg(long, conflicts_with_all = ["flags", "bitmap"])]
    pub map: bool,
    /// Write one bit per page to FILE, lowest bit first; - is stdout
    #[arg(long, value_name = "FILE", conflicts_with = "flags", value_hint = ValueHint::FilePath)]
    pub bitmap: Option<PathBuf>,
    /// Exit with 1 if any page changed
    #[arg(long)]
    pub exit_code: bool,
}

/// How checkpoints treat unobserved writers
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    /// Report the pages that they may have written, marked conservative
    Conservative,
    /// Fail the checkpoint
    Refuse,
    /// Omit the pages that they may have written; coverage lists them as gaps
    Ignore,
}

impl PolicyArg {
    #[must_use]
    pub const fn policy(self) -> CoveragePolicy {
        match self {
            Self::Conservative => CoveragePolicy::Conservative,
            Self::Refuse => CoveragePolicy::Refuse,
            Self::Ignore => CoveragePolicy::Ignore,
        }
    }
}

/// Arguments of `fdmap dirty-rate`
#[derive(Args, Debug)]
pub struct DirtyRateArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Measuring time, 1ms to 1m
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub window: Duration,
}

/// Subcommands of `fdmap cursor`
#[derive(Debug, Subcommand)]
pub enum CursorCommand {
    /// Create a cursor
    Create {
        #[command(flatten)]
        which: CursorArgs,
        /// Closed generation after which the cursor starts; 0: all writes since the file was created
        #[arg(long, value_name = "GENERATION", default_value = "0", value_parser = generation)]
        at: Generation,
    },
    /// List your cursors on a file
    Ls {
        /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Delete a cursor
    Rm(CursorArgs),
    /// Take a checkpoint and freeze the changes since the cursor's generation, for fdmap dirty --cursor
    Begin {
        #[command(flatten)]
        which: CursorArgs,
        /// Harvest every tracked mapping even if no write was observed
        #[arg(long)]
        force_scan: bool,
    },
    /// Move the cursor to the end of its frozen set and drop the set
    Commit {
        #[command(flatten)]
        which: CursorArgs,
        /// Last generation of the frozen set, as printed by begin
        #[arg(value_parser = generation)]
        generation: Generation,
    },
    /// Drop the frozen set; the cursor keeps its generation
    Abort(CursorArgs),
}

/// A cursor of a file
#[derive(Args, Debug)]
pub struct CursorArgs {
    /// NAME, USER/NAME for a file of another user, or id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Cursor name
    #[arg(value_parser = cursor_name)]
    pub cursor: String,
}

/// Arguments of `fdmap watch`
#[derive(Args, Debug)]
pub struct WatchArgs {
    /// Print the checkpoints of FILE with page counts and rates, instead of changes to files
    #[arg(long, value_name = "FILE", value_parser = file_name)]
    pub checkpoints: Option<FileName>,
}

/// Arguments of `fdmap doctor`
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Check whether writes by process PID can be tracked. Needs no service
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Detect unnotified descriptors by briefly setting O_DIRECT on the descriptors of memfds
    #[arg(long, requires = "pid")]
    pub try_descriptors: bool,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::{Cli, Command};

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let words = std::iter::once("fdmap").chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.command)
    }

    #[test]
    fn dirty_needs_a_generation_or_a_cursor() {
        assert!(parse("dirty ram --since 3 0..9").is_ok());
        assert!(parse("dirty ram --cursor backup --map").is_ok());
        for bad in [
            "dirty ram",
            "dirty ram --since 3 --cursor backup",
            "dirty ram --since -1",
            "dirty ram --since 9999999999",
            "dirty ram --since 3 --map --flags",
            "dirty ram --since 3 --bitmap - --map",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn commit_needs_a_generation() {
        assert!(parse("cursor commit ram backup 9").is_ok());
        assert!(parse("cursor commit ram backup").is_err());
        assert!(parse("cursor create ram backup").is_ok());
        assert!(parse("cursor create ram backup --at 4").is_ok());
        assert!(parse("cursor ls ram").is_ok() && parse("cursor ls").is_err());
        let long = format!("cursor rm ram {}", "x".repeat(65));
        assert!(parse(&long).is_err());
    }

    #[test]
    fn idempotency_key_0_is_rejected() {
        assert!(parse("checkpoint ram --force-scan --idempotency-key 7").is_ok());
        assert!(parse("checkpoint ram --idempotency-key 0").is_err());
    }

    #[test]
    fn policies_and_windows_are_parsed() {
        assert!(parse("coverage-policy ram refuse").is_ok() && parse("coverage-policy ram strict").is_err());
        assert!(
            parse("dirty-rate ram --window 250ms").is_ok() && parse("dirty-rate ram --window soon").is_err()
        );
        assert!(parse("watch --checkpoints ram").is_ok() && parse("watch").is_ok());
    }

    #[test]
    fn try_descriptors_needs_a_process() {
        assert!(parse("doctor").is_ok() && parse("doctor --pid 1 --try-descriptors").is_ok());
        assert!(parse("doctor --try-descriptors").is_err() && parse("doctor --pid 0").is_err());
    }
}
