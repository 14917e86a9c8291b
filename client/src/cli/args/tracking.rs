//! Arguments of the commands about writes.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{CoveragePolicy, Generation};

use super::super::parse::{cursor_name, file_name, generation, page_range};
use super::PartialRange;

/// A checkpoint to make
#[derive(Args, Debug)]
pub struct CheckpointArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Look at every page table even if nothing seems to have been written
    #[arg(long)]
    pub exact: bool,
    /// A number of your own, not 0: asked for again with the same one, the checkpoint is told and not made again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub idempotency_key: Option<u64>,
    /// Exit with 1 if it is not exact
    #[arg(long)]
    pub exit_code: bool,
}

/// Written pages to tell about
#[derive(Args, Debug)]
pub struct DirtyArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// Which pages, as A..B [default: all]
    #[arg(value_name = "A..B", value_parser = page_range)]
    pub range: Option<PartialRange>,
    /// Written after this generation was closed; 0: ever
    #[arg(long, value_name = "GENERATION", value_parser = generation, required_unless_present = "cursor", conflicts_with = "cursor")]
    pub since: Option<Generation>,
    /// The set that this cursor has frozen
    #[arg(long, value_name = "CURSOR", value_parser = cursor_name)]
    pub cursor: Option<String>,
    /// Tell the folios' own dirty, writeback and referenced flags, as they are now
    #[arg(long)]
    pub flags: bool,
    /// Draw the file
    #[arg(long, conflicts_with_all = ["flags", "bitmap"])]
    pub map: bool,
    /// Write a bit for each page of the range, the lowest bit of a byte first, to a file, or to stdout for -
    #[arg(long, value_name = "FILE", conflicts_with = "flags", value_hint = ValueHint::FilePath)]
    pub bitmap: Option<PathBuf>,
    /// Exit with 1 if pages were written
    #[arg(long)]
    pub exit_code: bool,
}

/// What a checkpoint does about writers that are not observed
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    /// What they may have written is told as written
    Conservative,
    /// A checkpoint fails while there are any
    Refuse,
    /// What they may have written is left out, and the coverage says so
    Ignore,
}

impl PolicyArg {
    /// The policy.
    #[must_use]
    pub const fn policy(self) -> CoveragePolicy {
        match self {
            Self::Conservative => CoveragePolicy::Conservative,
            Self::Refuse => CoveragePolicy::Refuse,
            Self::Ignore => CoveragePolicy::Ignore,
        }
    }
}

/// A rate to measure
#[derive(Args, Debug)]
pub struct RateArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// For how long, 1ms to 1m
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub window: Duration,
}

/// What to do with cursors
#[derive(Debug, Subcommand)]
pub enum CursorCommand {
    /// Make a cursor
    Create {
        #[command(flatten)]
        #[allow(missing_docs)]
        which: CursorArgs,
        /// The closed generation that it begins with; 0: all that was ever written
        #[arg(long, value_name = "GENERATION", default_value = "0", value_parser = generation)]
        at: Generation,
    },
    /// List your cursors on a file
    Ls {
        /// The file: its name, or its id as in id:47699469b1a4153f
        #[arg(value_parser = file_name)]
        file: FileName,
    },
    /// Forget a cursor
    Rm(CursorArgs),
    /// Make a checkpoint and freeze what was written since the cursor's generation, for fdmap dirty --cursor
    Begin {
        #[command(flatten)]
        #[allow(missing_docs)]
        which: CursorArgs,
        /// Look at every page table even if nothing seems to have been written
        #[arg(long)]
        exact: bool,
    },
    /// The frozen set was dealt with: move the cursor to what it reached
    Commit {
        #[command(flatten)]
        #[allow(missing_docs)]
        which: CursorArgs,
        /// The generation that the set reached, as begin told it
        #[arg(value_parser = generation)]
        generation: Generation,
    },
    /// Let go of the frozen set; the cursor stays where it was
    Abort(CursorArgs),
}

/// A cursor of a file
#[derive(Args, Debug)]
pub struct CursorArgs {
    /// The file: its name, or its id as in id:47699469b1a4153f
    #[arg(value_parser = file_name)]
    pub file: FileName,
    /// The cursor's name
    #[arg(value_parser = cursor_name)]
    pub cursor: String,
}

/// What to watch
#[derive(Args, Debug)]
pub struct WatchArgs {
    /// Tell of the checkpoints of this file, with their counts and rates
    #[arg(long, value_name = "FILE", value_parser = file_name)]
    pub dirty: Option<FileName>,
}

/// What to look at
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// A process here: would it be seen what it writes? Needs no service
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Find out which of its descriptors are silent, by setting O_DIRECT on those of memfds for a moment
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
    fn changes_are_since_a_generation_or_a_cursors() {
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
    fn commit_names_its_generation() {
        assert!(parse("cursor commit ram backup 9").is_ok());
        assert!(parse("cursor commit ram backup").is_err());
        assert!(parse("cursor create ram backup").is_ok());
        assert!(parse("cursor create ram backup --at 4").is_ok());
        assert!(parse("cursor ls ram").is_ok() && parse("cursor ls").is_err());
        let long = format!("cursor rm ram {}", "x".repeat(65));
        assert!(parse(&long).is_err());
    }

    #[test]
    fn request_ids_are_not_0() {
        assert!(parse("checkpoint ram --exact --request-id 7").is_ok());
        assert!(parse("checkpoint ram --request-id 0").is_err());
    }

    #[test]
    fn policies_and_rates_are_read() {
        assert!(parse("policy ram refuse").is_ok() && parse("policy ram strict").is_err());
        assert!(parse("rate ram --window 250ms").is_ok() && parse("rate ram --window soon").is_err());
        assert!(parse("watch --dirty ram").is_ok() && parse("watch").is_ok());
    }

    #[test]
    fn descriptors_are_tried_in_a_process_only() {
        assert!(parse("doctor").is_ok() && parse("doctor --pid 1 --try-descriptors").is_ok());
        assert!(parse("doctor --try-descriptors").is_err() && parse("doctor --pid 0").is_err());
    }
}
