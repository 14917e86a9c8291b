//! Incidents of helper processes that a service counts and logs.

use std::time::{Duration, Instant};

use crate::doctor;
use crate::service::Service;

/// Time for an incident to be noticed.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(20);

/// How often an incident happened since the service started, as `fdmap doctor` reports it.
///
/// # Panics
/// If the service lists no incident of this name.
#[must_use]
pub fn count(service: &Service, name: &str) -> u64 {
    doctor::entry(service, "helper_incidents", name)["count"].as_u64().expect("a count")
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
