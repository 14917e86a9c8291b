//! All probes, in order of preference. A new probe needs one file, one line here, and one value of
//! [`ProbeKind`](fdmap_proto::provenance::ProbeKind).

use super::interface::ProbeEntry;
use super::{syscalls, xarray_registration};

pub const PROBES: &[ProbeEntry] = &[xarray_registration::ENTRY, syscalls::ENTRY];
