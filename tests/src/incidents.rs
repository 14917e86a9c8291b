//! Incidents of helper processes that a service counts and logs.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::service::{Service, fdmap_as};

/// Time for an incident to be noticed.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(20);

/// How often an incident happened since the service started, as `fdmap doctor` reports it.
///
/// # Panics
/// If the service lists no incident of this name.
#[must_use]
pub fn count(service: &Service, name: &str) -> u64 {
    let mut doctor = fdmap_as(service, 0).expect("fdmap");
    let output = doctor.args(["doctor", "--json"]).output().expect("the output of fdmap doctor");
    let report: Value = serde_json::from_slice(&output.stdout).expect("the report of fdmap doctor");
    let listed = report["helper_incidents"].as_array().expect("a list of incidents");
    let incident = listed.iter().find(|incident| incident["name"] == name);
    incident.and_then(|incident| incident["count"].as_u64()).expect("a known incident")
}

/// Waits until the service has counted an incident, and logged it by a line that contains `text`.
///
/// # Panics
/// If it does not.
#[track_caller]
pub fn assert_reported(service: &Service, name: &str, text: &str) {
    let began = Instant::now();
    while count(service, name) == 0 || !service.log().contains(text) {
        let counted = count(service, name);
        assert!(
            began.elapsed() < NOTICE_TIMEOUT,
            "{name} is counted {counted} times; the log: {}",
            service.log()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
