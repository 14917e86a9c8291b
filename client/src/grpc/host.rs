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
    pub facts: Vec<Fact>,
    /// hugetlb page sizes, bytes.
    pub hugetlb_page_sizes: Vec<u64>,
    /// Bounds.
    pub limits: HostLimits,
    /// What uname(2) says.
    pub kernel_release: String,
    /// The user that the service runs as.
    pub uid: u32,
    /// The hand-over socket on the service's host.
    pub handover_socket: PathBuf,
    /// Us, as the service sees us: user and group.
    pub you: (u32, u32),
}

/// One thing that the kernel can or cannot do for the service.
#[derive(Clone, Debug)]
pub struct Fact {
    /// A stable name.
    pub name: String,
    /// Whether it can.
    pub answer: FactAnswer,
    /// How it was found out, or why not.
    pub detail: String,
    /// What is lost where it is not so.
    pub lost_without: String,
}

/// Whether the kernel can do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactAnswer {
    /// It can.
    Yes,
    /// It cannot.
    No,
    /// It could not be tried.
    Unknown,
}

impl FactAnswer {
    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
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
    pub max_kept_per_user: u32,
    pub max_keep: Duration,
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
            facts: info.facts.into_iter().map(fact).collect::<Result<_, _>>()?,
            hugetlb_page_sizes: info.hugetlb_page_sizes,
            limits: limits(info.limits.ok_or(ConvertError::Missing("limits"))?)?,
            kernel_release: info.kernel_release,
            uid: info.uid,
            handover_socket: info.handover_socket.into(),
            you: (info.your_uid, info.your_gid),
        })
    }
}

fn fact(fact: v1::KernelFact) -> Result<Fact, ConvertError> {
    use v1::kernel_fact::Answer;
    let answer = match fact.answer() {
        Answer::Yes => FactAnswer::Yes,
        Answer::No => FactAnswer::No,
        Answer::Unknown => FactAnswer::Unknown,
        Answer::Unspecified => return Err(ConvertError::UnknownEnum { field: "Answer", value: fact.answer }),
    };
    let v1::KernelFact { name, detail, lost_without, .. } = fact;
    Ok(Fact { name, answer, detail, lost_without })
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
        max_kept_per_user: limits.max_kept_per_user,
        max_keep: duration_from_wire("max_keep", limits.max_keep)?,
        max_shared_snapshot_bytes_per_user: limits.max_shared_snapshot_bytes_per_user,
        max_shared_snapshots_per_user: limits.max_shared_snapshots_per_user,
    })
}
