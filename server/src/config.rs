//! The command line of `fdmapd`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};

use crate::files::Limits;
use crate::probe::select::ProbeChoice;
use crate::rpc::TlsFiles;

/// Owns memfds, and tells which of their pages hold data and where these are, with swap on
#[derive(Clone, Debug, Parser)]
#[command(name = "fdmapd", version, after_help = AFTER_HELP)]
pub struct Config {
    /// Where the sockets are, unless they are given by themselves; made if it is not there
    #[arg(long, value_name = "DIR", env = "FDMAP_RUNTIME_DIR", default_value = "/run/fdmap")]
    pub runtime_dir: PathBuf,
    /// The gRPC socket [default: DIR/fdmap.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The fdpass socket, which passes descriptors [default: DIR/fdpass.sock]
    #[arg(long, value_name = "PATH")]
    pub fdpass_socket: Option<PathBuf>,
    /// The group that may connect, by name or number; the sockets have mode 0660
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// How to read page states
    #[arg(long, value_enum, default_value_t = ProbeChoice::Auto)]
    pub probe: ProbeChoice,
    /// Do not trace the system calls of this host while writes are followed, which costs each of them some time: then the
    /// ranges of writes through descriptors are not known, and files that are not closed are told conservatively
    #[arg(long)]
    pub no_call_trace: bool,
    /// Serve gRPC on TCP as well, with mutual TLS
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsFiles,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub limits: LimitArgs,
    /// Try what this kernel can do, say it and exit: with 0 if a probe works, with 1 if none does
    #[arg(long)]
    pub check: bool,
}

/// The most that `--max-lookup-pages` may be.
const LOOKUP_PAGES: i64 = 16_384;

const AFTER_HELP: &str = "\
The log goes to stderr; FDMAPD_LOG sets its level: error, warn, info (the default), debug, or a filter such as
fdmap_server::fdpass=debug. Under systemd the service tells when it is ready (Type=notify).";

/// Bounds on what one user can make the service hold. Root and the service's own user are free of those per user
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Largest size of one file, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().file_bytes)]
    pub max_file_bytes: u64,
    /// For all files that one user owns, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().bytes_per_user)]
    pub max_bytes_per_user: u64,
    /// Files that one user owns
    #[arg(long, value_name = "N", default_value_t = Limits::default().files_per_user)]
    pub max_files_per_user: u32,
    /// Connections of one user, to both sockets together
    #[arg(long, value_name = "N", default_value_t = Limits::default().sessions_per_user)]
    pub max_sessions_per_user: u32,
    /// Watches of one user
    #[arg(long, value_name = "N", default_value_t = Limits::default().watches_per_user)]
    pub max_watches_per_user: u32,
    /// Page indexes in one Lookup, up to 16384: a request has at most 256 KiB, and an answer is to stay below 1 MiB
    #[arg(long, value_name = "N", default_value_t = Limits::default().lookup_pages)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=LOOKUP_PAGES))]
    pub max_lookup_pages: u32,
    /// Pages in one Scan or Lookup that asks for attributes
    #[arg(long, value_name = "N", default_value_t = Limits::default().attribute_pages)]
    pub max_attribute_pages: u64,
    /// Kept snapshots of one user
    #[arg(long, value_name = "N", default_value_t = Limits::default().kept_per_user)]
    pub max_retained_snapshots_per_user: u32,
    /// How long a snapshot is kept at most, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().keep.as_secs())]
    pub max_keep_seconds: u64,
    /// Bytes of shared snapshots that the processes of one user hold; also of a single one, whoever asks for it
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().shared_bytes_per_user)]
    pub max_shared_snapshot_bytes: u64,
    /// Shared snapshots that the processes of one user hold; each costs the service a descriptor
    #[arg(long, value_name = "N", default_value_t = Limits::default().shared_per_user)]
    pub max_shared_snapshots_per_user: u32,
}

impl LimitArgs {
    /// As the service takes them.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        Limits {
            file_bytes: self.max_file_bytes,
            bytes_per_user: self.max_bytes_per_user,
            files_per_user: self.max_files_per_user,
            sessions_per_user: self.max_sessions_per_user,
            watches_per_user: self.max_watches_per_user,
            lookup_pages: self.max_lookup_pages,
            attribute_pages: self.max_attribute_pages,
            kept_per_user: self.max_retained_snapshots_per_user,
            keep: Duration::from_secs(self.max_keep_seconds),
            shared_bytes_per_user: self.max_shared_snapshot_bytes,
            shared_per_user: self.max_shared_snapshots_per_user,
        }
    }
}

impl Config {
    /// The gRPC socket.
    #[must_use]
    pub fn socket_path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.runtime_dir.join("fdmap.sock"))
    }

    /// The fdpass socket.
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
    fn command_line_is_sound() {
        Config::command().debug_assert();
        let config = Config::parse_from(["fdmapd", "--runtime-dir", "/x", "--socket", "/y/s"]);
        assert_eq!(config.socket_path(), PathBuf::from("/y/s"));
        assert_eq!(config.fdpass_path(), PathBuf::from("/x/fdpass.sock"));
        assert_eq!(config.limits.limits(), Limits::default());
        assert!(Config::try_parse_from(["fdmapd", "--tls-cert", "x"]).is_err(), "TLS is for TCP");
    }

    #[test]
    fn lookups_that_no_request_could_hold_are_not_promised() {
        let most = |pages: u32| Config::try_parse_from(["fdmapd", "--max-lookup-pages", &pages.to_string()]);
        assert!(most(26_000).is_err() && most(0).is_err());
        let pages = most(16_384).unwrap().limits.max_lookup_pages;
        // The longest index has 10 bytes as a varint, the longest page of an answer some 60.
        let lookup = v1::LookupRequest { pages: vec![u64::MAX; pages as usize], ..Default::default() };
        assert!(lookup.encoded_len() < crate::rpc::MAX_REQUEST);
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
