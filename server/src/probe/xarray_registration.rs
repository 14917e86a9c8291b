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
    let probe = crate::bpf::load_explained(super::xarray::XarrayProbe::load);
    Ok(Arc::new(probe.map_err(|refusal| refusal.to_string())?))
}

#[cfg(not(feature = "xarray"))]
fn load() -> Result<Arc<dyn Probe>, String> {
    Err("fdmapd was built without the xarray feature".to_owned())
}
