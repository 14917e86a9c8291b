//! Host information.

use super::{
    ConvertError, duration_from_wire, duration_to_wire, known, probe_from_wire, timestamp_from_wire,
    timestamp_to_wire, wire_enum,
};
use crate::attributes::AttributeSet;
use crate::host::{Availability, Capability, HelperIncident, HostInfo, HostLimits};
use crate::units::PageSize;
use crate::v1;

wire_enum!(Availability, v1::capability::Availability, "Availability", availability:
    Available, Unavailable, Unknown);

impl From<Capability> for v1::Capability {
    fn from(capability: Capability) -> Self {
        let Capability { name, availability, detail, impact } = capability;
        let availability = v1::capability::Availability::from(availability).into();
        Self { name: name.into_owned(), availability, detail, impact: impact.into_owned() }
    }
}

impl TryFrom<v1::Capability> for Capability {
    type Error = ConvertError;

    fn try_from(capability: v1::Capability) -> Result<Self, ConvertError> {
        let v1::Capability { name, availability: value, detail, impact } = capability;
        Ok(Self { name: name.into(), availability: availability(value)?, detail, impact: impact.into() })
    }
}

impl From<HostLimits> for v1::Limits {
    fn from(limits: HostLimits) -> Self {
        Self {
            max_file_bytes: limits.max_file_bytes,
            max_bytes_per_user: limits.max_bytes_per_user,
            max_files_per_user: limits.max_files_per_user,
            max_sessions_per_user: limits.max_sessions_per_user,
            max_watches_per_user: limits.max_watches_per_user,
            max_streams_per_user: limits.max_streams_per_user,
            max_buffered_bytes_per_user: limits.max_buffered_bytes_per_user,
            max_lookup_pages: limits.max_lookup_pages,
            max_attribute_pages: limits.max_attribute_pages,
            max_retained_snapshots_per_user: limits.max_retained_snapshots_per_user,
            max_state_bytes_per_user: limits.max_state_bytes_per_user,
            max_retain_for: Some(duration_to_wire(limits.max_retain_for)),
            max_shared_snapshot_bytes_per_user: limits.max_shared_snapshot_bytes_per_user,
            max_shared_snapshot_bytes_of_users: limits.max_shared_snapshot_bytes_of_users,
            max_shared_snapshots_per_user: limits.max_shared_snapshots_per_user,
            max_tracked_per_user: limits.max_tracked_per_user,
            max_page_table_bytes_per_user: limits.max_page_table_bytes_per_user,
            max_tracked_children_per_user: limits.max_tracked_children_per_user,
            max_users_at_limit: limits.max_users_at_limit,
            max_calls_per_user: limits.max_calls_per_user,
            max_threads_per_user: limits.max_threads_per_user,
            max_allocated_bytes_per_user: limits.max_allocated_bytes_per_user,
            max_allocated_bytes_of_users: limits.max_allocated_bytes_of_users,
            unused_file_timeout: Some(duration_to_wire(limits.unused_file_timeout)),
        }
    }
}

impl TryFrom<v1::Limits> for HostLimits {
    type Error = ConvertError;

    fn try_from(limits: v1::Limits) -> Result<Self, ConvertError> {
        Ok(Self {
            max_file_bytes: limits.max_file_bytes,
            max_bytes_per_user: limits.max_bytes_per_user,
            max_files_per_user: limits.max_files_per_user,
            max_sessions_per_user: limits.max_sessions_per_user,
            max_watches_per_user: limits.max_watches_per_user,
            max_streams_per_user: limits.max_streams_per_user,
            max_buffered_bytes_per_user: limits.max_buffered_bytes_per_user,
            max_lookup_pages: limits.max_lookup_pages,
            max_attribute_pages: limits.max_attribute_pages,
            max_retained_snapshots_per_user: limits.max_retained_snapshots_per_user,
            max_state_bytes_per_user: limits.max_state_bytes_per_user,
            max_retain_for: duration_from_wire("max_retain_for", limits.max_retain_for)?,
            max_shared_snapshot_bytes_per_user: limits.max_shared_snapshot_bytes_per_user,
            max_shared_snapshot_bytes_of_users: limits.max_shared_snapshot_bytes_of_users,
            max_shared_snapshots_per_user: limits.max_shared_snapshots_per_user,
            max_tracked_per_user: limits.max_tracked_per_user,
            max_page_table_bytes_per_user: limits.max_page_table_bytes_per_user,
            max_tracked_children_per_user: limits.max_tracked_children_per_user,
            max_users_at_limit: limits.max_users_at_limit,
            max_calls_per_user: limits.max_calls_per_user,
            max_threads_per_user: limits.max_threads_per_user,
            max_allocated_bytes_per_user: limits.max_allocated_bytes_per_user,
            max_allocated_bytes_of_users: limits.max_allocated_bytes_of_users,
            unused_file_timeout: duration_from_wire("unused_file_timeout", limits.unused_file_timeout)?,
        })
    }
}

impl From<HostInfo> for v1::InfoResponse {
    fn from(info: HostInfo) -> Self {
        Self {
            version: info.version,
            instance: info.instance,
            started: Some(timestamp_to_wire(info.started)),
            page_size: info.page_size.bytes(),
            probe: v1::Probe::from(info.probe).into(),
            attributes: info.attributes.to_wire(),
            capabilities: info.capabilities.into_iter().map(v1::Capability::from).collect(),
            hugetlb_page_sizes: info.hugetlb_page_sizes,
            limits: Some(info.limits.into()),
            kernel_release: info.kernel_release,
            uid: info.uid,
            fdpass_socket: info.fdpass_socket.to_string_lossy().into_owned(),
            caller_uid: info.caller_uid,
            caller_gid: info.caller_gid,
            helper_incidents: info.helper_incidents.into_iter().map(v1::HelperIncident::from).collect(),
        }
    }
}

impl TryFrom<v1::InfoResponse> for HostInfo {
    type Error = ConvertError;

    fn try_from(info: v1::InfoResponse) -> Result<Self, ConvertError> {
        let capabilities = info.capabilities.into_iter().map(Capability::try_from);
        Ok(Self {
            version: info.version,
            instance: info.instance,
            started: timestamp_from_wire("started", info.started)?,
            page_size: PageSize::new(info.page_size)
                .ok_or(ConvertError::Number { field: "page_size", value: info.page_size })?,
            probe: probe_from_wire(info.probe)?,
            attributes: AttributeSet::from_wire(&info.attributes)?,
            capabilities: capabilities.collect::<Result<_, _>>()?,
            hugetlb_page_sizes: info.hugetlb_page_sizes,
            limits: info.limits.ok_or(ConvertError::Missing("limits"))?.try_into()?,
            kernel_release: info.kernel_release,
            uid: info.uid,
            fdpass_socket: info.fdpass_socket.into(),
            caller_uid: info.caller_uid,
            caller_gid: info.caller_gid,
            helper_incidents: info.helper_incidents.into_iter().map(HelperIncident::from).collect(),
        })
    }
}

impl From<HelperIncident> for v1::HelperIncident {
    fn from(HelperIncident { name, count }: HelperIncident) -> Self {
        Self { name: name.into_owned(), count }
    }
}

impl From<v1::HelperIncident> for HelperIncident {
    fn from(v1::HelperIncident { name, count }: v1::HelperIncident) -> Self {
        Self { name: name.into(), count }
    }
}
