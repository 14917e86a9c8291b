//! The command line of `fdmapd`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};

use crate::files::{AllocatedLimits, Keeper, Limits};
use crate::probe::select::ProbeChoice;
use crate::rpc::TlsOptions;

/// Serve memfds, the states of their pages, and the writes to them
///
/// fdmapd owns memfds and reports for each of their pages whether it is a hole, resident or swapped, and in which swap
/// slot. It also tracks which pages were written since a checkpoint. Clients use gRPC, and the fdpass socket for
/// requests that pass file descriptors.
#[derive(Clone, Debug, Parser)]
#[command(name = "fdmapd", version, after_help = AFTER_HELP)]
pub struct Config {
    /// Directory of both sockets. fdmapd creates it if it does not exist
    #[arg(long, value_name = "DIR", env = "FDMAP_RUNTIME_DIR", default_value = "/run/fdmap")]
    pub runtime_dir: PathBuf,
    /// Path of the gRPC socket [default: DIR/fdmap.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Path of the fdpass socket, which passes file descriptors [default: DIR/fdpass.sock]
    #[arg(long, value_name = "PATH")]
    pub fdpass_socket: Option<PathBuf>,
    /// Group of both sockets, by name or number. Their mode is 0660 [default: the group of fdmapd]
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Probe that reads page states
    #[arg(long, value_enum, default_value_t = ProbeChoice::Auto)]
    pub probe: ProbeChoice,
    /// Do not trace system calls. While any file is tracked, tracing delays each system call of the host by some
    /// 140 ns, and by some 50 ns more while a mapping is tracked. Without it, the page ranges of writes through descriptors are unknown, and such a write makes all pages
    /// of a file conservative unless the file is writer-sealed. Calls that take written bits of tracked mappings
    /// are not noticed, so the coverage of a file with tracked mappings is never exact. On kernels with the bug that
    /// `guard-regions` of `fdmap doctor` reports, guard regions cannot be installed in tracked mappings, except by programs
    /// under `fdmap exec`
    #[arg(long)]
    pub no_call_trace: bool,
    /// Also serve gRPC on this TCP address, with mutual TLS. Requires --tls-cert, --tls-key, --tls-client-ca and --tls-peer
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    #[command(flatten)]
    pub tls: TlsOptions,
    /// Users who may keep files: create or adopt them such that they do not end with their last user. A name or number of a
    /// user; of a group, after @; or `all`. Repeatable. Root and the user that fdmapd runs as always may
    #[arg(long, value_name = "USER|@GROUP|all")]
    pub allow_keep: Vec<Keeper>,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Print the capabilities of this kernel, and exit with status 0 if a probe works, else with 1
    #[arg(long)]
    pub check: bool,
}

/// Upper bound of `--max-lookup-pages`.
const MAX_LOOKUP_PAGES: i64 = 16_384;

const AFTER_HELP: &str = "\
fdmapd logs to stderr. FDMAPD_LOG selects the level: error, warn, info (the default), debug, or a filter such as
fdmap_server::fdpass=debug. Under systemd, fdmapd notifies readiness (Type=notify) and uses the file descriptor store.";

/// Limits on the resources of one user. Limits per user do not apply to root and to the user that fdmapd runs as. Subordinate user ids
/// (/etc/subuid) count for their owner
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Size of one file, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().file_bytes)]
    pub max_file_bytes: u64,
    /// Sizes of all files of one user together, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().bytes_per_user)]
    pub max_bytes_per_user: u64,
    /// Memory that the files of one user hold, in RAM and in swap, in bytes. A user whose files hold as much gets no further and
    /// no larger file [default: RAM/2]
    #[arg(long, value_name = "BYTES")]
    pub max_allocated_bytes_per_user: Option<u64>,
    /// The same for all users but root together [default: RAM*3/4]
    #[arg(long, value_name = "BYTES")]
    pub max_allocated_bytes_of_users: Option<u64>,
    /// Files of one user; ephemeral files of root, too. Each costs fdmapd three descriptors
    #[arg(long, value_name = "N", default_value_t = Limits::default().files_per_user)]
    pub max_files_per_user: u32,
    /// Connections of one user to both unix sockets together, and as many over TCP
    #[arg(long, value_name = "N", default_value_t = Limits::default().sessions_per_user)]
    pub max_sessions_per_user: u32,
    /// Watch and WatchCheckpoints streams of one user
    #[arg(long, value_name = "N", default_value_t = Limits::default().watches_per_user)]
    pub max_watches_per_user: u32,
    /// Open streams of answers of one user: Scan, Diff, Changes, Watch and WatchCheckpoints
    #[arg(long, value_name = "N", default_value_t = Limits::default().streams_per_user)]
    pub max_streams_per_user: u32,
    /// Memory of the service for requests of one user until their answers begin, and answers that it has not read, in bytes: at least
    /// 8 KiB for each call. Beyond it, calls are refused. As much for its streams, beyond one message of each; further messages
    /// wait [default: RAM/64]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_buffered_bytes_per_user: Option<u64>,
    /// Pages in one Lookup, at most 16384, so that requests stay below 256 KiB and answers below 1 MiB
    #[arg(long, value_name = "N", default_value_t = Limits::default().lookup_pages)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=MAX_LOOKUP_PAGES))]
    pub max_lookup_pages: u32,
    /// Pages in one Scan, Lookup or Changes that requests attributes
    #[arg(long, value_name = "N", default_value_t = Limits::default().attribute_pages)]
    pub max_attribute_pages: u64,
    /// Retained snapshots of one user
    #[arg(long, value_name = "N", default_value_t = Limits::default().retained_per_user)]
    pub max_retained_snapshots_per_user: u32,
    /// Memory of the service for the stamps of a user's files, in bytes, and as much for its retained snapshots, frozen sets, open
    /// streams, and the page attributes that calls in progress have read [default: RAM/64]
    #[arg(long, value_name = "BYTES")]
    pub max_state_bytes_per_user: Option<u64>,
    /// Longest time to retain a snapshot, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().retain_for.as_secs())]
    pub max_retain_seconds: u64,
    /// Shared snapshots that the processes of one user hold, in bytes. The kernel charges them to fdmapd. Also limits a single
    /// snapshot, of root too [default: min(RAM/32,4GiB)]
    #[arg(long, value_name = "BYTES")]
    pub max_shared_snapshot_bytes: Option<u64>,
    /// Shared snapshots that the processes of all users but root hold together, in bytes. Without this option, at least
    /// --max-shared-snapshot-bytes [default: min(RAM/8,64GiB)]
    #[arg(long, value_name = "BYTES")]
    pub max_shared_snapshot_bytes_of_users: Option<u64>,
    /// Shared snapshots that the processes of one user hold. Each costs fdmapd a descriptor
    #[arg(long, value_name = "N", default_value_t = Limits::default().shared_per_user)]
    pub max_shared_snapshots_per_user: u32,
    /// Tracked address spaces of one user: Track requests whose mappings exist. Each costs fdmapd three descriptors. Up to
    /// as many others, which are no longer tracked and have page tables left, cost one each
    #[arg(long, value_name = "N", default_value_t = Limits::default().tracked_per_user)]
    pub max_tracked_per_user: u32,
    /// Page tables of the tracked mappings of one user, in bytes: 2 MiB for each GiB that is mapped, whether it holds data or not. The
    /// kernel charges them to fdmapd. When tracking ends, they count until they are freed. Those of tracked children count apart, up to
    /// as much again [default: RAM/64]
    #[arg(long, value_name = "BYTES")]
    pub max_page_table_bytes_per_user: Option<u64>,
    /// Tracked children of one user: address spaces that tracked processes forked, one for each Track request of the process. Each
    /// costs fdmapd up to three descriptors. Further children are not tracked: the mappings of their parent are conservative
    #[arg(long, value_name = "N", default_value_t = Limits::default().tracked_children_per_user)]
    pub max_tracked_children_per_user: u32,
    /// Calls of one user that may block, such as Checkpoint, and wait or run
    #[arg(long, value_name = "N", default_value_t = Limits::default().calls_per_user)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub max_calls_per_user: u32,
    /// Those of them that run, in a thread each. Further ones wait. As many as there are processors, from 2 to 16, so that one user
    /// leaves time to others [default: clamp(CPUs,2,16)]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_threads_per_user: Option<u32>,
    /// All users but root together have at most N times what one user may have
    #[arg(long, value_name = "N", default_value_t = Limits::default().users_at_limit)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub max_users_at_limit: u32,
    /// Time for which an ephemeral file that no process opened exists, in seconds. fdmapd checks at this interval, but at
    /// least every 10 s and at most once a second
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().unused_file_timeout.as_secs())]
    pub unused_file_timeout: u64,
    /// Time after which an inode helper without calls, or an fdpass receiver without sessions, ends, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().helper_idle_timeout.as_secs())]
    pub helper_idle_timeout: u64,
}

impl LimitArgs {
    #[must_use]
    pub fn limits(&self) -> Limits {
        let default = Limits::default();
        let shared_bytes_per_user = self.max_shared_snapshot_bytes.unwrap_or(default.shared_bytes_per_user);
        Limits {
            allocated: AllocatedLimits {
                per_user: self.max_allocated_bytes_per_user.unwrap_or(default.allocated.per_user),
                of_users: self.max_allocated_bytes_of_users.unwrap_or(default.allocated.of_users),
            },
            file_bytes: self.max_file_bytes,
            bytes_per_user: self.max_bytes_per_user,
            files_per_user: self.max_files_per_user,
            sessions_per_user: self.max_sessions_per_user,
            watches_per_user: self.max_watches_per_user,
            streams_per_user: self.max_streams_per_user,
            buffered_bytes_per_user: self
                .max_buffered_bytes_per_user
                .unwrap_or(default.buffered_bytes_per_user),
            lookup_pages: self.max_lookup_pages,
            attribute_pages: self.max_attribute_pages,
            retained_per_user: self.max_retained_snapshots_per_user,
            state_bytes_per_user: self.max_state_bytes_per_user.unwrap_or(default.state_bytes_per_user),
            retain_for: Duration::from_secs(self.max_retain_seconds),
            shared_bytes_per_user,
            shared_bytes_of_users: self
                .max_shared_snapshot_bytes_of_users
                .unwrap_or_else(|| default.shared_bytes_of_users.max(shared_bytes_per_user)),
            shared_per_user: self.max_shared_snapshots_per_user,
            tracked_per_user: self.max_tracked_per_user,
            page_table_bytes_per_user: self
                .max_page_table_bytes_per_user
                .unwrap_or(default.page_table_bytes_per_user),
            tracked_children_per_user: self.max_tracked_children_per_user,
            calls_per_user: self.max_calls_per_user,
            threads_per_user: self.max_threads_per_user.unwrap_or(default.threads_per_user),
            users_at_limit: self.max_users_at_limit,
            unused_file_timeout: Duration::from_secs(self.unused_file_timeout),
            helper_idle_timeout: Duration::from_secs(self.helper_idle_timeout),
        }
    }
}

impl Config {
    #[must_use]
    pub fn socket_path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.runtime_dir.join("fdmap.sock"))
    }

    #[must_use]
    pub fn fdpass_path(&self) -> PathBuf {
        self.fdpass_socket.clone().unwrap_or_else(|| self.runtime_dir.join("fdpass.sock"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use fdmap_proto::v1;
    use prost::Message as _;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Config::command().debug_assert();
        let config = Config::parse_from(["fdmapd", "--runtime-dir", "/x", "--socket", "/y/s"]);
        assert_eq!(config.socket_path(), PathBuf::from("/y/s"));
        assert_eq!(config.fdpass_path(), PathBuf::from("/x/fdpass.sock"));
        assert_eq!(config.limits.limits(), Limits::default());
        assert!(Config::try_parse_from(["fdmapd", "--tls-cert", "x"]).is_err(), "--tls-cert requires --tcp");
    }

    #[test]
    fn limit_of_shared_snapshots_of_all_users_is_as_requested() {
        const LARGE: u64 = 1 << 50;
        let of_users = |options: &[&str]| {
            let config = Config::parse_from([&["fdmapd"], options].concat());
            config.limits.limits().shared_bytes_of_users
        };
        let large = LARGE.to_string();
        assert_eq!(of_users(&["--max-shared-snapshot-bytes", &large]), LARGE, "one user may have as much");
        let smaller = ["--max-shared-snapshot-bytes", &large, "--max-shared-snapshot-bytes-of-users", "4096"];
        assert_eq!(of_users(&smaller), 4096);
    }

    #[test]
    fn largest_lookup_fits_into_a_request_and_an_answer() {
        let parse = |pages: u32| Config::try_parse_from(["fdmapd", "--max-lookup-pages", &pages.to_string()]);
        assert!(parse(26_000).is_err() && parse(0).is_err());
        let pages = parse(16_384).unwrap().limits.max_lookup_pages;
        // The longest index takes 10 bytes as a varint, the longest page of an answer some 60.
        let lookup = v1::LookupRequest { pages: vec![u64::MAX; pages as usize], ..Default::default() };
        assert!(lookup.encoded_len() < crate::rpc::MAX_REQUEST_BYTES);
        let attributes = v1::PageAttributes {
            order: Some(18),
            flags: Some(1 << 34),
            known_flags: 1 << 34,
            map_count: Some(u32::MAX),
            mappers: v1::Mappers::Several.into(),
            maybe_pinned: Some(true),
        };
        let info =
            v1::PageInfo { page: 1 << 52, state: 4, slot: Some(u64::MAX), attributes: Some(attributes) };
        let answer = v1::LookupResponse { pages: vec![info; pages as usize], ..Default::default() };
        assert!(answer.encoded_len() < 1 << 20, "{}", answer.encoded_len());
    }
}
