//! The service, its kernel and its limits.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::attributes::AttributeSet;
use crate::provenance::ProbeKind;
use crate::units::PageSize;

/// Description of a running service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostInfo {
    /// Version of the service.
    pub version: String,
    /// Random id of the service process.
    #[serde(serialize_with = "crate::json::hex")]
    pub instance: u64,
    /// Start time of the service process.
    #[serde(serialize_with = "crate::json::rfc3339")]
    pub started: SystemTime,
    /// Base page size of the host.
    pub page_size: PageSize,
    /// Probe in use.
    pub probe: ProbeKind,
    /// Attributes that the probe in use reports.
    pub attributes: AttributeSet,
    /// Kernel capabilities, determined by trial when the service started.
    pub capabilities: Vec<Capability>,
    /// hugetlb page sizes of the host, bytes.
    pub hugetlb_page_sizes: Vec<u64>,
    /// Limits that the service enforces.
    pub limits: HostLimits,
    /// Kernel release from uname(2). For display only.
    pub kernel_release: String,
    /// User id of the service process.
    pub uid: u32,
    /// Path of the fdpass socket on the service's host; empty if the service has none.
    pub fdpass_socket: PathBuf,
    /// User id of the caller as seen by the service.
    pub caller_uid: u32,
    /// Group id of the caller as seen by the service.
    pub caller_gid: u32,
    /// Incidents of helper processes since the service started.
    pub helper_incidents: Vec<HelperIncident>,
}

/// A client can cause a helper process to be late, to end, or to be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HelperIncident {
    /// Stable name, such as `receiver-replaced`.
    pub name: Cow<'static, str>,
    /// How often it happened.
    pub count: u64,
}

/// One kernel feature that the service uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capability {
    /// Stable name, such as `xarray-walk`.
    pub name: Cow<'static, str>,
    /// Whether the kernel has the feature.
    pub availability: Availability,
    /// How the availability was determined; if unavailable, the failing call and its error. For display only.
    pub detail: String,
    /// Consequence for users if the capability is not available; empty if there is none. For display only.
    pub impact: Cow<'static, str>,
}

/// Availability of a capability.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Availability {
    /// The trial succeeded.
    Available,
    /// The trial failed.
    Unavailable,
    /// The trial could not be performed.
    Unknown,
}

/// Limits that the service enforces. Limits per user do not apply to administrators (root and the service's user).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostLimits {
    /// Size of one file, bytes.
    pub max_file_bytes: u64,
    /// Total size of the files owned by one user, bytes.
    pub max_bytes_per_user: u64,
    /// Files owned by one user. For administrators, this limits ephemeral files only.
    pub max_files_per_user: u32,
    /// Connections to the gRPC and fdpass sockets together.
    pub max_sessions_per_user: u32,
    /// Concurrent watch streams.
    pub max_watches_per_user: u32,
    /// Open streams of answers, watches among them.
    pub max_streams_per_user: u32,
    /// Memory of the service for requests until their answers begin, and answers that are not read, bytes: at least 8 KiB for each
    /// call. As much for streams, beyond one message of each.
    pub max_buffered_bytes_per_user: u64,
    /// Page indexes in one lookup.
    pub max_lookup_pages: u32,
    /// Pages in one request that selects attributes.
    pub max_attribute_pages: u64,
    /// Retained snapshots of all files together.
    pub max_retained_snapshots_per_user: u32,
    /// Memory of the service for the stamps of a user's files, bytes, and as much for its retained snapshots, frozen sets, open
    /// streams, and the page attributes that calls in progress have read.
    pub max_state_bytes_per_user: u64,
    /// Longest time for which a snapshot can be retained.
    #[serde(rename = "max_retain_for_ns", serialize_with = "crate::json::nanoseconds")]
    pub max_retain_for: Duration,
    /// Total size of the shared snapshots that a user's processes hold, each rounded up to whole pages, bytes. Also the
    /// maximum size of one shared snapshot; that maximum applies to administrators too.
    pub max_shared_snapshot_bytes_per_user: u64,
    /// Shared snapshots that the processes of all users but root hold together, bytes.
    pub max_shared_snapshot_bytes_of_users: u64,
    /// Shared snapshots that a user's processes hold.
    pub max_shared_snapshots_per_user: u32,
    /// Address spaces with tracked mappings: Track requests whose mappings exist.
    pub max_tracked_per_user: u32,
    /// Page tables of the tracked mappings, bytes: 2 MiB for each GiB that is mapped, whether it holds data or not.
    pub max_page_table_bytes_per_user: u64,
    /// Tracked children: address spaces that tracked processes forked. Further children are not tracked.
    pub max_tracked_children_per_user: u32,
    /// All users but root together have at most this many times what one user may have.
    pub max_users_at_limit: u32,
    /// Calls that may block, such as Checkpoint: those that run and those that wait for their turn or for a thread.
    pub max_calls_per_user: u32,
    /// Those of them that run, in a thread each.
    pub max_threads_per_user: u32,
    /// Memory that the files of one user hold, in RAM and in swap, bytes. With as much, the user gets no further and no larger file.
    pub max_allocated_bytes_per_user: u64,
    /// The same for all users but root together.
    pub max_allocated_bytes_of_users: u64,
    /// Time for which an ephemeral file that was never opened exists at least.
    #[serde(rename = "unused_file_timeout_ns", serialize_with = "crate::json::nanoseconds")]
    pub unused_file_timeout: Duration,
}
