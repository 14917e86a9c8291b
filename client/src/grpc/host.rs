//! The service and its kernel.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use fdmap_proto::convert::{AttributeSet, ConvertError, duration_from_wire, probe_from_wire};
use fdmap_proto::{PageSize, ProbeKind, v1};

use super::Client;
use crate::ClientError;

/// What the service tells of itself.
#[derive(Clone, Debug)]
pub struct HostInfo {
    /// Its version.
    pub version: String,
    /// Names the process.
    pub instance: u64,
    /// When it started.
    pub started: SystemTime,
    /// The host's base page size.
    pub page_size: PageSize,
    /// The probe in use.
    pub probe: ProbeKind,
    /// The attributes that it sees.
    pub attributes: AttributeSet,
    /// What was found out about the kernel.
    pub capabilities: Vec<Capability>,
    /// hugetlb page sizes, bytes.
    pub hugetlb_page_sizes: Vec<u64>,
    /// Bounds.
    pub limits: HostLimits,
    /// What uname(2) says.
    pub kernel_release: String,
    /// The user that the service runs as.
    pub uid: u32,
    /// The fdpass socket on the service's host.
    pub fdpass_socket: PathBuf,
    /// Us, as the service sees us: user and group.
    pub you: (u32, u32),
}

/// One thing that the kernel can or cannot do for the service.
#[derive(Clone, Debug)]
pub struct Capability {
    /// A stable name.
    pub name: String,
    /// Whether it can.
    pub availability: Availability,
    /// How it was found out, or why not.
    pub detail: String,
    /// What is lost where it is not so.
    pub impact: String,
}

/// Whether the kernel can do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It can.
    Available,
    /// It cannot.
    Unavailable,
    /// It could not be tried.
    Unknown,
}

impl Availability {
    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Unavailable => "unavailable",
            Self::Unknown => "unknown",
        }
    }
}

/// Bounds that the service enforces: those of `fdmap.v1.Limits`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // named and documented in host.proto
pub struct HostLimits {
    pub max_file_bytes: u64,
    pub max_bytes_per_user: u64,
    pub max_files_per_user: u32,
    pub max_sessions_per_user: u32,
    pub max_watches_per_user: u32,
    pub max_lookup_pages: u32,
    pub max_attribute_pages: u64,
    pub max_retained_snapshots_per_user: u32,
    pub max_retain_for: Duration,
    pub max_shared_snapshot_bytes_per_user: u64,
    /// Shared snapshots of one user.
    pub max_shared_snapshots_per_user: u32,
}

impl Client {
    /// What the service tells of itself and its kernel.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn host_info(&self) -> Result<HostInfo, ClientError> {
        let info = self.wait("Info", self.host.clone().info(v1::InfoRequest {})).await?;
        let started = info.started.ok_or(ConvertError::Missing("started"))?;
        Ok(HostInfo {
            version: info.version,
            instance: info.instance,
            started: SystemTime::try_from(started)
                .map_err(|_| ClientError::Unexpected("its start lies outside of time"))?,
            page_size: PageSize::new(info.page_size)
                .ok_or(ConvertError::Number { field: "page_size", value: info.page_size })?,
            probe: probe_from_wire(info.probe)?,
            attributes: AttributeSet::from_wire(&info.attributes)?,
            capabilities: info.capabilities.into_iter().map(capability).collect::<Result<_, _>>()?,
            hugetlb_page_sizes: info.hugetlb_page_sizes,
            limits: limits(info.limits.ok_or(ConvertError::Missing("limits"))?)?,
            kernel_release: info.kernel_release,
            uid: info.uid,
            fdpass_socket: info.fdpass_socket.into(),
            you: (info.caller_uid, info.caller_gid),
        })
    }
}

fn capability(capability: v1::Capability) -> Result<Capability, ConvertError> {
    use v1::capability::Availability as Wire;
    let availability = match capability.availability() {
        Wire::Available => Availability::Available,
        Wire::Unavailable => Availability::Unavailable,
        Wire::Unknown => Availability::Unknown,
        Wire::Unspecified => {
            return Err(ConvertError::UnknownEnum { field: "Availability", value: capability.availability });
        }
    };
    let v1::Capability { name, detail, impact, .. } = capability;
    Ok(Capability { name, availability, detail, impact })
}

fn limits(limits: v1::Limits) -> Result<HostLimits, ConvertError> {
    Ok(HostLimits {
        max_file_bytes: limits.max_file_bytes,
        max_bytes_per_user: limits.max_bytes_per_user,
        max_files_per_user: limits.max_files_per_user,
        max_sessions_per_user: limits.max_sessions_per_user,
        max_watches_per_user: limits.max_watches_per_user,
        max_lookup_pages: limits.max_lookup_pages,
        max_attribute_pages: limits.max_attribute_pages,
        max_retained_snapshots_per_user: limits.max_retained_snapshots_per_user,
        max_retain_for: duration_from_wire("max_retain_for", limits.max_retain_for)?,
        max_shared_snapshot_bytes_per_user: limits.max_shared_snapshot_bytes_per_user,
        max_shared_snapshots_per_user: limits.max_shared_snapshots_per_user,
    })
}
