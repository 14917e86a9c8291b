//! One capability of the host.

pub use fdmap_proto::{Availability, Capability};

/// The result of an attempt to use the capability `name`. `impact` is what users lose without it; empty if nothing.
pub(super) fn capability_of<T>(
    name: &'static str,
    outcome: &Result<T, String>,
    impact: &'static str,
) -> Capability {
    let (availability, detail) = match outcome {
        Ok(_) => (Availability::Available, "tried on a file of fdmapd".to_owned()),
        Err(reason) => (Availability::Unavailable, reason.clone()),
    };
    Capability { name: name.into(), availability, detail, impact: impact.into() }
}
