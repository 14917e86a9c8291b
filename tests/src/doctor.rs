//! The report of `fdmap doctor` about a service.

use serde_json::Value;

use crate::service::{Service, fdmap_as};

/// The entry of this name in a list of the report.
///
/// # Panics
/// If there is none.
pub(crate) fn entry(service: &Service, list: &str, name: &str) -> Value {
    let mut doctor = fdmap_as(service, 0).expect("fdmap");
    let output = doctor.args(["doctor", "--json"]).output().expect("the output of fdmap doctor");
    let report: Value = serde_json::from_slice(&output.stdout).expect("the report of fdmap doctor");
    let entries = report[list].as_array().unwrap_or_else(|| panic!("a list of {list}"));
    let found = entries.iter().find(|entry| entry["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {list}")).clone()
}

/// True if the service has a capability.
///
/// # Panics
/// If the service lists no capability of this name.
#[must_use]
pub fn has_capability(service: &Service, name: &str) -> bool {
    entry(service, "capabilities", name)["availability"] == "available"
}
