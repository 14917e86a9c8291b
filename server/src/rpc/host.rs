//! Handlers of `fdmap.v1.Host`.

use fdmap_proto::convert::duration_to_wire;
use fdmap_proto::v1;
use fdmap_proto::v1::host_server::Host;
use tonic::{Request, Response, Status};

use super::Rpc;
use crate::files::Limits;
use crate::incidents;

#[tonic::async_trait]
impl Host for Rpc {
    async fn info(&self, request: Request<v1::InfoRequest>) -> Result<Response<v1::InfoResponse>, Status> {
        let caller = self.caller(&request)?;
        let service = &self.service;
        let release = nix::sys::utsname::uname().map(|uname| uname.release().to_string_lossy().into_owned());
        Ok(Response::new(v1::InfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: service.instance,
            started: Some(service.started.into()),
            page_size: service.page_size.bytes(),
            probe: v1::Probe::from(service.probe.kind()).into(),
            attributes: service.probe.attributes().to_wire(),
            capabilities: service.capabilities.iter().cloned().map(v1::Capability::from).collect(),
            hugetlb_page_sizes: service.hugetlb_page_sizes.clone(),
            limits: Some(encode_limits(&service.limits)),
            kernel_release: release.unwrap_or_default(),
            uid: service.uid,
            fdpass_socket: service.fdpass_path.to_string_lossy().into_owned(),
            caller_uid: caller.uid,
            caller_gid: caller.gid,
            helper_incidents: incidents::counts().into_iter().map(v1::HelperIncident::from).collect(),
        }))
    }
}

fn encode_limits(limits: &Limits) -> v1::Limits {
    v1::Limits {
        max_file_bytes: limits.file_bytes,
        max_bytes_per_user: limits.bytes_per_user,
        max_files_per_user: limits.files_per_user,
        max_sessions_per_user: limits.sessions_per_user,
        max_watches_per_user: limits.watches_per_user,
        max_streams_per_user: limits.streams_per_user,
        max_buffered_bytes_per_user: limits.buffered_bytes_per_user,
        max_lookup_pages: limits.lookup_pages,
        max_attribute_pages: limits.attribute_pages,
        max_retained_snapshots_per_user: limits.retained_per_user,
        max_state_bytes_per_user: limits.state_bytes_per_user,
        max_retain_for: Some(duration_to_wire(limits.retain_for)),
        max_shared_snapshot_bytes_per_user: limits.shared_bytes_per_user,
        max_shared_snapshot_bytes_of_users: limits.shared_bytes_of_users,
        max_shared_snapshots_per_user: limits.shared_per_user,
        max_tracked_per_user: limits.tracked_per_user,
        max_page_table_bytes_per_user: limits.page_table_bytes_per_user,
        max_tracked_children_per_user: limits.tracked_children_per_user,
        max_users_at_limit: limits.users_at_limit,
        max_calls_per_user: limits.calls_per_user,
        max_threads_per_user: limits.threads_per_user,
        max_allocated_bytes_per_user: limits.allocated.per_user,
        max_allocated_bytes_of_users: limits.allocated.of_users,
        unused_file_timeout: Some(duration_to_wire(limits.unused_file_timeout)),
    }
}
