//! The unit file under systemd: its protection takes no capability from the service, files and writes outlast a crash and a restart,
//! and the service ends in time.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use fdmap_tests::built_programs::program;
use fdmap_tests::harness::require;
use fdmap_tests::service::{Service, fdmap_as};
use fdmap_tests::systemd::Systemd;
use fdmap_tests::test;
use fdmap_tests::test_agent::{PROGRAM, TestAgent};
use serde_json::Value;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// Limit of the end of the service.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time until systemd notices a crash and starts the service again.
const RESTART_TIMEOUT: Duration = Duration::from_secs(20);

/// Standard output of `fdmap --json`.
fn json(output: &Output) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)))
}

/// Runs `fdmap`, which must succeed, in the namespaces of systemd.
fn fdmap(systemd: &Systemd, arguments: &[&str]) -> Value {
    let output = systemd.command(program("fdmap").unwrap()).arg("--json").args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}\n{}", systemd.log());
    json(&output)
}

/// The capabilities that `fdmap doctor` reports as available.
fn available(doctor: &Value) -> BTreeSet<String> {
    let all = doctor["capabilities"].as_array().unwrap().iter();
    let available = all.filter(|one| one["availability"] == "available");
    available.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// Pages that were written after a generation. `observed`: only those that are not conservative.
fn written(systemd: &Systemd, since: u64, observed: bool) -> BTreeSet<u64> {
    let changes = fdmap(systemd, &["dirty", "ram", "--since", &since.to_string()]);
    let runs = changes["runs"].as_array().unwrap().iter();
    let runs = runs.filter(|run| !observed || run["conservative"] == false);
    runs.flat_map(|run| run["start"].as_u64().unwrap()..run["end"].as_u64().unwrap()).collect()
}

fn checkpoint(systemd: &Systemd) -> u64 {
    fdmap(systemd, &["checkpoint", "ram"])["generation"].as_u64().unwrap()
}

#[test]
fn protection_of_the_unit_takes_no_capability_from_the_service() {
    let systemd = require(Systemd::start());
    let service = Service::start(&[]).unwrap();
    // It exits with 1 if one is missing.
    let doctor =
        |mut command: std::process::Command| json(&command.args(["doctor", "--json"]).output().unwrap());
    let mut expected = available(&doctor(fdmap_as(&service, 0).unwrap()));
    let found = available(&doctor(systemd.command(program("fdmap").unwrap())));
    // fanotify names threads in the initial pid namespace only.
    expected.remove("writer-threads");
    assert!(expected.contains("write-tracking") && expected.contains("xarray-walk"), "{expected:?}");
    assert_eq!(found, expected, "{}", systemd.log());
}

#[test]
fn unit_keeps_files_and_writes_over_a_crash_and_a_restart_and_stops_in_time() {
    let systemd = require(Systemd::start());
    fdmap(&systemd, &["create", "ram", "--size", "16M"]);
    let mut agent = TestAgent::start_by(systemd.command(program(PROGRAM).unwrap()), None).unwrap();
    agent.map_in(Path::new("/run/fdmap"), "ram", true).unwrap();
    let first = checkpoint(&systemd);

    agent.poke(0, 7, 9).unwrap();
    systemd.systemctl(&["kill", "--signal=KILL", "fdmapd"]).unwrap();
    let killed = Instant::now();
    while systemd.property("NRestarts").unwrap() != "1" {
        assert!(killed.elapsed() < RESTART_TIMEOUT, "{}", systemd.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    systemd.wait_until_active().unwrap();
    agent.poke(0, 100, 101).unwrap();
    let second = checkpoint(&systemd);
    assert_eq!(second, first + 1);
    assert_eq!(written(&systemd, first, true), BTreeSet::from([7, 8, 100]));

    systemd.systemctl(&["restart", "fdmapd"]).unwrap();
    agent.poke(0, 200, 202).unwrap();
    let third = checkpoint(&systemd);
    assert_eq!(third, second + 1);
    assert!(written(&systemd, second, false).is_superset(&BTreeSet::from([200, 201])));
    let files = fdmap(&systemd, &["ls"]);
    assert_eq!(files[0]["allocated_bytes"], 5 * 4096, "{files}");
    assert_ne!(systemd.property("NFileDescriptorStore").unwrap(), "0");

    assert!(systemd.processes_named("fdmapd").unwrap().len() > 1, "the service has helpers");
    let stopping = Instant::now();
    systemd.systemctl(&["stop", "fdmapd"]).unwrap();
    let (elapsed, result) = (stopping.elapsed(), systemd.property("Result").unwrap());
    assert!(elapsed < STOP_TIMEOUT && result == "success", "{elapsed:?}, {result}: {}", systemd.log());
    assert_eq!(systemd.processes_named("fdmapd").unwrap(), [] as [u32; 0]);
    // A stop is the end of the files, as the service's documentation says.
    assert_eq!(systemd.property("NFileDescriptorStore").unwrap(), "0");
    systemd.systemctl(&["start", "fdmapd"]).unwrap();
    assert_eq!(fdmap(&systemd, &["ls"]).as_array().unwrap().len(), 0);
}
