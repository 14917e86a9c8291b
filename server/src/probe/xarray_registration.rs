//! The registry entry of the `xarray` probe, in services that are built with and without BPF.

use std::sync::Arc;

use fdmap_proto::provenance::ProbeKind;

use super::interface::{Probe, ProbeEntry};

pub(super) const ENTRY: ProbeEntry = ProbeEntry {
    kind: ProbeKind::Xarray,
    description: "Walk the page cache XArray with a BPF program",
    capability: "xarray-walk",
    impact: "swap slots, exact states of hugetlb files, swap-cached pages, page attributes, and most of the speed",
    load,
};

#[cfg(feature = "xarray")]
fn load() -> Result<Arc<dyn Probe>, String> {
    let (loaded, messages) = crate::bpf::with_libbpf_messages(super::xarray::XarrayProbe::load);
    match loaded {
        Ok(probe) => Ok(Arc::new(probe)),
        Err(error) => Err(match messages.last() {
            Some(message) => format!("{}; libbpf: {message}", fdmap_proto::error_chain(&error)),
            None => fdmap_proto::error_chain(&error),
        }),
    }
}

#[cfg(not(feature = "xarray"))]
fn load() -> Result<Arc<dyn Probe>, String> {
    Err("fdmapd was built without the xarray feature".to_owned())
}
