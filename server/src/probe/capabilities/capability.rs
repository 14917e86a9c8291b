//! One capability of the host.

pub use fdmap_proto::Availability;

/// Something that this host can or cannot do for the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// A stable name.
    pub name: &'static str,
    pub availability: Availability,
    /// How the availability was determined, or why the capability is unavailable.
    pub detail: String,
    /// What users lose without the capability; empty if they lose nothing.
    pub impact: &'static str,
}

impl Capability {
    /// The result of an attempt to use the capability.
    pub(super) fn tried<T>(name: &'static str, outcome: &Result<T, String>, impact: &'static str) -> Self {
        let (availability, detail) = match outcome {
            Ok(_) => (Availability::Available, "tried on a file of fdmapd".to_owned()),
            Err(reason) => (Availability::Unavailable, reason.clone()),
        };
        Self { name, availability, detail, impact }
    }
}
